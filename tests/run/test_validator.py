"""Validation from prompts to metrics, table and JSON lines; generation and scoring are stand-ins."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from hpcrl.algorithms.metrics import Sum
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.schema import Config, DataConfig, ValKwargs
from hpcrl.data.prompts import PromptDataset
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.observe.read.comparison import compare_evaluations
from hpcrl.observe.record.writer import write_generations
from hpcrl.rollout.protocol import SamplingParams
from hpcrl.run.inference import ProblemResults
from hpcrl.run.validation import Validator, shown_rows

TOKENIZER = Path(__file__).parents[2] / "configs" / "tokenizer"
SOURCES = ["x", "y", "x"]


class StandIn:
    """Row r's sample s is right when (r + s) is even; row 1 of source y has no acc, and neither has sample `without` of
    three; failures are rows in `failing`."""

    def __init__(self, prompts: PromptDataset, failing: tuple[int, ...] = (), without: int | None = None) -> None:
        self.prompts = prompts
        self.failing, self.without = failing, without
        self.samplings: list[SamplingParams] = []

    def __getitem__(self, role: str) -> StandIn:
        return self

    def generate(self, batch: DataProto, sampling: SamplingParams) -> Any:
        self.samplings.append(sampling)
        lengths = np.full(len(batch), 4, np.int32)
        reasons = np.where(batch.samples["row"] == 1, "length", "stop").astype(object)
        columns = {"response_length": lengths, "finish_reason": reasons}
        return SimpleNamespace(get=lambda: DataProto({}, columns))

    def score(self, batch: DataProto) -> Any:
        rows, samples = batch.samples["row"], batch.samples["sample_index"]
        right = ((rows + samples) % 2 == 0).astype(np.float32)
        failed = np.isin(rows, self.failing)
        texts = [
            f"<|bos|>{row} is | `it`" if show else "" for row, show in zip(rows, batch.samples["show"], strict=True)
        ]
        extras = [
            {}
            if failed[i]
            else {"format": 0.5}
            if rows[i] == 1
            else {"pred": str(int(right[i])), "kind": "k"} | ({"acc": float(right[i])} if i % 3 != self.without else {})
            for i in range(len(batch))
        ]
        found = {
            "score": np.where(failed, 0, right).astype(np.float32),
            "acc": np.where(failed, np.nan, right).astype(np.float32),
            "extras": np.array(extras, object),
            "prompt_text": np.array(texts, object),
            "response_text": np.array([text and f"{i}\n" for i, text in enumerate(texts)], object),
        }
        metrics = {"reward/errors": Sum(float(failed.sum()))}
        return SimpleNamespace(get=lambda: DataProto({}, found, {"metrics": metrics}))


@pytest.fixture
def prompts(tmp_path: Path) -> PromptDataset:
    rows = [
        {"prompt": f"{9 - i} 1 2:", "data_source": source, "reward_model": {"ground_truth": {"target": i}}}
        for i, source in enumerate(SOURCES)
    ]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptDataset([str(tmp_path / "val.jsonl")], load_tokenizer(str(TOKENIZER)), DataConfig())


def validator(prompts: PromptDataset, ways: list[ValKwargs], **more: Any) -> Validator:
    controller: Any = more.pop("controller", None) or StandIn(prompts)
    tokenizer = SimpleNamespace(eos_token_id=1, name_or_path="")
    inputs: Any = SimpleNamespace(prompts={"val": prompts}, tokenizer=tokenizer)
    return Validator(controller, Config(), inputs, ways, **more)


def test_metrics_of_several_ways(prompts: PromptDataset) -> None:
    ways = [ValKwargs(n=4, temperature=1.0), ValKwargs(n=2, temperature=0.5), ValKwargs(n=1, temperature=0.0)]
    found, table = validator(prompts, ways).run(3)
    assert table == ""
    assert found["val-core/x/acc/mean@1"] == 1.0 and found["val-core/x/acc/mean@4"] == 0.5
    assert "val-core/x/acc/maj@4/mean" in found and "val-core/x/acc/best@4/std" in found
    assert found["val-core/y/reward/mean@4"] == 0.5 and "val-core/y/acc/mean@4" not in found
    assert found["val-aux/y/format/mean@4"] == 0.5
    assert found["val-aux/response_length/mean@2"] == 4.0
    assert not any("/kind/" in name or "/pred/" in name for name in found)
    # Both n=2 and n=4 have a worst@2: it is that of two samples.
    assert found["val-aux/x/acc/worst@2/mean"] == validator(prompts, ways[1:2]).run(3)[0]["val-aux/x/acc/worst@2/mean"]


def test_a_failed_score_is_wrong_and_counted(prompts: PromptDataset) -> None:
    found, _ = validator(prompts, [ValKwargs(n=1)], controller=StandIn(prompts, failing=(2,))).run(1)
    assert found["val-core/x/acc/mean@1"] == 0.5
    assert found["val-aux/x/acc_success_only/mean@1"] == 1.0
    assert found["val-aux/reward/errors"] == 1.0


@pytest.mark.parametrize("without", [0, 2])
def test_a_result_without_an_accuracy_counts_with_its_score(prompts: PromptDataset, without: int) -> None:
    """Of source x, with prompts 0 and 2; both are right."""
    found, _ = validator(prompts, [ValKwargs(n=1)], controller=StandIn(prompts, without=without)).run(1)
    assert found["val-core/x/acc/mean@1"] == found["val-aux/x/reward/mean@1"] == 1.0
    assert found["val-aux/x/acc_success_only/mean@1"] == 1.0


def test_do_sample_false_is_greedy_whatever_the_temperature(prompts: PromptDataset) -> None:
    stand_in = StandIn(prompts)
    ways = [ValKwargs(n=1, temperature=0.7, do_sample=False), ValKwargs(n=2, temperature=0.7, top_k=5, top_p=0.9)]
    validator(prompts, ways, controller=stand_in).run(1)
    greedy, sampled = stand_in.samplings
    assert greedy.temperature == 0.0
    assert (sampled.temperature, sampled.top_k, sampled.top_p) == (0.7, 5, 0.9)
    assert greedy.max_new_tokens == DataConfig().max_response_length


def test_every_sample_is_written_with_verls_keys(prompts: PromptDataset, tmp_path: Path) -> None:
    folder = tmp_path / "validation"
    ways = [ValKwargs(n=1), ValKwargs(n=2, temperature=1.0)]
    for step in (0, 20, 20):
        validator(prompts, ways, folder=folder, num_shown=1).run(step)
    assert sorted(path.name for path in folder.iterdir()) == ["0.jsonl", "20.jsonl"]
    rows = [json.loads(line) for line in (folder / "20.jsonl").read_text().splitlines()]
    assert len(rows) == 3 + 6
    assert list(rows[0])[:5] == ["input", "output", "gts", "score", "step"]
    assert rows[0] == {
        "input": "<|bos|>0 is | `it`",
        "output": "0\n",
        "gts": {"target": 0},
        "score": 1.0,
        "step": 20,
        "reward": 1.0,
        "acc": 1.0,
        "pred": "1",
        "kind": "k",
        "format": None,
        "uid": "val.jsonl:0:0",
        "n": 1,
    }
    assert rows[1]["acc"] is None and rows[1]["format"] == 0.5
    assert [row["n"] for row in rows] == [1] * 3 + [2] * 6


def test_results_of_each_problem_have_the_same_means(prompts: PromptDataset, tmp_path: Path) -> None:
    """Greedy twice in two spellings is one way. Source x has an acc, y has not; one score of x has failed."""
    ways = [
        ValKwargs(n=1, do_sample=False, temperature=0.7),
        ValKwargs(n=1, top_p=0.5),
        ValKwargs(n=3, temperature=1.0),
    ]
    results = ProblemResults(prompts)
    metrics, _ = validator(prompts, ways, controller=StandIn(prompts, failing=(2,)), results=results).run(1)
    digest = results.write(tmp_path / "evaluation.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()]
    assert [(row["file"], row["row"], row["data_source"], row["way"]["n"]) for row in rows] == [
        ("val.jsonl", row, SOURCES[row], n) for n in (1, 3) for row in range(3)
    ]
    assert [row["acc"] for row in rows[3:]] == [[1, 0, 1], None, [None] * 3]
    assert [row["truncated"] for row in rows[:3]] == [[False], [True], [False]]
    assert rows[4]["reward"] == [0, 1, 0] and rows[5]["response_length"] == [4, 4, 4]
    assert len({row["digest"] for row in rows}) == 3

    (tmp_path / "evaluation.json").write_text(json.dumps({"metrics": metrics, "problems_digest": digest}))
    for level in compare_evaluations([tmp_path]).levels:
        for name in {"acc", "reward"} & level.estimates.keys():
            assert level.estimates[name].mean == metrics[f"val-core/{level.source}/{name}/mean@{level.way.n}"]


def test_a_problem_is_its_contents(tmp_path: Path) -> None:
    """Not its file, format, place or tokens; another prompt, answer or data source is another problem."""
    row = {"prompt": [{"role": "user", "content": "1 2:"}], "data_source": "x", "reward_model": {"ground_truth": "3"}}
    changed = [
        {**row, "prompt": [{"role": "user", "content": "1 3:"}]},
        {**row, "data_source": "y"},
        {**row, "reward_model": {"ground_truth": "4"}},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [row, *changed]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([changed[0], row]), tmp_path / "b.parquet")
    digests = []
    for name in ("a.jsonl", "b.parquet"):
        data = PromptDataset([str(tmp_path / name)], load_tokenizer(str(TOKENIZER)), DataConfig())
        results = ProblemResults(data)
        validator(data, [ValKwargs(n=1)], results=results).run(1)
        digests.append([one["digest"] for one in results.rows])
    assert len(set(digests[0])) == 4 and digests[1] == [digests[0][1], digests[0][0]]


def test_the_table_has_the_samples_that_verl_would_show(prompts: PromptDataset) -> None:
    # Prompts are 9.., 8.., 7..: sorted by text that is rows 2, 1, 0. As verl: a list of samples, sorted, shuffled.
    texts = [prompts.prompt_text(row, skip_special_tokens=True) for row in (0, 1, 2) for _ in range(2)]
    samples = [(text, row) for row, text in enumerate(texts)]
    samples.sort(key=lambda sample: sample[0])
    np.random.RandomState(42).shuffle(samples)
    wanted = [row for _, row in samples]
    assert shown_rows(np.array([2, 1, 0]), 2, 4) == wanted[:4]
    assert texts[0] == "9 1 2:"

    table = validator(prompts, [ValKwargs(n=2, temperature=1.0)], num_shown=4).run(1)[1]
    title, empty, *lines = table.splitlines()
    assert title == "n = 2, temperature 1" and empty == ""
    assert [line.split("|")[-3].strip() for line in lines[2:]] == [f"`{row} `" for row in wanted[:4]]
    assert lines[2].startswith(f"| `<\\|bos\\|>{wanted[0] // 2} is \\| 'it'` |")


def test_no_text_is_asked_for_that_nobody_reads(prompts: PromptDataset) -> None:
    run = validator(prompts, [ValKwargs(n=2, temperature=1.0)], num_shown=1)
    batch = run._sample(run.ways[0], [3])
    assert [bool(text) for text in batch.samples["response_text"]] == [False, False, False, True, False, False]


def test_json_lines_hold_no_number_that_json_does_not_know(tmp_path: Path) -> None:
    write_generations(tmp_path / "a.jsonl", [{"score": float("nan"), "more": [float("inf"), 1.5]}, {"text": "é"}])
    lines = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines == [
        '{"score": null, "more": [null, 1.5], "text": null}',
        '{"score": null, "more": null, "text": "é"}',
    ]
