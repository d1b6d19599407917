"""Text into token ids: special tokens once, chat templates, and where the assistant speaks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from openrlhf.datasets.sources import DataError
from openrlhf.utils.continued import encode_continued
from openrlhf.utils.first_ids import adds_bos, last_ids
from openrlhf.utils.template_facts import template_fact
from openrlhf.utils.tool_calls import with_readable_arguments

Message = dict[str, Any]

_ROLES = {
    **{name: name for name in ("system", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "observation": "tool"},
}
"""Role of who a message is ``from``, in data that names it so."""

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of messages that have the thoughts before an answer. Each template reads one of them, or none."""

# what a template's own words, or what it does with a message that it doesn't expect, raise
_REFUSALS = (TemplateError, TypeError, KeyError)


def apply_template(template: str | None, text: str) -> str:
    """Put a prompt into ``--input_template``, in the place of its ``{}``; other braces are text."""
    return template.replace("{}", text, 1) if template else text


def plain_text(value: Any, where: str, column: str) -> str:
    """The value of a column that has to be a text where there is no chat template.

    Raises:
        DataError: it is something else.
    """
    if not isinstance(value, str):
        raise DataError(
            f"{where}: column {column!r} is a {type(value).__name__}, not a text; lists of messages need "
            "--apply_chat_template"
        )
    return value


def require_values(row: Mapping[str, Any], columns: Iterable[str | None], where: str) -> None:
    """Raise a DataError where one of a row's columns is null; None stands for a column that isn't asked for."""
    for column in columns:
        if column is not None and row[column] is None:
            raise DataError(f"{where}: column {column!r} is null")


def without_none(value: Any) -> Any:
    """Without the keys, at every depth, that columns of structs have as None because other rows have them."""
    if isinstance(value, Mapping):
        return {str(key): without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list | tuple) else value


def with_roles(value: Any) -> Any:
    """A list of messages with the keys role and content, also of those with from and value; anything else as it is."""
    if not isinstance(value, (list, tuple)):
        return value
    return [_with_role(message) if isinstance(message, Mapping) else message for message in value]


def _with_role(message: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: item for key, item in message.items() if key not in ("from", "value") or item is not None}
    role = _ROLES.get(str(own.get("from")))
    if role is None or "value" not in own or own.get("role") is not None:
        return own
    rest = {key: item for key, item in own.items() if key not in ("from", "value", "role", "content")}
    return {"role": role, "content": own["value"], **rest}


def as_messages(value: Any, role: str, where: str) -> list[Message]:
    """A string as one message of ``role``; a list of messages as it is, or see :func:`with_roles`.

    Raises:
        DataError: neither, or a message without role, or without content and tool calls.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, (list, tuple)):
        raise DataError(f"{where}: expected a text or a list of messages, got {type(value).__name__}")
    messages = []
    for position, message in enumerate(with_roles(value)):
        known = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not known or (message.get("content") is None and not message.get("tool_calls")):
            raise DataError(
                f"{where}: message {position} needs the keys role and content, or from ({', '.join(_ROLES)}) and "
                f"value, got {message!r}"
            )
        own = without_none(message)
        own.setdefault("content", None)  # an answer of tool calls alone has none
        messages.append(own)
    return messages


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    prompt: bool,
    where: str,
    tools: Sequence[dict[str, Any]] | None = None,
) -> str:
    """A conversation as text.

    Args:
        prompt: end with the head of an assistant turn.
        tools: descriptions of the tools that the template shows.

    Raises:
        DataError: the tokenizer has no chat template, or the template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise DataError("the tokenizer has no chat template; leave --apply_chat_template out or give one")
    if any(isinstance(message["content"], list) for message in messages) and not _takes_parts(tokenizer):
        messages = [{**message, "content": _joined(message["content"], where)} for message in messages]
    readable = with_readable_arguments(tokenizer, messages)
    try:
        text = tokenizer.apply_chat_template(
            readable, tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=prompt
        )
    except _REFUSALS as error:
        raise DataError(f"{where}: the chat template refuses the messages: {error}") from error
    for position, message in enumerate(messages):
        if message["content"] is None:  # some templates write it as a word
            _require_answer(message, str(text), f"{where}: the chat template writes message {position}")
    return str(text)


def _takes_parts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template writes the text of a content that is a list of parts, not the list."""

    def trial() -> bool:
        probe = [{"role": "user", "content": [{"type": "text", "text": "Qx7"}]}]
        try:
            text = str(tokenizer.apply_chat_template(probe, tokenize=False))
        except (*_REFUSALS, ValueError):
            return False
        return "Qx7" in text and not any(f"{q}Qx7{q}" in text for q in "'\"")

    return template_fact(tokenizer, "takes_parts", trial)


def _joined(content: Any, where: str) -> Any:
    """The text of a content of parts, for templates that know only texts."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        raise DataError(f"{where}: the chat template takes texts only, but a content has other parts: {content!r:.200}")
    return "".join(part["text"] for part in content)


def prompt_text(
    tokenizer: PreTrainedTokenizerBase, value: Any, where: str, tools: Sequence[dict[str, Any]] | None = None
) -> str:
    """The text an assistant answers, from a user's text or a list of messages; see :func:`render`."""
    return render(tokenizer, as_messages(value, "user", where), True, where, tools)


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a text that a chat template made: the template has put every special token in."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_scored(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of prompt and answer together, as a reward model is trained on them and asked; without the end token."""
    return encode_all_scored(tokenizer, [text])[0]


def encode_all_scored(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """:func:`encode_scored` of several texts, side by side on all cores."""
    if not texts:  # which tokenizers refuse
        return []
    encoded = tokenizer([text.rstrip("\n") for text in texts], add_special_tokens=False)["input_ids"]
    return [scored_tokens(tokenizer, ids) for ids in encoded]


def scored_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """Ids as a reward model reads them, but for the end token: no padding, BOS once where the tokenizer uses one.

    Also where a chat template made the text without BOS: who asks for a score has a text, and can't know who made it.
    """
    end, padding, bos = tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id
    first, last = 0, len(ids)
    while last and ids[last - 1] in (end, padding):
        last -= 1
    while first < last and ids[first] == padding and padding not in (end, bos):
        first += 1
    needs_bos = bos is not None and adds_bos(tokenizer) and (first == last or ids[first] != bos)
    return [*([bos] if needs_bos else []), *ids[first:last]]


def end_scored(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], max_len: int, side: str | None = None
) -> tuple[list[int], bool]:
    """What :func:`scored_tokens` made with the end token, at which the score is read, and whether it had to be cut.

    Args:
        max_len: most tokens, the end token included.
        side: where too many are cut: right, or left, behind BOS; None = the tokenizer's ``truncation_side``.
    """
    room = max_len - 1
    left = (side or tokenizer.truncation_side) == "left"
    kept = last_ids(tokenizer, ids, room) if left else list(ids[:room])
    return [*kept, int(tokenizer.eos_token_id)], len(ids) > room


def encode_spans(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[tuple[int, int]]
) -> tuple[list[int], list[bool]]:
    """Ids of a rendered text, and which of them lie in the character spans (ascending, disjoint).

    The ids begin with those of the text before the first span, and no token lies across the border of a span.
    """
    borders = sorted({border for span in spans for border in span} - {0, len(text)})
    ids, begins = _encode_between(tokenizer, text, borders, False)
    return ids, [any(a <= begin < b for a, b in spans) for begin in begins]


def _encode_between(
    tokenizer: PreTrainedTokenizerBase, text: str, borders: Sequence[int], continues: bool
) -> tuple[list[int], list[int]]:
    """Ids and the place where each begins; the text is cut only at borders that a token would lie across."""
    ids, before = encode_continued(tokenizer, text) if continues else (encode_rendered(tokenizer, text), "")
    begins, cuts = [0] * len(ids), set(borders)
    if tokenizer.is_fast:
        encoded = tokenizer(before + text, add_special_tokens=False, return_offsets_mapping=True)
        end, ends = 0, []
        # what is between two tokens was trimmed from the second
        for i, (first, last) in enumerate(encoded["offset_mapping"][-len(ids) :] if ids else []):
            begins[i] = min(max(first - len(before), 0), end)
            ends.append(end := max(last - len(before), end))
        across = {
            border: ids[i - 1] for border in borders if (i := bisect_left(begins, border)) and ends[i - 1] > border
        }
        # an added token takes blanks beside it in, not text
        cuts = {border for border, token in across.items() if token not in tokenizer.added_tokens_decoder}
    if borders and not continues:
        head = encode_rendered(tokenizer, text[: borders[0]])
        cuts |= set() if ids[: len(head)] == head else {borders[0]}
    if not cuts:
        return ids, begins
    ids, begins = [], []
    places = [0, *sorted(cuts), len(text)]
    for a, b in zip(places, places[1:], strict=False):
        inner = [border - a for border in borders if a < border < b]
        piece, starts = _encode_between(tokenizer, text[a:b], inner, continues or a > 0)
        ids += piece
        begins += [a + start for start in starts]
    return ids, begins


def encode_turns(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], turns: Sequence[int], where: str
) -> tuple[list[int], list[bool]]:
    """Ids of a conversation, with an end token, and which of them the wanted turns are; see :func:`assistant_spans`."""
    ids, mask = encode_spans(tokenizer, *assistant_spans(tokenizer, messages, turns, where))
    if ids and ids[-1] != tokenizer.eos_token_id:
        return [*ids, int(tokenizer.eos_token_id)], [*mask, True]
    return ids, mask


def assistant_spans(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], turns: Sequence[int], where: str
) -> tuple[str, list[tuple[int, int]]]:
    """A conversation as text, and the character span of each wanted assistant turn, its end token included.

    Where turns end with the tag of the next role (GLM), that tag is what stops the model, and belongs to the span.

    Args:
        turns: positions of the wanted messages, ascending. The text ends with the last of them.

    Raises:
        DataError: the template changes what is before a turn when the turn is added, so its place is unknown, or does
            not write what the turn says.
    """
    last = turns[-1]
    full = render(tokenizer, messages[: last + 1], False, where)
    spans = []
    for turn in turns:
        head = render(tokenizer, messages[:turn], True, where)
        upto = full if turn == last else render(tokenizer, messages[: turn + 1], False, where)
        if not (full.startswith(head) and full.startswith(upto.rstrip("\n"))):
            begins = f"{where}: the chat template "
            if len(turns) > 1:
                raise DataError(
                    f"{begins}rewrites earlier turns, so the place of assistant message {turn} can't be told; train on "
                    "the last turn only (train_sft: without --multiturn) or use another template"
                )
            raise DataError(
                f"{begins}does not begin assistant message {turn} as its generation prompt does, which ends with "
                f"{head[-20:]!r}, so what the model has to write can't be told (some open a thought there, and leave "
                "thoughts out of answers); give another template with --tokenizer_chat_template"
            )
        # templates write a newline after the end token, which the model never has to produce
        end = len(upto.rstrip("\n"))
        _require_answer(messages[turn], upto[len(head) :], f"{where}: the chat template writes message {turn}")
        spans.append((len(head), end if turn == last else end + _next_tag(tokenizer, full, len(head), end)))
    return full[: spans[-1][1]], spans


def _require_answer(message: Message, text: str, what: str) -> None:
    """Raise a DataError if a template leaves out something of a message; blanks may differ."""
    content = message["content"] or ""
    parts = content if isinstance(content, list) else [{"text": content}]
    said = [str(part.get("text", "")) for part in parts if isinstance(part, dict)]
    written = "".join(text.split())
    if not all("".join(piece.split()) in written for piece in said):
        raise DataError(
            f"{what} as {text[-80:]!r}, without (all of) its content; take out of the rows what the template drops, or "
            "give a template that keeps it with --tokenizer_chat_template"
        )
    lost = [k for k in _THOUGHTS if isinstance(message.get(k), str) and "".join(message[k].split()) not in written]
    if lost:
        raise DataError(
            f"{what} as {text[-80:]!r}, without the thoughts that it has under {lost[0]!r}; rename the key to the one "
            f"that the template reads (of {', '.join(_THOUGHTS)}), put the thoughts into the content, take them out of "
            "the rows, or give a template that writes them with --tokenizer_chat_template"
        )
    calls = [call.get("function", call) for call in message.get("tool_calls") or () if isinstance(call, dict)]
    missing = [call["name"] for call in calls if isinstance(call, dict) and str(call.get("name", "")) not in text]
    if missing:
        raise DataError(
            f"{what} as {text[-80:]!r}, without its tool call {missing[0]!r}; leave such rows out, or give a template "
            "that writes them with --tokenizer_chat_template"
        )


def _next_tag(tokenizer: PreTrainedTokenizerBase, text: str, start: int, end: int) -> int:
    """Characters after an answer up to the end of the special token that follows; 0 if the answer ends with one."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special.update(tokenizer.all_special_tokens)
    if any(text.endswith(token, start, end) for token in special):
        return 0
    newlines = len(text[end:]) - len(text[end:].lstrip("\n"))
    tag = max((token for token in special if text.startswith(token, end + newlines)), key=len, default="")
    return newlines + len(tag) if tag else 0
