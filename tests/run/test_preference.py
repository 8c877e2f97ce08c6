"""`hpcrl preference` before anything is built: what cannot run, what a step compares, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.algorithms.aggregation import LossNorm
from hpcrl.algorithms.metrics import finish
from hpcrl.batch.data_proto import training_mask
from hpcrl.config.yaml_core import ConfigError
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.jobs.preference import Preference
from hpcrl.run.pairs import PAIRS_AT_ONCE, RefLogps
from hpcrl.runtime.exits import InputError
from hpcrl.workers.preference import PreferencePolicy
from hpcrl.workers.supervised import PreferenceDataWorker
from hpcrl.workers.team import Inputs
from tests.rollout.small_model import SHAPE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(ROOT / "configs" / "tokenizer"))


def config_of(**own: Any) -> Any:
    data = {"train_files": ["a.jsonl"], "max_prompt_length": 8, "max_response_length": 8}
    return Preference.schema().model_validate({"data": data, "preference": own})


@pytest.mark.parametrize(
    ("own", "line"),
    [
        ({"loss_type": "exo_pair"}, "needs preference.label_smoothing above 0"),
        ({"loss_type": "kto", "batch_size": 1}, "batch_size=1: .* use 2 or more"),
        ({"loss_type": "kto", "precompute_ref_log_probs": True}, "is for pairs"),
        ({"loss_type": "kto", "max_token_len_per_gpu": 15}, "max_token_len_per_gpu=15 is less than"),
        ({"max_token_len_per_gpu": 31}, "holds no pair of the longest sequences"),
    ],
)
def test_what_cannot_run_is_one_line(own: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        Preference.check(config_of(**own), 1)
    assert "\n" not in str(caught.value)


def test_a_reference_is_built_only_where_it_is_used() -> None:
    roles = {
        loss: set(Preference.check(config_of(loss_type=loss), 1).roles) for loss in ("sigmoid", "simpo", "orpo", "kto")
    }
    assert roles == {"sigmoid": {"actor", "ref"}, "simpo": {"actor"}, "orpo": {"actor"}, "kto": {"actor", "ref"}}
    assert set(Preference.check(config_of(precompute_ref_log_probs=True), 1).roles) == {"actor"}
    assert Preference.without_effect(config_of(precompute_ref_log_probs=True)) == []
    assert "has no reference" in Preference.without_effect(config_of(loss_type="cpo", precompute_ref_log_probs=True))[0]


def job_on(tmp_path: Path, rows: list[dict[str, Any]], tokenizer: Any, run: Any = None, **own: Any) -> Preference:
    """A job that has read these rows."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(**own)
    job = Preference(None, config, Preference.check(config, 1), None)  # type: ignore[arg-type]
    job.inputs = Inputs(SHAPE, tokenizer)
    job.inputs.pairs["train"] = job.read_rows([str(path)], tokenizer)
    job.check_answers(job.inputs.pairs["train"])
    job.set_up(run)
    return job


def loaded(job: Preference, rows: list[int], tokenizer: Any) -> tuple[list[str], Any]:
    """The sequences of a step as text, and its batch."""
    batch = job.pairs("train", np.array(rows))
    worker = PreferenceDataWorker(None, 0, job.inputs, job.config)  # type: ignore[arg-type]
    found = batch.union(worker.load(batch))
    ids = found.fetch("input_ids")
    return [tokenizer.decode(ids.row(i).tolist(), skip_special_tokens=True) for i in range(len(found))], found


def test_kto_compares_with_the_answer_before_in_the_step(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": f"{i}:", "completion": str(10 + i), "label": i != 2} for i in range(4)]
    texts, batch = loaded(job_on(tmp_path, rows, tokenizer, loss_type="kto"), [3, 0, 2], tokenizer)
    assert texts == ["3:13", "3:12", "0:10", "0:13", "2:12", "2:10"]
    assert batch.samples["label"].tolist() == [True, True, True, True, False, False]


def test_orpos_nll_is_over_the_prompt_too(tmp_path: Path, tokenizer: Any) -> None:
    """All tokens of chosen but the first, as TRL's cross-entropy; the odds ratio is of the answers. CPO's is not."""
    rows = [{"prompt": "12:", "chosen": "3", "rejected": "45"}]
    log_probs = -torch.tensor([[1.0, 2, 3, 4, 5, 0], [1.0, 2, 3, 4, 5, 6]])  # 3 tokens of the prompt, then the answer
    for loss_type, first, nll, chosen, rejected in (("orpo", 0, 3.0, -4.5, -5.0), ("cpo", 3, 4.5, -9.0, -15.0)):
        job = job_on(tmp_path, rows, tokenizer, loss_type=loss_type, beta=1.0)
        _, batch = loaded(job, [0], tokenizer)
        policy = PreferencePolicy.__new__(PreferencePolicy)
        policy.params, policy.loss, policy.nll_weight = job.own, job.loss, 1.0
        num_chosen = float(training_mask(batch)[0].sum())
        _, metrics = policy._loss(LossNorm(0.0, 2.0), num_chosen, {"log_probs": log_probs[:, first:]}, batch)
        found = finish(metrics)
        assert found["train/nll_loss"] == pytest.approx(nll)
        assert (found["logps/chosen"], found["logps/rejected"]) == pytest.approx((chosen, rejected))


@pytest.mark.parametrize(
    ("own", "rows", "line"),
    [
        ({}, [{"chosen": "1", "rejected": "1"}, {"chosen": "2", "rejected": "2"}], "in all 2 pairs .* are the same"),
        ({}, [{"chosen": "1", "rejected": "2"}, {"chosen": "1", "rejected": None}], "row 1: no column 'rejected'"),
        ({"loss_type": "kto"}, [{"completion": "1", "label": True}] * 3, "all 3 labels in 'label' are true"),
        ({"loss_type": "kto"}, [{"completion": "1"}], "row 0: no column 'label'; expected true .*label_key"),
        ({"loss_type": "kto"}, [{"completion": "1", "label": "good"}], "column 'label' holds 'good'"),
        ({"loss_type": "kto"}, [{"chosen": "1", "label": True}], "no column 'completion'.*completion_key"),
    ],
)
def test_data_that_teach_nothing_are_one_line(
    tmp_path: Path, tokenizer: Any, own: dict[str, Any], rows: list[dict[str, Any]], line: str
) -> None:
    with pytest.raises(InputError, match=line) as caught:
        job_on(tmp_path, [{"prompt": "1:", **row} for row in rows], tokenizer, **own)
    assert "\n" not in str(caught.value)


def test_an_interrupted_pass_continues_with_the_same_rows(tmp_path: Path) -> None:
    """What is computed before a stop is kept, and not computed again; other data or weights have none of it."""
    path, sizes, calls = tmp_path / "kept.npz", {"train": 2 * PAIRS_AT_ONCE + 5, "val": 3}, []

    def compute(split: str, rows: np.ndarray) -> np.ndarray | None:
        calls.append((split, len(rows)))
        if len(calls) == 2:
            return None  # a signal
        return np.stack([rows, -rows], axis=1).reshape(-1).astype(np.float32)

    first = RefLogps(path, "key", sizes)
    assert not first.fill(compute)
    second = RefLogps(path, "key", sizes)
    assert second.num_missing == PAIRS_AT_ONCE + 5 + 3
    assert second.fill(compute)
    assert calls[2:] == [("train", PAIRS_AT_ONCE), ("train", 5), ("val", 3)]
    third = RefLogps(path, "key", sizes)
    assert third.num_missing == 0
    assert third.of("train", np.array([7, 0])).tolist() == [7, -7, 0, 0]
    assert RefLogps(path, "other", sizes).num_missing == sum(sizes.values())
    path.write_bytes(b"torn")
    assert RefLogps(path, "key", sizes).num_missing == sum(sizes.values())


def test_a_policy_that_has_left_its_start_weights_is_no_reference(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "1:", "chosen": "3", "rejected": "45"}]
    run = SimpleNamespace(folder=tmp_path, step=0, start=SimpleNamespace(init_from=None))
    job = job_on(tmp_path, rows, tokenizer, run, precompute_ref_log_probs=True)
    assert job.ref_logps.num_missing == 1
    run.step = 3
    with pytest.raises(InputError, match="lacks reference log-probs of 1 pairs, and after 3 steps"):
        job.set_up(run)
