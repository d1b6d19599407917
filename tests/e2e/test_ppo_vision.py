"""A vision-language model through the whole system: images in prompts and feedback, on real Ray, DeepSpeed and vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from ppo_helpers import Command, CommandRun, ppo_arguments, read_metrics
from transformers import AutoModelForImageTextToText, AutoTokenizer
from vision_cases import make_tiny_vision_model

from openrlhf.rollout.dump import read_rollout_dump

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

AGENT = Path(__file__).resolve().parents[2] / "examples" / "python" / "image_agent_func.py"


def _write_prompts(folder: Path, count: int = 16) -> Path:
    """Questions about pictures of noise; every fourth has none, and is about nothing."""
    generator = np.random.default_rng(0)
    rows = []
    for number in range(count):
        row = {"input": f"how many? {number}", "answer": str(number % 4), "images": []}
        if number % 4:
            pixels = generator.integers(0, 256, (40 + 10 * number, 90, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
            row["images"] = [str(folder / f"{number}.png")]
        rows.append(row)
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


@pytest.fixture(scope="module")
def run(folder: Path) -> CommandRun:
    model = make_tiny_vision_model(folder / "base")
    arguments = ppo_arguments(model, _write_prompts(folder), folder / "out", "--agent_func_path", str(AGENT))
    arguments += f"""
        --apply_chat_template --max_images_per_prompt 2 --max_len 160 --actor_num_gpus_per_node 2 --zero_stage 2
        --packing_samples --enable_vllm_is_correction --init_kl_coef 0 --actor_learning_rate 1e-2
        --dump_rollouts {folder / "dump"} --use_tensorboard {folder / "tb"}
    """.split()
    return Command("openrlhf.cli.train_ppo_ray", arguments).run()


def test_it_trains_and_says_so(run: CommandRun, folder: Path) -> None:
    assert run.code == 0, run.output[-6000:]
    before = AutoModelForImageTextToText.from_pretrained(folder / "base").state_dict()
    after = AutoModelForImageTextToText.from_pretrained(folder / "out" / "model").state_dict()
    for part in ("model.visual.blocks.0.attn.qkv.weight", "model.language_model.layers.0.mlp.up_proj.weight"):
        assert (before[part] - after[part]).abs().max() > 1e-4


def test_engine_and_trainer_agree_on_every_sampled_token_and_after_every_sync(run: CommandRun, folder: Path) -> None:
    assert run.code == 0, run.output[-6000:]
    (metrics,) = list(folder.rglob("metrics.jsonl"))
    records = read_metrics(metrics.parent)
    assert len(records) == 2
    for record in records:
        assert record["sync/logprob_diff_max"] <= 1e-5
    # both optimizer steps of a rollout score what the first weights sampled; the first step has them still
    assert min(record["logprobs_diff"] for record in records) <= 1e-5


def test_the_trained_ids_have_every_image(run: CommandRun, folder: Path) -> None:
    assert run.code == 0, run.output[-6000:]
    token = AutoTokenizer.from_pretrained(folder / "base").convert_tokens_to_ids("<|image_pad|>")
    samples = [t for file in sorted((folder / "dump").glob("*.jsonl")) for t in read_rollout_dump(file)[0]]
    counts = set()
    for t in samples:
        counts.add(len(t.images))
        places = [i for image in t.images for i in range(image.offset, image.offset + image.length)]
        assert places == np.flatnonzero((t.token_ids == token) & ~t.action_mask).tolist()[: len(places)]
        assert len(t.images) >= bool(t.prompt_id % 4)
    assert counts >= {1, 2}
