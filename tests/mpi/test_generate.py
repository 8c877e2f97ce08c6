"""`hpcrl generate` and `hpcrl evaluate`: the validation of training, and the same samples on any layout."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from hpcrl.cli import load_job
from hpcrl.config.schema import Config
from hpcrl.observe.read.comparison import compare_evaluations
from hpcrl.run.inference import inside_run
from hpcrl.run.job_config import with_presets
from hpcrl.runtime.exits import InputError
from tests.mpi.lab import Lab, metrics, own_layout, run_job

pytestmark = pytest.mark.ci_world(2)

ROLES = ("actor", "critic", "ref", "rollout", "reward")
ALONE = {"pools": {"one": "0"}, **{role: {"pool": "one"} for role in ROLES}}
PLACEMENTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {},
    2: {"replicas": {}, "from_tp_to_replicas": {"actor": {"tp": 2}}, "tp": {"rollout": {"tp": 2}}},
    4: {
        "replicas": {"actor": {"tp": 2, "pp": 2}},
        "tp": {"rollout": {"tp": 2}},
        "pools_apart": {
            "pools": {"weights": "0-1", "engine": "2-3"},
            "actor": {"pool": "weights", "pp": 2},
            "rollout": {"pool": "engine"},
        },
        "rank_0_in_no_role": {"pools": {"work": "1-3"}, "actor": {"pool": "work"}, "rollout": {"pool": "work"}},
    },
}
EOS = 2  # of configs/tokenizer
WAYS = [{"n": 1, "temperature": 0.0}, {"n": 3, "temperature": 0.7, "top_p": 0.9}]


class Inference:
    """The two jobs in the session's world, on the first validation prompts."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.world = lab, lab.world
        self.data = {"val_files": [str(lab.data / "val.parquet")], "val_max_samples": 40}

    def evaluate(self, name: str, placement: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
        """What evaluation.json holds."""
        sections = {"rollout": {"val_kwargs": WAYS}, **sections}
        config = self._config("evaluate", name, placement, sections)
        run_job(self.world, "evaluate", config)
        return json.loads((self.lab.folder / name / "evaluation.json").read_text())

    def generate(self, name: str, placement: dict[str, Any], **sections: dict[str, Any]) -> list[dict[str, Any]]:
        """The lines of generations.jsonl."""
        sections = {"rollout": {"n": 3}, **sections}
        config = self._config("generate", name, placement, sections)
        run_job(self.world, "generate", config)
        return [json.loads(line) for line in self.output(name).read_text().splitlines()]

    def output(self, name: str) -> Path:
        return self.lab.folder / name / "generations.jsonl"

    def _config(self, job: str, name: str, placement: dict[str, Any], sections: dict[str, dict[str, Any]]) -> Config:
        template = self.lab.config(name, placement, {"data": self.data, **sections})
        template["data"].pop("train_files")
        make = partial(inside_run, with_presets(load_job(job).schema().model_validate(template)), job)
        config: Config = self.world.broadcast_object(make() if self.world.rank == 0 else None)
        return config


@pytest.fixture(scope="module")
def inference(lab: Lab) -> Inference:
    return Inference(lab)


def of_validation(line: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name.startswith("val-")}


@pytest.mark.slow
def test_evaluation_is_the_validation_of_training(world, lab: Lab, inference: Inference) -> None:
    """Bit for bit, of the start weights and of those of the last step, and the run's own files stay as they are."""
    placement = own_layout(world.size)
    options = {"rollout": {"n": 2, "val_kwargs": WAYS}, "data": inference.data}
    run = lab.run("validated", placement, **options, trainer={"test_freq": 2, "save_freq": 2})
    before = {path.name: path.read_bytes() for path in run.glob("*.*")}

    first = inference.evaluate("of_the_start", placement)
    assert (first["weights"], first["step"]) == (None, 0)
    assert first["metrics"] == of_validation(metrics(run)[0])

    found = inference.evaluate("validated", placement, model={"init_from": str(run)})
    assert found["step"] == 2 and found["num_prompts"] == 40
    assert found["metrics"] == of_validation(metrics(run)[2]) == of_validation(metrics(run / "evaluate")[2])
    assert found["metrics"] != first["metrics"]
    assert {name: (run / name).read_bytes() for name in before} == before


@pytest.mark.slow
@pytest.mark.world(2, 4)
def test_layouts_write_the_same_results_of_problems(world, lab: Lab, inference: Inference) -> None:
    """Of the same weights: the differences are 0, apart from a token at the boundary of its random number."""
    layouts = {"problems_alone": ALONE, "problems_spread": list(PLACEMENTS[world.size].values())[-1]}
    for name, placement in layouts.items():
        inference.evaluate(name, placement)
    names = list(layouts)
    expected, found = ((lab.folder / name / "evaluation.jsonl").read_text().splitlines() for name in names)
    assert len(expected) == 2 * 40
    assert np.mean([line == other for line, other in zip(found, expected, strict=True)]) >= 0.97
    comparison = compare_evaluations([lab.folder / name for name in names])
    metrics = json.loads((lab.folder / names[0] / "evaluation.json").read_text())["metrics"]
    for level in comparison.levels[:2]:
        assert level.estimates["acc"].mean == metrics[f"val-core/countdown/acc/mean@{level.way.n}"]
    assert len(comparison.changes) == 2
    for change in comparison.changes:
        assert abs(change.differences["acc"].mean) < 0.03 and change.differences["acc"].ties >= 38


@pytest.mark.slow
@pytest.mark.world(2)
def test_evaluation_with_a_reward_model(world, lab: Lab, inference: Inference) -> None:
    rewards = lab.run_rm("rewards", {"reward": {"pp": 2}}, trainer={"save_freq": 2})
    reward = {"reward_model": {"enable": True, "init_from": str(rewards), "max_token_len_per_gpu": 128}}
    sampling = {"n": 2, "val_kwargs": WAYS}
    run = lab.run("by_model", {}, reward=reward, rollout=sampling, data=inference.data, trainer={"test_freq": 2})
    found = inference.evaluate("evaluated_by_model", {}, reward=reward)
    assert any(name.endswith("/rm_score/mean@1") for name in found["metrics"])
    assert found["metrics"] == of_validation(metrics(run)[0])
    with pytest.raises(InputError, match="holds no policy; name a run of `hpcrl train` or `hpcrl sft`"):
        inference.evaluate("of_no_policy", {}, model={"init_from": str(rewards)})


@pytest.mark.slow
def test_layouts_generate_the_same_file(world, inference: Inference) -> None:
    expected = inference.generate("alone", ALONE)
    assert [(line["uid"], line["sample_index"]) for line in expected] == [
        (f"val.parquet:{row}:0", sample) for row in range(40) for sample in range(3)
    ]
    for line in expected:
        assert len(line["log_probs"]) == len(line["response_ids"]) and 0 <= line["score"] <= 1
        assert (line["finish_reason"] == "length") == (
            len(line["response_ids"]) == 12 and line["response_ids"][-1] != 2
        )
    for name, placement in PLACEMENTS[world.size].items():
        found = inference.generate(name, placement, generate={"batch_size": 7})
        assert [line["prompt_ids"] for line in found] == [line["prompt_ids"] for line in expected]
        same = [mine["response_ids"] == other["response_ids"] for mine, other in zip(found, expected, strict=True)]
        assert np.mean(same) >= 0.99, name
        for mine, other, equal in zip(found, expected, same, strict=True):
            assert (mine["uid"], mine["sample_index"]) == (other["uid"], other["sample_index"])
            if equal:
                np.testing.assert_allclose(mine["log_probs"], other["log_probs"], rtol=0, atol=1e-4)
                assert (mine["response"], mine["score"]) == (other["response"], other["score"])


def test_a_killed_generation_goes_on(world, inference: Inference) -> None:
    placement, options = own_layout(world.size), {"generate": {"batch_size": 10, "log_probs": False, "score": False}}
    whole = inference.generate("killed", placement, **options)
    assert len(whole) == 120 and not {"score", "log_probs"} & whole[0].keys()
    file = inference.output("killed")
    text = file.read_bytes()
    world.barrier()
    if world.rank == 0:
        file.write_bytes(text[: len(text) // 2])
    kept = text[: text.rindex(b"\n", 0, len(text) // 2) + 1]
    world.barrier()
    again = inference.generate("killed", placement, **options)
    assert file.read_bytes().startswith(kept) and len(kept) > len(text) // 3
    same = [mine["response_ids"] == other["response_ids"] for mine, other in zip(again, whole, strict=True)]
    assert np.mean(same) >= 0.99

    text = file.read_bytes()
    inference.generate("killed", placement, **options)  # complete: nothing to do
    with pytest.raises(InputError, match=r"holds samples of rollout.n=3, and this job has 2"):
        inference.generate("killed", placement, **options, rollout={"n": 2})
    other = inference.lab.folder / "other_data" / "val.parquet"
    if world.rank == 0:  # the same uids, of other prompts
        other.parent.mkdir()
        pyarrow.parquet.write_table(pyarrow.parquet.read_table(inference.lab.data / "val.parquet")[1:], other)
    with pytest.raises(InputError, match=r"line 1 has another prompt_ids than val.parquet:0:0 has now"):
        inference.generate("killed", placement, **options, data={**inference.data, "val_files": [str(other)]})
    assert file.read_bytes() == text
