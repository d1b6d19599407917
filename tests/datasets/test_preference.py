"""Pairs of answers and labelled answers: every form of a row, what is masked, what is dropped, what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import BOS_TEMPLATE, letters
from datasets import Dataset

from openrlhf.config import DPOConfig, KTOConfig, RMConfig
from openrlhf.datasets.preference import PreferenceDataset, build_preference_dataset
from openrlhf.datasets.sft import EMPTY_PROMPT, TOO_LONG
from openrlhf.datasets.sources import DataError, load_rows
from openrlhf.datasets.unpaired import UnpairedDataset, build_unpaired_dataset

TOKENIZER = letters()
END = "<|im_end|>"


def build(rows: list[dict[str, Any]], config: type = DPOConfig, tokenizer: Any = TOKENIZER, **flags: Any) -> Any:
    cfg = config(**flags)
    builder = build_unpaired_dataset if config is KTOConfig else build_preference_dataset
    return builder(Dataset.from_list(rows), cfg, tokenizer, "rows.jsonl")


def shown(data: PreferenceDataset | UnpairedDataset, index: int, tokenizer: Any = TOKENIZER) -> tuple[str, str]:
    """The whole text of a sequence, and the part under the mask."""
    ids, mask = data.fetch([index])[0]
    assert len(ids) == len(mask) == data.lengths[index] and ids.dtype == np.int32 and mask.dtype == bool
    return tokenizer.decode(ids), tokenizer.decode(ids[mask])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


class TestText:
    def test_prompt_and_answers(self) -> None:
        data = build([{"p": "ab?", "chosen": "yes", "rejected": "no\n"}], prompt_key="p")
        assert shown(data, 0) == (f"ab?yes{END}", f"yes{END}")
        assert shown(data, 1) == (f"ab?no{END}", f"no{END}")
        assert data.lengths.tolist() == [7, 6] and len(data) == 1

    def test_template_goes_round_the_prompt(self) -> None:
        row = {"p": "ab", "good": "yes", "bad": "no"}
        data = build([row], prompt_key="p", chosen_key="good", rejected_key="bad", input_template="Q: {} A: ")
        assert shown(data, 1) == (f"Q: ab A: no{END}", f"no{END}")

    def test_whole_texts(self) -> None:
        """Without a prompt column everything is answer, but for the first token, which nothing predicts."""
        rows = [{"chosen": "Q yes", "rejected": "Q no"}, {"chosen": "Yes", "rejected": "No"}]
        data = build(rows, input_template="ignored {}")
        assert shown(data, 0) == (f"Q yes{END}", f" yes{END}")
        assert shown(data, 3) == (f"No{END}", f"o{END}")

    def test_bos_comes_once_and_an_end_token_is_not_doubled(self) -> None:
        tokenizer = letters(adds_bos=True)
        rows = [{"p": "ab", "chosen": f"yes{END}", "rejected": "no"}]
        for config in (DPOConfig, RMConfig):
            data = build(rows, config, tokenizer, prompt_key="p")
            assert shown(data, 0, tokenizer)[0] == f"<bos>abyes{END}"
        data = build([{"chosen": "<bos>yes", "rejected": "no"}], RMConfig, tokenizer)
        assert [shown(data, half, tokenizer)[0] for half in (0, 1)] == [f"<bos>yes{END}", f"<bos>no{END}"]

    def test_reward_model_reads_at_the_end_token_also_when_cut(self) -> None:
        data = build([{"p": "abc", "chosen": "defg", "rejected": "x"}], RMConfig, prompt_key="p", max_len=6)
        assert shown(data, 0)[0] == f"abcde{END}"
        assert shown(data, 1)[0] == f"abcx{END}"

    def test_dpo_cuts_the_answer_and_adds_nothing(self) -> None:
        data = build([{"p": "abc", "chosen": "defg", "rejected": "x"}], prompt_key="p", max_len=5)
        assert shown(data, 0) == ("abcde", "de")
        assert shown(data, 1) == (f"abcx{END}", f"x{END}")


class TestChat:
    @pytest.mark.parametrize("prompt", ["hi", [user("hi")]])
    @pytest.mark.parametrize("as_list", [True, False])
    def test_prompt_with_lists_or_strings(self, prompt: Any, as_list: bool) -> None:
        answers = {"chosen": "yes", "rejected": "no"}
        row = {"p": prompt, **{k: [assistant(v)] if as_list else v for k, v in answers.items()}}
        data = build([row], prompt_key="p", apply_chat_template=True)
        head = f"<|im_start|>user\nhi{END}\n<|im_start|>assistant\n"
        assert shown(data, 0) == (f"{head}yes{END}", f"yes{END}")
        assert shown(data, 1) == (f"{head}no{END}", f"no{END}")
        reward = build([row], RMConfig, prompt_key="p", apply_chat_template=True)
        assert [shown(reward, half)[0] for half in (0, 1)] == [f"{head}yes{END}", f"{head}no{END}"]

    @pytest.mark.parametrize("config", [DPOConfig, RMConfig])
    def test_whole_conversations(self, config: type) -> None:
        before = [user("hi"), assistant("ho"), user("go")]
        row = {"chosen": [*before, assistant("yes")], "rejected": [*before, assistant("no")]}
        data = build([row], config, apply_chat_template=True)
        text, answer = shown(data, 1)
        assert text.endswith(f"<|im_start|>assistant\nno{END}") and text.count(END) == 4
        if config is DPOConfig:
            assert answer == f"no{END}"

    def test_answers_of_several_turns(self) -> None:
        """All that the assistant says in the answer is under the mask, and nothing of the prompt."""
        row = {
            "p": [user("a"), assistant("b"), user("c")],
            "chosen": [assistant("d"), user("e"), assistant("f")],
            "rejected": [assistant("g")],
        }
        data = build([row], prompt_key="p", apply_chat_template=True)
        assert shown(data, 0)[1] == f"d{END}f{END}"
        assert shown(data, 1)[1] == f"g{END}"

    def test_different_prompts_are_left_out(self) -> None:
        good = {"chosen": [user("a"), assistant("x")], "rejected": [user("a"), assistant("y")]}
        bad = {"chosen": [user("a"), assistant("x")], "rejected": [user("b"), assistant("y")]}
        assert build([good, bad], apply_chat_template=True).dropped == {
            "chosen and rejected follow different prompts": 1
        }
        assert len(build([good, bad], RMConfig, apply_chat_template=True)) == 2

    def test_end_token_after_another_turn_token(self) -> None:
        tokenizer = letters(BOS_TEMPLATE.replace("eos_token", "'#'"), eos="<eos>", adds_bos=True)
        row = {"p": "a", "chosen": "x", "rejected": "y"}
        for config in (DPOConfig, RMConfig):
            data = build([row], config, tokenizer, prompt_key="p", apply_chat_template=True)
            assert shown(data, 0, tokenizer)[0] == "<bos>[u]a#[a]x#<eos>"

    @pytest.mark.parametrize(
        ("row", "flags", "message"),
        [
            (
                {"p": "a", "chosen": [user("a"), assistant("x")], "rejected": "y"},
                {"prompt_key": "p"},
                "would come twice",
            ),
            ({"chosen": "x", "rejected": "y"}, {}, "whole conversation.*--prompt_key"),
            (
                {"p": "a", "chosen": [user("x")], "rejected": "y"},
                {"prompt_key": "p"},
                "ends with a message from 'user'",
            ),
        ],
    )
    def test_refused(self, row: dict[str, Any], flags: dict[str, Any], message: str) -> None:
        with pytest.raises(DataError, match=f"row 0: .*{message}"):
            build([row], apply_chat_template=True, **flags)


class TestUnusable:
    def test_what_is_dropped_and_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told: list[str] = []
        monkeypatch.setattr(
            logging.getLogger("openrlhf.datasets.tokenized"), "warning", lambda text, *args: told.append(text % args)
        )
        rows = [
            {"p": "a", "chosen": "b", "rejected": "c"},
            {"p": "a", "chosen": "", "rejected": "c"},
            {"p": "a", "chosen": "b", "rejected": "\n"},
            {"p": "a", "chosen": "b", "rejected": "b"},
            {"p": "a", "chosen": "b" * 8 + "c", "rejected": "b" * 8},
            {"p": "a" * 8, "chosen": "b", "rejected": "c"},
        ]
        data = build(rows, prompt_key="p", max_len=8)
        assert len(data) == 1 and data.dropped == {
            "empty response (chosen)": 1,
            "empty response (rejected)": 1,
            "chosen and rejected are the same": 1,
            "chosen and rejected are the same up to max_len": 1,
            TOO_LONG: 1,
        }
        assert told[0].startswith("rows.jsonl: 5 of 6 rows are left out: ")
        reward = build(rows, RMConfig, prompt_key="p", max_len=8)
        assert len(reward) == 1 and sum(reward.dropped.values()) == 5

    @pytest.mark.parametrize("config", [DPOConfig, RMConfig])
    def test_chats_without_prompt_or_answer(self, config: type) -> None:
        rows = [
            {"p": [user("a")], "chosen": [assistant("x")], "rejected": [assistant("y")]},
            {"p": [user("a")], "chosen": [assistant("x")], "rejected": [assistant("")]},
            {"p": [user("a")], "chosen": [], "rejected": [assistant("y")]},
            {"p": [], "chosen": [assistant("x")], "rejected": [assistant("y")]},
        ]
        data = build(rows, config, prompt_key="p", apply_chat_template=True)
        assert len(data) == 1 and data.dropped == {
            "empty response (chosen)": 1,
            "empty response (rejected)": 1,
            EMPTY_PROMPT: 1,
        }

    @pytest.mark.parametrize("config", [DPOConfig, RMConfig])
    def test_nothing_left(self, config: type) -> None:
        with pytest.raises(
            DataError, match="none of the 2 rows can be trained on: 2 x chosen and rejected are the same"
        ):
            build([{"p": "a", "chosen": "b", "rejected": "b"}] * 2, config, prompt_key="p")

    @pytest.mark.parametrize(
        ("rows", "flags", "message"),
        [
            ([{"a": "x", "rejected": "y"}], {}, "no column for --chosen_key 'chosen'; its columns are: a, rejected"),
            ([{"chosen": "x", "a": "y"}], {}, "no column for --rejected_key 'rejected'; its columns are: chosen, a"),
            ([{"chosen": "x", "rejected": "y"}], {"prompt_key": "q"}, "--prompt_key 'q'"),
            (
                [{"chosen": "x", "rejected": "y"}, {"chosen": None, "rejected": "y"}],
                {},
                "row 1: column 'chosen' is null",
            ),
            ([{"chosen": [assistant("x")], "rejected": "y"}], {}, "row 0: .*list, not a text.*--apply_chat_template"),
        ],
    )
    def test_refused(self, rows: list[dict[str, Any]], flags: dict[str, Any], message: str) -> None:
        for config in (DPOConfig, RMConfig):
            with pytest.raises(DataError, match=message):
                build(rows, config, **flags)


class TestMargin:
    ROW = {"p": "a", "chosen": "b", "rejected": "c"}

    def test_is_read_when_asked_for(self) -> None:
        rows = [{**self.ROW, "margin": 0.1}, {**self.ROW, "margin": None}]
        assert build(rows, RMConfig, prompt_key="p", margin_loss=True).margins.tolist() == [0.1, 0.0]
        assert build(rows, RMConfig, prompt_key="p").margins.tolist() == [0.0, 0.0]

    def test_missing_column(self) -> None:
        with pytest.raises(
            DataError, match="--margin_loss needs a column 'margin'.*its columns are: p, chosen, rejected"
        ):
            build([self.ROW], RMConfig, prompt_key="p", margin_loss=True)

    def test_of_csv_files(self, tmp_path: Path) -> None:
        (tmp_path / "rows.csv").write_text("p,chosen,rejected,margin\na,b,c,0.5\na,b,c,\na,b,c,-2\n")
        cfg = RMConfig(prompt_key="p", margin_loss=True)
        data = build_preference_dataset(load_rows(str(tmp_path / "rows.csv")), cfg, TOKENIZER)
        assert data.margins.tolist() == [0.5, 0.0, -2.0]

    @pytest.mark.parametrize("value", ["much", "nan", float("nan"), [1.0], True])
    def test_no_number(self, value: Any) -> None:
        with pytest.raises(DataError, match="row 0: column 'margin' is"):
            build([{**self.ROW, "margin": value}], RMConfig, prompt_key="p", margin_loss=True)


def test_first_rows_as_a_data_set() -> None:
    data = build([{"chosen": f"x{i}", "rejected": "y"} for i in range(5)], RMConfig).first(2)
    assert len(data) == 2 and shown(data, 2)[0] == f"x1{END}" and data.lengths.tolist() == [3, 2, 3, 2]


class TestUnpaired:
    def test_rows(self) -> None:
        rows = [{"input": "ab", "output": "yes", "label": 1}, {"input": "cd", "output": "no", "label": 0}]
        data = build(rows, KTOConfig, output_key="output", input_template="{}=")
        assert shown(data, 1) == (f"cd=no{END}", f"no{END}")
        assert data.labels.tolist() == [True, False] and data.answer_lengths.tolist() == [4, 3]

    def test_conversations(self) -> None:
        rows = [
            {"input": [user("a"), assistant("b")], "good": True},
            {"input": [user("a"), assistant("")], "good": False},
        ]
        data = build(rows, KTOConfig, label_key="good", apply_chat_template=True)
        assert shown(data, 0)[1] == f"b{END}" and data.dropped == {"empty response": 1}

    def test_labels_of_csv_files(self, tmp_path: Path) -> None:
        (tmp_path / "rows.csv").write_text("input,output,label\na,b,1\na,b,False\na,b, 0.0\na,2,True\na,b,1.0 \n")
        cfg = KTOConfig(output_key="output", input_template="{}=")
        data = build_unpaired_dataset(load_rows(str(tmp_path / "rows.csv")), cfg, TOKENIZER)
        assert data.labels.tolist() == [True, False, False, True, True] and shown(data, 3)[1] == f"2{END}"

    @pytest.mark.parametrize("label", [2, "good", "2", "", None])
    def test_labels_are_yes_or_no(self, label: Any) -> None:
        with pytest.raises(DataError, match=r"rows.jsonl, row 0: column 'label' is .* a label is 1 or true"):
            build([{"input": "a", "output": "b", "label": label}], KTOConfig, output_key="output")

    def test_missing_column(self) -> None:
        with pytest.raises(DataError, match="no column for --label_key 'label'"):
            build([{"input": "a", "output": "b"}], KTOConfig, output_key="output")
