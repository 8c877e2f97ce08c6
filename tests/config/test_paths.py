"""Paths of YAML files and overrides: what is expanded, where, and that no path key was forgotten."""

from __future__ import annotations

import re
import subprocess
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from hpcrl.config.loader import dump_config, job_file, load_config
from hpcrl.config.paths import NodePath, PathStr, expanded, literal
from hpcrl.config.problems import sections_in
from hpcrl.config.schema import Config, Section
from hpcrl.config.yaml_core import ConfigError
from hpcrl.engine.checkpoint.manifest import write_file
from hpcrl.jobs.train import Train
from hpcrl.run.start import check_scratch
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.job import run_directory
from hpcrl.slurm.bundle import with_paths
from hpcrl.slurm.site import SiteConfig

COMMON = Path(__file__).parents[2] / "slurm" / "common.sh"
PATHS = [
    ("$WORK/runs", "/big/a b/runs"),
    ("x/${WORK}s", "x//big/a bs"),
    ("${oc.env:WORK}/$USER_NAME", "/big/a b/ada"),
    ("${oc.env:UNSET,/tmp/d}/x", "/tmp/d/x"),
    ("${oc.env:WORK,/tmp/d}", "/big/a b"),
    ("~/x", "/home/ada/x"),
    ("~", "/home/ada"),
    ("$TILDE/x", "/home/ada/x"),
    ("a~b/~", "a~b/~"),
    ("$$WORK/$5$", "$WORK/$5$"),
    ("runs/x.parquet", "runs/x.parquet"),
]
WRONG = [
    ("$UNSET/runs", "UNSET to be set in the environment"),
    ("${oc.env:EMPTY}/runs", "EMPTY to be set"),
    ("${WORK:-/tmp}", "${NAME}, ${oc.env:NAME} or ${oc.env:NAME,default} where"),
    ('${oc.env:UNSET,"/tmp"}/x', "${NAME}, ${oc.env:NAME}"),
    ("${trainer.project_name}/x", "${NAME}, ${oc.env:NAME}"),
    ("~no_such_user/x", "a user of this machine after the ~, or ./~no_such_user/x"),
]
OTHERS = {  # text whose description names a file, and that is no path
    "data.sampler.class_name",
    "job.time",
    "reward.custom_reward_function.name",
    "rollout.multi_turn.format",
    "rollout.multi_turn.interaction_name",
    "rollout.multi_turn.environment.name",
    "sft.messages_key",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    given = {"WORK": "/big/a b", "USER_NAME": "ada", "HOME": "/home/ada", "TILDE": "~", "EMPTY": ""}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("UNSET", raising=False)
    return given


@pytest.mark.parametrize(("path", "found"), PATHS)
def test_a_path_is_expanded_in_files_and_overrides_and_by_bash(tmp_path: Path, path: str, found: str) -> None:
    assert expanded(path) == found and expanded(literal(found)) == found
    file = tmp_path / "job.yaml"
    file.write_text(f"run: {{dir: '{path}'}}\ndata: {{train_files: '{path}', val_files: [a, '{path}']}}\n")
    config = load_config(file, [f"model.tokenizer='{path}'"])
    assert (config.run.dir, config.model.tokenizer) == (found, found)
    assert (config.data.train_files, config.data.val_files) == ([found], ["a", found])
    file.write_text(dump_config(config))
    assert load_config(file) == config
    shown = subprocess.run(["bash", "-c", f'source {COMMON}; hpcrl_path "$1"', "bash", path], stdout=subprocess.PIPE)
    assert shown.stdout.decode() == f"{found}\n"


@pytest.mark.parametrize(("path", "words"), WRONG)
def test_what_cannot_be_expanded_is_an_error_with_its_place(tmp_path: Path, path: str, words: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"run: {{name: x}}\nmodel:\n  init_from: '{path}'\n")
    for arguments, place in (([file], f"{file}:3: "), ([None, [f"model.init_from={path}"]], "override ")):
        with pytest.raises(ConfigError) as caught:
            load_config(*arguments)
        line = str(caught.value)
        assert line.startswith(place) and f"model.init_from is the text {path!r}; expected {words}" in line
        assert "\n" not in line
    file.write_text(f"run: {{name: x}}\nextends: '{path}.yaml'\n")
    with pytest.raises(ConfigError, match=re.escape(f"{file}:2: extends is the text")):
        load_config(file)


def test_extends_and_the_file_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORK", str(tmp_path / "base"))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "job.yaml").write_text("run: {job_file: $WORK/mine.py, name: '${USER_NAME}_1'}\n")
    file = tmp_path / "job.yaml"
    file.write_text("extends: ${oc.env:WORK}/job.yaml\n")
    assert job_file(file, []) == load_config(file).run.job_file == f"{tmp_path}/base/mine.py"
    assert run_directory(load_config(file)).name == "ada_1"
    assert load_config(None, ["job.on_event=$WORK/tell.sh '$HPCRL_EVENT'"]).job.on_event == [
        f"{tmp_path}/base/tell.sh '$HPCRL_EVENT'"
    ], "the program; what is quoted is for the command"


def test_a_submitted_job_has_the_paths_of_who_submits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (odd := tmp_path / "a$b").mkdir()
    (odd / "v.parquet").touch()
    config = load_config(
        None, ["run.dir=~/runs", "data.val_files=a$$b/v.parquet", "trainer.checkpoint.scratch_dir=$T/x"]
    )
    tree = with_paths(config, {})
    assert tree["run"]["dir"] == "/home/ada/runs"
    assert tree["data"]["val_files"] == [f"{tmp_path}/a$$b/v.parquet"]
    assert tree["trainer"]["checkpoint"]["scratch_dir"] == "$T/x", "the node's"
    assert Config.model_validate(tree).data.val_files == [str(odd / "v.parquet")]


def test_scratch_is_the_ranks_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, ["trainer.checkpoint.scratch_dir=${oc.env:NODE_DISK}/x"])
    world: Any = SimpleNamespace(run_collectively=lambda check: check())
    with pytest.raises(InputError, match=r"trainer.checkpoint.scratch_dir=.* on .*: expected NODE_DISK to be set"):
        check_scratch(world, config)
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "node"))
    check_scratch(world, config)
    target = tmp_path / "run" / "checkpoints" / "step_1" / "actor" / "x"
    target.parent.mkdir(parents=True)
    write_file(target, lambda file: file.write(b"x"), config.trainer.checkpoint.scratch_dir, lambda: None)
    assert target.read_bytes() == b"x" and (tmp_path / "node" / "x").is_dir()
    with pytest.raises(ConfigError, match="scratch_dir is the text .*expected"):
        load_config(None, ["trainer.checkpoint.scratch_dir=${NODE_DISK:-/tmp}"])


def texts(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The keys with text, in lists and mappings too, without those of one or several given words."""
    for name, field in section.model_fields.items():
        inner = sections_in(field.annotation)
        for kind in inner:
            yield from texts(kind, f"{prefix}{name}.")
        if not inner and str in kinds(field.annotation):
            yield prefix + name, field


def kinds(annotation: Any) -> set[Any]:
    return {annotation}.union(*map(kinds, typing.get_args(annotation))) if not isinstance(annotation, str) else set()


def is_path(field: FieldInfo) -> bool:
    validators = {kind.__metadata__[0].func for kind in (PathStr, NodePath)}
    found = [*field.metadata, *(data for kind in kinds(field.annotation) for data in getattr(kind, "__metadata__", ()))]
    return any(getattr(data, "func", None) in validators for data in found)


def test_every_key_that_names_a_file_is_a_path() -> None:
    """By its name or its description. A new key of the kind is to be a PathStr, or to stand among OTHERS."""
    named = re.compile(r"(path|dir|file|files|from|tokenizer|plugins|machine|venv|image|mounts|scratch)$")
    told = re.compile(r"\b(file|files|folder|folders|directory|path|paths)\b", re.IGNORECASE)
    plain, paths = set(), set()
    for schema in (Train.schema(), SiteConfig):
        for key, field in texts(schema):
            if is_path(field):
                paths.add(key)
            elif named.search(key) or told.search(field.description or ""):
                plain.add(re.sub(r"^(teacher|reward\.reward_model|reward\.judge)\.(?=model\.)", "", key))
    assert plain == OTHERS
    assert {"run.dir", "run.name", "trainer.checkpoint.scratch_dir", "reward.custom_reward_function.path"} <= paths
    assert {"teacher.model.path", "generate.output_path", "venv", "container.mounts", "scratch"} <= paths
