"""What a person sees after a mistake on the command line: one line, exit code 2, no traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpcrl
from hpcrl import cli
from tests.preloaded import RANK
from tests.runtime.conftest import environment

ROOT = Path(__file__).parents[1]


def refused(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """The line of a command line that is refused in this process, before anything heavy is imported."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", leave)
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    out, err = capfd.readouterr()
    assert caught.value.code == 2
    assert out == ""
    assert err.startswith("hpcrl: error: ") and err.count("\n") == 1
    return err.removeprefix("hpcrl: error: ").rstrip()


COMMANDS = (
    "convert, evaluate, generate, online_dpo, preference, rm, score, sft, train, "
    "init, run, plan, check, data, from-verl, submit, status, samples, report, trace, replay"
)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], f"a command is missing; expected one of {COMMANDS}"),
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["fly"], f"unknown command 'fly'; expected one of {COMMANDS}"),
        (
            ["train"],
            "train: the following arguments are required: CONFIG; usage: hpcrl train [-h] CONFIG",
        ),
        (["sft", "run.seed=1"], "sft: found the override 'run.seed=1' in place of a YAML file; usage: hpcrl sft"),
        (["evalute"], "unknown command 'evalute'; did you mean evaluate?"),
        (["evaluate"], "evaluate: the following arguments are required: CONFIG; usage: hpcrl evaluate"),
        (["generate", "a.yaml", "--n=4"], "generate: unrecognized arguments: --n=4; usage: hpcrl generate [-h] CONFIG"),
        (["plan"], "plan: the following arguments are required: [JOB:]CONFIG; usage: hpcrl plan [-h]"),
        (["plan", "x=1"], "plan: found the override 'x=1' in place of a YAML file; usage: hpcrl plan"),
        (["check", "a.yaml"], "check: found 'a.yaml', which only --job reads; usage: hpcrl check"),
        (["init"], "init: one of the arguments --laptop --one-gpu --slurm is required; usage: hpcrl init [-h]"),
        (["run"], "run: the following arguments are required: CONFIG; usage: hpcrl run [JOB.py]"),
        (["run", "none.py", "a.yaml"], "none.py cannot be loaded: ImportError: no such file; name a Python file"),
        (["data"], "data: the following arguments are required: NAME; usage: hpcrl data [-h] NAME"),
        (["data", "gsm8k"], "data: the following arguments are required: --from, --out; usage: hpcrl data gsm8k [-h]"),
        (["submit"], "submit: the following arguments are required: [COMMAND:]CONFIG; usage: hpcrl submit"),
        (["status", "--watch", "x"], "status: argument --watch: invalid float value: 'x'; usage: hpcrl status [-h]"),
        (["replay"], "replay: the following arguments are required: --step; usage: hpcrl replay [-h] --step N"),
        (["replay", "/none", "--step", "1"], "/none is no run's folder: it has no config.yaml; expected <run.dir>/"),
        (["status", "/none"], "/none is no run's folder; expected <run.dir>/<run.name> of a run"),
        (["samples"], "samples: the following arguments are required: RUN; usage: hpcrl samples [-h]"),
        (["score", "m", "--tokens"], "score: argument --tokens: expected one argument; usage: hpcrl score"),
    ],
)
def test_wrong_command_lines(
    arguments: list[str], line: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(capfd, monkeypatch, *arguments).startswith(line)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], COMMANDS.split(", ")),
        (["train", "--help"], ["usage: hpcrl train", "CONFIG", "key=value"]),
        (["score", "-h"], ["MODEL", "--tokens", "--out"]),
    ],
)
def test_help(arguments: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(word in out for word in expected)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    written = re.search(r'version="(.+?)"', (ROOT / "setup.py").read_text(encoding="utf-8"))
    assert written is not None and hpcrl.__version__ == written[1] and "__version__" in dir(hpcrl)
    assert (caught.value.code, capsys.readouterr().out) == (0, f"hpcrl {written[1]}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["plan", "configs/grpo_countdown_cpu.yaml"]])
def test_a_reader_that_has_left_is_no_error(arguments: list[str]) -> None:
    """As `head` leaves; without a buffer the first line fails, with one the flush at the end."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hpcrl", *arguments]
    for more in ({}, {"PYTHONUNBUFFERED": "1"}):
        done = subprocess.run(command, cwd=ROOT, env=environment(**more), stdout=writer, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (0, b"")
    os.close(writer)


def test_ctrl_c_in_a_tool_is_one_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str]) -> None:
        raise KeyboardInterrupt

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setitem(cli.TOOLS, "data", (interrupted, ""))
    monkeypatch.setattr("os._exit", leave)
    with pytest.raises(SystemExit) as caught:
        cli.main(["data"])
    assert caught.value.code == 130
    assert capfd.readouterr() == ("", "hpcrl: interrupted\n")


@pytest.mark.parametrize(
    ("line", "found"),
    [("hpcrl tr", {"train"}), ("hpcrl score --", {"--tokens", "--out"}), ("hpcrl s", {"sft", "submit", "status"})],
)
def test_completion(tmp_path: Path, line: str, found: set[str]) -> None:
    """As argcomplete's hook of a shell asks for it."""
    asks = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "found")}
    environ = environment() | asks | {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    subprocess.run([sys.executable, "-m", "hpcrl"], cwd=ROOT, env=environ, check=True)
    assert found <= set((tmp_path / "found").read_text().replace(" ", "").split("\n"))


def launch(*arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """A command line under mpiexec, as users run it."""
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    command = [mpiexec, "-n", str(ranks), *RANK, "-m", "hpcrl", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)


def assert_one_line(run: subprocess.CompletedProcess[str], line: str, *others: str) -> None:
    assert run.returncode == 2, run.stderr
    assert run.stderr.count("hpcrl: error: ") == 1 + len(others), run.stderr
    assert all(f"hpcrl: error: {each}" in run.stderr for each in (line, *others))
    assert "Traceback" not in run.stderr + run.stdout


def test_ranks_speak_with_one_voice() -> None:
    assert_one_line(launch("chekc"), "unknown command 'chekc'; did you mean check?")


@pytest.mark.parametrize("command", ["train", "generate"])
def test_missing_file_under_mpi(tmp_path: Path, command: str) -> None:
    assert_one_line(launch(command, str(tmp_path / "none.yaml")), "no such config file: ")


@pytest.mark.slow
def test_refusals_under_mpi(tmp_path: Path) -> None:
    """The kinds of mistake that only a started job can see, or that go another way through it."""
    job = tmp_path / "job.yaml"
    job.write_text(f"run: {{dir: {tmp_path}}}\ndata: {{train_files: [none.parquet]}}\n")
    for override, line in {
        "actor.optm.lr=1": "override actor.optm.lr=1: unknown key actor.optm; did you mean actor.optim?",
        "actor.optim.lr=x": "override actor.optim.lr=x: actor.optim.lr is the text 'x'; expected a number",
        "placement.actor.tp=3": "placement.actor.tp=3 does not divide num_attention_heads=4; use 1 or 2",
        "placement.pools.all=0-7": "placement.pools.all='0-7' names rank 2, and the job has 2 (0 to 1)",
        "algorithm.adv_estimator=gea": "unknown adv_estimator 'gea'; did you mean 'gae'?",
        "actor.policy_loss.loss_mode=vanila": "unknown policy_loss.loss_mode 'vanila'; did you mean 'vanilla'?",
    }.items():
        assert_one_line(launch("train", str(job), override), line)
    several = ("rollout.name=vllm", "run.dir=$NO_SUCH/runs")  # a line each
    one, other = (f"override {override}: " for override in several)
    assert_one_line(launch("train", str(job), *several), f"{one}unknown key rollout.name; use", f"{other}run.dir is")
    assert_one_line(launch("evaluate", str(job)), "data.val_files is empty; name at least one")
    assert_one_line(launch("generate", str(job)), "model.tokenizer and model.path are null; name a tokenizer directory")
