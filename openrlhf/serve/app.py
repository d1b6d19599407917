"""The routes of the reward server.

``POST /get_reward`` with ``{"query": [text, ...], "prompts": [...], "labels": [...]}`` answers ``{"rewards": [...],
"scores": [...], "extra_logs": {"dummy_scores": [...]}}``; ``GET /health`` and ``GET /metrics`` tell how it is.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from openrlhf.serve.batcher import Batcher, QueueFull
from openrlhf.serve.metrics import CONTENT_TYPE, ServerMetrics
from openrlhf.tools.scoring import Encoded

# A little less than what clients (180 s) wait, so that they are told why.
REQUEST_TIMEOUT_S = 170.0
# So much of a body beyond the limit is read and dropped, so that its sender gets to see the answer.
_DRAIN_BYTES = 64 << 20
_RETRY_AFTER_S = 1
_HUNG_UP = 499  # nginx' status for it; only the metrics see it


class Scorer(Protocol):
    """What the server needs of a reward model."""

    def encode(self, text: str) -> Encoded:
        """Token ids of a text."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """A number for each sequence."""


@dataclass(frozen=True)
class AppSettings:
    """Limits of the server.

    Attributes:
        model: name of the model, for ``/health``.
        max_batch: texts scored at once.
        max_waiting: texts that may wait; also the most texts of a request.
        max_body: bytes of a request.
        token: bearer token that requests need; None = none.
    """

    model: str
    max_batch: int = 32
    max_waiting: int = 1024
    max_body: int = 16 << 20
    token: str | None = None
    timeout_s: float = REQUEST_TIMEOUT_S


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


def parse_body(body: bytes, max_queries: int) -> list[str]:
    """The texts to score.

    Raises:
        Refused: 400 for what is not JSON, 422 for JSON of another form, 413 for too many texts.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        what = "is empty" if not body else f"is not JSON ({error})"
        raise Refused(400, f'the body {what}; send {{"query": ["prompt and response", ...]}}') from error
    if not isinstance(content, dict):
        raise Refused(422, f'the body is a JSON {_json_type(content)}; send an object: {{"query": [...]}}')
    if "query" not in content:
        keys = ", ".join(map(repr, list(content)[:10])) or "nothing"
        raise Refused(422, f"the body has no key 'query' (it has {keys}); 'query' is the list of texts to score")
    query = content["query"]
    if isinstance(query, str):
        query = [query]
    if not isinstance(query, list):
        raise Refused(422, f"'query' is a JSON {_json_type(query)}; send a list of texts")
    wrong = next((i for i, text in enumerate(query) if not isinstance(text, str)), None)
    if wrong is not None:
        raise Refused(422, f"query[{wrong}] is a JSON {_json_type(query[wrong])}; every query is a text")
    for i, text in enumerate(query):
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can escape half of a pair of surrogates, which is no character
            half = f"\\u{ord(text[error.start]):04x}"
            raise Refused(
                422, f"query[{i}] has half a character, {half} at {error.start}; send Unicode text"
            ) from error
    if len(query) > max_queries:
        raise Refused(413, f"{len(query)} queries in one request; send at most {max_queries} (--queue_size)")
    return query


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


async def _read_body(request: Request, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size <= limit:
                parts.append(part)
            elif size > limit + _DRAIN_BYTES:
                break
    except ClientDisconnect as error:
        raise Refused(_HUNG_UP, "the client hung up before the end of the body") from error
    if size > limit:
        raise Refused(
            413, f"the body is larger than {limit} bytes; send fewer queries in a request, or raise --max_body_mib"
        )
    return b"".join(parts)


class RewardService:
    """Answers scoring requests.

    Args:
        scorer: the model.
        settings: limits.
    """

    def __init__(self, scorer: Scorer, settings: AppSettings) -> None:
        self.settings = settings
        self._scorer = scorer
        # fast tokenizers are not safe to use in two threads at a time
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self.batcher = Batcher(scorer.score, settings.max_batch, settings.max_waiting, self._on_batch)
        self.metrics = ServerMetrics(lambda: self.batcher.waiting)

    def _on_batch(self, size: int) -> None:
        self.metrics.batches.observe(size)
        self.metrics.update_queue()

    async def stop(self) -> None:
        """End both threads."""
        await self.batcher.stop()
        self._tokenizing.shutdown(wait=True)

    def check_token(self, request: Request) -> None:
        """Refuse a request without the token."""
        expected = self.settings.token
        if expected is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode("latin-1"), f"Bearer {expected}".encode()):
            what = "a wrong bearer token" if given else "no bearer token"
            raise Refused(
                401,
                f"the request has {what}; send 'Authorization: Bearer TOKEN' with the server's OPENRLHF_REWARD_TOKEN",
                {"WWW-Authenticate": "Bearer"},
            )

    async def get_reward(self, request: Request) -> Response:
        """Scores for the texts of a request."""
        self.check_token(request)
        queries = parse_body(await _read_body(request, self.settings.max_body), self.settings.max_waiting)
        scores = await self._score(queries)
        content = {"rewards": scores, "scores": scores, "extra_logs": {"dummy_scores": scores}}
        return JSONResponse(content)

    async def _score(self, queries: list[str]) -> list[float]:
        loop = asyncio.get_running_loop()
        busy = {"Retry-After": str(_RETRY_AFTER_S)}
        try:
            encoded = await loop.run_in_executor(self._tokenizing, lambda: [self._scorer.encode(q) for q in queries])
            scores = await self.batcher.submit([e.token_ids for e in encoded], self.settings.timeout_s)
        except QueueFull as error:
            raise Refused(
                503,
                f"{self.batcher.waiting} texts wait already and --queue_size is {self.settings.max_waiting}; send the "
                "request again later",
                busy,
            ) from error
        except TimeoutError as error:
            raise Refused(503, f"not scored within {self.settings.timeout_s:g} s; send it again later", busy) from error
        except Exception as error:  # the model failed; the server goes on, and the log has the traceback
            raise Refused(500, f"the model failed: {type(error).__name__}: {error}") from error
        bad = next((i for i, score in enumerate(scores) if not math.isfinite(score)), None)
        if bad is not None:
            raise Refused(
                500, f"the score of query[{bad}] is {scores[bad]}; check the model, or try --param_dtype fp32"
            )
        self.metrics.texts.inc(len(encoded))
        self.metrics.tokens.inc(sum(len(e.token_ids) for e in encoded))
        self.metrics.truncated.inc(sum(e.truncated for e in encoded))
        return scores

    async def health(self) -> Response:
        """200 while the server works, else 503."""
        content = {
            "status": "ok" if self.batcher.alive else "stopped",
            "model": self.settings.model,
            "waiting": self.batcher.waiting,
        }
        return JSONResponse(content, 200 if self.batcher.alive else 503)

    async def get_metrics(self) -> Response:
        """All numbers, as Prometheus reads them."""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)


def create_app(scorer: Scorer, settings: AppSettings) -> FastAPI:
    """The ASGI application."""
    service = RewardService(scorer, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.batcher.start()
        yield
        await service.stop()

    app = FastAPI(title="reward model", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    app.post("/get_reward")(service.get_reward)
    app.get("/health")(service.health)
    app.get("/metrics")(service.get_metrics)

    @app.middleware("http")
    async def measure(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        start = time.perf_counter()
        response = await go_on(request)
        if request.url.path == "/get_reward":
            service.metrics.requests.labels(str(response.status_code)).inc()
            service.metrics.seconds.observe(time.perf_counter() - start)
        return response

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return JSONResponse({"error": str(error)}, error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        message = (
            f"{request.method} {request.url.path} is not served ({error.detail}); there are POST /get_reward, "
            "GET /health and GET /metrics"
        )
        return JSONResponse({"error": message}, error.status_code, error.headers)

    return app
