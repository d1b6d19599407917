"""Agents: multi-turn episodes, executors of users, and what happens when their code breaks the contract."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollout_helpers import EOS, LetterTokenizer, ScriptedEngine, item, mark_beginnings

from openrlhf.rollout.agents import MultiTurnAgentExecutor
from openrlhf.rollout.episodes import EpisodeSpec, run_group
from openrlhf.rollout.errors import AgentError, EngineError, EpisodeTimeout
from openrlhf.rollout.group import Group
from openrlhf.rollout.loader import load_agent_executor
from openrlhf.rollout.protocol import GenerationResult, SamplingParams
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, SingleTurnAgentExecutor

TOK = LetterTokenizer()
A, B, C, AB = (TOK.ids[piece] for piece in ("a", "b", "c", "ab"))


def spec(executor: AgentExecutorBase, **options: Any) -> EpisodeSpec:
    sampling = options.pop("sampling", SamplingParams(logprobs=True))
    max_length = options.pop("max_length", 32)
    return EpisodeSpec(sampling=sampling, max_length=max_length, tokenizer=TOK, executor=executor, **options)


def play(executor: AgentExecutorBase, engine: ScriptedEngine, text: str = "q", n: int = 1, **options: Any) -> Group:
    return asyncio.run(run_group(item(TOK, text, 4, label="gold"), n, engine, spec(executor, **options)))


def one(executor: AgentExecutorBase, engine: ScriptedEngine, text: str = "q", **options: Any) -> Trajectory:
    return play(executor, engine, text, **options).trajectories[0]


class Scripted(AgentInstanceBase):
    """Answers with the scripted step results, and keeps what it was given."""

    steps: list[dict[str, Any]] = []
    seen: list[dict[str, Any]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.turn = 0

    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        type(self).seen.append(dict(state_dict))
        result = type(self).steps[self.turn]
        self.turn += 1
        return result


def scripted(*steps: dict[str, Any]) -> tuple[MultiTurnAgentExecutor, type[Scripted]]:
    cls = type("Scripted", (Scripted,), {"steps": list(steps), "seen": []})
    return MultiTurnAgentExecutor(cls), cls


def step(rewards: Any = 0.0, feedback: str = "", done: Any = False, **more: Any) -> dict[str, Any]:
    return {"rewards": rewards, "environment_feedback": feedback, "done": done, **more}


def test_sampled_ids_are_never_encoded_again() -> None:
    executor, cls = scripted(step(0.25, "c"), step(torch.tensor(1.0), "", True))
    engine = ScriptedEngine([([A, B], "stop"), ([B, EOS], "stop")])
    trajectory = one(executor, engine)
    start = TOK.encode("q")
    assert engine.prompts == [start, [*start, A, B, C]]  # a, b as sampled, not the merged piece "ab"
    assert trajectory.token_ids.tolist() == [*start, A, B, C, B, EOS]
    assert trajectory.action_mask.tolist() == [False, True, True, False, True, True]
    assert trajectory.logprobs is not None
    np.testing.assert_allclose(trajectory.logprobs, [0, -0.5, -0.51, 0, -0.5, -0.51])
    assert trajectory.weight_version.tolist() == [-1, 3, 3, -1, 3, 3]
    assert trajectory.reward == trajectory.score == 1.25
    assert trajectory.step_rewards == ((2, 0.25), (5, 1.0))
    assert not trajectory.truncated and trajectory.finish_reason == "stop"
    assert trajectory.metadata["label"] == "gold" and trajectory.metadata["response"] == "abcb<eos>"
    assert "unsampled_action_ranges" not in trajectory.metadata
    assert [s["observation_text"] for s in cls.seen] == ["q", "qabc"]
    assert [s["action_text"] for s in cls.seen] == ["ab", "b"]
    assert all(s["label"] == "gold" for s in cls.seen)


def test_feedback_goes_on_without_a_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    mark_beginnings(monkeypatch)
    executor, cls = scripted(step(0.0, "c"), step(1.0, done=True))
    trajectory = one(executor, ScriptedEngine([([A], "stop"), ([B, EOS], "stop")]))
    assert trajectory.token_ids.tolist() == [*TOK.encode("q"), A, C, B, EOS] and cls.seen[1]["action_text"] == "b"


@pytest.mark.parametrize("reward", [0.5, np.float32(0.5), np.array([0.5]), torch.tensor(0.5), torch.tensor([0.5])])
def test_rewards_of_any_kind_are_numbers(reward: Any) -> None:
    executor, _ = scripted(step(reward, done=torch.tensor(True), scores=reward, extra_logs={"a": reward, "b": [2]}))
    trajectory = one(executor, ScriptedEngine([[A, EOS]]))
    assert (trajectory.reward, trajectory.score, trajectory.extra_logs) == (0.5, 0.5, {"a": 0.5, "b": 2.0})


def test_last_score_and_logs_count_and_a_score_of_zero_is_a_score() -> None:
    executor, _ = scripted(
        step(1.0, "c", scores=0.7, extra_logs={"a": 1}), step(1.0, done=True, scores=0.0, extra_logs={"b": 2})
    )
    trajectory = one(executor, ScriptedEngine([[A, EOS]] * 2))
    assert (trajectory.reward, trajectory.score, trajectory.extra_logs) == (2.0, 0.0, {"b": 2.0})


def test_a_second_turn_cut_by_the_limit_is_truncated() -> None:
    executor, _ = scripted(step(0.0, "c"), step(1.0, done=True))
    trajectory = one(executor, ScriptedEngine([([A], "stop"), ([B, B], "length")]))
    assert trajectory.truncated and trajectory.finish_reason == "length"
    executor, _ = scripted(step(0.0, "c"), step(1.0, done=True))
    trajectory = one(executor, ScriptedEngine([([A], "length"), ([B, B], "stop")]))
    assert not trajectory.truncated


def test_one_turn_equals_the_single_turn_path() -> None:
    sampling = SamplingParams(max_tokens=3, logprobs=True)
    for reply in (([A, B, EOS], "stop"), ([A, B, C], "length")):
        executor, _ = scripted(step(1.0, done=True))
        by_agent = one(executor, ScriptedEngine([reply]), sampling=sampling)
        plain = EpisodeSpec(sampling=sampling, max_length=32, tokenizer=TOK)
        group = asyncio.run(run_group(item(TOK, "q", 4, label="gold"), 1, ScriptedEngine([reply]), plain))
        single = group.trajectories[0]
        for name in ("token_ids", "action_mask", "logprobs", "weight_version"):
            np.testing.assert_array_equal(getattr(by_agent, name), getattr(single, name))
        assert (by_agent.truncated, by_agent.finish_reason) == (single.truncated, single.finish_reason)
        assert by_agent.metadata["response"] == single.metadata["response"]


def test_the_episode_stays_within_max_length() -> None:
    executor, _ = scripted(step(0.0, "ccc"), step(0.5, "ccc"), step(9.0))
    engine = ScriptedEngine(lambda ids, sampling: ([A] * min(2, sampling.max_tokens or 2), "stop"))
    trajectory = one(executor, engine, max_length=8)
    assert [s.max_tokens for s in engine.sampling] == [7, 2]
    assert trajectory.token_ids.tolist() == [*TOK.encode("q"), A, A, C, C, C, A, A]
    assert trajectory.truncated and trajectory.reward == 0.5


def test_turns_have_all_the_room_and_max_tokens_only_reserves_some_for_the_first() -> None:
    """As in OpenRLHF: 63 and 58 tokens for two turns, of which the first wrote 4 and was answered with 1."""

    class Looking(AgentInstanceBase):
        seen: list[int] = []

        async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            self.seen.append(state_dict["sampling_params"].max_tokens)
            return step(1.0, "b", len(self.seen) == 2)

    engine = ScriptedEngine(lambda ids, sampling: ([A] * 4, "stop"))
    one(MultiTurnAgentExecutor(Looking), engine, sampling=SamplingParams(max_tokens=4), max_length=64)
    assert [s.max_tokens for s in engine.sampling] == Looking.seen == [63, 58]


def test_an_executor_may_limit_its_turns() -> None:
    _, cls = scripted(step(0.0, "c"), step(1.0), step(1.0, done=True))
    engine = ScriptedEngine(lambda ids, sampling: ([A] * 9, "length"))
    trajectory = one(MultiTurnAgentExecutor(cls, max_turn_tokens=3), engine, max_length=9)
    assert [s.max_tokens for s in engine.sampling] == [3, 3, 1]
    assert trajectory.response_length == 7 and trajectory.total_length == 9
    with pytest.raises(ValueError, match="max_turn_tokens must be at least 1"):
        MultiTurnAgentExecutor(cls, max_turn_tokens=0)


def test_an_agent_may_limit_its_next_turns() -> None:
    class Limiting(AgentInstanceBase):
        def __init__(self) -> None:
            self.limits: list[int | None] = [2, 5, None]

        async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            if not self.limits:
                return step(1.0, done=True)
            params = state_dict["sampling_params"].clone()
            params.max_tokens = self.limits.pop(0)
            return step(0.0, sampling_params=params)

    engine = ScriptedEngine(lambda ids, sampling: ([A], "stop"))
    one(MultiTurnAgentExecutor(Limiting), engine, max_length=20)
    assert [s.max_tokens for s in engine.sampling] == [19, 2, 5, 16]


def test_options_that_an_agent_made_with_vllm_set_no_limit_by_themselves() -> None:
    vllm = pytest.importorskip("vllm")
    executor, _ = scripted(step(sampling_params=vllm.SamplingParams(temperature=0.5)), step(done=True))
    engine = ScriptedEngine(lambda ids, sampling: ([A], "stop"))
    one(executor, engine, max_length=64)
    assert [(s.temperature, s.max_tokens) for s in engine.sampling] == [(1.0, 63), (0.5, 62)]


def test_the_last_feedback_is_kept_but_not_trained_on() -> None:
    executor, _ = scripted(step(1.0, "c", True))
    trajectory = one(executor, ScriptedEngine([[A, EOS]]))
    assert trajectory.token_ids.tolist()[-1] == C and not trajectory.action_mask[-1]


def test_sampling_parameters_change_from_the_next_turn_on_and_only_for_this_sample() -> None:
    class Warmer(AgentInstanceBase):
        def __init__(self) -> None:
            self.turn = 0

        async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            self.turn += 1
            params = state_dict["sampling_params"]
            if self.turn == 1:
                params.temperature = 0.3
                return step(0.0, "c")
            changed = params.clone()
            changed.top_k, changed.stop, changed.guided_choice = 5, "x", ["a"]
            return step(1.0, "c", self.turn == 3, sampling_params=changed)

    engine = ScriptedEngine(lambda ids, sampling: ([A], "stop"))
    play(MultiTurnAgentExecutor(Warmer), engine, n=2)
    by_turn = sorted(engine.sampling, key=lambda s: (-s.temperature, s.top_k))
    assert [(s.temperature, s.top_k, s.stop) for s in by_turn] == [(1.0, -1, ())] * 2 + [(0.3, -1, ())] * 2 + [
        (0.3, 5, ("x",))
    ] * 2
    assert by_turn[-1].extra == (("guided_choice", ["a"]),)
    assert all(s.logprobs for s in engine.sampling)
    assert len({s.seed for s in engine.sampling}) == 6  # every sample and every turn has its own


def test_calls_side_by_side_have_seeds_of_their_own() -> None:
    class BestOfFour(AgentExecutorBase):
        async def execute(self, **given: Any) -> dict[str, Any]:
            engine, ids = given["llm_engine"], given["llm_engine"].prompt_token_ids
            calls = [engine.generate(ids, given["sampling_params"]) for _ in range(4)]
            best = (await asyncio.gather(*calls))[0].outputs[0].token_ids
            whole = {"observation_tokens": [*ids, *best], "action_ranges": [(len(ids), len(ids) + len(best))]}
            return {"prompt": given["prompt"], "label": given["label"], "reward": 1.0, **whole}

    engine = ScriptedEngine(lambda ids, sampling: ([A], "stop"), delays=[0.01] * 8)
    play(BestOfFour(), engine, n=2)
    assert len({s.seed for s in engine.sampling}) == 8


def test_reset_gives_the_first_observation() -> None:
    class Framed(Scripted):
        steps = [step(1.0, done=True)]
        given: list[Any] = []

        async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            self.given.append(states)
            return {"observation": "x" + states["observation"] + "y"}

    engine = ScriptedEngine([[A, EOS]])
    trajectory = one(MultiTurnAgentExecutor(Framed), engine, "qq")
    assert Framed.given == [{"observation": "qq", "label": "gold"}]
    assert engine.prompts == [TOK.encode("xqqy")] and trajectory.prompt_length == 4
    engine = ScriptedEngine([[A, EOS]])
    one(MultiTurnAgentExecutor(Framed), engine, "qq", max_length=5, sampling=SamplingParams(max_tokens=2))
    assert engine.prompts == [TOK.encode("qqy")]  # cut on the left: 5 less 2 for the answer


def test_plain_functions_and_async_initialisers_work() -> None:
    class Old(AgentInstanceBase):
        async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
            self.ready = True

        def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            return states

        def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            return step(float(self.ready), done=True)

    assert one(MultiTurnAgentExecutor(Old), ScriptedEngine([[A, EOS]])).reward == 1.0


def test_stop_strings_are_left_out_of_the_action_text() -> None:
    executor, cls = scripted(step(1.0, done=True))
    engine = ScriptedEngine([([A, C, B], "stop")])
    one(executor, engine, sampling=SamplingParams(stop=("c",)))
    assert cls.seen[0]["action_text"] == "a"


# --- Executors written by users

OK = "return {'observation_tokens': [1], 'action_ranges': [(0, 1)], 'rollout_log_probs': [0]"

OLD_STYLE = """
import copy
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine{images}):
        ids = hf_tokenizer.encode(prompt, add_special_tokens=False)
        params = copy.deepcopy(sampling_params)
        params.max_tokens = 2
        out = (await llm_engine.generate(ids, params)).outputs[0]
        logprobs = None
        if out.logprobs is not None:
            logprobs = [0.0] * len(ids) + [d[t].logprob for t, d in zip(out.token_ids, out.logprobs)]
        assert params.top_p == 1.0 and params.top_k == -1 and params.min_tokens == 1
        assert params.skip_special_tokens is False and params.logprobs == {logprobs}
        {body}
        return {{"prompt": prompt, "label": label, "observation_tokens": ids + out.token_ids,
                "action_ranges": [(len(ids), len(ids) + len(out.token_ids))], "rollout_log_probs": logprobs,
                "reward": 0.5, "scores": 0.25, "extra_logs": {{"length": len(out.text)}}}}
"""


def user_executor(tmp_path: Path, *, images: str = "", logprobs: str = "1", body: str = "pass") -> AgentExecutorBase:
    path = tmp_path / "my_agent.py"
    path.write_text(OLD_STYLE.format(images=images, logprobs=logprobs, body=body))
    return load_agent_executor(str(path))


@pytest.mark.parametrize("images", ["", ", images=None", ", images", ", **kwargs"])
def test_executors_of_both_releases_run(tmp_path: Path, images: str) -> None:
    trajectory = one(user_executor(tmp_path, images=images), ScriptedEngine([[A, B, C, EOS]]))
    assert trajectory.token_ids.tolist() == [*TOK.encode("q"), A, B]
    assert (trajectory.reward, trajectory.score, trajectory.extra_logs) == (0.5, 0.25, {"length": 2.0})
    assert trajectory.truncated  # not reported by this executor: the engine's finish reason says so
    assert trajectory.weight_version.tolist() == [-1, 3, 3]


def test_log_probs_that_an_executor_forgot_come_from_the_engine(tmp_path: Path) -> None:
    trajectory = one(user_executor(tmp_path, body="logprobs = None"), ScriptedEngine([[A, EOS]]))
    assert trajectory.logprobs is not None
    np.testing.assert_allclose(trajectory.logprobs, [0, -0.5, -0.51])
    executor = user_executor(tmp_path, logprobs="None")
    assert one(executor, ScriptedEngine([[A, EOS]]), sampling=SamplingParams()).logprobs is None


def test_log_probs_are_recorded_even_if_an_agent_switches_them_off() -> None:
    class Quiet(AgentExecutorBase):
        async def execute(self, sampling_params: Any, llm_engine: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            sampling_params.logprobs = None
            output = (await llm_engine.generate([A], sampling_params)).outputs[0]
            return {"observation_tokens": [A, *output.token_ids], "action_ranges": [(1, 3)]}

    trajectory = one(Quiet(), ScriptedEngine([[A, EOS]]))
    assert trajectory.logprobs is not None and trajectory.logprobs[1] == -0.5


def test_ids_that_were_not_sampled_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = "out.token_ids = hf_tokenizer.encode(out.text)"
    executor = user_executor(tmp_path, logprobs="None", body=body)
    trajectory = one(executor, ScriptedEngine([[A, B]]), sampling=SamplingParams())
    assert trajectory.token_ids.tolist()[-1] == AB
    assert trajectory.metadata["unsampled_action_ranges"] == 1
    assert "did not sample" in caplog.text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 3", r"returned int, not a dict. Return"),
        ("return {'reward': 1}", r"without \['observation_tokens', 'action_ranges'\] \(keys: \['reward'\]\)"),
        ("ids = [1.5]", r"observation_tokens\[0\] is 1.5, not a token id"),
        ("return {'observation_tokens': [], 'action_ranges': []}", "observation_tokens is empty"),
        ("return {'observation_tokens': [1], 'action_ranges': []}", "no action tokens"),
        (
            "return {'observation_tokens': [1], 'action_ranges': [(0, 2)]}",
            r"\(0, 2\) is outside the 1 tokens",
        ),
        (
            "return {'observation_tokens': [1, 2], 'action_ranges': [(0, 2), (1, 2)]}",
            "overlaps the one before",
        ),
        (
            "return {'observation_tokens': [1, 2], 'action_ranges': [3]}",
            r"holds 3; each entry is \(start, end\)",
        ),
        ("logprobs = [0.0]", "rollout_log_probs has 1 entries, observation_tokens has 3"),
        ("logprobs[1] = float('nan')", r"rollout_log_probs\[1\] is nan"),
        (
            "return {'observation_tokens': [1, 2], 'action_ranges': [(0, 2)]}",
            "rollout_log_probs is None, but training needs",
        ),
        (
            OK + ", 'reward': 'x'}",
            "\"reward\" is 'x'; it must be one finite number",
        ),
        (
            OK + ", 'extra_logs': 1}",
            '"extra_logs" is a int',
        ),
        (
            OK + ", 'extra_logs': {'a': []}}",
            r"extra_logs\['a'\] is \[\], not a number",
        ),
        (
            OK + ", 'step_rewards': [1]}",
            '"step_rewards" must be',
        ),
    ],
)
def test_outputs_that_break_the_contract_are_named(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(AgentError, match=words) as caught:
        one(user_executor(tmp_path, body=body), ScriptedEngine([[A, EOS]]))
    assert "prompt 4 sample 0: AgentExecutor.execute()" in str(caught.value)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, r"step\(\) returned NoneType, not a dict. Return"),
        ({"rewards": 1.0}, r"without \['environment_feedback', 'done'\] \(keys: \['rewards'\]\)"),
        (step("1"), "\"rewards\" = '1'; it must be one finite number"),
        (step(float("nan")), '"rewards" = nan'),
        (step(torch.ones(2)), '"rewards" = tensor'),
        ({**step(), "environment_feedback": 3}, '"environment_feedback" of type int; it must be text'),
    ],
)
def test_steps_that_break_the_contract_are_named(result: Any, words: str) -> None:
    executor, _ = scripted(result)
    with pytest.raises(AgentError, match=words) as caught:
        one(executor, ScriptedEngine([[A, EOS]]))
    assert "prompt 4 sample 0: Scripted.step()" in str(caught.value)


def test_a_reset_without_observation_is_named() -> None:
    class NoText(Scripted):
        async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            return {"text": "x"}

    with pytest.raises(AgentError, match=r"NoText.reset\(\) returned a dict with \['text'\]; return a dict with"):
        one(MultiTurnAgentExecutor(NoText), ScriptedEngine([]))


def test_exceptions_of_agent_code_name_file_line_and_sample(tmp_path: Path) -> None:
    with pytest.raises(AgentError) as caught:
        one(user_executor(tmp_path, body="{}['x']"), ScriptedEngine([[A, EOS]]))
    message = str(caught.value)
    assert message == (f"prompt 4 sample 0: AgentExecutor.execute() raised KeyError: 'x' at {tmp_path}/my_agent.py:16")
    with pytest.raises(AgentError, match=r"raised RuntimeError: user code called sys.exit\(2\) at .*my_agent.py:16"):
        one(user_executor(tmp_path, body="raise SystemExit(2)"), ScriptedEngine([[A, EOS]]))


def test_one_failing_sample_can_be_dropped_and_counted() -> None:
    class Fragile(Scripted):
        steps = [step(1.0, done=True)]
        made = 0

        def __init__(self) -> None:
            super().__init__()
            Fragile.made += 1
            if Fragile.made == 2:
                raise OSError("no sandbox")

    group = play(MultiTurnAgentExecutor(Fragile), ScriptedEngine(lambda i, s: [A, EOS]), n=3, on_agent_failure="drop")
    assert [t.sample_index for t in group.trajectories] == [0, 2]
    assert [(f.sample_index, f.kind) for f in group.failures] == [(1, "agent")]
    assert "OSError: no sandbox at" in group.failures[0].message


@pytest.mark.parametrize("policy", ["raise", "drop"])
def test_an_agent_that_hangs_ends_in_time(policy: str) -> None:
    class Hangs(Scripted):
        async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(1)  # and it takes its time to go
            return step()

    executor, engine = MultiTurnAgentExecutor(Hangs), ScriptedEngine([[A, EOS]])
    started = time.monotonic()
    if policy == "raise":
        with pytest.raises(EpisodeTimeout, match="prompt 4 sample 0: agent MultiTurnAgentExecutor.*did not end"):
            play(executor, engine, episode_timeout=0.1)
    else:
        group = play(executor, engine, episode_timeout=0.1, on_agent_failure="drop")
        assert [f.kind for f in group.failures] == ["timeout"]
    assert time.monotonic() - started < 5


def test_engine_trouble_is_not_blamed_on_the_agent(tmp_path: Path) -> None:
    executor, _ = scripted(step(1.0, done=True))
    with pytest.raises(EngineError, match="generation engine failed: RuntimeError: gone"):
        play(executor, ScriptedEngine([RuntimeError("gone")]), on_agent_failure="drop")
    wrapped = user_executor(tmp_path, images=", **kwargs")

    class Hides(AgentExecutorBase):
        async def execute(self, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            try:
                return await wrapped.execute(**kwargs)
            except Exception as error:
                raise ValueError("something") from error

    with pytest.raises(EngineError, match="gone"):
        play(Hides(), ScriptedEngine([RuntimeError("gone")]), on_agent_failure="drop")


def test_an_agent_may_try_a_failed_request_again() -> None:
    class Stubborn(AgentExecutorBase):
        async def execute(self, sampling_params: Any, llm_engine: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            with pytest.raises(EngineError, match="gone"):
                await llm_engine.generate([A], sampling_params)
            output = (await llm_engine.generate([A], sampling_params)).outputs[0]
            return {"observation_tokens": [A, *output.token_ids], "action_ranges": [(1, 3)]}

    assert one(Stubborn(), ScriptedEngine([RuntimeError("gone"), [A, EOS]])).response_length == 2


def test_wrong_arguments_to_generate_are_named() -> None:
    class Calls(AgentExecutorBase):
        def __init__(self, *arguments: Any) -> None:
            self.arguments = arguments

        async def execute(self, llm_engine: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            options = self.arguments[1:] or (kwargs["sampling_params"],)
            return await llm_engine.generate(self.arguments[0], *options)

    with pytest.raises(AgentError, match="wants a list of token ids first, got str"):
        one(Calls("text"), ScriptedEngine([]))
    with pytest.raises(AgentError, match="sampling_params are not usable: .*temperature -1"):
        one(Calls([1], {"temperature": -1}), ScriptedEngine([]))
    with pytest.raises(AgentError, match="sampling_params.n must be 1"):
        one(Calls([1], {"n": 2}), ScriptedEngine([]))
    with pytest.raises(AgentError, match="multi_modal_data has images, but --max_images_per_prompt is 0"):
        one(Calls([1], SamplingParams(), {"image": 1}), ScriptedEngine([]))


def test_a_vllm_like_options_object_is_understood() -> None:
    class Options:
        __struct_fields__ = (
            "temperature",
            "top_k",
            "max_tokens",
            "logprobs",
            "bad_words",
            "output_kind",
            "_x",
        )

        def __init__(self, temperature: float = 1.0, bad_words: list[str] | None = None) -> None:
            self.temperature, self.top_k, self.max_tokens, self.logprobs = temperature, 0, 16, 0
            self.bad_words, self.output_kind, self._x = bad_words, 1, object()

    class Executor(AgentExecutorBase):
        async def execute(self, llm_engine: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            await llm_engine.generate([A], Options(0.5, ["no"]))
            output = (await llm_engine.generate([A], Options())).outputs[0]
            return {"observation_tokens": [A, *output.token_ids], "action_ranges": [(1, 2)]}

    engine = ScriptedEngine(lambda ids, sampling: ([B], "stop"))
    one(Executor(), engine)
    assert [(s.temperature, s.top_k, s.max_tokens, s.logprobs) for s in engine.sampling] == [
        (0.5, 0, 16, True),
        (1.0, 0, 16, True),
    ]
    assert [s.extra for s in engine.sampling] == [(("bad_words", ["no"]),), ()]


def test_versions_follow_the_turns() -> None:
    executor, _ = scripted(step(0.0, "c"), step(1.0, done=True))
    replies = [GenerationResult([A, A], None, "stop", 5), GenerationResult([A, A], None, "stop", [5, 6])]
    trajectory = one(executor, ScriptedEngine(replies), sampling=SamplingParams())
    assert trajectory.weight_version.tolist() == [-1, 5, 5, -1, 5, 6]


def test_what_was_sampled_elsewhere_counts_as_of_the_present_weights() -> None:
    class Demonstration(AgentExecutorBase):
        async def execute(self, **given: Any) -> dict[str, Any]:
            whole = {"observation_tokens": [A, B, C], "action_ranges": [(1, 3)], "rollout_log_probs": [0.0, -1.0, -1.0]}
            return {"prompt": given["prompt"], "label": given["label"], "reward": 1.0, **whole}

    trajectory = one(Demonstration(), ScriptedEngine([]), weight_version=7)
    assert trajectory.weight_version.tolist() == [-1, 7, 7]


def test_the_single_turn_executor_for_users_scores_its_sample(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("def reward_func(q, p, l):\n    return {'rewards': len(q[0]), 'extra_logs': {'a': 1}}\n")
    trajectory = one(SingleTurnAgentExecutor(str(path)), ScriptedEngine([([A, B, EOS], "stop")]))
    assert trajectory.reward == len("qab<eos>") and trajectory.extra_logs == {"a": 1.0}
    assert trajectory.logprobs is not None and trajectory.logprobs[1] == -0.5
    assert one(SingleTurnAgentExecutor(), ScriptedEngine([([A, EOS], "stop")])).reward is None


# --- Loading

IMPORT = "from openrlhf.utils.agent import *\n"
BASE = IMPORT + "class AgentExecutor(AgentExecutorBase):\n    "


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = 1\n", "defines no class AgentExecutor. Define `class AgentExecutor"),
        ("async def step(s, a, l): ...\n", "interface of releases before 0.9.1"),
        ("class AgentExecutor: ...\n", "not a subclass of AgentExecutorBase"),
        ("AgentExecutor = 3\n", "not a subclass of AgentExecutorBase"),
        (BASE + "x = 1\n", r"AgentExecutor lacks \['execute'\]"),
        (BASE + "def execute(self, **k): ...\n", "execute must be `async def`"),
        (BASE + "async def execute(self, prompt): ...\n", "can't be called with the keywords prompt, label"),
        (
            BASE + "async def __init__(self): ...\n    async def execute(self, **k): ...\n",
            "has an `async def __init__`, which Python can't call",
        ),
        (
            BASE + "def __init__(self, url): ...\n    async def execute(self, **k): ...\n",
            r"AgentExecutor\(\) raised TypeError: .*missing 1 required positional argument: 'url'",
        ),
        (
            BASE + "def __init__(self):\n        raise OSError('x')\n    async def execute(self, **k): ...\n",
            r"AgentExecutor\(\) raised OSError: x at .*my_agent.py:4",
        ),
        (
            BASE + "def __init__(self):\n        raise SystemExit(2)\n    async def execute(self, **k): ...\n",
            r"AgentExecutor\(\) raised SystemExit: 2 at .*my_agent.py:4",
        ),
        ("import nothing_of_this_name\n", r"ModuleNotFoundError.*\(at .*my_agent.py:1\)"),
    ],
)
def test_unusable_agent_files_are_named(tmp_path: Path, code: str, words: str) -> None:
    path = tmp_path / "my_agent.py"
    path.write_text(code)
    with pytest.raises(AgentError, match=words):
        load_agent_executor(str(path))


def test_the_instance_class_is_checked() -> None:
    with pytest.raises(TypeError, match="needs a subclass of AgentInstanceBase"):
        MultiTurnAgentExecutor(Scripted())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs a subclass of AgentInstanceBase"):
        MultiTurnAgentExecutor(dict)  # type: ignore[arg-type]
