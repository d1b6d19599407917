"""Which weights have a gradient that is NaN or infinite. DeepSpeed only tells that there is one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.workers.distributed import gather_objects

# Names in a message: the first ones of the model, and the last.
_SHOWN = 3


class BrokenGradients:
    """Looks at the gradients when DeepSpeed refuses them, just before it drops them.

    Every rank looks only at what it holds: nothing is sent before all ranks are known to have refused.

    Args:
        module: the transformers (or peft) model.
        optimizer: DeepSpeed's, which holds the gradients of the module; or torch's own.
    """

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        self._named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._own: list[bool] | None = None
        # The first thing that each of DeepSpeed's optimizers does with gradients that it refuses.
        clears = "clear_hp_grads" if hasattr(optimizer, "clear_hp_grads") else "zero_grad"
        clear = getattr(optimizer, clears)

        def look_and_clear(*arguments: Any, **options: Any) -> Any:
            if self._own is None and getattr(optimizer, "overflow", False):
                self.look()
            return clear(*arguments, **options)

        if hasattr(optimizer, "overflow"):
            setattr(optimizer, clears, look_and_clear)

    def expect(self) -> None:
        """Forget what was seen: a new step begins."""
        self._own = None

    def look(self) -> None:
        """See which of this rank's gradients, or parts of them, are not finite."""
        self._own = []  # first: what looks may clear something
        self._own = [_is_broken(p) for _, p in self._named]

    def told(self) -> str:
        """The names, for a message; empty when none was seen. All ranks call it."""
        seen = [part for part in gather_objects(self._own) if part]
        names = [name for (name, _), *flags in zip(self._named, *seen, strict=True) if any(flags)]
        return _listed(names, len(self._named)) if names else ""


def _listed(names: list[str], of: int) -> str:
    listed = names if len(names) <= _SHOWN + 1 else [*names[:_SHOWN], "...", names[-1]]
    return f" ({len(names)} of {of} weights have such a gradient: {', '.join(listed)})"


def _is_broken(parameter: Any) -> bool:
    try:
        gradient = _own_gradient(parameter)
        return gradient is not None and not bool(torch.isfinite(gradient).all())
    except Exception:  # a help for a message, in places that DeepSpeed may move
        return False


def _own_gradient(parameter: Any) -> Tensor | None:
    """What this rank holds of the gradient that DeepSpeed has summed."""
    if hasattr(parameter, "_z3_optimizer"):
        return parameter._z3_optimizer.get_local_fp32_grad_for_param(parameter)
    if getattr(parameter, "_hp_grad", None) is not None:
        return parameter._hp_grad
    if getattr(parameter, "_hp_mapping", None) is not None:
        return parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)
    return parameter.grad
