"""What submit prints and sets by job.machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.cli import load_job
from hpcrl.config.schema import seconds_of
from hpcrl.machine.machine_file import read_machine
from hpcrl.runtime.exits import InputError
from hpcrl.slurm.bundle import with_paths
from hpcrl.slurm.request import Request, Stage
from hpcrl.slurm.site import SiteConfig
from hpcrl.slurm.submit import PlannedJob, plan, run

ROOT = Path(__file__).parents[2]
RL, SFT = f"{ROOT}/configs/grpo_8b.yaml", f"{ROOT}/configs/sft_countdown_cpu.yaml"
STEPS = "trainer.total_training_steps=500"
FAST = ["placement.actor.tp=2", "placement.rollout.tp=1", STEPS]
SLOW = ["placement.actor.tp=8", "placement.actor.pp=2", "placement.rollout.tp=8", STEPS]


def request(*overrides: str, command: str = "train", config: str = RL, lengths: str | None = None) -> Request:
    return Request([Stage(command, config, list(overrides), [])], [], None, lengths, dry_run=True)


def planned(*overrides: str, site: SiteConfig | None = None, command: str = "train", config: str = RL) -> PlannedJob:
    asked = request(*overrides, command=command, config=config)
    return plan(asked.stages[0], load_job(command), asked, lambda job, config, ranks: None, site or SiteConfig())


def lines(asked: Request, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """What is printed about times, and the script."""
    monkeypatch.setenv("HOME", "/none")
    monkeypatch.delenv("HPCRL_SITE", raising=False)
    run(asked, load_job, lambda job, config, ranks: None)
    out, err = capsys.readouterr()
    return "\n".join(line for line in err.splitlines() if "does not exist" not in line), out


def test_the_line_and_the_warning(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = "job.machine=dgx_h100"
    text, _ = lines(request(machine, *SLOW, lengths="600,0.5"), capsys, monkeypatch)
    step, hours, slices, cost = re.search(  # type: ignore[union-attr]
        r"grpo_8b: ([\d.]+) s per step .* extrapolated for dgx_h100; 500 steps take ([\d.]+) h without validation, "
        r"(\d+) slices? of 12:00:00, ([\d.]+) node-hours; \d+ s of set-up each, assumed",
        text,
    ).groups()
    assert float(hours) * 3600 == pytest.approx(500 * float(step) + 311 + 1, rel=0.02)
    assert (int(slices), float(cost)) == (1, pytest.approx(2 * float(hours), rel=0.01))
    ratio, command = re.search(r"takes ([\d.]+) times the .*; see (hpcrl plan --search .*)", text).groups()  # type: ignore[union-attr]
    assert float(ratio) > 1.3
    assert command.startswith(f"hpcrl plan --search {RL} {machine} ") and command.endswith("--response-lengths 600,0.5")
    text, _ = lines(request(machine, *FAST), capsys, monkeypatch)
    assert "s per step" in text and "warning" not in text


def test_auto_is_the_time_of_the_run(tmp_path: Path) -> None:
    """With the spread of the machine, 0.5 where nothing was measured, and the set-up that a slice has measured."""
    auto = ("job.machine=dgx_h100", "job.time=auto", *FAST, f"run.dir={tmp_path}")
    whole = planned(*auto)
    assert whole.forecast is not None and not read_machine("dgx_h100").spread
    step, seconds = whole.forecast.prediction.seconds, whole.batch.job.time_seconds
    assert 0 <= seconds - (500 * 2.1 * step + whole.forecast.slice(0.0).setup + 600) < 60  # job.signal_seconds
    assert with_paths(whole.configs[0], {})["job"]["time"] == whole.batch.job.time
    (tmp_path / "grpo_8b").mkdir()
    (tmp_path / "grpo_8b" / "times.json").write_text(json.dumps({"setup_s": 1200.0, "step_s": 9.0, "save_s": 1}))
    assert planned(*auto).batch.job.time_seconds - seconds == pytest.approx(1200 - 311, abs=60)
    divided = planned(*auto, "job.requeue=false", site=SiteConfig(max_time="06:00:00"))
    assert divided.forecast is not None and seconds_of(divided.batch.job.time) <= 6 * 3600
    assert "2 slices of" in divided.forecast.line(divided.batch.job.time)
    assert divided.forecast.warnings(divided.batch.job.time) == [
        "the run takes 2 slices, but job.requeue=false ends it after 1"
    ]


def test_a_prediction_that_cannot_be_made(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text, script = lines(request("job.machine=dgx_h10"), capsys, monkeypatch)
    assert "warning: grpo_8b is not predicted: no machine dgx_h10" in text and "did you mean dgx_h100?" in text
    assert "--time=12:00:00" in script
    text, _ = lines(request("job.machine=dgx_h100", command="sft", config=SFT), capsys, monkeypatch)
    assert "predicted" not in text


@pytest.mark.parametrize(
    ("overrides", "command", "text"),
    [
        ((), "train", "job.machine is not set"),
        (("job.machine=none",), "train", "no machine none"),
        (("job.machine=dgx_h100",), "train", "needs trainer.total_training_steps"),
        (("job.machine=dgx_h100", STEPS), "train", "no step ends within the site's max_time=00:06:00"),
        (("job.machine=dgx_h100",), "sft", "only jobs of `hpcrl train`"),
    ],
)
def test_auto_needs_a_prediction(overrides: tuple[str, ...], command: str, text: str) -> None:
    config = RL if command == "train" else SFT
    with pytest.raises(InputError, match=text):
        planned("job.time=auto", *overrides, site=SiteConfig(max_time="00:06:00"), command=command, config=config)


def test_lengths_that_are_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="without job.machine"):
        lines(request(lengths="600,0.5"), capsys, monkeypatch)
    with pytest.raises(ValueError, match="MEAN,SIGMA"):
        lines(request("job.machine=dgx_h100", lengths="600"), capsys, monkeypatch)


def test_without_a_machine_nothing_is_predicted() -> None:
    """Imports of the time model would add a third to submit's CPU seconds."""
    code = (
        "import sys; from hpcrl.cli import main\n"
        "try: main(['submit', sys.argv[1], '--dry-run'])\n"
        "finally: assert not [name for name in sys.modules if name.startswith('hpcrl.forecast.time')]"
    )
    ran = subprocess.run([sys.executable, "-c", code, RL], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
