from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path

from hpcrl.config.loader import load_config
from hpcrl.config.paths import KEYS, inputs, missing
from hpcrl.config.schema import Section
from hpcrl.jobs.train import Train

# what a job makes, keys that the teacher's and the reward model's own `init_from` stands in for, and one that a judge
# does not take
OTHERS = {"generate.output_path", "score.output_path", "teacher.model.init_from", "reward.reward_model.model.init_from"}
OTHERS |= {"reward.judge.model.init_from"}


def keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = [kind for kind in (field.annotation, *typing.get_args(field.annotation)) if isinstance(kind, type)]
        sections = [kind for kind in inner if not isinstance(kind, types.GenericAlias) and issubclass(kind, Section)]
        for kind in sections:
            yield from keys(kind, f"{prefix}{name}.")
        if not sections:
            yield prefix + name


def test_every_key_that_names_a_file_is_known() -> None:
    files = ("path", "_file", "_files", "_from", "model_dir", "tokenizer", "plugins", "machine")
    assert {key for key in keys(Train.schema()) if key.endswith(files)} - OTHERS == set(KEYS)


def test_what_a_job_reads(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    template = Path(__file__).parents[2] / "configs" / "ppo_countdown_cpu.yaml"
    reward = f"reward.custom_reward_function.path={tmp_path}/mine.py:score"
    config = load_config(template, ["data.train_files=[a.parquet, b.parquet]", reward])
    found = [(given.key, given.path) for given in inputs(config)]
    assert [path for key, path in found if key == "data.train_files"] == ["a.parquet", "b.parquet"]
    assert ("reward.custom_reward_function.path", f"{tmp_path}/mine.py") in found
    assert "reward.custom_reward_function.path" not in [given.key for given in missing(config)]
    assert "data.train_files" in [given.key for given in missing(config)]

    machine = {name: load_config(template, [f"job.machine={name}"]) for name in ("dgx_h100", "mine.yaml")}
    assert [("job.machine", "mine.yaml")] == [
        tuple(it) for it in inputs(machine["mine.yaml"]) if it.key == "job.machine"
    ]
    assert "job.machine" not in [given.key for given in inputs(machine["dgx_h100"])], "a name is no file"
