"""Code of users that tries to end the process: the run hears of it, and what others wait for goes on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
from typing import Any

import pytest

from openrlhf.rollout.errors import user_location
from openrlhf.rollout.usercode import call_user_code, contained, gather_all


def plain(error: BaseException) -> None:
    raise error


async def awaited(error: BaseException) -> None:
    raise error


def gives_a_coroutine(error: BaseException) -> Any:
    return awaited(error)


@pytest.mark.parametrize("function", [plain, awaited, gives_a_coroutine])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SystemExit(3), r"^user code called sys\.exit\(3\)$"),
        (SystemExit("no key"), r"^user code called sys\.exit\('no key'\)$"),
        (KeyboardInterrupt(), r"^user code raised KeyboardInterrupt$"),
    ],
)
def test_an_exit_is_an_error_like_others(function: Any, error: BaseException, told: str) -> None:
    async def both() -> Any:
        return await gather_all([call_user_code(function, error, seconds=60.0), asyncio.sleep(0.2, "went on")])

    with pytest.raises(RuntimeError, match=told) as caught:
        asyncio.run(both())
    assert user_location(caught.value, __file__).startswith(f"{__file__}:")
    assert int(user_location(caught.value, __file__).rpartition(":")[2]) in (17, 21)


def test_a_cancelled_future_in_user_code_is_an_error_and_cancels_nobody() -> None:
    with pytest.raises(RuntimeError, match="^user code raised CancelledError$") as caught:
        asyncio.run(call_user_code(plain, concurrent.futures.CancelledError(), seconds=60.0))
    assert user_location(caught.value, __file__) == f"{__file__}:17"


def test_errors_and_cancellation_stay_what_they_are() -> None:
    async def cancelled() -> None:
        task = asyncio.ensure_future(contained(asyncio.sleep(30)))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    for function in (plain, awaited):
        with pytest.raises(KeyError):
            asyncio.run(call_user_code(function, KeyError("label"), seconds=60.0))
    assert asyncio.run(call_user_code(sys.getrecursionlimit, seconds=60.0)) == sys.getrecursionlimit()
