"""Images in packed sequences, against transformers' own model run on each sequence alone."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from model_cases import options
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from vision_cases import make_tiny_vision_model

from openrlhf.batching import MicroBatch, pack
from openrlhf.models.loading import ModelLoadError, load_causal_lm, write_hf_folder
from openrlhf.models.logprobs import PolicyModel
from openrlhf.models.vision import VisionError, VisionInputs, freeze_visual_encoder
from openrlhf.utils.images import decode_image
from openrlhf.utils.tiny_model import make_tiny_model

SIZES = ((70, 90), (100, 60), (56, 112))


def picture(height: int, width: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


Case = tuple[Tensor, list[tuple[int, int, bytes]]]
"""Token ids, and each image's place, number of tokens and file contents."""
PICTURES = [picture(*size, seed) for seed, size in enumerate(SIZES)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def cases(folder: str) -> list[Case]:
    return picture_cases(folder)


def picture_cases(folder: str) -> list[Case]:
    """Sequences and their images: one, none, two, and a token of the image kind that the policy sampled."""
    vision = VisionInputs(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    token = vision.config.image_token_id
    result = []
    for text, images in (("a@b=3", PICTURES[:1]), ("abcdef=", []), ("@x@y=12", PICTURES[1:]), ("@c=9", PICTURES[2:])):
        ids: list[int] = []
        placed = []
        for piece in text:
            if piece == "@":
                data = images[len(placed)]
                ids.append(vision.config.vision_start_token_id)
                placed.append((len(ids), vision.count_tokens(data), data))
                ids += [token] * placed[-1][1] + [vision.config.vision_end_token_id]
            else:
                ids += tokenizer(piece).input_ids
        result.append((torch.tensor(ids), placed))
    ids, placed = result[-1]
    result[-1] = (torch.cat([ids, torch.tensor([token, 40, token, token])]), placed)
    return result


def packed(cases: list[Case]) -> MicroBatch:
    batch = pack([ids for ids, _ in cases], {}, range(len(cases)))
    starts = batch.cu_seqlens.tolist()
    images = [(start + at, n, d) for start, (_, own) in zip(starts, cases, strict=False) for at, n, d in own]
    return dataclasses.replace(batch, images=tuple(images))


def reference(
    model: torch.nn.Module, folder: str, ids: Tensor, images: list[tuple[int, int, bytes]], sampled: int
) -> Tensor:
    """Log-probs of a sequence by transformers; `sampled` tokens at its end are text whatever they are."""
    inputs: dict[str, Tensor] = {}
    if images:
        processor = VisionInputs(folder).processor
        inputs = dict(processor(images=[decode_image(data) for _, _, data in images], return_tensors="pt"))
        kinds = (ids == VisionInputs(folder).config.image_token_id).long()
        kinds[len(ids) - sampled :] = 0
        inputs["mm_token_type_ids"] = kinds[None]
    if sampled:  # transformers takes every such token for a piece of an image: let it place the embeddings by kind
        features = torch.cat(
            list(model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output)
        )
        embeddings = model.get_input_embeddings()(ids[None]).masked_scatter(kinds[None, :, None] == 1, features)
        positions, _ = model.model.get_rope_index(
            ids[None], mm_token_type_ids=kinds[None], image_grid_thw=inputs["image_grid_thw"]
        )
        logits = model(inputs_embeds=embeddings, position_ids=positions).logits[0]
    else:
        logits = model(input_ids=ids[None], **inputs).logits[0]
    values = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    return torch.cat([values.new_zeros(1), values])


@pytest.mark.parametrize("packing", [True, False])
def test_log_probs_and_gradients_are_those_of_each_sequence_alone(folder: str, cases: list, packing: bool) -> None:
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected = torch.cat([reference(plain, folder, *case, 4 * (i == 3)) for i, case in enumerate(cases)])
    model = PolicyModel(load_causal_lm(folder, options(packing_samples=packing)), packing=packing)
    got = model(packed(cases)).logprobs
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    weights = torch.linspace(-1, 1, len(got))
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    mine = dict(model.hf_model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None and mine[name].grad is not None, name
        torch.testing.assert_close(mine[name].grad, parameter.grad, atol=2e-5, rtol=1e-4, msg=name)
    assert mine["model.visual.blocks.0.attn.qkv.weight"].grad.abs().max() > 1e-3


def test_pictures_are_seen_and_the_layout_does_not_matter(folder: str, cases: list) -> None:
    model = PolicyModel(load_causal_lm(folder, options(), trainable=False))
    together = model(packed(cases)).logprobs.split([len(ids) for ids, _ in cases])
    alone = [model(packed([case])).logprobs for case in cases]
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    ids, [(at, length, _)] = cases[0]
    other = model(packed([(ids, [(at, length, picture(*SIZES[0], 9))])])).logprobs
    assert (other - alone[0])[at + length :].abs().max() > 1e-2


def test_without_images_every_parameter_still_has_a_gradient(folder: str, cases: list) -> None:
    model = PolicyModel(load_causal_lm(folder, options()))
    model(packed(cases[1:2])).logprobs.sum().backward()
    visual = [p.grad for name, p in model.named_parameters() if ".visual." in name]
    assert visual and all(grad is not None and not grad.any() for grad in visual)


def test_wrong_number_of_tokens_is_refused(folder: str, cases: list) -> None:
    ids, [(at, length, data)] = cases[0]
    model = PolicyModel(load_causal_lm(folder, options(), trainable=False))
    with pytest.raises(VisionError, match=f"makes {length} tokens, the sequence has {length - 1} at {at}"):
        model(packed([(ids, [(at, length - 1, data)])]))


def test_freezing_leaves_the_language_model(folder: str) -> None:
    model = load_causal_lm(folder, options())
    visual = sum(p.numel() for name, p in model.named_parameters() if name.startswith("model.visual."))
    assert freeze_visual_encoder(model) == visual > 0
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, _ in model.named_parameters() if n.startswith(("model.language_model.", "lm_head."))
    }
    assert freeze_visual_encoder(model) == 0


def test_text_models_have_nothing_to_freeze_and_take_no_images(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "text")
    with pytest.raises(VisionError, match="no visual encoder; leave the flag out"):
        freeze_visual_encoder(load_causal_lm(path, options()))
    with pytest.raises(VisionError, match="type llama, which takes no images here"):
        VisionInputs(path)


def test_liger_is_refused(folder: str) -> None:
    with pytest.raises(ModelLoadError, match="vision model"):
        load_causal_lm(folder, options(use_liger_kernel=True))


def test_a_written_folder_has_the_image_processor_and_loads_again(folder: str, cases: list, tmp_path: Path) -> None:
    model = load_causal_lm(folder, options())
    state = {name: p.detach() for name, p in model.named_parameters()}
    write_hf_folder(model, state, tmp_path / "out", AutoTokenizer.from_pretrained(folder))
    again = load_causal_lm(str(tmp_path / "out"), options(), trainable=False)
    torch.testing.assert_close(PolicyModel(again)(packed(cases)).logprobs, PolicyModel(model)(packed(cases)).logprobs)
    assert AutoConfig.from_pretrained(tmp_path / "out").model_type == "qwen2_5_vl"
