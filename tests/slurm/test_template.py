"""Batch scripts that `hpcrl submit` makes: what they ask for, and that no name in them is ever run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from hpcrl.config.loader import load_config
from hpcrl.config.paths import expanded, literal
from hpcrl.config.schema import JobConfig
from hpcrl.jobs.train import Train
from hpcrl.run.job_config import with_presets
from hpcrl.runtime.exits import InputError
from hpcrl.slurm.site import SiteConfig
from hpcrl.slurm.template import Batch, render

ROOT = Path(__file__).parents[2]


def script(job: dict[str, Any] | None = None, site: dict[str, Any] | None = None, **batch: Any) -> str:
    made = Batch(
        name=batch.pop("name", "ppo"),
        command=batch.pop("command", "train"),
        job=JobConfig(**(job or {})),
        run_dirs=tuple(batch.pop("run_dirs", (Path("/runs/ppo"),))),
        **batch,
    )
    return render(made, SiteConfig.model_validate(site or {}), "/code/.venv")


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_what_a_job_asks_for() -> None:
    job = {
        "nodes": 8,
        "ntasks_per_node": 4,
        "gpus_per_node": 4,
        "cpus_per_task": 12,
        "mem": "0",
        "time": "1-02:00:00",
        "exclusive": True,
        "constraint": "a100&ib",
        "exclude": "n[1-3]",
        "signal_seconds": 600,
        "extra": ["--mail-type=END"],
    }
    assert options(script(job)) == [
        "--job-name=ppo",
        "--nodes=8",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--cpus-per-task=12",
        "--mem=0",
        "--time=1-02:00:00",
        "--constraint=a100&ib",
        "--exclude=n[1-3]",
        "--exclusive",
        "--signal=URG@600",
        "--requeue",
        "--no-kill",
        "--open-mode=append",
        "--output=slurm-%j.out",
        "--mail-type=END",
    ]


@pytest.mark.parametrize("name", ["ppo_70b", "grpo_8b"])
def test_templates_ask_for_what_their_configurations_do(name: str) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    derived = Train.check_with_torch(with_presets(config), config.job.nodes * config.job.ntasks_per_node)
    assert derived.roles["rollout"].tp > 1
    made = Batch(name, "train", config.job, (Path("/runs") / name,))
    written = options((ROOT / "slurm" / f"{name}.sbatch").read_text())
    differ = set(written) ^ set(options(render(made, SiteConfig(), "/code/.venv")))
    assert differ == {"--output=slurm-%x-%j.out", "--output=slurm-%j.out"}


def test_the_job_wins_over_the_site() -> None:
    site = {"partition": "small", "account": "abc", "gpu_directive": "gres", "gpu_type": "h100", "modules": ["cuda/13"]}
    asked = options(script({"partition": "large", "gpus_per_node": 8}, site))
    assert {"--partition=large", "--account=abc", "--gres=gpu:h100:8"} < set(asked)
    assert "--gpus-per-node=8" not in asked
    assert "export HPCRL_MODULES=cuda/13\n" in script({}, site)


def test_a_job_that_may_not_be_requeued() -> None:
    text = script({"requeue": False})
    assert "--no-requeue" in options(text) and "export HPCRL_MAX_RESTARTS=0\n" in text


@pytest.mark.parametrize(("command", "folder"), [("sft", "$run"), ("evaluate", "$run/evaluate")])
def test_the_exit_of_a_command_is_read_where_it_is_written(command: str, folder: str) -> None:
    assert f'hpcrl_srun "{folder}" {command} ' in script(command=command)


def test_a_container_sees_runs_and_data() -> None:
    site = {"container": {"kind": "pyxis", "image": "nvcr.io#nvidia/x:1", "mounts": ["/scratch"]}}
    text = script({}, site, mounts=(Path("/runs"), Path("/data")))
    assert "export HPCRL_IMAGE='nvcr.io#nvidia/x:1'" in text
    assert "export HPCRL_MOUNTS=/runs:/runs,/data:/data,/scratch:/scratch" in text
    assert "HPCRL_VENV" not in text


@pytest.mark.parametrize("name", ["a,b", "a:b"])
def test_what_a_container_cannot_mount_is_refused(name: str) -> None:
    container = {"container": {"kind": "apptainer", "image": "/x.sif"}}
    for batch in ({"run_dirs": (Path("/runs") / name,)}, {"mounts": (Path("/data") / name,)}):
        script(**batch)
        with pytest.raises(InputError, match=f"{name} has ',' or ':'"):
            script(site=container, **batch)


HOSTILE = (
    "a b",
    "$(touch {0})",
    "`touch {0}`",
    "'; touch {0}; '",
    '"; touch {0}; "',
    "\\",
    "*",
    "~",
    "-n",
    "a#b",
    "é;|&<>",
)


@pytest.mark.parametrize("pattern", HOSTILE)
def test_names_are_words_and_never_code(pattern: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    seen(tmp_path, pattern.replace("{0}", canary.name))
    assert not list(tmp_path.rglob("canary"))


@given(st.text(st.characters(exclude_characters="/", exclude_categories=("C", "Z")), min_size=1, max_size=40))
@example("$(id)")
def test_any_printable_name_reaches_the_program(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    if name not in (".", ".."):
        seen(tmp_path_factory.mktemp("runs"), name)


def seen(folder: Path, name: str) -> None:
    """Run the script of a run of this name, and of an array with it, with a common.sh that shows what it was given."""
    run = folder / name
    code = run / "bundle_1" / "code" / "slurm"
    code.mkdir(parents=True)
    show = """hpcrl_start() { :; }; hpcrl_leave() { :; }; hpcrl_set() { export "$1=$2"; }
    hpcrl_srun() { printf '%s\\0' "$@" "$WORD"; }"""
    (code / "common.sh").write_text(show)
    site = {"environment": {"WORD": literal(name)}}
    one = {"run_dirs": (run,), "bundles": ("bundle_1",)}
    several = {"run_dirs": (folder / "no", run), "bundles": ("bundle_0", "bundle_1"), "is_array": True}
    for more in (one, several):
        text = script({}, site, name=name, **more)
        ran = subprocess.run(
            ["bash", "-c", text],
            cwd=folder,
            capture_output=True,
            env={"PATH": "/bin:/usr/bin", "SLURM_ARRAY_TASK_ID": "1"},
        )
        assert ran.stderr == b""
        words = [word.decode() for word in ran.stdout.split(b"\0")[:-1]]
        assert words == [str(run), "train", f"{run}/bundle_1/config.yaml", expanded(literal(name))]
        title = options(text)[0].removeprefix("--job-name=")
        assert title and not set(title) & set(" '\"\\$`;#%")


def test_scratch_is_found_on_the_node() -> None:
    lines = script(site={"scratch": "${LOCAL}/$SLURM_JOB_ID"}).splitlines()
    line = next(line for line in lines if "TMPDIR" in line)
    ran = subprocess.run(
        ["bash", "-c", f'{line}; printf %s "$TMPDIR"'],
        capture_output=True,
        text=True,
        env={"LOCAL": "/disk/a b", "SLURM_JOB_ID": "7"},
    )
    assert ran.stdout == "/disk/a b/7"
    unset = subprocess.run(["bash", "-c", f"{line}; echo $TMPDIR"], capture_output=True, text=True, env={"LOCAL": "/x"})
    assert unset.returncode != 0 and not unset.stdout
    assert "SLURM_JOB_ID: scratch of the site file names it, and it is unset" in unset.stderr


@pytest.mark.parametrize("text", ["a\nb", "a\x1b[31m", "a\u2028b"])
def test_line_breaks_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="not allowed in a batch script"):
        script(run_dirs=(Path("/runs") / text,))
    with pytest.raises(InputError, match="not allowed in a batch script"):
        script(site={"environment": {"X": text}})
    with pytest.raises(ValidationError):
        JobConfig(partition=text)


@pytest.mark.parametrize(
    "value", ["gpu x", "gpu\n#SBATCH --wrap=x", "gpu'", 'gpu"', "gpu$(x)", "gpu`x`", "a;b", "", "a#b"]
)
def test_values_of_options_are_plain(value: str) -> None:
    with pytest.raises(ValidationError):
        JobConfig(partition=value)
    with pytest.raises(ValidationError):
        JobConfig(extra=[f"--x={value}"])
    with pytest.raises(ValidationError):
        SiteConfig(account=value)
