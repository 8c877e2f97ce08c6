"""`hpcrl init`: each folder has templates that load, replaces nothing, and its commands run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from hpcrl import cli
from hpcrl.config.paths import TEMPLATES
from hpcrl.config.start_folder import KINDS, files
from hpcrl.slurm.site import SiteConfig, load_site
from hpcrl.slurm.template import Batch, render
from tests.preloaded import RANK
from tests.runtime.conftest import MPIEXEC, environment

SMALL = {
    "prepare_countdown.py": ["--sft-rows", "64"],
    "sft": ["sft.batch_size=8", "sft.total_training_steps=2", "sft.eval_freq=2", "sft.eval_samples=8"],
    "train": [
        *("data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "data.val_max_samples=8"),
        *("trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.save_freq=2"),
    ],
}


def init(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The commands that it prints."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["init", str(folder), f"--{kind}"])
    assert caught.value.code == 0
    _, commands = capsys.readouterr().out.split("then:\n")
    cd, *others = (line.strip() for line in commands.splitlines())
    assert cd == f"cd {folder}"
    return others


@pytest.mark.parametrize("kind", KINDS)
def test_templates_load_and_nothing_is_replaced(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = init(kind, tmp_path / "first", capfd)
    monkeypatch.chdir(tmp_path / "first")
    named = [word for command in commands for word in shlex.split(command) if word.endswith((".yaml", ".py"))]
    assert named and all(Path(name).is_file() for name in named)
    for path in Path().rglob("*.yaml"):
        if path.name == "site.yaml":
            load_site(path)
        else:
            job = "sft" if path.stem == "sft" else "train"
            cli.load_job(job).read_config(str(path), [])
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    Path("reward.py").write_text("of the user")
    before[Path("reward.py")] = Path("reward.py").stat().st_mtime_ns

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", leave)
    with pytest.raises(SystemExit) as caught:
        cli.main(["init", f"--{kind}"])
    assert caught.value.code == 2
    error = capfd.readouterr().err
    assert "exists, and init replaces no file; name another folder\n" in error and error.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before


def test_the_laptops_commands_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in init("laptop", tmp_path, capsys):
        words = shlex.split(command)
        small = next(extra for name, extra in SMALL.items() if name in words)
        at = words.index("--files") if "--files" in words else len(words)
        words[at:at] = small
        replaced = {"mpiexec": [str(MPIEXEC)], "hpcrl": [*RANK, "-m", "hpcrl"], "python": [*RANK]}
        run = [part for word in words for part in replaced.get(word, [word])]
        done = subprocess.run(run, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs" / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "val-core/countdown/acc/mean@1" in rows[0]  # `acc` is of reward.py, so it was called
    for line in ("done: grpo, 2 steps", "report: ", "evaluate: mpiexec -n 2 ", "export: "):
        assert line in done.stdout


def test_the_reward_function_is_the_rule_of_countdown(tmp_path: Path) -> None:
    names: dict = {}
    exec((TEMPLATES / "configs" / "start" / "reward.py").read_text(encoding="utf-8"), names)
    truth = {"numbers": [5, 8, 5, 2], "target": 6}
    for answer, score in (("8+5-5-2", 1.0), ("8+5-5+2", 0.1), ("8-2", 0.0), ("8+5-5-2+", 0.0), ("6", 0.0)):
        assert names["compute_score"]("countdown", f"<a>{answer}</a>", truth)["score"] == score
    assert names["compute_score"]("countdown", "8+5-5-2", truth) == {"score": 0.0, "acc": 0.0}


def test_the_site_file_has_an_example_of_each_key(tmp_path: Path) -> None:
    text = (TEMPLATES / "slurm" / "site.yaml").read_text(encoding="utf-8")
    assert load_site(TEMPLATES / "slurm" / "site.yaml") == SiteConfig()
    examples = tmp_path / "site.yaml"
    examples.write_text("\n".join(re.findall(r"^# (\w+: .*)", text, re.M)))
    assert set(yaml.safe_load(examples.read_text())) == set(SiteConfig.model_fields)
    site = load_site(examples)
    assert site.container.kind == "apptainer" and site.scratch == "/local/$SLURM_JOB_ID"


def test_the_batch_script_asks_for_what_the_template_does() -> None:
    places = {str(place): path for path, place in files(KINDS["slurm"])}
    config = cli.load_job("train").read_config(str(places["grpo.yaml"]), [])
    made = render(Batch("grpo", "train", config.job, (Path("/runs/grpo"),)), SiteConfig(), "/venv")
    written, rendered = (
        {line for line in text.splitlines() if line.startswith("#SBATCH") and "--output" not in line}
        for text in (places["job.sbatch"].read_text(encoding="utf-8"), made)
    )
    assert written == rendered
