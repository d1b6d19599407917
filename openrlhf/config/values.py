"""From what was written (command line text, YAML or Hydra values) to a flag's typed value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from openrlhf.config.flag import FlagSpec

TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")
NONE_WORDS = ("none", "null")


def convert(spec: FlagSpec, raw: Any) -> Any:
    """The value that `raw` means for the flag.

    Raises:
        ValueError: with a sentence that says what was expected and what was found.
    """
    if spec.count == 1 and isinstance(raw, list | tuple):
        if len(raw) != 1:
            raise ValueError(f"takes one value, not {len(raw)}: {_show(raw)}")
        raw = raw[0]
    if _is_none(spec, raw):
        return None
    if spec.count == 1:
        return _convert_one(spec, raw)
    values = _as_list(raw) if not spec.info.verbatim else list(raw) if isinstance(raw, list | tuple) else [raw]
    if spec.count == 0:
        return [_convert_one(spec, value) for value in values]
    fewest = spec.info.min_values or spec.count
    if not fewest <= len(values) <= spec.count:
        wanted = f"{spec.count} values" if fewest == spec.count else f"{fewest} or {spec.count} values"
        raise ValueError(f"takes {wanted}, not {len(values)}: {_show(values)}")
    missing = [spec.kind(0)] * (spec.count - len(values))
    return (*missing, *(_convert_one(spec, value) for value in values))


def type_name(spec: FlagSpec) -> str:
    """The type of a flag in a few words, for help and docs."""
    if spec.kind is bool:
        return "flag"
    name = {int: "int", float: "float", str: "text"}[spec.kind]
    if spec.count == 0:
        return f"{name} ..."
    if spec.count > 1:
        return f"{name} {name}" if not spec.info.min_values else f"[{name}] {name}"
    return name


def show_value(value: Any) -> str:
    """A value as it would be written on the command line."""
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return " ".join(show_value(item) for item in value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return repr(value) if value == "" or any(c.isspace() for c in value) else value
    return str(value)


def _is_none(spec: FlagSpec, raw: Any) -> bool:
    if not spec.optional:
        return False
    if raw is None or (isinstance(raw, str) and raw.strip().lower() in NONE_WORDS):
        return True
    # an empty text is what a script's unset variable gives
    return spec.kind is str and (raw is False or (raw == "" and spec.count == 1))


def _as_list(raw: Any) -> list[Any]:
    """The values that words mean; commas separate, with or without brackets."""
    if isinstance(raw, list | tuple):
        return [value for item in raw for value in (_as_list(item) if isinstance(item, str) else [item])]
    if not isinstance(raw, str):
        return [raw]
    text = raw.strip()
    text = text[1:-1].strip() if text.startswith("[") and text.endswith("]") else text
    return [part.strip() for part in text.split(",")] if text else []


def _convert_one(spec: FlagSpec, raw: Any) -> Any:
    if raw is None:
        raise ValueError("needs a value")
    if spec.kind is bool:
        return _to_bool(raw)
    if spec.kind is int:
        return _to_int(raw)
    if spec.kind is float:
        return _to_float(raw)
    if isinstance(raw, bool):
        text = "true" if raw else "false"
    elif isinstance(raw, str | int | float):
        text = str(raw)
    else:
        raise ValueError(f"takes text, not {_show(raw)}")
    text = spec.info.value_aliases.get(text, text)
    if spec.info.choices and not spec.info.extensible and text not in spec.info.choices:
        raise ValueError(f"must be one of {', '.join(spec.info.choices)}, not {_show(text)}")
    return text


def _to_bool(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    word = str(raw).strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError(f"is on or off: true or false, not {_show(raw)}")


def _to_int(raw: Any) -> int:
    try:
        if isinstance(raw, str) and raw.strip().lstrip("+-").replace("_", "").isdigit():
            return int(raw)
        number = _to_float(raw)
        if number == int(number):
            return raw if isinstance(raw, int) else int(number)
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"takes a whole number, not {_show(raw)}")


def _to_float(raw: Any) -> float:
    try:
        number = float(raw) if not isinstance(raw, bool) else math.nan
    except (ValueError, TypeError):
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"takes a number, not {_show(raw)}")
    return number


def _show(raw: Any) -> str:
    if isinstance(raw, str):
        return repr(raw)
    if isinstance(raw, Sequence):
        return " ".join(str(item) for item in raw) or "nothing"
    return str(raw)
