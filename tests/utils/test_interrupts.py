"""SIGINT and SIGTERM end a run once, also where the exception of the handler gets lost on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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


STUCK = """
import os, signal, time
from openrlhf.utils import interrupts
interrupts.END_SECONDS = {seconds}
with interrupts.handled(lambda: {hopeless}):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    except KeyboardInterrupt:
        time.sleep({cleaning})
print("in order")
"""


@pytest.mark.parametrize(("seconds", "hopeless", "cleaning"), [(600, True, 600), (0.2, False, 600), (600, False, 0.7)])
def test_an_end_that_can_not_be_ordered_does_not_take_long(seconds: float, hopeless: bool, cleaning: float) -> None:
    """SIGTERM to all processes of a job takes away those that the clean-up calls."""
    code = STUCK.format(seconds=seconds, hopeless=hopeless, cleaning=cleaning)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    if cleaning < 1:
        assert (run.returncode, run.stdout, run.stderr) == (0, "in order\n", "")
    else:
        assert run.returncode == 130
        assert run.stderr == "\ninterrupted (SIGTERM); all processes of this run were ended\n"
