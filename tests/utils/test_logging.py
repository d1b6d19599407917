"""One line a message, and one process that speaks."""

from __future__ import annotations

import logging

import pytest

from openrlhf.utils.logging import get_logger, note_once


def test_loggers_share_one_handler() -> None:
    first, second = get_logger("openrlhf.models.loading"), get_logger("openrlhf.trainer.sft")
    root = logging.getLogger("openrlhf")
    assert first.name == "openrlhf.models.loading" and first.parent is root and second.parent is root
    # pytest puts handlers of its own beside ours
    assert sum(type(handler) is logging.StreamHandler for handler in root.handlers) == 1 and not root.propagate


@pytest.mark.parametrize(
    ("rank", "level", "shown"), [("0", "info", "hello"), ("1", "info", ""), ("1", "warning", "[rank 1] hello")]
)
def test_other_ranks_only_warn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, level: str, shown: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    root = logging.getLogger("openrlhf")
    saved, root.handlers = root.handlers, []
    try:
        getattr(get_logger("openrlhf.test"), level)("hello")
    finally:
        root.handlers = saved
    err = capsys.readouterr().err
    assert (shown in err) if shown else err == ""


def test_notes_come_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []
    logger = get_logger("openrlhf.test")
    monkeypatch.setattr(logger, "log", lambda level, form, text: seen.append((level, text)))
    for _ in range(2):
        note_once(logger, "a note of this test")
        note_once(logger, "a warning of this test", logging.WARNING)
    assert seen == [(logging.INFO, "a note of this test"), (logging.WARNING, "a warning of this test")]
