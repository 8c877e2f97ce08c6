"""Where a run starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcrl.config.schema import Config
from hpcrl.engine.checkpoint.store import CheckpointStore
from hpcrl.run.start import find_start
from hpcrl.runtime.exits import InputError

ALONE = SimpleNamespace(rank=0, run_collectively=lambda look: look(), broadcast_object=lambda found: found)


@pytest.mark.parametrize("needs_ref", [False, True])
def test_a_resumed_run_keeps_the_start_weights_that_its_checkpoint_names(tmp_path: Path, needs_ref: bool) -> None:
    """Also while no reference needs them: it may be asked for after a later resume."""
    first = CheckpointStore(tmp_path / "sft" / "checkpoints")
    first.begin(1)
    start_weights = first.commit(1, {})
    store = CheckpointStore(tmp_path / "ppo" / "checkpoints")
    store.begin(5)
    store.commit(5, {"init_from": str(start_weights)})
    first.begin(2)
    first.commit(2, {})  # what model.init_from means now
    config = Config.model_validate(
        {"run": {"name": "ppo", "dir": str(tmp_path)}, "model": {"init_from": str(tmp_path / "sft")}}
    )
    start = find_start(ALONE, config, needs_ref=needs_ref)
    assert (start.step, start.init_from) == (5, start_weights)


def test_a_run_of_another_kind_of_job_is_left_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "rm" / "checkpoints")
    store.begin(5)
    store.commit(5, {"roles": ["reward"]})
    config = Config.model_validate({"run": {"name": "rm", "dir": str(tmp_path)}})
    with pytest.raises(InputError, match="holds checkpoints of reward, of another kind of job"):
        find_start(ALONE, config)
    assert find_start(ALONE, config, trained="reward").step == 5


def test_frozen_models_stay_those_that_the_checkpoint_names(tmp_path: Path) -> None:
    teacher = CheckpointStore(tmp_path / "teacher" / "checkpoints")
    teacher.begin(1)
    first = teacher.commit(1, {})
    store = CheckpointStore(tmp_path / "opd" / "checkpoints")
    store.begin(5)
    store.commit(5, {"frozen": {"teacher": str(first)}})
    teacher.begin(2)
    teacher.commit(2, {})  # what teacher.init_from means now
    config = Config.model_validate({"run": {"name": "opd", "dir": str(tmp_path)}})
    found = find_start(ALONE, config, frozen={"teacher": str(tmp_path / "teacher")})
    assert found.frozen == {"teacher": first}
