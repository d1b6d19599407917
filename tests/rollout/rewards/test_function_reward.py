"""Rewards from a user's Python file: calling conventions, result forms, and every error message."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openrlhf.rollout.errors import RewardError
from openrlhf.rollout.rewards import FunctionReward, RewardRequest, RewardResult, make_reward_source


def requests(count: int = 3, **options: Any) -> list[RewardRequest]:
    return [RewardRequest(f"p{i}r{i}", f"p{i}", i, {"datasource": "d"}, f"prompt {i} sample 0") for i in range(count)]


def source(tmp_path: Path, code: str, **options: Any) -> FunctionReward:
    path = tmp_path / "my_reward.py"
    path.write_text(code)
    return FunctionReward.from_file(str(path), **options)


def score(reward: Any, batch: list[RewardRequest]) -> list[RewardResult]:
    return asyncio.run(reward.score(batch))


def test_three_positional_lists_in_one_call(tmp_path: Path) -> None:
    code = (
        "calls = []\n"
        "def reward_func(queries, prompts, labels):\n"
        "    calls.append((queries, prompts, labels))\n"
        "    return {'rewards': [float(l) for l in labels], 'scores': [0.0, 1.0, 2.0],\n"
        "            'extra_logs': {'length': [len(q) for q in queries], 'one': 7}}\n"
    )
    reward = source(tmp_path, code)
    assert score(reward, requests()) == [
        RewardResult(0.0, 0.0, {"length": 4.0, "one": 7.0}),
        RewardResult(1.0, 1.0, {"length": 4.0, "one": 7.0}),
        RewardResult(2.0, 2.0, {"length": 4.0, "one": 7.0}),
    ]
    calls = reward._function.__globals__["calls"]
    assert calls == [(["p0r0", "p1r1", "p2r2"], ["p0", "p1", "p2"], [0, 1, 2])]


def test_metadata_goes_to_functions_that_take_it(tmp_path: Path) -> None:
    code = "def reward_func(q, p, l, **kw):\n    return [len(kw['metadata'][0]['datasource'])] * len(q)\n"
    assert [r.reward for r in score(source(tmp_path, code), requests())] == [1.0] * 3
    code = "def reward_func(q, p, l, metadata):\n    return [len(metadata)] * len(q)\n"
    with pytest.raises(RewardError, match="missing a required argument: 'metadata'"):
        source(tmp_path, code)
    code = "def reward_func(q, p, l, metadata=None):\n    return [len(metadata)] * len(q)\n"
    assert [r.reward for r in score(source(tmp_path, code), requests())] == [3.0] * 3


def test_async_functions_and_objects_are_awaited(tmp_path: Path) -> None:
    code = "import asyncio\nasync def reward_func(q, p, l):\n    await asyncio.sleep(0)\n    return l\n"
    assert [r.reward for r in score(source(tmp_path, code), requests())] == [0.0, 1.0, 2.0]
    code = "class Scorer:\n    async def __call__(self, q, p, l, **kwargs):\n        return l\nreward_func = Scorer()\n"
    assert [r.reward for r in score(source(tmp_path, code), requests())] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "value",
    [
        [0.5, 1.0],
        (0.5, 1.0),
        np.array([0.5, 1.0]),
        np.array([[0.5], [1.0]]),
        torch.tensor([0.5, 1.0], requires_grad=True),
        torch.tensor([[0.5], [1.0]], dtype=torch.bfloat16),
        [torch.tensor(0.5), np.float32(1.0)],
        [torch.tensor([0.5]), True],
    ],
)
def test_lists_arrays_and_tensors_are_rewards(value: Any) -> None:
    for reply in (value, {"rewards": value}):
        results = score(FunctionReward(lambda q, p, y, reply=reply: reply), requests(2))
        assert results == [RewardResult(0.5, 0.5), RewardResult(1.0, 1.0)]


@pytest.mark.parametrize("value", [0.5, torch.tensor(0.5), [0.5], np.float64(0.5)])
def test_one_sample_may_be_answered_with_a_number(value: Any) -> None:
    assert score(FunctionReward(lambda q, p, y: {"rewards": value}), requests(1)) == [RewardResult(0.5, 0.5)]


def test_a_score_of_zero_is_a_score() -> None:
    for zero in ([0.0], torch.zeros(1), 0):
        results = score(FunctionReward(lambda q, p, y, z=zero: {"rewards": [2.0], "scores": z}), requests(1))
        assert results == [RewardResult(2.0, 0.0)]


def test_extra_logs_may_miss_on_some_samples() -> None:
    reply = {"rewards": [1, 1], "extra_logs": {"a": [1.0, None], "b": None}}
    results = score(FunctionReward(lambda q, p, y: reply), requests(2))
    assert [dict(r.extra_logs) for r in results] == [{"a": 1.0}, {}]


def test_a_function_for_single_samples_gets_single_samples(caplog: pytest.LogCaptureFixture) -> None:
    sizes = []

    def reward_func(queries: list[str], prompts: list[str], labels: list[int]) -> dict[str, Any]:
        sizes.append(len(queries))
        return {"rewards": torch.tensor([float(labels[0])])}

    reward = FunctionReward(reward_func)
    assert [r.reward for r in score(reward, requests())] == [0.0, 1.0, 2.0]
    assert [r.reward for r in asyncio.run(FunctionReward(reward_func).score(requests(2)))] == [0.0, 1.0]
    assert sizes == [3, 1, 1, 1, 2, 1, 1]
    assert "one sample per call from now on" in caplog.text


@pytest.mark.parametrize(
    "body",
    [
        "assert len(q) == 1\n    return {'rewards': float(l[0])}",
        "(label,) = l\n    return float(label)",
        "import torch\n    return {'rewards': torch.tensor([float(x) for x in l]).item()}",
        "return {'rewards': [float(l[0])], 'extra_logs': {'v': [3.0, 1.0]}} if len(q) == 1 else None",
    ],
)
def test_a_function_that_fails_on_several_samples_gets_single_samples(
    tmp_path: Path, body: str, caplog: pytest.LogCaptureFixture
) -> None:
    code = f"sizes = []\ndef reward_func(q, p, l):\n    sizes.append(len(q))\n    {body}\n"
    reward = source(tmp_path, code)
    assert [r.reward for r in score(reward, requests())] == [0.0, 1.0, 2.0]
    assert [r.reward for r in score(reward, requests(2))] == [0.0, 1.0]
    assert reward._function.__globals__["sizes"] == [3, 1, 1, 1, 1, 1]
    assert "failed on 3 samples, and on none of them alone" in caplog.text


def test_a_function_that_took_a_batch_keeps_batches(tmp_path: Path) -> None:
    code = "sizes = []\ndef reward_func(q, p, l):\n    sizes.append(len(q))\n    return [1 / (3 - x) for x in l]\n"
    reward = source(tmp_path, code)
    assert [r.reward for r in score(reward, requests(3))] == [1 / 3, 1 / 2, 1.0]
    with pytest.raises(RewardError, match="ZeroDivisionError.* for prompt 0 sample 0 and 3 more"):
        score(reward, requests(4))
    assert reward._function.__globals__["sizes"] == [3, 4]


@pytest.mark.parametrize("bad", ["1 / 0 if x == 2 else x", "float('nan') if x == 2 else x"])
def test_one_bad_sample_in_the_first_batch_does_not_end_batches(
    tmp_path: Path, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    code = f"sizes = []\ndef reward_func(q, p, l):\n    sizes.append(len(q))\n    return [{bad} for x in l]\n"
    reward = source(tmp_path, code)
    with pytest.raises(RewardError, match="prompt 0 sample 0 and 2 more|nan in .* for prompt 2 sample 0"):
        score(reward, requests(3))
    assert [r.reward for r in score(reward, requests(2))] == [0.0, 1.0]
    assert reward._function.__globals__["sizes"] in ([3, 1, 1, 1, 2], [3, 2]) and not caplog.records


def test_of_an_extra_log_with_several_numbers_for_one_sample_the_first_counts() -> None:
    reply = {"rewards": 1.0, "extra_logs": {"v": torch.tensor([2.0, 3.0])}}
    assert score(FunctionReward(lambda q, p, y: reply), requests(1)) == [RewardResult(1.0, 1.0, {"v": 2.0})]


def test_the_signature_of_verl_is_refused_with_what_to_write(tmp_path: Path) -> None:
    arguments = "data_source, solution_str, ground_truth, extra_info=None"
    with pytest.raises(RewardError, match="parameters of verl's compute_score .*Name it compute_score") as caught:
        source(tmp_path, f"def reward_func({arguments}):\n    return 1.0\n")
    advice = str(caught.value).split("`")[1]
    code = f"def compute_score({arguments}):\n    return ground_truth + len(solution_str)\n{advice}\n"
    batch = [RewardRequest("pr", "p", label, {"datasource": "d", "response": "r"}) for label in (1, 2)]
    assert [r.reward for r in score(source(tmp_path, code), batch)] == [2.0, 3.0]
    own = source(tmp_path, "def reward_func(queries, prompts, ground_truth):\n    return ground_truth\n")
    assert [r.reward for r in score(own, requests(2))] == [0.0, 1.0]


def test_blocking_functions_run_side_by_side_up_to_the_limit() -> None:
    running, most, lock = 0, 0, threading.Lock()
    three = threading.Barrier(3)

    def reward_func(queries: list[str], prompts: list[str], labels: list[int]) -> list[float]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        three.wait(60)  # fails where they come one after the other
        time.sleep(0.05)  # more than three would meet here
        with lock:
            running -= 1
        return [1.0] * len(queries)

    async def run() -> None:
        reward = FunctionReward(reward_func, max_concurrency=3)
        await asyncio.gather(*(reward.score(requests(1)) for _ in range(9)))

    asyncio.run(run())
    assert most == 3


def test_an_empty_batch_calls_nothing() -> None:
    assert score(FunctionReward(lambda q, p, y: 1 / 0), []) == []


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ([1.0, 2.0], '2 values in "rewards" for 3 samples; return one number per sample'),
        ({"rewards": [1, 1, 1], "scores": [1, 2]}, '2 values in "scores" for 3 samples'),
        ({"rewards": [1, 1, 1], "extra_logs": {"a": [1, 2]}}, r"2 values in extra_logs\['a'\] for 3 samples"),
        ({"rewards": [1, 1, 1], "extra_logs": [1]}, '"extra_logs" of type list; return a dict'),
        (
            {"rewards": [1, 1, 1], "extra_logs": {"a": [1, "x", 2]}},
            r"'x' in extra_logs\['a'\] for prompt 1 sample 0",
        ),
        ([1.0, float("nan"), 1.0], 'nan in "rewards" for prompt 1 sample 0; it must be a finite number'),
        ([1.0, 1.0, float("inf")], 'inf in "rewards" for prompt 2 sample 0'),
        ([None, 1.0, 1.0], 'None in "rewards" for prompt 0 sample 0'),
        (["1", 1.0, 1.0], "'1' in \"rewards\" for prompt 0 sample 0"),
        ([[1.0, 2.0], 1.0, 1.0], r'\[1.0, 2.0\] in "rewards" for prompt 0 sample 0'),
        (None, 'returned None for "rewards"; return one number per sample'),
        ({"reward": [1, 1, 1]}, r"without the key \"rewards\" \(keys: \['reward'\]\)"),
    ],
)
def test_unusable_results_are_named(tmp_path: Path, reply: Any, words: str) -> None:
    reward = source(tmp_path, "REPLY = None\n\n\ndef reward_func(queries, prompts, labels):\n    return REPLY\n")
    reward._function.__globals__["REPLY"] = reply
    with pytest.raises(RewardError, match=words) as caught:
        score(reward, requests())
    assert f"{tmp_path}/my_reward.py:4 reward_func()" in str(caught.value)


def test_exceptions_name_file_line_and_sample(tmp_path: Path) -> None:
    reward = source(tmp_path, "def reward_func(q, p, l):\n    x = {}\n    return x['gold']\n")
    with pytest.raises(RewardError) as caught:
        score(reward, requests())
    message = str(caught.value)
    assert f"raised KeyError: 'gold' at {tmp_path}/my_reward.py:3 for prompt 0 sample 0 and 2 more" in message
    assert caught.value.isolatable and isinstance(caught.value.__cause__, KeyError)


def test_a_user_timeout_error_is_not_taken_for_ours(tmp_path: Path) -> None:
    reward = source(tmp_path, "def reward_func(q, p, l):\n    raise TimeoutError('judge')\n")
    with pytest.raises(RewardError, match="raised TimeoutError: judge"):
        score(reward, requests())


@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_call_that_hangs_ends_in_time(tmp_path: Path, prefix: str) -> None:
    wait = "await asyncio.sleep(60)" if prefix else "time.sleep(60)"
    code = f"import asyncio, time\n{prefix}def reward_func(q, p, l):\n    {wait}\n"
    started = time.monotonic()
    with pytest.raises(RewardError, match="did not return within 0.2 s for prompt 0 sample 0 and 2 more"):
        score(source(tmp_path, code, timeout=0.2), requests())
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def other(a): ...\n", "defines no function 'reward_func'. Define `def reward_func"),
        ("reward_func = 3\n", "reward_func is a int, not a function"),
        ("def reward_func(queries): ...\n", r"reward_func\(queries\) can't be called with"),
        ("import nothing_of_this_name\n", r"ModuleNotFoundError: .* \(at .*my_reward.py:1\)"),
        ("x = 1\ndef broken(:\n", r"SyntaxError: .* \(at .*my_reward.py:2\)"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, code: str, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        source(tmp_path, code)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="no such file .* must exist on every node"):
        make_reward_source(str(tmp_path / "gone.py"))
    with pytest.raises(RewardError, match="must end in .py"):
        FunctionReward.from_file(str(tmp_path / "gone.txt"))
    with pytest.raises(RewardError, match="'a.py' in a list of several: a list holds URLs only"):
        make_reward_source("a.py,http://localhost:1")
    with pytest.raises(RewardError, match=r"must start with http:// or https://, got \['localhost:1'\]"):
        make_reward_source(["localhost:1"])
