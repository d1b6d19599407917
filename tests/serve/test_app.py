"""The routes, without a server process."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fastapi.testclient import TestClient

from openrlhf.serve.app import AppSettings, Refused, create_app, parse_body
from openrlhf.tools.scoring import Encoded


class LengthScorer:
    """Scores a text with its length; some texts have special effects."""

    def encode(self, text: str) -> Encoded:
        if text == "%":
            raise ValueError("no token")
        return Encoded([ord(c) for c in text] or [0], len(text) > 8)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        if any(ids[0] == ord("!") for ids in sequences):
            raise MemoryError("too long")
        return [math.nan if ids[0] == ord("?") else float(len(ids)) for ids in sequences]


@pytest.fixture
def client() -> Iterator[TestClient]:
    settings = AppSettings("tiny", max_batch=2, max_waiting=4, max_body=200)
    with TestClient(create_app(LengthScorer(), settings), raise_server_exceptions=False) as client:
        yield client


def test_the_protocol(client: TestClient) -> None:
    body = {"query": ["ab", "abc", "a", "abcd"], "prompts": ["a"] * 4, "labels": [None, 1, {}, "x"]}
    reply = client.post("/get_reward", json=body)
    assert reply.status_code == 200 and reply.headers["content-type"] == "application/json"
    scores = [2.0, 3.0, 1.0, 4.0]
    assert reply.json() == {"rewards": scores, "scores": scores, "extra_logs": {"dummy_scores": scores}}
    assert client.post("/get_reward", json={"query": ["abc"]}).json()["rewards"] == [3.0]
    assert client.post("/get_reward", json={"query": "abc"}).json()["rewards"] == [3.0]


def test_no_queries(client: TestClient) -> None:
    reply = client.post("/get_reward", json={"query": [], "prompts": [], "labels": []})
    assert (reply.status_code, reply.json()) == (
        200,
        {"rewards": [], "scores": [], "extra_logs": {"dummy_scores": []}},
    )


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "the body is empty"),
        (b'{"query": ["a"', 400, "is not JSON"),
        (b"\xff\xfe", 400, "is not JSON"),
        (b"[" * 100_000, 400, "is not JSON"),
        (b'["a"]', 422, "the body is a JSON list"),
        (b"null", 422, "the body is a JSON null"),
        (b'{"queries": ["a"]}', 422, "no key 'query' (it has 'queries')"),
        (b'{"query": 3}', 422, "'query' is a JSON number"),
        (b'{"query": {"a": 1}}', 422, "'query' is a JSON object"),
        (b'{"query": ["a", null]}', 422, "query[1] is a JSON null"),
        (b'{"query": ["a", ["b"]]}', 422, "query[1] is a JSON list"),
        (b'{"query": ["a", true]}', 422, "query[1] is a JSON boolean"),
        (b'{"query": ["a", "b\\ud800"]}', 422, "query[1] has half a character, \\ud800 at 1"),
        (json.dumps({"query": ["a"] * 5}).encode(), 413, "at most 4"),
    ],
)
def test_bad_bodies(body: bytes, status: int, words: str) -> None:
    with pytest.raises(Refused) as refused:
        parse_body(body, max_queries=4)
    assert refused.value.status == status and words in str(refused.value)


def test_refusals_are_json(client: TestClient) -> None:
    reply = client.post("/get_reward", content=b"{")
    assert reply.status_code == 400 and "is not JSON" in reply.json()["error"]
    reply = client.post("/get_reward", json={"query": ["a" * 300]})
    assert reply.status_code == 413 and "200 bytes" in reply.json()["error"]
    reply = client.get("/get_reward")
    assert reply.status_code == 405 and "POST /get_reward" in reply.json()["error"]
    reply = client.post("/", json={"query": ["a"]})
    assert reply.status_code == 404 and "POST /get_reward" in reply.json()["error"]


def test_failures_of_the_model(client: TestClient) -> None:
    reply = client.post("/get_reward", json={"query": ["a", "?"]})
    assert reply.status_code == 500 and "query[1] is nan" in reply.json()["error"]
    reply = client.post("/get_reward", json={"query": ["!"]})
    assert reply.status_code == 500 and "too long" in reply.json()["error"]
    reply = client.post("/get_reward", json={"query": ["%"]})
    assert reply.status_code == 500 and "ValueError: no token" in reply.json()["error"]
    assert client.post("/get_reward", json={"query": ["ab"]}).json()["rewards"] == [2.0]
    assert 'rm_requests_total{status="500"} 3.0' in client.get("/metrics").text


def test_a_client_that_hangs_up(client: TestClient) -> None:
    """No traceback, and it is counted."""
    parts: list[dict[str, Any]] = [
        {"type": "http.request", "body": b'{"query"', "more_body": True},
        {"type": "http.disconnect"},
    ]
    headers = [(b"content-length", b"100")]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/get_reward", "headers": headers}

    async def receive() -> dict[str, Any]:
        return parts.pop(0)

    async def send(message: dict[str, Any]) -> None:
        pass

    asyncio.run(client.app({**scope, "query_string": b""}, receive, send))  # type: ignore[arg-type]
    assert 'rm_requests_total{status="499"} 1.0' in client.get("/metrics").text


def test_a_queue_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from openrlhf.serve import batcher

    async def full(*args: object) -> list[float]:
        raise batcher.QueueFull

    monkeypatch.setattr(batcher.Batcher, "submit", full)
    with TestClient(create_app(LengthScorer(), AppSettings("tiny"))) as client:
        reply = client.post("/get_reward", json={"query": ["a"]})
    assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
    assert "--queue_size is 1024" in reply.json()["error"]


def test_the_token() -> None:
    with TestClient(create_app(LengthScorer(), AppSettings("tiny", token="sécret"))) as client:
        body = {"query": ["a"]}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sécret".encode()}):
            reply = client.post("/get_reward", json=body, headers=headers)
            assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
            assert "OPENRLHF_REWARD_TOKEN" in reply.json()["error"] and "sécret" not in reply.text
        good = {"Authorization": "Bearer sécret".encode()}
        assert client.post("/get_reward", json=body, headers=good).status_code == 200
        assert client.get("/health").status_code == client.get("/metrics").status_code == 200


def test_health_and_metrics(client: TestClient) -> None:
    assert client.get("/health").json() == {"status": "ok", "model": "tiny", "waiting": 0}
    client.post("/get_reward", json={"query": ["abc", "abcdefghij", "a"]})
    client.post("/get_reward", content=b"{")
    lines = client.get("/metrics").text.splitlines()
    for line in (
        'rm_requests_total{status="200"} 1.0',
        'rm_requests_total{status="400"} 1.0',
        "rm_request_seconds_count 2.0",
        "rm_texts_total 3.0",
        "rm_tokens_total 14.0",
        "rm_truncated_texts_total 1.0",
        "rm_batch_texts_count 2.0",
        "rm_batch_texts_sum 3.0",
        "rm_queue_texts 0.0",
    ):
        assert line in lines, line
