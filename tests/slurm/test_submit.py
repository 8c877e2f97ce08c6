"""`hpcrl submit` as a person runs it, with an sbatch that only writes down what it gets."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.cli import load_job
from hpcrl.config.loader import load_config
from hpcrl.slurm.request import parse

ROOT = Path(__file__).parents[2]
SFT = f"sft:{ROOT}/configs/sft_countdown_cpu.yaml"
RL = f"{ROOT}/configs/ppo_countdown_cpu.yaml"
DPO = f"preference:{ROOT}/configs/dpo_countdown_cpu.yaml"


class Login:
    """A login node with data and sbatch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "data" / "countdown").mkdir(parents=True)
        (folder / "configs").symlink_to(ROOT / "configs")
        for name in ("train", "val", "sft", "preference", "preference_val"):
            (folder / "data" / "countdown" / f"{name}.parquet").write_bytes(b"rows")
        self.sbatch('printf "%s " "$@" >>{0}/called; echo >>{0}/called; echo $((40 + $(wc -l <{0}/called)))')

    def sbatch(self, body: str) -> None:
        self.command("sbatch", body)

    def command(self, name: str, body: str) -> None:
        path = self.folder / "bin" / name
        path.write_text("#!/bin/bash\n" + body.replace("{0}", shlex.quote(str(self.folder))) + "\n")
        path.chmod(0o755)

    def submit(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.hpcrl("submit", *arguments)

    def hpcrl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environ = os.environ | {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": "/none",
        }
        return subprocess.run(
            [sys.executable, "-m", "hpcrl", *arguments],
            cwd=self.folder,
            env=environ,
            capture_output=True,
            text=True,
        )

    @property
    def called(self) -> list[str]:
        path = self.folder / "called"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def login(tmp_path: Path) -> Login:
    return Login(tmp_path)


def test_a_chain_and_a_sweep(login: Login) -> None:
    stages = (SFT, "--chain", RL, "run.name=a b", "--array", "actor.optim.lr=1e-4,2e-4")
    ran = login.submit(*stages, "--nodes=2", "--ntasks-per-node", "2")
    assert ran.returncode == 0, ran.stderr
    runs = login.folder / "runs"
    assert [line.split() for line in login.called] == [
        ["--parsable", str(runs / "sft_countdown" / "job.sbatch")],
        ["--parsable", "--dependency=afterok:41", "--kill-on-invalid-dep=yes", *f"{runs}/a b/job.sbatch".split()],
    ]
    assert "2 x 2 nodes x 00:30:00 = 2.0 node-hours" in ran.stderr
    assert "#SBATCH --array=0-1\n" in (runs / "a b" / "job.sbatch").read_text()
    for rate in ("1e-4", "2e-4"):
        config = load_config(runs / "a b" / f"actor.optim.lr={rate}" / "bundle" / "config.yaml")
        assert config.actor.optim.lr == float(rate)
        assert config.model.init_from == str(runs / "sft_countdown")  # the first job makes it
        assert Path(config.run.dir, config.run.name) == runs / "a b" / f"actor.optim.lr={rate}"


def test_each_link_starts_from_the_policy_trained_before_it(login: Login) -> None:
    """On as many nodes as it says itself; a reward model is trained in between, from the same policy."""
    rm = f"rm:{ROOT}/configs/rm_countdown_cpu.yaml"
    free = "model.init_from=null"
    stages = [SFT, "run.name=base", "--chain", DPO, free, "job.nodes=4", "--chain", rm, free, "--chain", RL, free]
    ran = login.submit(*stages, "--nodes=2", "--ntasks-per-node=2")
    assert ran.returncode == 0, ran.stderr
    runs = login.folder / "runs"
    names = ("base", "dpo_countdown", "rm_countdown", "ppo_countdown")
    configs = [load_config(runs / name / "bundle" / "config.yaml", (), load_job("rm").schema()) for name in names]
    base, dpo = str(runs / "base"), str(runs / "dpo_countdown")
    assert [config.model.init_from for config in configs] == [None, base, dpo, dpo]
    assert [config.job.nodes for config in configs] == [2, 4, 2, 2]


def test_status_shows_every_link(login: Login) -> None:
    assert login.submit(SFT, "--chain", DPO, "--chain", RL, "--ntasks-per-node=4").returncode == 0
    runs = [login.folder / "runs" / name for name in ("sft_countdown", "dpo_countdown", "ppo_countdown")]

    def shown(folder: Path) -> list[list[str]]:
        ran = login.hpcrl("status", str(folder))
        assert ran.returncode == 0, ran.stderr
        return [line.split(maxsplit=7) for line in ran.stdout.split("\n\n")[0].splitlines()[1:]]

    login.command("squeue", "echo '41|PENDING|Resources||N/A'; echo '42|PENDING|Dependency||N/A'")
    assert [line[3:] for line in shown(runs[2])] == [
        ["41", "-", "-", "-", "queued (Resources)"],
        ["42", "-", "-", "-", "waiting for the job before it"],
        ["43", "-", "-", "-", "not started"],
    ]
    (runs[0] / "exit.json").write_text('{"code": 0}')
    lines = [json.dumps({"step": step, "timing_s/step": 2.0}) for step in range(1, 8)]
    (runs[1] / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 8, "tim']))
    (runs[1] / "times.json").write_text('{"total_steps": 100}')
    (runs[1] / "slices.json").write_text("[{}, {}]")
    login.command("squeue", "echo '42|RUNNING|None|n[0-1]|2026-01-01T00:00:00'; echo '43|PENDING|Dependency||N/A'")
    assert [line[4:] for line in shown(runs[0])] == [
        ["-", "-", "-", "done"],
        ["2", "7/100", "3m06s", "running on n[0-1]"],
        ["-", "-", "-", "waiting for the job before it"],
    ]
    (runs[1] / "exit.json").write_text('{"code": 2, "error": "no complete checkpoint"}')
    login.command("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert shown(runs[1])[1][7] == "failed (exit code 2: no complete checkpoint)"


def test_a_link_without_weights_is_refused_before_anything_is_made(login: Login) -> None:
    (login.folder / "runs" / "sft_countdown" / "checkpoints").mkdir(parents=True)
    before = sorted(login.folder.rglob("*"))
    ran = login.submit(RL)
    assert ran.returncode == 2
    assert "model.init_from: no complete checkpoint at runs/sft_countdown" in ran.stderr.splitlines()[-1]
    assert sorted(login.folder.rglob("*")) == before


def test_a_dry_run_prints_the_script_and_changes_nothing(login: Login) -> None:
    before = sorted(login.folder.rglob("*"))
    shown = login.submit(SFT, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert sorted(login.folder.rglob("*")) == before and login.called == []
    assert login.submit(SFT).returncode == 0
    run = login.folder / "runs" / "sft_countdown"
    bundle = (run / "bundle").resolve().name
    assert (run / "job.sbatch").read_text() == shown.stdout.replace("bundle=bundle\n", f"bundle={bundle}\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((RL, "--nodes=3", "job.ntasks_per_node=1"), "placement.actor: tp*pp*cp=2*1*1=2 does not divide"),
        ((SFT, "--chain", SFT), "two jobs of this chain write to"),
        ((SFT, "--array", "run.seed=1,2", "--chain", DPO, "model.init_from=null"), "is 2 runs; name one of them with"),
        ((SFT, "--chain", RL, "trainer.save_freq=-1", "--chain", DPO, "model.init_from=null"), "saves no weights: "),
        ((RL,), "model.init_from=runs/sft_countdown does not exist"),
        ((SFT, "job.partition=a b"), "job.partition"),
        ((SFT, "--site=no.yaml"), "site file no.yaml cannot be read"),
        ((SFT, "--time=00:04:00"), "job.signal_seconds=300 ends a slice that long before"),
    ],
)
def test_what_cannot_run_is_refused_before_it_queues(login: Login, arguments: tuple[str, ...], line: str) -> None:
    ran = login.submit(*arguments)
    assert ran.returncode == 2
    assert line in ran.stderr.splitlines()[-1]
    assert login.called == []


def test_what_sbatch_says_is_told(login: Login) -> None:
    login.sbatch("echo 'sbatch: error: invalid account' >&2; exit 1")
    ran = login.submit(SFT)
    assert ran.returncode == 2 and "invalid account" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "arguments are required: [COMMAND:]CONFIG"),
        (("a.yaml", "b.yaml"), "a further job is --chain b.yaml"),
        (("x=1", "a.yaml"), "found the override 'x=1' in place of a YAML file"),
        (("fly:a.yaml",), "unknown command 'fly'"),
        (("a.yaml", "--tasks=4"), "unrecognized arguments: --tasks=4"),
        (("a.yaml", "--time"), "argument --time: expected one argument"),
    ],
)
def test_wrong_command_lines(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit, match="2"):
        parse(arguments, ["sft", "train"])
    assert line in capsys.readouterr().err
