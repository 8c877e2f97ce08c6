from __future__ import annotations

import json
import math
import resource
from contextlib import closing
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpcrl.observe.record.writer import MetricsWriter


def metrics_of(step: int) -> dict[str, float]:
    metrics = {"actor/pg_loss": 0.1 * step, "timing_s/gen": 1.0 + step}
    if step % 3 == 0:
        metrics["val-core/countdown/acc/mean@1"] = step / 10
    return metrics


def write(folder: Path, steps: range, first_step: int) -> None:
    with closing(MetricsWriter(folder, first_step=first_step)) as writer:
        for step in steps:
            writer.log(step, metrics_of(step))


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def board(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = board(folder)
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_each_step_is_one_line_and_one_event_per_tag(tmp_path):
    write(tmp_path, range(4), first_step=1)
    assert lines(tmp_path) == [{"step": step, **metrics_of(step)} for step in range(4)]
    assert scalars(tmp_path)["timing_s/gen"] == [(step, 1.0 + step) for step in range(4)]


def test_a_line_is_on_disk_before_the_next_step(tmp_path):
    with closing(MetricsWriter(tmp_path, first_step=1)) as writer:
        writer.log(1, {"a": 1.0})
        assert lines(tmp_path) == [{"step": 1, "a": 1.0}]
        assert scalars(tmp_path)["a"] == [(1, 1.0)]


def test_not_a_number_is_null(tmp_path):
    with closing(MetricsWriter(tmp_path, first_step=1)) as writer:
        writer.log(1, {"nan": math.nan, "inf": -math.inf, "whole": 7, "flag": True})
    assert lines(tmp_path) == [{"step": 1, "nan": None, "inf": None, "whole": 7, "flag": True}]


@pytest.mark.parametrize("resumed_at", [0, 1, 3, 4])
def test_a_resumed_log_equals_an_uninterrupted_one(tmp_path, resumed_at):
    write(tmp_path / "whole", range(9), first_step=1)
    write(tmp_path / "joined", range(7), first_step=1)
    write(tmp_path / "joined", range(resumed_at + 1, 9), first_step=resumed_at + 1)
    assert lines(tmp_path / "joined") == lines(tmp_path / "whole")
    assert scalars(tmp_path / "joined") == scalars(tmp_path / "whole")


def test_a_fresh_run_in_an_old_folder_starts_from_nothing(tmp_path):
    write(tmp_path, range(7), first_step=1)
    write(tmp_path, range(2), first_step=0)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]
    assert [step for step, _ in scalars(tmp_path)["timing_s/gen"]] == [0, 1]


def test_a_torn_last_line_is_dropped_on_resume(tmp_path):
    write(tmp_path, range(1, 4), first_step=1)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    write(tmp_path, range(3, 5), first_step=3)
    assert lines(tmp_path) == [{"step": step, **metrics_of(step)} for step in range(1, 5)]


def test_a_step_cannot_be_written_twice(tmp_path):
    with closing(MetricsWriter(tmp_path, first_step=1)) as writer:
        writer.log(2, {"a": 1.0})
        with pytest.raises(ValueError, match="step 2"):
            writer.log(2, {"a": 1.0})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
def test_a_full_disk_costs_no_line(tmp_path, caplog):
    """What the disk did not take, half lines too, comes with a later step."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(MetricsWriter(tmp_path, first_step=0)) as writer:
        writer.log(1, {"a": 1.0})
        size = (tmp_path / "metrics.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, limit[1]))
        try:
            writer.log(2, {"a": 2.0})
            writer.log(3, {"a": 3.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert lines(tmp_path) == [{"step": 1, "a": 1.0}]
        writer.log(4, {"a": 4.0})
    assert lines(tmp_path) == [{"step": step, "a": float(step)} for step in range(1, 5)]
    assert caplog.text.count("metrics cannot be written") == 1


def test_text_hparams_and_layout_reach_tensorboard(tmp_path):
    with closing(MetricsWriter(tmp_path, first_step=1)) as writer:
        writer.log(5, {"critic/score/mean": 0.5})
        writer.text("rollouts/train", 5, "**prompt** answer")
        writer.hparams({"actor.optim.lr": 1e-4, "run.name": "x", "data.train_files": ["a"]}, {"acc": 0.25})
    events = board(tmp_path)
    text = events.Tensors("rollouts/train/text_summary")[0]
    assert (text.step, text.tensor_proto.string_val[0]) == (5, b"**prompt** answer")
    assert events.Scalars("hparam/acc")[0].value == 0.25
    assert "custom_scalars__config__" in events.Tags()["tensors"]
    assert len(events.PluginTagToContent("hparams")) == 3
    assert not [path for path in (tmp_path / "tensorboard").iterdir() if path.is_dir()]
