"""SIGINT and SIGTERM end a run once, also where the exception of the handler gets lost on the way."""

from __future__ import annotations

import os
import signal

import pytest

from openrlhf.utils import interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_lost_interrupt_is_found_by_the_next_check(number: signal.Signals) -> None:
    with interrupts.handled():
        interrupts.check()
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            pass  # a library dropped it
        assert interrupts.requested() == number.name
        os.kill(os.getpid(), number)  # a second one is ignored
        with interrupts.cleaning_up():
            interrupts.check()
        with pytest.raises(KeyboardInterrupt, match=number.name):
            interrupts.check()
    with interrupts.handled():
        assert interrupts.requested() is None


def test_a_failure_elsewhere_ends_the_next_check() -> None:
    with interrupts.handled():
        interrupts.fail(ValueError("the other thread"))
        with interrupts.cleaning_up():
            interrupts.check()
        with pytest.raises(ValueError, match="the other thread"):
            interrupts.check()
    with interrupts.handled():
        interrupts.check()


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in interrupts.SIGNALS]
    with interrupts.handled():
        own = [signal.getsignal(number) for number in interrupts.SIGNALS]
        with interrupts.kept():
            signal.signal(signal.SIGTERM, lambda *_: None)  # as Ray does when it starts
        assert [signal.getsignal(number) for number in interrupts.SIGNALS] == own
    assert [signal.getsignal(number) for number in interrupts.SIGNALS] == before
