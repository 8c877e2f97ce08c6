"""`hpcrl preference`: layouts agree, a resumed run is the uninterrupted one, the reference stays what it was."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from hpcrl.cli import load_job
from hpcrl.run.pairs import REF_LOGPS_FILE
from tests.mpi.lab import Lab, metrics, run_job

pytestmark = pytest.mark.ci_world(2)

ALONE = {"pools": {"one": "0"}, "actor": {"pool": "one"}, "ref": {"pool": "one"}}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"dp": {}},
    2: {"dp": {}, "tp": {"actor": {"tp": 2}, "ref": {"pp": 2}}, "pp": {"actor": {"pp": 2}}, "cp": {"actor": {"cp": 2}}},
    4: {
        "tp_pp": {"actor": {"tp": 2, "pp": 2}, "ref": {"cp": 2}},
        "cp_dp": {"actor": {"cp": 2}},
        "apart": {"pools": {"a": "0-1", "b": "2-3"}, "actor": {"pool": "a", "tp": 2}, "ref": {"pool": "b"}},
        "rank_0_in_no_role": {"pools": {"a": "1-3"}, "actor": {"pool": "a"}, "ref": {"pool": "a"}},
    },
}
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {"label_smoothing": 0.1, "nll_weight": 0.2},
    "ipo": {},
    "simpo": {"beta": 2.0},
    "orpo": {},
    "kto": {"undesirable_weight": 0.5, "beta": 0.5},
}
LORA = {"lora_rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def run(lab: Lab, name: str, placement: dict[str, Any], steps: int = 3, model: Any = None, **options: Any) -> dict:
    """Metrics by step, of the run `preference_<name>`: the session's jobs share a folder."""
    name, kind = f"preference_{name}", "labelled" if options.get("loss_type") == "kto" else "preference"
    files = {split: [str(lab.data / f"{kind}{ending}.parquet")] for split, ending in (("train", ""), ("val", "_val"))}
    data = {"train_files": files["train"], "val_files": files["val"], "max_response_length": 18}
    data |= {"train_max_samples": 16, "val_max_samples": 16}
    own = {"batch_size": 5, "max_token_len_per_gpu": 192, "total_training_steps": steps, "eval_freq": 2}
    own |= {"eval_samples": 7, "optim": {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0}, **options}
    sections = {"data": data, "preference": own, "model": model or {}, "trainer": {"save_freq": 2}}
    template = lab.config(name, placement, sections)
    template["trainer"].pop("total_training_steps")
    job = load_job("preference")
    run_job(lab.world, "preference", job.prepare(job.schema().model_validate(template)))
    return metrics(lab.folder / name)


def assert_agree(found: dict[int, dict[str, float]], expected: dict[int, dict[str, float]]) -> None:
    for step, line in expected.items():
        assert found[step].keys() == line.keys()
        for key, value in line.items():
            if value is None:  # KTO's, of a step without bad answers
                assert found[step][key] is None, (step, key)
            elif step > 1 or not key.endswith("accuracies"):  # the rewards of step 1 are 0 but for rounding
                assert found[step][key] == pytest.approx(value, rel=1e-4, abs=1e-5), (step, key)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_layouts_agree(lab: Lab, loss_type: str) -> None:
    options = {"loss_type": loss_type, **LOSSES[loss_type]}
    expected = run(lab, f"{loss_type}_alone", ALONE, **options)
    assert all(line["actor/grad_norm"] > 1e-3 for line in expected.values())
    for name, placement in LAYOUTS[lab.world.size].items():
        assert_agree(run(lab, f"{loss_type}_{name}", placement, **options), expected)


def test_adapters_are_compared_with_the_model_without_them(lab: Lab) -> None:
    """As a reference of its own would be: with equal initial adapters the first loss is that of equal policies."""
    expected = run(lab, "lora_alone", ALONE, model=LORA)
    assert expected[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert expected[3]["rewards/margins"] > expected[1]["rewards/margins"] == 0
    for name, placement in LAYOUTS[lab.world.size].items():
        own = {key: sizes for key, sizes in placement.items() if key != "ref"}
        if name != "cp":
            assert_agree(run(lab, f"lora_{name}", own, model=LORA), expected)


@pytest.mark.parametrize("name", ["sigmoid", "kto", "kept"])
def test_resumed_equals_uninterrupted_bitwise(lab: Lab, name: str) -> None:
    placement = {1: {}, 2: {"actor": {"tp": 2}}, 4: {"actor": {"tp": 2, "pp": 2}}}[lab.world.size]
    own = {"precompute_ref_log_probs": True} if name == "kept" else {"loss_type": name}
    make = partial(run, lab, placement=placement, optim={"lr": 1e-3}, **own)
    straight = make(f"{name}_straight", steps=4)
    make(f"{name}_halted", steps=2)
    assert make(f"{name}_halted", steps=4) == straight
    assert straight[4]["train/loss"] < straight[1]["train/loss"]


def test_kept_reference_log_probs_are_those_of_the_reference(lab: Lab) -> None:
    """Without a model of its own; the file has those of all pairs."""
    own = {"precompute_ref_log_probs": True}
    expected = run(lab, "kept_reference", {}, steps=3)
    assert_agree(run(lab, "kept_alone", {"pools": ALONE["pools"], "actor": ALONE["actor"]}, **own), expected)
    with np.load(lab.folder / "preference_kept_alone" / REF_LOGPS_FILE) as found:
        assert not np.isnan(found["train"]).any()
        assert found["val"].shape == (7, 2)
