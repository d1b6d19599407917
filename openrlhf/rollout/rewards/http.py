"""Rewards from HTTP servers, with retries, several servers and bounded connections.

Protocol: ``POST`` to the URL exactly as given, JSON body ``{"query": [...], "prompts": [...], "labels":
[...]}``, JSON reply ``{"rewards": ..., "scores": ..., "extra_logs": {...}}`` with one number for each query.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import tenacity

from openrlhf.rollout.errors import RewardError, describe_exception
from openrlhf.rollout.rewards.base import RewardRequest, RewardResult, parse_reply, sample_names
from openrlhf.rollout.rewards.batches import BatchCaller
from openrlhf.rollout.usercode import gather_all

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "OPENRLHF_REWARD_TOKEN"
# Client errors that mean "later", not "never".
_RETRYABLE_CLIENT_ERRORS = (408, 425, 429)
_BODY_LIMIT = 500


@dataclass(frozen=True)
class HTTPOptions:
    """How reward servers are called.

    Attributes:
        batch_size: samples in one request.
        max_connections: open connections for each server: so many requests times servers at the same time.
        timeout: seconds for one try.
        max_tries: tries for one request, the first included; a try goes round all servers that work. With the
            waits below 8 tries outlast servers that are down for a minute.
        first_wait: seconds before the second try; doubled each time.
        max_wait: limit of that wait in seconds.
        jitter: random seconds added to each wait, so that clients don't come back all at once.
    """

    batch_size: int = 16
    max_connections: int = 64
    timeout: float = 180.0
    max_tries: int = 8
    first_wait: float = 1.0
    max_wait: float = 30.0
    jitter: float = 1.0


class _TryFailed(Exception):
    """One try failed in a way that may pass."""


class _WrongForm(_TryFailed):
    """The reply is JSON of the wrong form, with the RewardError that says so: another server may do better."""

    def __init__(self, error: RewardError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(eq=False)
class _Server:
    url: str
    in_flight: int = 0
    sent: int = 0
    failures_in_a_row: int = 0
    resting_until: float = 0.0


class HTTPReward:
    """Scores samples with one or several reward servers.

    Each request goes to the least-loaded server that is not resting after a failure; when it fails, another
    one is asked at once. Retried are 5xx, 408, 425, 429, connection errors, time-outs and bodies that are not
    JSON. Any other 4xx, and JSON of the wrong shape, fails at once.

    If the environment variable OPENRLHF_REWARD_TOKEN is set, it is sent as bearer token.
    """

    def __init__(self, urls: Sequence[str], options: HTTPOptions | None = None) -> None:
        wrong = [url for url in urls if not url.startswith(("http://", "https://"))]
        if wrong or not urls:
            raise RewardError(f"reward URLs must start with http:// or https://, got {wrong or 'an empty list'}")
        self.options = options or HTTPOptions()
        self.retries = 0
        self._servers = [_Server(url) for url in urls]
        self._session: aiohttp.ClientSession | None = None
        self._limit = self.options.max_connections * len(urls)
        self._slots = asyncio.Semaphore(self._limit)
        self._batches = BatchCaller(f"the reward server {self._urls()}")

    async def score(self, batch: Sequence[RewardRequest]) -> list[RewardResult]:
        """Returns one result for each request, in order; sends nothing for an empty batch.

        Raises:
            RewardError: a server refused, replied nonsense, or none answered after all tries.
        """
        size = 1 if self._batches.one_by_one else self.options.batch_size
        chunks = [batch[start : start + size] for start in range(0, len(batch), size)]
        parts = await gather_all(
            [self._batches.score(chunk, self._post_with_retries, self._post_once) for chunk in chunks]
        )
        return [result for part in parts for result in part]

    async def close(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post_once(self, chunk: Sequence[RewardRequest]) -> list[RewardResult]:
        try:
            return await self._try_servers(_encode(chunk), chunk)
        except _TryFailed as error:
            raise RewardError(str(error)) from error

    async def _post_with_retries(self, chunk: Sequence[RewardRequest]) -> list[RewardResult]:
        body = _encode(chunk)
        options = self.options
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(_TryFailed),
            stop=tenacity.stop_after_attempt(options.max_tries),
            wait=tenacity.wait_exponential(options.first_wait, options.max_wait)
            + tenacity.wait_random(0, options.jitter),
            before_sleep=self._count_retry,
            reraise=True,
        )
        try:
            return await retrying(self._try_servers, body, chunk)
        except _TryFailed as error:
            raise RewardError(
                f"no reward for {sample_names(chunk)} after {options.max_tries} tries; the last: {error}. Is the "
                f"server up and reachable from this node? Servers: {self._urls()}"
            ) from error

    def _urls(self) -> str:
        return ", ".join(server.url for server in self._servers)

    def _count_retry(self, state: tenacity.RetryCallState) -> None:
        self.retries += 1
        error = state.outcome.exception() if state.outcome is not None else None
        wait = state.next_action.sleep if state.next_action is not None else 0.0
        logger.warning("try %d of a reward request failed (%s); next in %.1f s", state.attempt_number, error, wait)

    async def _try_servers(self, body: bytes, chunk: Sequence[RewardRequest]) -> list[RewardResult]:
        """One try: a server, and where it fails, at once each other server that is not resting.

        Raises:
            _TryFailed: none of them answered.
            RewardError: a refusal, or every server there is gave a reply of the wrong form.
        """
        session = self._open_session()
        tried: list[_Server] = []
        wrong = 0
        # The server is chosen when there is room for the request, so one that hangs keeps its share of the room only.
        async with self._slots:
            while True:
                server = self._choose_server(tried)
                tried.append(server)
                try:
                    return await self._post(session, server, body, chunk)
                except _WrongForm as error:
                    wrong += 1
                    if wrong == len(self._servers):
                        raise error.error from error
                    if len(tried) == len(self._servers):
                        raise
                    what: _TryFailed = error
                except _TryFailed as error:
                    if not self._healthy(tried):
                        raise
                    what = error
                self.retries += 1
                logger.warning("reward server failed (%s); asking another one", what)

    async def _post(
        self, session: aiohttp.ClientSession, server: _Server, body: bytes, chunk: Sequence[RewardRequest]
    ) -> list[RewardResult]:
        server.in_flight += 1
        server.sent += 1
        try:
            async with session.post(server.url, data=body) as response:
                text = await response.text(errors="replace")
                return self._read(server, response.status, text, chunk)
        except (aiohttp.ClientError, OSError) as error:
            self._rest(server)
            late = isinstance(error, TimeoutError)
            what = f"no answer within {self.options.timeout:g} s" if late else describe_exception(error)
            raise _TryFailed(f"{server.url}: {what}") from error
        finally:
            server.in_flight -= 1

    def _read(self, server: _Server, status: int, text: str, chunk: Sequence[RewardRequest]) -> list[RewardResult]:
        if 400 <= status < 500 and status not in _RETRYABLE_CLIENT_ERRORS:
            raise RewardError(
                f"reward server {server.url} refused the request for {sample_names(chunk)} with status {status}: "
                f"{text[:_BODY_LIMIT]!r}",
                isolatable=status in (400, 413, 422),
            )
        if not 200 <= status < 300:
            self._rest(server)
            raise _TryFailed(f"{server.url}: status {status}: {text[:_BODY_LIMIT]!r}")
        try:
            reply = json.loads(text)
        except ValueError as error:
            self._rest(server)
            raise _TryFailed(f"{server.url}: the reply is not JSON: {text[:_BODY_LIMIT]!r}") from error
        failures, server.failures_in_a_row, server.resting_until = server.failures_in_a_row, 0, 0.0
        try:
            return parse_reply(reply, chunk, f"reward server {server.url}")
        except RewardError as error:
            if error.isolatable:  # it is about a sample, and another server would say the same
                raise
            server.failures_in_a_row = failures
            self._rest(server)
            raise _WrongForm(error) from error

    def _healthy(self, without: Sequence[_Server]) -> list[_Server]:
        """Servers that may be chosen. One that failed last proves itself with a single request first."""
        now = time.monotonic()
        return [
            server
            for server in self._servers
            if server not in without
            and server.resting_until <= now
            and (server.failures_in_a_row == 0 or server.in_flight == 0)
        ]

    def _choose_server(self, tried: Sequence[_Server]) -> _Server:
        healthy = self._healthy(tried)
        if healthy:
            return min(healthy, key=lambda server: (server.in_flight, server.sent))
        untried = [server for server in self._servers if server not in tried]
        return min(untried, key=lambda server: server.resting_until)

    def _rest(self, server: _Server) -> None:
        """Keeps a failing server out of the choice, for longer with each failure in a row."""
        doublings = min(server.failures_in_a_row, 64)  # requests fail by the hundred when a server dies
        wait = min(self.options.first_wait * 2.0**doublings, self.options.max_wait)
        server.failures_in_a_row += 1
        server.resting_until = time.monotonic() + wait

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:  # made here: aiohttp wants a running loop
            token = os.environ.get(TOKEN_VARIABLE)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._limit),
                timeout=aiohttp.ClientTimeout(total=self.options.timeout),
                headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {}),
            )
        return self._session


def _encode(chunk: Sequence[RewardRequest]) -> bytes:
    payload = {
        "query": [request.query for request in chunk],
        "prompts": [request.prompt for request in chunk],
        "labels": [request.label for request in chunk],
    }
    try:
        return json.dumps(payload, default=_plain).encode("utf-8")
    except TypeError as error:
        kinds = sorted({type(request.label).__name__ for request in chunk})
        raise RewardError(f"the labels of {chunk[0].sample} can't be sent as JSON ({error}); types: {kinds}") from error


def _plain(value: Any) -> Any:
    """Turns NumPy and tensor labels into plain JSON values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no JSON form")
