"""Episodes whose prompts and feedback have images: their tokens, what the engine is given, what is trained on."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rollout_helpers import EOS, LetterTokenizer, ScriptedEngine, item

from openrlhf.rollout.buffer import group_from_dict, group_to_dict
from openrlhf.rollout.dump import RolloutDumpWriter, read_rollout_dump
from openrlhf.rollout.episodes import EpisodeSpec, run_group
from openrlhf.rollout.errors import AgentError, RolloutError
from openrlhf.rollout.group import Group
from openrlhf.rollout.images import PromptImages
from openrlhf.rollout.protocol import GenerationResult, PlacedImage, SamplingParams
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.utils.images import decode_image, image_sources, read_image

TOK = LetterTokenizer()
A, B, X = (TOK.ids[piece] for piece in "abx")
PIECE = TOK.ids["?"]  # stands for a piece of an image; a picture has as many as it is wide


def picture(width: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, 1)).save(buffer, "PNG")
    return buffer.getvalue()


IMAGES = PromptImages("?", PIECE, lambda data: decode_image(data).width, limit=3)


class SeeingEngine(ScriptedEngine):
    """A scripted engine that notes the images it is given."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.images: list[tuple[tuple[int, int], ...]] = []

    async def generate(
        self, prompt_token_ids: list[int], sampling: SamplingParams, images: tuple[PlacedImage, ...] = ()
    ) -> GenerationResult:
        self.images.append(tuple((image.offset, image.length) for image in images))
        for image in images:
            assert prompt_token_ids[image.offset : image.offset + image.length] == [PIECE] * image.length
            assert decode_image(image.data).width == image.length
        return await super().generate(prompt_token_ids, sampling)


def run(
    engine: ScriptedEngine,
    text: str,
    images: list[Any],
    n: int = 1,
    how: PromptImages | None = IMAGES,
    **options: Any,
) -> Group:
    values: dict[str, Any] = {"max_length": 32, "sampling": SamplingParams(logprobs=True), "images": how, **options}
    prompt = item(TOK, text, 4, label="gold", images=tuple(images))
    return asyncio.run(run_group(prompt, n, engine, EpisodeSpec(tokenizer=TOK, **values)))


def places(trajectory: Trajectory) -> list[tuple[int, int]]:
    return [(image.offset, image.length) for image in trajectory.images]


def test_single_turn(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(3))
    engine = SeeingEngine([[A, EOS], [PIECE, EOS]])
    group = run(engine, "a?b?x", [str(tmp_path / "a.png"), picture(2)], n=2)
    prompt = [A, PIECE, PIECE, PIECE, B, PIECE, PIECE, X]
    assert engine.prompts == [prompt] * 2 and engine.images == [((1, 3), (5, 2))] * 2
    first, second = group.trajectories
    assert first.token_ids.tolist() == [*prompt, A, EOS] and second.token_ids.tolist() == [*prompt, PIECE, EOS]
    assert places(first) == places(second) == [(1, 3), (5, 2)]
    assert first.images[0].data is second.images[0].data  # read once


def test_prompts_without_images_reach_engines_that_know_none() -> None:
    (trajectory,) = run(ScriptedEngine([[A, EOS]]), "ab", []).trajectories
    assert trajectory.images == ()


def test_a_prompt_that_its_images_make_too_long_is_lost_and_counted() -> None:
    group = run(SeeingEngine([]), "a?b", [picture(30)], n=2, sampling=SamplingParams(max_tokens=4))
    assert [(f.kind, f.message) for f in group.failures] == [
        ("long_prompt", "prompt 4 has 32 tokens, the limit is 28")
    ] * 2


@pytest.mark.parametrize(
    ("text", "images", "options", "message"),
    [
        ("a?", [b"no picture"], {}, "an image of 10 bytes can't be read"),
        ("a?", [picture(1)] * 4, {}, "4 images, --max_images_per_prompt is 3"),
        ("a??", [picture(1)], {}, "more places for images than there are images"),
        ("a", [picture(1)], {}, "0 places for 1 images"),
        ("a?", [picture(1)], {"how": None}, "--max_images_per_prompt is 0"),
    ],
)
def test_what_is_wrong_with_images(text: str, images: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutError, match=f"prompt 4: .*{message}"):
        run(SeeingEngine([]), text, images, **options)
    group = run(SeeingEngine([]), text, images, on_agent_failure="drop", **options)
    assert [failure.kind for failure in group.failures] == ["image"] and not group.trajectories


def environment(*steps: dict[str, Any]) -> MultiTurnAgentExecutor:
    class Environment(AgentInstanceBase):
        def __init__(self) -> None:
            self.steps = list(steps)

        async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            return {"rewards": 1.0, "done": not self.steps[1:], **self.steps.pop(0)}

    return MultiTurnAgentExecutor(Environment)


def test_images_in_the_feedback() -> None:
    """The policy samples the token of images too: it stays what it is, text."""
    shown = {"environment_feedback": "x<image>x", "environment_images": [Image.new("RGB", (2, 1))]}
    first = {"environment_feedback": "b", "environment_images": picture(1)}
    executor = environment(shown, first, {"environment_feedback": ""})
    engine = SeeingEngine([[PIECE, EOS], [A, EOS], [B, EOS]])
    (trajectory,) = run(engine, "a?", [picture(3)], executor=executor).trajectories
    prompt = [A, PIECE, PIECE, PIECE]
    second = [*prompt, PIECE, EOS, X, PIECE, PIECE, X]
    third = [*second, A, EOS, PIECE, B]
    assert engine.prompts == [prompt, second, third]
    assert engine.images == [((1, 3),), ((1, 3), (7, 2)), ((1, 3), (7, 2), (12, 1))]
    assert trajectory.token_ids.tolist() == [*third, B, EOS]
    assert places(trajectory) == [(1, 3), (7, 2), (12, 1)]
    assert [t for t, a in zip(trajectory.token_ids.tolist(), trajectory.action_mask, strict=True) if a] == [
        *(PIECE, EOS, A, EOS, B, EOS)
    ]


def test_an_image_for_which_there_is_no_room_is_left_out_whole() -> None:
    shown = {"environment_feedback": "x<image>x", "environment_images": [picture(9)], "done": False}
    engine = SeeingEngine([[A, EOS], [B, EOS]])
    executor = environment(shown, {"environment_feedback": ""})
    (trajectory,) = run(engine, "a?", [picture(3)], executor=executor, max_length=10).trajectories
    assert engine.prompts[1] == [A, PIECE, PIECE, PIECE, A, EOS, X]
    assert places(trajectory) == [(1, 3)]


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        ({"environment_images": ["nowhere.png"]}, {}, "no image file 'nowhere.png'"),
        ({"environment_images": [picture(1)] * 3}, {}, "4 images, --max_images_per_prompt is 3"),
        ({"environment_feedback": "<image><image>", "environment_images": [picture(1)]}, {}, "more places"),
    ],
)
def test_what_is_wrong_with_feedback(step: dict[str, Any], options: dict[str, Any], message: str) -> None:
    executor = environment({"environment_feedback": "x", **step}, {"environment_feedback": ""})
    with pytest.raises(AgentError, match=f"prompt 4 sample 0: Environment.step.. returned .*{message}"):
        run(SeeingEngine([[A, EOS]]), "a?", [picture(1)], executor=executor, **options)


class Looking(AgentExecutorBase):
    """Encodes the prompt itself, with one token for the image, and gives the pictures to the engine."""

    expand = True

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        ids = hf_tokenizer.encode(prompt, add_special_tokens=False)
        answer = await llm_engine.generate(ids, sampling_params, multi_modal_data={"image": images})
        start = answer.prompt_token_ids if self.expand else ids
        new = answer.outputs[0].token_ids
        ranges = [(len(start), len(start) + len(new))]
        return {"observation_tokens": start + new, "action_ranges": ranges, "rollout_log_probs": None, "reward": 1.0}


class Careless(Looking):
    expand = False


class Forgetful(AgentExecutorBase):
    """Written for text: encodes the prompt and knows of no images."""

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        return await llm_engine.generate(hf_tokenizer.encode(prompt, add_special_tokens=False), sampling_params)


class Reusing(AgentExecutorBase):
    """Begins with the engine's ids of the prompt, which have all tokens of its image."""

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        ids = list(llm_engine.prompt_token_ids)
        new = (await llm_engine.generate(ids, sampling_params)).outputs[0].token_ids
        return {"observation_tokens": ids + new, "action_ranges": [(len(ids), len(ids) + len(new))], "reward": 1.0}


@pytest.mark.parametrize("executor", [Looking(), Reusing()])
def test_executors_of_their_own(executor: AgentExecutorBase) -> None:
    engine = SeeingEngine([[A, EOS]])
    (trajectory,) = run(engine, "a?b", [picture(3)], executor=executor).trajectories
    assert trajectory.token_ids.tolist() == [A, PIECE, PIECE, PIECE, B, A, EOS]
    assert engine.images == [((1, 3),)] and places(trajectory) == [(1, 3)]


def test_an_executor_that_trains_on_other_ids_is_told() -> None:
    with pytest.raises(AgentError, match="observation_tokens 1 to 4 are not the image that the engine saw"):
        run(SeeingEngine([[A, EOS]]), "a?b", [picture(3)], executor=Careless())


def test_images_are_never_left_out_unnoticed() -> None:
    with pytest.raises(AgentError, match="places for images, and no images are given: begin with llm_engine.prompt"):
        run(SeeingEngine([[A, EOS]]), "a?b", [picture(3)], executor=Forgetful())


def test_images_survive_checkpoint_and_dump(tmp_path: Path) -> None:
    group = run(SeeingEngine([[A, EOS]]), "a?b", [picture(3)])
    again = group_from_dict(group_to_dict(group))
    assert again.trajectories[0].images == group.trajectories[0].images
    assert [read_image(*image_sources(image)) for image in again.item.images] == [picture(3)]
    assert again.item == group.item
    RolloutDumpWriter(tmp_path).write(1, group.trajectories)
    samples, _ = read_rollout_dump(tmp_path / "rollout_step_00000001.jsonl")
    assert samples[0].images == group.trajectories[0].images


def test_a_trajectory_checks_its_images() -> None:
    group = run(SeeingEngine([[A, EOS]]), "a?b", [picture(3)])
    record = group.trajectories[0].to_dict()
    record["images"][0][0] = 3  # reaches into the answer
    with pytest.raises(ValueError, match="tokens 3 to 6 can't be an image's"):
        Trajectory.from_dict(record)
