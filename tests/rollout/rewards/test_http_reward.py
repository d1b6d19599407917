"""Rewards over HTTP, against real servers on loopback."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import idle_clock
import numpy as np
import pytest
from aiohttp import web

from openrlhf.rollout.errors import RewardError
from openrlhf.rollout.rewards import HTTPOptions, HTTPReward, RewardClient, RewardRequest
from openrlhf.rollout.rewards.client import NoReward

FAST = HTTPOptions(first_wait=0.01, max_wait=0.02, jitter=0.0, max_tries=4, timeout=5.0)
Answer = Callable[[dict[str, Any]], Awaitable[web.Response] | web.Response]


class Server:
    """A reward server that records what it gets."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.connections: set[Any] = set()
        self.running = self.most = 0
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        self.connections.add(request.transport)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            reply = self.answer(self.bodies[-1])
            return reply if isinstance(reply, web.Response) else await reply
        finally:
            self.running -= 1

    @asynccontextmanager
    async def serve(self) -> Any:
        app = web.Application()
        app.router.add_post("/get_reward", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/get_reward"
        try:
            yield self
        finally:
            await runner.cleanup()


def label_server(body: dict[str, Any]) -> web.Response:
    """Answers with the labels as numbers; 500 on an empty list."""
    if not body["query"]:
        return web.Response(status=500, text="empty list")
    return web.json_response({"rewards": [int(label) for label in body["labels"]]})


def statuses(*codes: int) -> Answer:
    queue = list(codes)

    def answer(body: dict[str, Any]) -> web.Response:
        code = queue.pop(0) if len(queue) > 1 else queue[0]
        if code == 200:
            return web.json_response({"rewards": [0.8] * len(body["query"])})
        return web.Response(status=code, text=f"status {code} here")

    return answer


def now() -> float:
    return asyncio.get_running_loop().time()


def requests(count: int) -> list[RewardRequest]:
    return [RewardRequest(f"p{i} r{i}", f"p{i}", str(i), {}, f"prompt {i} sample 0") for i in range(count)]


def with_servers(answers: list[Answer], use: Callable[..., Awaitable[Any]], options: HTTPOptions = FAST) -> Any:
    async def run() -> Any:
        async with AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(Server(answer).serve()) for answer in answers]
            reward = HTTPReward([server.url for server in servers], options)
            try:
                return await use(reward, servers)
            finally:
                await reward.close()

    return idle_clock.run(run())


@pytest.mark.parametrize("count", [0, 1, 4, 6])
@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_several_servers_get_no_empty_batch_and_answers_keep_their_order(count: int, batch_size: int) -> None:
    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        results = await reward.score(requests(count))
        assert [r.reward for r in results] == [float(i) for i in range(count)]
        bodies = [body for server in servers for body in server.bodies]
        assert all(body["query"] for body in bodies)
        assert len(bodies) == -(-count // batch_size)
        assert sorted(q for body in bodies for q in body["query"]) == [f"p{i} r{i}" for i in range(count)]
        assert reward.retries == 0

    with_servers([label_server] * 3, use, HTTPOptions(batch_size=batch_size))


def test_the_payload_and_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENRLHF_REWARD_TOKEN", "s3cret")

    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        batch = [
            RewardRequest("ü r", "ü", {"gold": np.int64(3)}),
            RewardRequest("q r", "q", np.array([1, 2])),
        ]
        await reward.score(batch)
        assert servers[0].bodies == [{"query": ["ü r", "q r"], "prompts": ["ü", "q"], "labels": [{"gold": 3}, [1, 2]]}]
        assert servers[0].headers[0]["Authorization"] == "Bearer s3cret"
        assert servers[0].headers[0]["Content-Type"] == "application/json"

    with_servers([statuses(200)], use)


def test_replies_with_scores_and_logs() -> None:
    def answer(body: dict[str, Any]) -> web.Response:
        text = json.dumps({"rewards": [1, 2], "scores": [0.0, 0.5], "extra_logs": {"a": [3, 4]}})
        return web.Response(text=text, content_type="text/plain")

    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        results = await reward.score(requests(2))
        assert [(r.reward, r.score, dict(r.extra_logs)) for r in results] == [
            (1, 0, {"a": 3}),
            (2, 0.5, {"a": 4}),
        ]

    with_servers([answer], use)


def test_a_blip_is_retried() -> None:
    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        assert [r.reward for r in await reward.score(requests(1))] == [0.8]
        assert len(servers[0].bodies) == 3 and reward.retries == 2

    with_servers([statuses(503, 503, 200)], use)
    with_servers([statuses(429, 408, 200)], use)


def test_a_refusal_fails_at_once_with_url_and_body() -> None:
    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        with pytest.raises(RewardError) as caught:
            await reward.score(requests(1))
        assert servers[0].url in str(caught.value) and "status 400 here" in str(caught.value)
        assert len(servers[0].bodies) == 1 and reward.retries == 0

    with_servers([statuses(400)], use)


def test_a_server_that_stays_down_is_an_error_and_never_a_zero() -> None:
    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        with pytest.raises(RewardError, match="after 4 tries; the last: .* status 503") as caught:
            await reward.score(requests(1))
        assert servers[0].url in str(caught.value) and not caught.value.isolatable
        assert len(servers[0].bodies) == 4
        client = RewardClient(reward, on_failure="drop")
        assert isinstance(await client.score(requests(1)[0]), NoReward)
        assert client.pop_metrics()["reward/dropped"] == 1

    with_servers([statuses(503)], use)


def test_a_hung_server_ends_in_time() -> None:
    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        started = now()
        with pytest.raises(RewardError, match="no answer within 1 s"):
            await reward.score(requests(1))
        assert 2.0 < now() - started < 10  # two tries

    with_servers([hang], use, HTTPOptions(timeout=1.0, max_tries=2, first_wait=0.1))


def test_many_calls_share_few_connections_and_lose_nothing() -> None:
    async def slow(body: dict[str, Any]) -> web.Response:
        await asyncio.sleep(0.005)
        return label_server(body)

    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        results = await asyncio.gather(*(reward.score([request]) for request in requests(500)))
        assert [r[0].reward for r in results] == [float(i) for i in range(500)]
        assert servers[0].most <= 8 and len(servers[0].connections) <= 8

    with_servers([slow], use, HTTPOptions(max_connections=8))


def test_waiting_for_a_connection_is_not_held_against_the_server() -> None:
    async def slow(body: dict[str, Any]) -> web.Response:
        await asyncio.sleep(0.1)
        return label_server(body)

    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        results = await asyncio.gather(*(reward.score([request]) for request in requests(20)))
        assert len(results) == 20 and reward.retries == 0

    with_servers([slow], use, HTTPOptions(max_connections=1, timeout=1.0, max_tries=1))


def test_load_goes_to_the_least_busy_server() -> None:
    async def run() -> None:
        free = asyncio.Event()

        async def busy(body: dict[str, Any]) -> web.Response:
            await free.wait()
            return label_server(body)

        async with Server(busy).serve() as first, Server(label_server).serve() as second:
            reward = HTTPReward([first.url, second.url], FAST)
            waiting = asyncio.ensure_future(reward.score(requests(1)))
            async with asyncio.timeout(60):
                while not first.bodies:
                    await asyncio.sleep(0.001)
            for request in requests(10):
                await reward.score([request])
            assert (len(first.bodies), len(second.bodies)) == (1, 10)
            free.set()
            assert (await waiting)[0].reward == 0.0
            for request in requests(10):
                await reward.score([request])
            assert len(first.bodies) + len(second.bodies) == 21 and len(first.bodies) > 5
            await reward.close()

    idle_clock.run(run())


def test_a_broken_server_is_avoided() -> None:
    # Waits of half an hour: the other server is asked at once, and the broken one is left alone.
    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        started = now()
        for request in requests(30):
            await reward.score([request])
        assert now() - started < 15
        assert len(servers[1].bodies) == 30
        assert len(servers[0].bodies) == 1 and reward.retries == 1

    with_servers([statuses(500), label_server], use, HTTPOptions(first_wait=1800.0, max_wait=1800.0))


def short_list(body: dict[str, Any]) -> web.Response:
    return web.json_response({"rewards": [9.0] * max(len(body["query"]) - 1, 2)})


async def hang(body: dict[str, Any]) -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError


@pytest.mark.parametrize("batch_size", [1, 4])
def test_faults_of_three_servers_lose_and_misplace_nothing(batch_size: int) -> None:
    """One answers 500, one hangs, one leaves a value out: each answers rightly from its third request on."""

    def recovering(fault: Answer) -> Answer:
        calls = iter([fault, fault])
        return lambda body: next(calls, label_server)(body)

    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        client = RewardClient(reward, batch_size=8)
        results = await asyncio.gather(*(client.score(request) for request in requests(200)))
        assert [r and r.reward for r in results] == [float(i) for i in range(200)]
        assert client.pop_metrics()["reward/failures"] == 0 and reward.retries >= 3
        assert all(len(server.bodies) > 2 for server in servers)

    options = HTTPOptions(batch_size, timeout=2.0, first_wait=0.01, max_wait=0.02, jitter=0.0, max_tries=6)
    with_servers([recovering(fault) for fault in (statuses(500), hang, short_list)], use, options)


@pytest.mark.parametrize("fault", [statuses(500), hang, short_list], ids=["status 500", "hangs", "short list"])
def test_a_server_that_stays_faulty_beside_a_good_one_costs_no_sample(fault: Answer) -> None:
    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        for count in (90, 10):
            results = await reward.score(requests(count))
            assert [r.reward for r in results] == [float(i) for i in range(count)]
        assert len(servers[0].bodies) <= 15 + 1  # its half of the first wave; later it has to prove itself

    with_servers([fault, label_server], use, HTTPOptions(3, timeout=1.5, first_wait=0.1))


def test_three_servers_that_stay_faulty_are_an_error_that_names_one() -> None:
    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        with pytest.raises(RewardError, match="after 2 tries; the last: "):
            await reward.score(requests(4))
        assert all(server.bodies for server in servers)

    with_servers([statuses(500), hang, short_list], use, HTTPOptions(4, timeout=1.5, first_wait=0.01, max_tries=2))


def test_a_server_that_hangs_leaves_the_connections_of_the_others() -> None:
    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        waiting = asyncio.ensure_future(asyncio.gather(*(reward.score([request]) for request in requests(40))))
        async with asyncio.timeout(60):
            while len(servers[1].bodies) < 36:
                await asyncio.sleep(0.001)
        assert not waiting.done() and len(servers[0].bodies) == 4
        waiting.cancel()

    with_servers([hang, label_server], use, HTTPOptions(timeout=5.0, max_connections=4))


def test_with_all_servers_down_each_is_asked_in_every_try() -> None:
    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        with pytest.raises(RewardError, match="after 4 tries"):
            await reward.score(requests(1))
        assert sum(len(server.bodies) for server in servers) >= 5
        assert all(server.bodies for server in servers)

    with_servers([statuses(500), statuses(503)], use)


def test_connection_errors_are_retried_and_named() -> None:
    async def run() -> None:
        with socket.socket() as taken:  # bound but not listening: nobody else gets the port, nobody answers
            taken.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{taken.getsockname()[1]}/get_reward"
            down = HTTPReward([url], FAST)
            try:
                with pytest.raises(RewardError, match=f"after 4 tries; the last: {url}: Client") as caught:
                    await down.score(requests(2))
                assert "for prompt 0 sample 0 and 1 more" in str(caught.value)
                assert down.retries == 3
            finally:
                await down.close()

    idle_clock.run(run())


@pytest.mark.parametrize(
    ("text", "words", "tries"),
    [
        ("<html>", "the reply is not JSON: '<html>'", 5),
        ('{"rewards": [1, 2, 3]}', '3 values in "rewards" for 2 samples', 2),
        ('{"rewards": [1, NaN]}', 'nan in "rewards" for prompt 1 sample 0', 1),
        ('{"rewards": [1, null]}', 'None in "rewards" for prompt 1 sample 0', 1),
        ('{"error": "no model"}', r"without the key \"rewards\" \(keys: \['error'\]\)", 2),
    ],
)
def test_wrong_replies_are_named(text: str, words: str, tries: int) -> None:
    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        with pytest.raises(RewardError, match=words) as caught:
            await reward.score(requests(2))
        assert servers[0].url in str(caught.value)
        # Where no sample was answered, the first is sent by itself.
        assert len(servers[0].bodies) == tries

    with_servers([lambda body: web.Response(text=text, content_type="application/json")], use)


def test_a_server_for_single_samples_gets_single_samples(caplog: pytest.LogCaptureFixture) -> None:
    def answer(body: dict[str, Any]) -> web.Response:
        return web.json_response({"rewards": int(body["labels"][0])})

    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        for _ in range(2):
            assert [r.reward for r in await reward.score(requests(3))] == [0.0, 1.0, 2.0]
        assert [len(body["query"]) for body in servers[0].bodies] == [3, 1, 1, 1, 1, 1, 1]

    with_servers([answer], use)
    assert "one sample per call from now on" in caplog.text


@pytest.mark.parametrize("status", [400, 422, 500])
def test_a_server_that_fails_on_several_samples_gets_single_samples(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(body: dict[str, Any]) -> web.Response:
        return label_server(body) if len(body["query"]) == 1 else web.Response(status=status, text="one query only")

    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        assert [r.reward for r in await reward.score(requests(3))] == [0.0, 1.0, 2.0]
        sent = len(servers[0].bodies)
        assert sent == 3 + (FAST.max_tries if status == 500 else 1)
        assert [r.reward for r in await reward.score(requests(2))] == [0.0, 1.0]
        assert len(servers[0].bodies) == sent + 2

    with_servers([answer], use)
    assert "failed on 3 samples, and on none of them alone" in caplog.text


def test_a_blip_does_not_end_batches() -> None:
    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        await reward.score(requests(3))
        await reward.score(requests(3))
        assert [len(body["query"]) for body in servers[0].bodies] == [3, 3, 3]

    with_servers([statuses(500, 200)], use)


def test_labels_without_a_json_form_are_named() -> None:
    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        with pytest.raises(RewardError, match="labels of prompt 3 sample 0 can't be sent as JSON .*object"):
            await reward.score([RewardRequest("q", "p", object(), {}, "prompt 3 sample 0")])

    with_servers([label_server], use)


def test_default_waits_outlast_a_minute_of_downtime() -> None:
    options = HTTPOptions()
    waits = [min(options.first_wait * 2**i, options.max_wait) for i in range(options.max_tries - 1)]
    assert sum(waits) > 60


def test_a_thousand_failures_in_a_row() -> None:
    async def use(reward: HTTPReward, servers: list[Server]) -> None:
        servers[0].answer = lambda body: web.Response(status=500)
        with pytest.raises(RewardError, match="after 4 tries"):
            await asyncio.gather(*(reward.score(requests(1)) for _ in range(300)))
        reward._servers[0].failures_in_a_row = 5000
        with pytest.raises(RewardError, match="after 4 tries"):
            await reward.score(requests(1))
        servers[0].answer = label_server
        assert [r.reward for r in await reward.score(requests(2))] == [0.0, 1.0]

    with_servers([label_server], use)
