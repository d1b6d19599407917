"""An exponential moving average of a model's weights (``--enable_ema``): Polyak averaging with a fixed decay."""

from __future__ import annotations

from torch import Tensor


class MovingAverage:
    """``average = decay * average + (1 - decay) * weights`` after each update, in float32 on the CPU.

    The first weights that it gets are its first value. A rank that gets nothing keeps nothing.

    Args:
        decay: in [0, 1).
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.weights: dict[str, Tensor] = {}

    def update(self, weights: dict[str, Tensor]) -> None:
        """Take the weights after an optimizer step in: full tensors on the CPU, by name."""
        for name, tensor in weights.items():
            if not tensor.is_floating_point():
                continue
            value = tensor.float()
            if name in self.weights:
                self.weights[name].lerp_(value, 1 - self.decay)
            else:
                self.weights[name] = value.clone()

    def replaced(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same names and formats, with averages for values."""
        return {name: self.weights[name].to(t.dtype) if name in self.weights else t for name, t in weights.items()}
