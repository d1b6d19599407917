"""Load transformers models and tokenizers, and write them back as ordinary Hugging Face folders."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from openrlhf import platform
from openrlhf.config.options_model import EngineModelOptions, ModelOptions
from openrlhf.models.attention import PACKED_ATTENTION, PackingError, check_packing
from openrlhf.models.checks import ModelLoadError, check_output, check_positions, fix_rotary, padded_attention
from openrlhf.models.folder import WEIGHT_FILES, check_model_folder, no_head, require_head
from openrlhf.models.fused import fuse_elementwise
from openrlhf.models.head import ScalarHead
from openrlhf.models.lora import EVERY_LINEAR, add_lora, check_targets, is_peft
from openrlhf.models.partition import effective_zero_stage, whole
from openrlhf.models.quantized import keep_layout, nf4_config
from openrlhf.models.vision import VisionInputs, is_vision_model
from openrlhf.utils.files import publish_folder, temporary_folder
from openrlhf.utils.logging import get_logger, note_once

logger = get_logger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Above this size on disk, ZeRO-3 ranks load only their part of each tensor into memory.
ZERO3_INIT_BYTES = 4 << 30
_RANDOM = re.compile("dropout|pdrop|jitter|layerdrop")
_HEAD = "score"
# On a tokenizer whose pad token is not its own.
_PAD_GIVEN = "openrlhf_pad_given"


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a ``--param_dtype`` value."""
    if name not in DTYPES:
        raise ValueError(f"param_dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


# ------------------------------------------------------------------------------------------------- reading


def load_config(path: str) -> PretrainedConfig:
    """A model's configuration.

    Raises:
        ModelLoadError: there is no such model, or its folder is not complete.
    """
    check_model_folder(path)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(
            f"cannot read the model configuration of {path!r}: it is not a local folder with a valid config.json, "
            f"and not a model of the Hugging Face hub that can be reached from here ({_first_line(error)})"
        ) from error


def vocabulary_size(config: PretrainedConfig) -> int:
    """Number of token ids that a model knows (its tokenizer may use fewer, or more)."""
    return int(config.get_text_config().vocab_size)


def note_unknown_tokens(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Say which tokens of a model's tokenizer the model has no embedding of: some have them, and use them nowhere."""
    vocabulary = vocabulary_size(load_config(path))
    unknown = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= vocabulary)
    if unknown:
        number, token = unknown[0]
        logger.info(
            "%s: the tokenizer has %d tokens that the model has no embedding of, from %d (%s) on; data with one of "
            "them ends the run (model.resize_token_embeddings() adds embeddings)",
            *(path, len(unknown), number, token),
        )


def score_scale(config: PretrainedConfig) -> tuple[float, float] | None:
    """Mean and standard deviation of a reward model's scores, which train_rm stores; None where it has none."""
    mean, std = getattr(config, "mean", None), getattr(config, "std", None)
    if mean is None or std is None or not (math.isfinite(mean) and 0 < std < math.inf):
        return None
    return float(mean), float(std)


def require_score_scale(config: PretrainedConfig) -> tuple[float, float]:
    """:func:`score_scale`, for ``--normalize_reward``.

    Raises:
        ModelLoadError: the model has none.
    """
    scale = score_scale(config)
    if scale is None:
        mean, std = getattr(config, "mean", None), getattr(config, "std", None)
        raise ModelLoadError(
            f"--normalize_reward needs `mean` and `std` in {config.name_or_path}/config.json, which has {mean} and "
            f"{std}. train_rm stores them at its end; leave the flag out for models of other origin"
        )
    return scale


def _quiet_progress_bars() -> None:
    """Progress bars are for terminals, and for one process at a time."""
    if not sys.stderr.isatty() or int(os.environ.get("RANK", "0")) > 0:
        transformers.utils.logging.disable_progress_bar()


@contextlib.contextmanager
def _no_load_report() -> Iterator[None]:
    """transformers prints a table of missing weights; callers here decide about them, and say so in a line."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(before)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _silence_dropout(config: PretrainedConfig, path: str) -> dict[str, Any]:
    """Set the rates of dropout and of a router's noise to 0: two passes of the same weights must not differ."""
    changed: dict[str, Any] = {}
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, rate in list(vars(part).items()):
            if part.model_type == "phimoe" and name == "router_jitter_noise":
                continue  # a threshold of its router, outside of training too
            if _RANDOM.search(name) and isinstance(rate, float) and rate > 0:
                setattr(part, name, 0.0)
                changed[name] = rate
    if changed:
        note_once(logger, f"{path}: set to 0 for training ({', '.join(f'{k}={v}' for k, v in changed.items())})")
    return changed


def resolve_attention(requested: str, packing: bool) -> str:
    """The attention implementation that transformers is given.

    ``auto`` is PyTorch's own kernels: packed variable-length attention with ``packing``, SDPA on padded rows
    without. ``flash_attention_2`` means the same when the flash-attn package is not installed, because
    PyTorch ships these kernels.

    Raises:
        ModelLoadError: the implementation needs a package that is not installed.
    """
    own = PACKED_ATTENTION if packing else "sdpa"
    if requested in ("auto", PACKED_ATTENTION, "", None):
        return own
    if requested in ("sdpa", "eager"):
        if packing:
            raise PackingError(
                f"--attn_implementation {requested} can't keep packed samples apart; leave it or --packing_samples out"
            )
        return requested
    if requested == "flash_attention_2":
        if importlib.util.find_spec("flash_attn") is not None and torch.cuda.is_available():
            return requested
        note_once(logger, "flash-attn is not installed: using the attention kernels of PyTorch instead")
        return own
    package = {"flash_attention_3": "flash_attn_interface", "flash_attention_4": "flash_attn"}.get(
        requested, "kernels" if "/" in requested else None
    )
    if package is None:
        raise ModelLoadError(
            f"attn_implementation {requested!r} is unknown; use auto, sdpa, eager, flash_attention_2, "
            "flash_attention_3 or a kernels-hub name such as kernels-community/vllm-flash-attn3"
        )
    if importlib.util.find_spec(package) is None:
        raise ModelLoadError(
            f"attn_implementation {requested!r} needs the Python package {package!r}, which is not installed; "
            "install it or use --attn_implementation auto"
        )
    return requested


@contextlib.contextmanager
def _zero3_loading(path: str, opts: EngineModelOptions, force: bool | None, offload: bool) -> Iterator[None]:
    """Make transformers partition parameters while it loads them, for models too big to load whole on each rank."""
    folder = Path(path)
    size = sum(f.stat().st_size for pattern in WEIGHT_FILES for f in folder.glob(pattern)) if folder.is_dir() else 0
    wanted = force if force is not None else size >= ZERO3_INIT_BYTES
    if not wanted or opts.load_in_4bit or effective_zero_stage(opts.zero_stage) != 3:
        yield
        return
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    # weights keep what they are made with: the engine's configuration comes too late
    device = "cpu" if offload else "none"
    zero = {"stage": 3, "zero_hpz_partition_size": opts.zpg, "offload_param": {"device": device}}
    config: dict[str, Any] = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1}
    if opts.param_dtype != "fp32":
        config[opts.param_dtype] = {"enabled": True}
    keep_alive = HfDeepSpeedConfig(config)  # transformers holds only a weak reference
    try:
        with _same_groups():
            yield
    finally:
        del keep_alive
        unset_hf_deepspeed_config()


@contextlib.contextmanager
def _same_groups() -> Iterator[None]:
    """The ranks that ``--zpg`` puts together are those of all models; DeepSpeed refuses to group them again."""
    from deepspeed.utils import groups

    create = groups._create_zero_param_parallel_group

    def create_once(size: int) -> None:
        if groups._get_zero_param_intra_parallel_group() is None:
            create(size)

    groups._create_zero_param_parallel_group = create_once
    try:
        yield
    finally:
        groups._create_zero_param_parallel_group = create


def _liger_class() -> Any:
    from liger_kernel.transformers import AutoLigerKernelForCausalLM

    return AutoLigerKernelForCausalLM


def _from_pretrained(
    auto_class: Any,
    path: str,
    config: PretrainedConfig,
    opts: EngineModelOptions,
    zero3_init: bool | None,
    offload: bool,
    **extra: Any,
) -> tuple[PreTrainedModel, set[str]]:
    """The model and the names of the weights that its folder lacks."""
    _quiet_progress_bars()
    dropout = _silence_dropout(config, path)
    attention = resolve_attention(opts.attn_implementation, opts.packing_samples)
    if attention == "sdpa":
        attention = padded_attention(auto_class, config, opts.attn_implementation)
    implementation: Any = attention
    if attention == PACKED_ATTENTION and is_vision_model(config):  # it is causal, and images are not
        implementation = {"": attention, "text_config": attention, "vision_config": "sdpa"}
    if opts.experts_implementation is not None:
        extra["experts_implementation"] = opts.experts_implementation
    try:
        with _zero3_loading(path, opts, zero3_init, offload), _no_load_report():
            model, info = auto_class.from_pretrained(
                path,
                config=config,
                dtype=torch_dtype(opts.param_dtype),
                attn_implementation=implementation,
                quantization_config=nf4_config() if opts.load_in_4bit else None,
                trust_remote_code=True,
                output_loading_info=True,
                **extra,
            )
    except ModelLoadError:
        raise
    except Exception as error:  # transformers, safetensors and torch each have their own; all mean the same here
        raise ModelLoadError(f"cannot load model {path!r}: {type(error).__name__}: {_first_line(error)}") from error
    check_output(model, path)
    if max_len := getattr(opts, "max_len", None):
        check_positions(model, path, max_len)
        fix_rotary(model, path, max_len)
    if opts.packing_samples and attention != "flash_attention_2":
        check_packing(config, type(model))
    if platform.device_type() == "cuda" and not opts.use_liger_kernel:
        fuse_elementwise(model)
    keep_layout(model)
    model.openrlhf_original_config = dropout
    model.config.use_cache = False
    return model, set(info["missing_keys"])


@contextlib.contextmanager
def _named_targets(opts: ModelOptions) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ModelLoadError(f"--target_modules {' '.join(opts.target_modules)}: {error}") from error


def check_lora_targets(path: str, opts: ModelOptions) -> None:
    """See that a causal language model has the layers of ``--target_modules``, without reading its weights.

    Raises:
        ModelLoadError: it has not.
    """
    if opts.lora_rank == 0 or opts.target_modules in EVERY_LINEAR:
        return
    config = load_config(path)
    auto_class = AutoModelForImageTextToText if is_vision_model(config) else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto_class.from_config(config, trust_remote_code=True)
    with _named_targets(opts):
        check_targets(model, opts.target_modules)


def _prepare_training(model: PreTrainedModel, opts: EngineModelOptions, task: str) -> nn.Module:
    wrapped: nn.Module = model
    if opts.lora_rank > 0:
        with _named_targets(opts):
            wrapped = add_lora(model, opts, task)
    if opts.gradient_checkpointing:
        reentrant = bool(opts.gradient_checkpointing_use_reentrant)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant}, opts.gradient_checkpointing_every)
        if reentrant and opts.lora_rank > 0:
            model.enable_input_require_grads()
    return wrapped


def load_causal_lm(
    path: str,
    opts: EngineModelOptions,
    *,
    trainable: bool = True,
    zero3_init: bool | None = None,
    offload: bool = False,
) -> nn.Module:
    """Load a causal language model.

    Args:
        path: local folder or hub id.
        opts: dtype, attention, LoRA and related flags.
        trainable: False for a reference model: no LoRA, no gradient checkpointing, no gradients.
        zero3_init: partition while loading (ZeRO-3 only); None = when the weights are large.
        offload: what is partitioned while loading stays on the CPU, for an engine with ``param_offload``.

    Returns:
        A transformers model, wrapped by peft with ``lora_rank`` > 0.

    Raises:
        ModelLoadError: the model can't be read, or needs a package that is not installed.
        PackingError: it can't keep packed sequences apart.
    """
    config = load_config(path)
    vision = is_vision_model(config)
    if vision and opts.use_liger_kernel:
        raise ModelLoadError(f"{path!r} is a vision model, for which there are no Liger kernels; leave them out")
    auto_class = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    auto_class = _liger_class() if opts.use_liger_kernel else auto_class
    model, missing = _from_pretrained(auto_class, path, config, opts, zero3_init, offload)
    if missing:
        raise ModelLoadError(
            f"model {path!r} lacks {len(missing)} weight(s) of a {type(model).__name__}, for example "
            f"{sorted(missing)[:5]}; is it another kind of model?"
        )
    if vision:
        model.openrlhf_vision = VisionInputs(path, config)
    if not trainable:
        return model.requires_grad_(False).eval()
    return _prepare_training(model, opts, "CAUSAL_LM")


def load_sequence_regression(
    path: str,
    opts: EngineModelOptions,
    *,
    head_prefix: str = _HEAD,
    init_head: bool = False,
    trainable: bool = True,
    zero3_init: bool | None = None,
    offload: bool = False,
) -> nn.Module:
    """Load a transformer with one scalar output a token: a critic or a reward model.

    The head is stored as ``<prefix>.weight`` (``[1, hidden]``, no bias); the prefix in config.json
    (``value_head_prefix``) wins over ``head_prefix``. Inside the model it is always called ``score``.

    Args:
        init_head: draw the head anew, N(0, 1/(hidden + 1)), even when the folder has one.
        trainable: False for a model that only gives scores, and so has to have a head.
        zero3_init, offload: as of :func:`load_causal_lm`.

    Raises:
        ModelLoadError: the model can't be read, or has no head and nothing would train one.
        PackingError: it can't keep packed sequences apart.
    """
    if not (trainable or init_head):
        require_head(path, head_prefix)
    config = load_config(path)
    prefix = getattr(config, "value_head_prefix", None) or head_prefix
    config.value_head_prefix = prefix
    config.num_labels = 1
    config.architectures = None
    mapping = {rf"^{prefix}\.": f"{_HEAD}."} if prefix != _HEAD else None
    model, missing = _from_pretrained(
        AutoModelForSequenceClassification, path, config, opts, zero3_init, offload, key_mapping=mapping
    )
    head = getattr(model, _HEAD, None)
    if not isinstance(head, nn.Linear):
        raise ModelLoadError(f"{type(model).__name__} has no linear head named {_HEAD!r}; it can't give scalar scores")
    head_missing = f"{_HEAD}.weight" in missing
    body_missing = sorted(name for name in missing if not name.startswith(f"{_HEAD}."))
    if body_missing:
        raise ModelLoadError(f"model {path!r} lacks {len(body_missing)} weight(s), for example {body_missing[:5]}")
    if head_missing or init_head:
        if head_missing and not init_head:
            if not trainable:  # of a hub id, the weights are known only now
                raise no_head(path, prefix)
            note_once(logger, f"{path}: no weight {prefix}.weight; the head starts from random values")
        _init_head(head, config.get_text_config().hidden_size, opts.seed)
    model.score = ScalarHead.of(head)
    if not trainable:
        return model.requires_grad_(False).eval()
    return _prepare_training(model, opts, "SEQ_CLS")


def _init_head(head: nn.Linear, hidden: int, seed: int) -> None:
    """Draw the head from N(0, 1/(hidden + 1)); the same on every rank, also when it is partitioned."""
    values = torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed)) * (hidden + 1) ** -0.5
    with whole([head.weight], write=True), torch.no_grad():
        head.weight.copy_(values.to(head.weight))


def load_tokenizer(path: str, *, use_fast: bool = True, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer; give it a pad token when it has none (training never depends on which).

    :func:`save_tokenizer` writes it without that one.

    Args:
        use_fast: False for the slow Python tokenizer (``--disable_fast_tokenizer``).
        chat_template: Jinja source, or a file that holds it; it replaces the tokenizer's own template.

    Raises:
        ModelLoadError: there is no tokenizer, it has no end-of-sequence token, or ``chat_template`` is not a template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, use_fast=use_fast, trust_remote_code=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(
            f"cannot load a tokenizer from {path!r} (tokenizer.json or tokenizer_config.json): {_first_line(error)}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelLoadError(f"the tokenizer of {path!r} has no eos_token; set it in tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        used = {tokenizer.eos_token, tokenizer.bos_token}
        spare = [t for t in ("<pad>", "<|pad|>", "[PAD]", "<|endoftext|>", "<|finetune_right_pad_id|>")]
        vocabulary = tokenizer.get_vocab()
        tokenizer.pad_token = next((t for t in spare if t in vocabulary and t not in used), tokenizer.eos_token)
        setattr(tokenizer, _PAD_GIVEN, True)
    if chat_template is not None:
        if os.path.isfile(chat_template):
            chat_template = Path(chat_template).read_text(encoding="utf-8")
        if "{" not in chat_template:
            raise ModelLoadError(
                f"--tokenizer_chat_template {chat_template[:80]!r} is neither a file that exists nor a Jinja template, "
                "which has a '{'; give the path of a file, or the template itself"
            )
        tokenizer.chat_template = chat_template
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path, keep_pad: bool = False) -> None:
    """Write a tokenizer as it was, without a pad token that :func:`load_tokenizer` gave it.

    Where that is the end token, other programs would mask the ends of texts as padding.

    Args:
        keep_pad: with it, for a model that reads it.
    """
    pad = tokenizer.pad_token
    if getattr(tokenizer, _PAD_GIVEN, False) and not keep_pad:
        tokenizer.pad_token = None
    try:
        tokenizer.save_pretrained(folder)
    finally:
        tokenizer.pad_token = pad


def get_tokenizer(
    pretrain: str, model: nn.Module | None, padding_side: str = "left", strategy: Any = None, use_fast: bool = True
) -> PreTrainedTokenizerBase:
    """A tokenizer as users' files get it from ``openrlhf.utils``, with OpenRLHF's arguments.

    Args:
        model: its configuration gets the id of the pad token; may be None.
        strategy: may be anything; how a model is trained does not matter to its tokenizer.

    Raises:
        ModelLoadError: there is no tokenizer, or it has no end-of-sequence token.
    """
    tokenizer = load_tokenizer(pretrain, use_fast=use_fast)
    tokenizer.padding_side = padding_side
    if model is not None:
        config: Any = model.config
        config.pad_token_id = tokenizer.pad_token_id
    return tokenizer


# ------------------------------------------------------------------------------------------------- writing


def unwrap_hf(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a peft model (or the model itself)."""
    inner: Any = model
    return inner.get_base_model() if is_peft(model) else inner


def write_hf_folder(
    model: nn.Module,
    state: dict[str, Tensor],
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config_updates: dict[str, Any] | None = None,
) -> None:
    """Write a model as a Hugging Face folder: all of it, or nothing.

    The files are written beside the folder and moved in when complete.

    Args:
        model: the transformers or peft model the weights belong to (its own tensors are not read).
        state: full tensors on the CPU by their name in ``model``; a tied weight once. For a peft model, the
            adapter's only.
        config_updates: entries to set in config.json.

    Raises:
        ValueError: a tensor is empty (a partition that was not gathered).
    """
    empty = [name for name, tensor in state.items() if tensor.numel() == 0]
    if empty:
        raise ValueError(f"refusing to save empty tensors: {empty[:5]}")
    _quiet_progress_bars()
    base = unwrap_hf(model)
    config = copy.deepcopy(base.config)
    for part in (config, config.get_text_config()):
        for name, value in getattr(base, "openrlhf_original_config", {}).items():
            if hasattr(part, name):
                setattr(part, name, value)
    config.use_cache = True
    for name, value in (config_updates or {}).items():
        setattr(config, name, value)
    prefix = getattr(config, "value_head_prefix", _HEAD) or _HEAD
    with temporary_folder(folder) as scratch:
        if is_peft(model):
            model.save_pretrained(scratch, state_dict=state, safe_serialization=True)  # type: ignore[operator]
            (scratch / "README.md").unlink(missing_ok=True)  # peft's empty model card
        else:
            if prefix != _HEAD:
                state = {_rename_head(name, prefix): tensor for name, tensor in state.items()}
            _save_weights(base, state, scratch)
        config.architectures = [type(base).__name__]
        config.save_pretrained(scratch)
        if isinstance(getattr(base, "openrlhf_vision", None), VisionInputs):
            base.openrlhf_vision.processor.save_pretrained(scratch)
        if tokenizer is not None:
            # transformers pads for a score, and finds the last token by the id in config.json
            scores = hasattr(base, _HEAD) and getattr(config, "pad_token_id", None) is not None
            save_tokenizer(tokenizer, scratch, keep_pad=scores)
        publish_folder(scratch, folder)


def _save_weights(model: PreTrainedModel, state: dict[str, Tensor], folder: Path) -> None:
    """Weights, config.json and generation_config.json, the last as it was loaded.

    Published models have a temperature without ``do_sample``, which transformers reads and refuses to write.
    """
    generation = getattr(model, "generation_config", None)
    if generation is None:
        model.save_pretrained(folder, state_dict=state, safe_serialization=True)
        return
    model.generation_config = type(generation)()
    try:
        model.save_pretrained(folder, state_dict=state, safe_serialization=True)
    finally:
        model.generation_config = generation
    if model.can_generate():
        generation.to_json_file(folder / "generation_config.json", use_diff=True, keys_to_pop=["compile_config"])


def _rename_head(name: str, prefix: str) -> str:
    return f"{prefix}{name.removeprefix(_HEAD)}" if name.startswith(f"{_HEAD}.") else name
