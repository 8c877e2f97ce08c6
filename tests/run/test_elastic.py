"""A checkpoint of four ranks goes on with two and with three: the same samples, and the same step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.observe.read.archive import read_step
from hpcrl.observe.record.archive import step_path
from tests.run.small_run import TP2, compared, run_folder, train

SAVED, NEXT = 2, 3  # steps


@pytest.fixture(scope="module")
def on_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TP2 x DP2, saved in the middle."""
    folder = tmp_path_factory.mktemp("four")
    assert train(folder, 4, placement=TP2, trainer={"total_training_steps": NEXT, "save_freq": SAVED}) == 0
    return folder


def moved(on_four: Path, folder: Path) -> Path:
    step = f"checkpoints/step_{SAVED:08d}"
    shutil.copytree(run_folder(on_four) / step, run_folder(folder) / step)
    return folder


def rows(column: tuple[np.ndarray, np.ndarray]) -> list[np.ndarray]:
    return np.split(column[0], column[1][1:-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "placement"),
    [
        pytest.param(2, {"critic": {"pp": 2}}, marks=pytest.mark.exhaustive, id="2 ranks"),
        pytest.param(3, {}, id="3 ranks"),
    ],
)
def test_fewer_ranks_go_on(tmp_path: Path, on_four: Path, ranks: int, placement: dict[str, Any]) -> None:
    trainer: dict[str, Any] = {"total_training_steps": NEXT, "save_freq": -1}
    tokens, samples, _ = read_step(step_path(run_folder(on_four) / "rollouts", NEXT))

    drawn = moved(on_four, tmp_path / "drawn")
    assert train(drawn, ranks, placement=placement, trainer=trainer) == 0
    other_tokens, other_samples, _ = read_step(step_path(run_folder(drawn) / "rollouts", NEXT))
    assert other_samples["uid"].tolist() == samples["uid"].tolist()  # prompts, their order, the global batch
    pairs = zip(rows(tokens["input_ids"]), rows(other_tokens["input_ids"]), strict=True)
    assert np.mean([np.array_equal(mine, others) for mine, others in pairs]) >= 0.99

    recorded = moved(on_four, tmp_path / "recorded")
    trainer["rollouts_from"] = str(run_folder(on_four) / "rollouts")
    assert train(recorded, ranks, placement=placement, trainer=trainer) == 0
    (found,), expected = compared(recorded), compared(on_four)[NEXT - 1]
    assert found["step"] == expected["step"] == NEXT
    for key in ("actor/grad_norm", "critic/grad_norm"):
        assert found[key] == pytest.approx(expected[key], rel=1e-4), key
    for key in ("critic/vf_loss", "actor/entropy"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-8), key
    assert abs(found["actor/pg_loss"] - expected["actor/pg_loss"]) <= 1e-5
    assert found["actor/lr"] == expected["actor/lr"]
    other_tokens, other_samples, _ = read_step(step_path(run_folder(recorded) / "rollouts", NEXT))
    assert other_samples["uid"].tolist() == samples["uid"].tolist()
    for column in ("old_log_probs", "values", "ref_log_prob", "advantages"):
        np.testing.assert_allclose(other_tokens[column][0], tokens[column][0], rtol=0, atol=1e-4, err_msg=column)
