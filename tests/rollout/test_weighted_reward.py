"""Several rewards by name, and the weighted sum that is trained on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from rollout_helpers import EOS, LetterTokenizer, ScriptedEngine, item

from openrlhf.config.problems import FlagValueError
from openrlhf.config.reward_sources import BUILTIN_REWARDS, parse_reward_sources
from openrlhf.rollout.dump import RolloutDumpWriter, dump_files, read_rollout_dump
from openrlhf.rollout.episodes import EpisodeSpec, run_group
from openrlhf.rollout.errors import RewardError
from openrlhf.rollout.metrics import extra_log_means, rollout_metrics
from openrlhf.rollout.protocol import SamplingParams
from openrlhf.rollout.rewards import FunctionReward, HTTPReward, RewardClient, RewardRequest, make_reward_source
from openrlhf.rollout.rewards import builtin as builtin_rewards
from openrlhf.rollout.rewards.base import RewardResult
from openrlhf.rollout.rewards.client import NoReward


def requests(count: int) -> list[RewardRequest]:
    return [RewardRequest(f"p{i} r{i}", f"p{i} ", f"r{i}", {}, f"sample {i}") for i in range(count)]


def scored(source: Any, batch: list[RewardRequest]) -> list[RewardResult]:
    async def run() -> list[RewardResult]:
        try:
            return await source.score(batch)
        finally:
            await source.close()

    return asyncio.run(run())


def write(path: Path, body: str) -> str:
    path.write_text(f"VALUE = __name__\ndef reward_func(queries, prompts, labels):\n    {body}\n")
    return str(path)


def test_the_sum_the_parts_and_the_logs(tmp_path: Path) -> None:
    """Parts [1, 0] with weights [0.25, 0.75] are 0.25; scores that differ from rewards are summed the same way."""
    one = write(tmp_path / "one.py", 'return {"rewards": [1.0] * len(queries), "extra_logs": {"length": 7}}')
    other = write(tmp_path / "other.py", 'return {"rewards": [0.0, 2.0], "scores": [1.0, 0.0]}')
    source = make_reward_source(f"one={one}, other={other}", "other=0.75,one=0.25")
    first, second = scored(source, requests(2))
    assert (first.reward, second.reward) == (0.25, 1.75)
    assert (first.score, second.score) == (1.0, 0.25)
    assert first.extra_logs == {"reward_part/one": 1.0, "reward_part/other": 0.0, "one/length": 7.0}
    assert second.extra_logs["reward_part/other"] == 2.0


def test_without_weights_parts_count_alike_and_each_file_is_a_module_of_its_own(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.py", "return [float(len(VALUE))] * len(queries)") for name in ("a", "bb")]
    source = make_reward_source(f"a={files[0]},bb={files[1]},exact=builtin:exact_match")
    (result,) = scored(source, requests(1))
    assert result.reward == len("reward_func_a") + len("reward_func_bb") + 1.0
    assert scored(make_reward_source(f"a={files[0]}", "a=-1"), requests(1))[0].reward == -float(len("reward_func_a"))
    assert scored(make_reward_source("builtin:exact_match"), requests(2))[1].extra_logs == {}


def test_against_the_sum_in_float64(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    values, weights = chance.normal(size=(3, 20)), chance.normal(size=3)
    names = ["a", "b", "c"]
    files = [
        write(tmp_path / f"{name}.py", f"return [{row.tolist()}[int(label[1:])] for label in labels]")
        for name, row in zip(names, values, strict=True)
    ]
    given = ",".join(f"{name}={file}" for name, file in zip(names, files, strict=True))
    source = make_reward_source(
        given, ",".join(f"{name}={weight}" for name, weight in zip(names, weights, strict=True))
    )
    results = scored(source, requests(20))
    np.testing.assert_allclose([r.reward for r in results], weights @ values, rtol=1e-14)
    np.testing.assert_array_equal([r.extra_logs["reward_part/b"] for r in results], values[1])


def test_servers_of_one_name_are_replicas_and_a_part_that_fails_is_a_failure(tmp_path: Path) -> None:
    bodies: list[Any] = []
    down = False

    async def answer(request: web.Request) -> web.Response:
        if down:
            return web.Response(status=400, text="down")
        bodies.append((request.path, (await request.json())["query"]))
        return web.json_response({"rewards": [2.0] * len(bodies[-1][1])})

    async def run() -> None:
        nonlocal down
        app = web.Application()
        app.router.add_post("/{replica}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        file = write(tmp_path / "one.py", "return [1.0] * len(queries)")
        source = make_reward_source(f"judge={url}/x,length={file},judge={url}/y", "judge=2,length=3")
        client = RewardClient(source, on_failure="drop")
        results = await asyncio.gather(*(client.score(request) for request in requests(32)))
        assert [r.reward for r in results] == [7.0] * 32
        assert {path for path, _ in bodies} == {"/x", "/y"} and sum(len(query) for _, query in bodies) == 32
        down = True
        lost = await client.score(requests(1)[0])
        assert isinstance(lost, NoReward) and "down" in lost.reason
        assert client.pop_metrics()["reward/dropped"] == 1
        await client.close()
        await runner.cleanup()

    asyncio.run(run())


def test_parts_are_metrics_and_in_the_dump(tmp_path: Path) -> None:
    tok = LetterTokenizer()
    b = write(tmp_path / "b.py", 'return [float("b" in query) for query in queries]')
    c = write(tmp_path / "c.py", 'return [float("c" in query) for query in queries]')

    async def run() -> Any:
        client = RewardClient(make_reward_source(f"b={b},c={c}", "b=0.25,c=0.75"))
        spec = EpisodeSpec(sampling=SamplingParams(), max_length=9, tokenizer=tok, rewards=client)
        replies = [[*tok.encode(text), EOS] for text in ("b", "c", "b", "b")]
        return await run_group(item(tok, "a", label="x"), 4, ScriptedEngine(replies), spec)

    trajectories = asyncio.run(run()).trajectories
    assert [t.reward for t in trajectories] == [0.25, 0.75, 0.25, 0.25]
    metrics = rollout_metrics(trajectories, max_new_tokens=None, max_len=64)
    assert metrics["rollout/reward_mean"] == 0.375
    assert extra_log_means(trajectories) == {"reward_part/b": 0.75, "reward_part/c": 0.25}
    RolloutDumpWriter(tmp_path / "dump").write(1, trajectories)
    (file,) = dump_files(tmp_path / "dump")
    read = read_rollout_dump(file)[0]
    assert [t.extra_logs for t in read] == [t.extra_logs for t in trajectories]
    assert read[1].extra_logs == {"reward_part/b": 0.0, "reward_part/c": 1.0}


def test_names_and_replicas() -> None:
    assert parse_reward_sources("http://a/x?k=1, http://b") == {"": ["http://a/x?k=1", "http://b"]}
    assert parse_reward_sources(["j=http://a/x?k=1", "m=./m.py", "j=http://b"]) == {
        "j": ["http://a/x?k=1", "http://b"],
        "m": ["./m.py"],
    }
    assert isinstance(make_reward_source("http://a,http://b"), HTTPReward)
    assert isinstance(make_reward_source("builtin:math"), FunctionReward)
    for name in BUILTIN_REWARDS:
        assert callable(getattr(builtin_rewards, f"{name}_reward"))
    with pytest.raises(FlagValueError, match="'b.py' in a list of several"):
        parse_reward_sources("m=a=b.py,m=b.py,m=http://c")


@pytest.mark.parametrize(
    ("sources", "weights", "words"),
    [
        ("a=builtin:math,http://b", None, "'http://b' has no name beside entries that have one"),
        ("a=builtin:maths", None, "'builtin:maths' is not a reward that is built in; .* builtin:exact_match"),
        ("builtin:math", "math=1", "weighs rewards by their names, and there are none"),
        ("a=builtin:math", "a=1,b=2", "has weights of a, b, and --remote_rm_url has a"),
        ("a=builtin:math,b=builtin:math", "a=1", "has weights of a, and --remote_rm_url has a, b"),
        ("a=builtin:math", "a=much", "'a=much' is no weight of its own"),
        ("a=builtin:math", "a=inf", "'a=inf' is no weight"),
        ("a=builtin:math", "a=1,a=2", "'a=2' is no weight of its own"),
    ],
)
def test_what_can_not_be_meant(sources: str, weights: str | None, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        make_reward_source(sources, weights)
