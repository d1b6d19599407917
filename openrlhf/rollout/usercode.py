"""Loading and running the Python files that users plug in."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError
from types import ModuleType
from typing import Any, TypeVar

from openrlhf.rollout.errors import RolloutError, describe_exception, user_location
from openrlhf.utils.threads import in_daemon_thread

T = TypeVar("T")


class DeadlinePassed(Exception):
    """What was waited for did not come in time. Not TimeoutError, which user code may raise itself."""


def load_user_module(path: str, module_name: str, error_type: type[RolloutError]) -> ModuleType:
    """Runs the Python file at `path` as module `module_name`.

    The module is put into `sys.modules`, so that dataclasses and pickling work in it; a second file of the
    same module name replaces the first.

    Raises:
        error_type: no such file, not a .py file, or running it raised (file and line are named).
    """
    full_path = os.path.abspath(os.path.expanduser(path))
    if not full_path.endswith(".py"):
        raise error_type(f"{path}: the file name must end in .py")
    if not os.path.isfile(full_path):
        raise error_type(
            f"{path}: no such file (looked at {full_path}). The path must exist on every node that runs an engine."
        )
    spec = importlib.util.spec_from_file_location(module_name, full_path)
    if spec is None or spec.loader is None:
        raise error_type(f"{path}: Python can't load this file as a module")
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(module_name)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if previous is None:
            sys.modules.pop(module_name, None)
        else:
            sys.modules[module_name] = previous
        line = error.lineno if isinstance(error, SyntaxError) else None
        place = f"{full_path}:{line}" if line is not None else user_location(error, full_path)
        raise error_type(f"{path} can't be imported: {describe_exception(error)} (at {place})") from error
    return module


def accepts_keyword(function: Callable[..., Any], name: str) -> bool:
    """Tells whether `function` can be called with the keyword `name` (its own parameter or ``**kwargs``)."""
    try:
        inspect.signature(function).bind_partial(**{name: None})
    except (TypeError, ValueError):  # a builtin may have no signature
        return False
    return True


async def run_in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a blocking function in a thread of its own and returns its result.

    Where it hangs in user code, the thread is given up (the caller's time-out).
    """

    def call() -> Any:
        try:
            return function(*args, **kwargs)
        except (StopIteration, CancelledError) as error:  # asyncio refuses the one, and takes the other for its own
            raise _as_failure(error) from error
        except (Exception, asyncio.CancelledError):  # handed to the awaiting task as it is
            raise
        except BaseException as error:
            raise _as_failure(error) from error

    name = f"user-code-{getattr(function, '__name__', 'call')}"
    return await asyncio.wrap_future(in_daemon_thread(call, name))


async def contained(awaitable: Awaitable[T]) -> T:
    """Awaits what may run a user's coroutine, whose sys.exit() becomes an error like others.

    In a task, SystemExit would also stop the event loop, with everything that others wait for.
    """
    try:
        return await awaitable
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        raise _as_failure(error) from error


def _as_failure(error: BaseException) -> RuntimeError:
    what = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {type(error).__name__}"
    return RuntimeError(f"user code {what}").with_traceback(error.__traceback__)


def source_of(function: Callable[..., Any]) -> str | None:
    """The file that defines a function (or the class of an object); None where Python can't tell."""
    try:
        return inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        return inspect.getsourcefile(type(function)) if type(function).__module__ != "builtins" else None


def name_of(function: Callable[..., Any], path: str | None = None) -> str:
    """``file:line name()``, for messages; `path` stands for the file as the user wrote it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f"{path or code.co_filename}:{code.co_firstlineno}" if code is not None else path or "<function>"
    return f"{place} {getattr(function, '__name__', type(function).__name__)}()"


def is_async(function: Callable[..., Any]) -> bool:
    """Tells whether a function, or an object with `__call__`, is `async def`."""
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def call_user_code(function: Callable[..., Any], *args: Any, seconds: float | None, **keywords: Any) -> Any:
    """Calls a user's function, sync (in a thread) or async, and returns its result.

    Raises:
        DeadlinePassed: no result after `seconds` (None = no limit).
        Exception: whatever it raises.
    """
    call = function(*args, **keywords) if is_async(function) else run_in_thread(function, *args, **keywords)
    reply = await within(call, seconds)
    return await within(reply, seconds) if inspect.isawaitable(reply) else reply  # a plain one that gives a coroutine


async def within(awaitable: Awaitable[T], seconds: float | None) -> T:
    """Awaits with a deadline, and does not wait for what ignores its cancellation.

    Raises:
        DeadlinePassed: no result after `seconds` (None = no limit).
    """
    task = asyncio.ensure_future(contained(awaitable))
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise DeadlinePassed
        return task.result()
    finally:
        task.cancel()


async def gather_all(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Like asyncio.gather, but lets every call end before the first error is raised: none is left running."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    values = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        values.append(result)
    return values
