"""The bundle: it is what the job would have read, and whoever changes a byte of it is found out."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from hpcrl.config.loader import load_config
from hpcrl.config.paths import inputs
from hpcrl.config.schema import Config
from hpcrl.data.row_file import short_names
from hpcrl.engine.checkpoint.manifest import verify, write_manifest
from hpcrl.runtime.exits import InputError
from hpcrl.slurm import bundle

ROOT = Path(__file__).parents[2]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A job with two data files of one name, a warm start and a reward function that imports its neighbour."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "train.parquet").write_bytes(name.encode() * 100)
    (tmp_path / "data" / "val.parquet").write_bytes(b"v" * 1000)
    for step in (10, 20):
        saved = tmp_path / "runs" / "sft" / "checkpoints" / f"step_{step:08d}"
        (saved / "actor").mkdir(parents=True)
        (saved / "trainer.json").write_text(json.dumps({"step": step}))
        (saved / "actor" / "weights").write_bytes(bytes(step))
        write_manifest(saved)
    (tmp_path / "mine.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("")
    return load_config(
        "configs/ppo_countdown_cpu.yaml",
        [
            "run.name=a b;$(x)",
            "model.init_from=runs/sft",
            "data.train_files=[data/a/train.parquet, data/b/train.parquet]",
            "data.val_files=data/val.parquet",
            "reward.custom_reward_function.path=mine.py:score",
            "job.machine=configs/machines/dgx_h100.yaml",
            "algorithm.rollout_correction.preset=bypass_ppo_clip",
            "job.on_event=['./notify.sh \"to me\"', mail]",
        ],
    )


def test_the_job_reads_the_same(job: Config, tmp_path: Path) -> None:
    made = bundle.stage(job, ROOT, (), print)
    staged = load_config(made / "config.yaml")
    assert verify(made, with_links=True) == []
    given, moved = list(inputs(job)), list(inputs(staged))
    assert [key for key, _ in given] == [key for key, _ in moved]
    assert all(Path(path).is_relative_to(made) and Path(path).exists() for _, path in moved)
    # samples are named after files, and random numbers after samples
    assert short_names(job.data.train_files) == short_names(staged.data.train_files)
    assert staged.reward.custom_reward_function.path == str(made / "inputs" / "mine.py") + ":score"
    assert (made / "inputs" / "helper.py").exists()
    assert str(staged.model.init_from).endswith("runs/sft/checkpoints/step_00000020")

    os.chdir("/")  # nothing depends on where the job starts
    assert load_config(made / "config.yaml") == staged
    same = staged.model_dump()
    for section, name in (("run", "dir"), ("model", "init_from"), ("model", "tokenizer"), ("job", "machine")):
        same[section][name] = job.model_dump()[section][name]
    same["data"] |= {name: job.model_dump()["data"][name] for name in ("train_files", "val_files")}
    assert staged.job.on_event == [f"{tmp_path}/notify.sh 'to me'", "mail"]
    same["job"]["on_event"] = job.job.on_event
    same["reward"]["custom_reward_function"] = job.model_dump()["reward"]["custom_reward_function"]
    assert same == job.model_dump()
    # a preset fills in what the template leaves out, so that has to stay out
    correction = staged.algorithm.rollout_correction
    assert correction.model_fields_set == job.algorithm.rollout_correction.model_fields_set == {"preset"}


def test_the_code_is_whole(job: Config) -> None:
    code = bundle.stage(job, ROOT, (), print) / "code"
    assert (code / "slurm" / "common.sh").exists()
    here = {path.relative_to(ROOT) for path in [*ROOT.glob("hpcrl/**/*.py"), *ROOT.glob("hpcrl/kernels/*.py")]}
    assert {path.relative_to(code) for path in (code / "hpcrl").rglob("*.py")} == here


def test_a_change_of_any_input_is_found(job: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_COPIED", 500)  # val.parquet is large now
    made = bundle.stage(job, ROOT, (), print)
    assert (made / "inputs" / "data" / "val.parquet").is_symlink()
    assert not (made / "inputs" / "data" / "a" / "train.parquet").is_symlink()
    assert verify(made, with_links=True) == []
    (tmp_path / "data" / "val.parquet").write_bytes(b"w" * 1000)
    assert [line.split()[0] for line in verify(made, with_links=True)] == ["inputs/data/val.parquet"]
    (tmp_path / "data" / "val.parquet").unlink()
    assert [line.split()[0] for line in verify(made, with_links=True)] == ["inputs/data/val.parquet"]


def test_a_job_in_the_queue_keeps_its_bundle(job: Config) -> None:
    first = bundle.stage(job, ROOT, (), print)
    before = first.stat().st_ino
    assert bundle.stage(job, ROOT, (), print) == first and first.stat().st_ino == before
    other = job.model_copy(update={"trainer": job.trainer.model_copy(update={"total_training_steps": 7})})
    second = bundle.stage(other, ROOT, (), print)
    assert load_config(second / "config.yaml").trainer.total_training_steps == 7
    assert first.stat().st_ino == before and verify(first, with_links=True) == []
    run = first.parent
    assert (run / "bundle").resolve() == second  # what `check --job` reads
    assert {path.name for path in run.iterdir()} == {"bundle", first.name, second.name}


def test_packages_beside_a_function_come_along(job: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pack/a.py", "pack/sub/b.py", ".git/c.py", "pack/__pycache__/d.py", "env/e.py", "env/pyvenv.cfg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    made = bundle.stage(job, ROOT, (), print)
    found = {path.relative_to(made / "inputs").as_posix() for path in (made / "inputs").rglob("*.py")}
    assert found == {"mine.py", "helper.py", "pack/a.py", "pack/sub/b.py"}
    assert bundle.stage(job, ROOT, (), print) == made  # bundles do not hold one another
    monkeypatch.setattr(bundle, "MAX_MODULES", 3)
    with pytest.raises(InputError, match=r"more than 3 files \*\.py"):
        bundle.stage(job, ROOT, (), print)


def test_what_links_lead_to_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a cache of models: the folder that the config names has links to files elsewhere."""
    monkeypatch.setattr(bundle, "MAX_COPIED", 500)
    snapshot, blobs = tmp_path / "snapshots" / "1", tmp_path / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for name, size in (("large", 1000), ("small", 10)):
        (blobs / name).write_bytes(bytes(size))
    (snapshot / "weights").symlink_to("../../blobs/large")
    assert bundle.linked_folders(snapshot) == {blobs}
    (snapshot / "weights").unlink()
    (snapshot / "notes").symlink_to("../../blobs/small")
    assert bundle.linked_folders(snapshot) == set()


def test_what_an_earlier_job_makes_is_left_where_it_will_be(job: Config, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "runs" / "sft")
    made = bundle.stage(job, ROOT, [tmp_path / "runs" / "sft"], print)
    assert load_config(made / "config.yaml").model.init_from == str(tmp_path / "runs" / "sft")
