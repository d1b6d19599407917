"""A scripted engine and a transparent tokenizer for the rollout tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from openrlhf.rollout.group import PromptItem
from openrlhf.rollout.protocol import GenerationResult, SamplingParams

PAD, EOS, EOS2, ANS = 0, 7, 9, 8
SPECIAL = {PAD: "<pad>", EOS: "<eos>", EOS2: "<eos2>", ANS: "<ans>"}
FIRST_LETTER = 10


class LetterTokenizer:
    """Ids 10.. are letters, digits and signs, then the merged piece "ab"; 0, 7, 8 and 9 are special.

    Encoding prefers "ab" over "a", "b": decode-and-encode does not give sampled ids back.
    """

    letters = "abcdefghijklmnopqrstuvwxyz0123456789 =+.?!\n"
    eos_token_id: int | None = EOS
    pad_token_id: int | None = PAD

    def __init__(self) -> None:
        self.pieces = {FIRST_LETTER + i: letter for i, letter in enumerate(self.letters)}
        self.merged = FIRST_LETTER + len(self.letters)
        self.pieces[self.merged] = "ab"
        self.ids = {piece: token for token, piece in self.pieces.items()}
        self.ids.update({text: token for token, text in SPECIAL.items()})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            piece = next(p for p in sorted(self.ids, key=len, reverse=True) if text.startswith(p))
            ids.append(self.ids[piece])
            text = text[len(piece) :]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        kept = [t for t in token_ids if not (skip_special_tokens and t in SPECIAL)]
        return "".join(SPECIAL.get(t) or self.pieces[t] for t in kept)


def mark_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on letters are encoded with a blank before each text, as SentencePiece does, and decoded without it."""
    encode, decode = LetterTokenizer.encode, LetterTokenizer.decode
    monkeypatch.setattr(LetterTokenizer, "encode", lambda self, text, **more: encode(self, " " + text, **more))
    monkeypatch.setattr(
        LetterTokenizer, "decode", lambda self, ids, **more: decode(self, ids, **more).removeprefix(" ")
    )


class ScriptedEngine:
    """Answers with scripted token lists: in the order of calls, or by a function of its arguments."""

    def __init__(
        self,
        replies: Sequence[Any] | Callable[[list[int], SamplingParams], Any],
        *,
        delays: Sequence[float] = (),
        version: int = 3,
    ) -> None:
        self._replies = replies
        self._delays = list(delays)
        self.version = version
        self.prompts: list[list[int]] = []
        self.sampling: list[SamplingParams] = []

    async def generate(self, prompt_token_ids: list[int], sampling: SamplingParams) -> GenerationResult:
        number = len(self.prompts)
        self.prompts.append(list(prompt_token_ids))
        self.sampling.append(sampling)
        if callable(self._replies):
            reply = self._replies(prompt_token_ids, sampling)
        else:
            reply = self._replies[number]
        if number < len(self._delays):
            await asyncio.sleep(self._delays[number])
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, GenerationResult):
            return reply
        ids, reason = reply if isinstance(reply, tuple) else (reply, None)
        ids = list(ids)[: sampling.max_tokens]
        if reason is None:
            reason = "stop" if ids[-1] in (EOS, *sampling.stop_token_ids) else "length"
        logprobs = [-0.5 - 0.01 * i for i in range(len(ids))] if sampling.logprobs else None
        return GenerationResult(ids, logprobs, reason, self.version)


def item(tokenizer: LetterTokenizer, text: str, prompt_id: int = 0, label: Any = "", **kw: Any) -> PromptItem:
    """A prompt whose group id is its prompt id plus 100."""
    group = kw.pop("group_id", 100 + prompt_id)
    return PromptItem(prompt_id, group, text, tokenizer.encode(text), label, **kw)
