"""The loader: merging, YAML 1.2 scalars, round trip, and the one line that each mistake gets."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcrl.cli import load_job
from hpcrl.config.loader import dump_config, load_config
from hpcrl.config.paths import literal
from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError

TEMPLATES = Path(__file__).parents[2] / "configs"
COMMANDS = {"sft": "sft", "rm": "rm", "dpo": "preference", "kto": "preference", "online": "online_dpo"}
COMMANDS |= {"samples": "generate"}  # first word of a template's name -> command, where it is not train


def write(folder: Path, text: str, name: str = "job.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, *overrides: str) -> str:
    """The error's line, without the temporary folder."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    line = str(caught.value)
    assert "\n" not in line
    return line.replace(f"{path.parent}/", "")


def test_templates_load() -> None:
    """Those of configs/*_cpu.yaml also run, in tests/mpi/test_templates.py."""
    paths = sorted(path for path in TEMPLATES.rglob("*.yaml") if path.parent.name not in ("machines", "sites"))
    assert {path.parent.name for path in paths} >= {"configs", "smollm2", "vision"}
    for path in paths:
        load_job(COMMANDS.get(path.stem.split("_")[0], "train")).read_config(str(path), [])


def test_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "")) == Config()


def test_later_wins_and_mappings_merge(tmp_path: Path) -> None:
    write(tmp_path, "actor: {optim: {lr: 1, eps: 1e-7}, ppo_epochs: 2}\ndata: {val_files: [a, b]}", "base/ppo.yaml")
    write(tmp_path, "extends: ppo.yaml\nactor: {optim: {lr: 2}}", "base/middle.yaml")
    job = write(tmp_path, "extends: base/middle.yaml\nactor: {ppo_epochs: 3}\ndata: {val_files: [c]}")
    config = load_config(job, ["run.seed=5", "actor.optim.eps=1e-6", "run.seed=6"])
    assert (config.actor.optim.lr, config.actor.optim.eps, config.actor.ppo_epochs) == (2.0, 1e-6, 3)
    assert config.data.val_files == ["c"]
    assert config.run.seed == 6


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("2E+1", 20.0), ("1.e-3", 1e-3), (".5", 0.5), ("3", 3.0), ("0x10", 16.0)]
)
def test_numbers_as_in_yaml_1_2(tmp_path: Path, text: str, value: float) -> None:
    empty = write(tmp_path, "")
    for config in (
        load_config(write(tmp_path, f"actor: {{optim: {{lr: {text}}}}}", "file.yaml")),
        load_config(empty, [f"actor.optim.lr={text}"]),
    ):
        assert config.actor.optim.lr == value
        assert isinstance(config.actor.optim.lr, float)


def test_text_as_in_yaml_1_2(tmp_path: Path) -> None:
    """YAML 1.1 reads these as 1800, False, 8 and a date."""
    config = load_config(write(tmp_path, "job: {time: 00:30:00}\nrun: {name: off, dir: 2026-01-01, seed: 010}"))
    assert (config.job.time, config.run.name, config.run.dir, config.run.seed) == ("00:30:00", "off", "2026-01-01", 10)


def test_anchors_and_merge_keys(tmp_path: Path) -> None:
    text = "actor: {optim: &o {lr: 1, eps: 2}}\ncritic: {optim: {<<: *o, lr: 3}}"
    optim = load_config(write(tmp_path, text)).critic.optim
    assert (optim.lr, optim.eps) == (3.0, 2.0)


texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1).filter(lambda text: not set("/\0") & set(text))
scalars = st.one_of(texts, st.sampled_from(["1e-4", "no", "~", "", "12:30", "<<", "=", "0o7", "\x85", " a"]))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    text=scalars,
    lr=st.floats(0, 1e30),
    seed=st.integers(-(2**63), 2**63 - 1),
    extra=st.dictionaries(texts, st.one_of(scalars, st.integers(), st.booleans(), st.floats(-1e9, 1e9)), max_size=3),
)
def test_dump_loads_back_equal(tmp_path: Path, text: str, lr: float, seed: int, extra: dict) -> None:
    config = Config.model_validate(
        {
            "run": {"dir": literal(text), "seed": seed},
            "actor": {"optim": {"lr": lr}},
            "data": {"apply_chat_template_kwargs": extra, "val_files": [literal(text)]},
            "rollout": {"val_kwargs": {"n": 4, "temperature": 1}},
        }
    )
    again = load_config(write(tmp_path, dump_config(config)))
    assert again == config
    types = [type(value) for value in again.data.apply_chat_template_kwargs.values()]
    assert types == [type(value) for value in extra.values()]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("actor.optm.lr=1", "unknown key actor.optm; did you mean actor.optim?"),
        ("actr.optim.lr=1", "unknown key actr; did you mean actor?"),
        ("actor.temperature=1", "unknown key actor.temperature; known here: "),
        ("rollout.tp=2", "unknown key rollout.tp; use placement.rollout.tp"),
        ("rollout.val_kwargs={top_kk: 1}", "key rollout.val_kwargs.top_kk; did you mean rollout.val_kwargs.top_k?"),
        ("actor_rollout_ref.actor.ppo_epochs=1", "key actor_rollout_ref.actor.ppo_epochs; use actor.ppo_epochs"),
        ("zzz=1", "unknown key zzz; known here: run, model, placement"),
        ("actor.optim.lr=fast", "actor.optim.lr is the text 'fast'; expected a number"),
        ("actor.optim.lr=true", "actor.optim.lr is true; expected a number"),
        ("actor.optim.lr=-1", "actor.optim.lr is -1; expected a number of at least 0.0"),
        ("actor.optim.lr=.nan", "actor.optim.lr is nan; expected a finite number"),
        ("data.train_batch_size=1.5", "data.train_batch_size is 1.5; expected an integer"),
        ("data.train_files=[a, 3]", "data.train_files[1] is 3; expected text"),
        ("data.apply_chat_template_kwargs.x=[]", "is an empty list; expected text or an integer or a number or true"),
        ("actor=3", "actor is 3; expected a mapping"),
        ("rollout.top_k=0", "rollout.top_k is 0; expected -1, or an integer of 1 or more"),
        ("rollout.temperature=0", "rollout.temperature is 0; expected a number above 0.0"),
        ("trainer.test_freq=0", "trainer.test_freq is 0; expected -1, or"),
        ("trainer.profile_steps=[2, 0]", "trainer.profile_steps[1] is 0; expected a number above 0"),
        ("trainer.profile_steps=[3, 3]", "is a list of 2; expected each step once, and 3 is there 2 times"),
        ("actor.loss_agg_mode=mean", "actor.loss_agg_mode is the text 'mean'; expected token-mean, token-sum,"),
        ("actor.optim.betas=[0.9]", "actor.optim.betas is a list of 1; expected 2 entries"),
        ("job.on_event=[./a.sh, '']", "job.on_event[1] is the text ''; expected a command, such as ./notify.sh"),
        ("job.on_event='mail \"x'", "expected a command in the shell's notation (No closing quotation)"),
        ("run.name=../x", "run.name is the text '../x'; expected a folder name"),
    ],
)  # fmt: skip
def test_wrong_values(tmp_path: Path, override: str, line: str) -> None:
    found = refusal(write(tmp_path, ""), override)
    assert found.startswith(f"override {override}: ")
    assert line in found


@pytest.mark.parametrize("override", ["actor.optim.lr", "=3", "actor..lr=3", ""])
def test_overrides_that_are_none(tmp_path: Path, override: str) -> None:
    assert refusal(write(tmp_path, ""), override).startswith(f"found the override {override!r}; expected key=value")


BOMB = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9) if n else 1}]\n" for n in range(13))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("run: {seed: 1}\nactor:\n  optim:\n    lr: x", "job.yaml:4: actor.optim.lr is the text 'x'; expected"),
        ("run: {seed: 1}\nactr: {}", "job.yaml:2: unknown key actr; did you mean actor?"),
        ("run:\n  seed: 1\n  seed: 2", "job.yaml:3: the key seed stands twice, first at job.yaml:2; keep one of them"),
        ("run: [", "job.yaml:1: not valid YAML: "),
        ("run: {}\n\tactor: {}", "job.yaml:2: not valid YAML: "),
        ("\x01", "job.yaml: not YAML: "),
        ("- run", "job.yaml: found a list of 1 at the top; expected sections"),
        ("3: x", "job.yaml:1: found the key 3; keys are text, so quote it"),
        ("a: &a {b: *a}", "job.yaml: nested too deeply"),
        ("run: !!python/object:os.system {}", "job.yaml:1: not valid YAML: could not determine a constructor"),
        ("extends: [a]", "job.yaml:1: extends is a list of 1; expected the path of a YAML file"),
        ("extends: job.yaml", "job.yaml extends job.yaml: a circle"),
        ("extends: jb.yaml", "job.yaml extends jb.yaml: no such config file: jb.yaml; did you mean job.yaml?"),
        ("extends: .", "is a directory; expected a YAML file"),
        ("extends: /dev/zero", "job.yaml extends /dev/zero: /dev/zero is a device; expected a YAML file"),
        ("run: " + "[" * 200_000, "job.yaml: nested too deeply"),
        (BOMB, "job.yaml: its aliases stand for more than 200000 values; write them out"),
    ],
)  # fmt: skip
def test_wrong_files(tmp_path: Path, text: str, line: str) -> None:
    assert line in refusal(write(tmp_path, text))


def test_a_pipe_and_a_large_file_are_not_read_and_a_link_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "is a pipe; expected a YAML file" in refusal(tmp_path / "pipe.yaml")
    assert "extends pipe.yaml: pipe.yaml is a pipe" in refusal(write(tmp_path, "extends: pipe.yaml"))
    assert "is 1048577 bytes; expected a YAML file" in refusal(write(tmp_path, " " * (2**20 + 1)))
    other = write(tmp_path, "run: {seed: 7}", "shared.yaml").rename(tmp_path.parent / f"{tmp_path.name}.yaml")
    (tmp_path / "mine.yaml").symlink_to(other)
    assert load_config(write(tmp_path, "extends: mine.yaml")).run.seed == 7


def test_error_names_the_file_that_said_it(tmp_path: Path) -> None:
    write(tmp_path, "actor:\n  ppo_epochs: x\n  optim: {lr: y}", "base.yaml")
    job = write(tmp_path, "extends: base.yaml\nactor: {optim: {lr: 1}}")
    assert refusal(job).startswith("base.yaml:2: actor.ppo_epochs")
    assert refusal(job, "actor.ppo_epochs=1", "actor.optim.lr=z").startswith("override actor.optim.lr=z: ")


def test_circle_through_two_files(tmp_path: Path) -> None:
    write(tmp_path, "extends: b.yaml", "a.yaml")
    line = refusal(write(tmp_path, "extends: a.yaml", "b.yaml"))
    assert line == "b.yaml extends a.yaml extends b.yaml: a circle; remove one of the extends"


def test_missing_and_binary_files(tmp_path: Path) -> None:
    write(tmp_path, "")
    assert refusal(tmp_path / "jobs.yaml") == "no such config file: jobs.yaml; did you mean job.yaml?"
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x80")
    assert refusal(binary) == "binary.yaml: not YAML: it is not UTF-8 text"


def test_nulls_of_verls_templates_are_the_defaults(tmp_path: Path) -> None:
    """And no other nulls are: they stay an error where null means nothing."""
    text = """
      algorithm: {filter_groups: null, gdpo_reward_keys: null, rollout_correction: null}
      distillation: {distillation_loss: {topk: null}}
    """
    assert load_config(write(tmp_path, text)) == Config()
    filtered = load_config(write(tmp_path, ""), ["algorithm.filter_groups={enable: true, metric: null}"])
    assert filtered.algorithm.filter_groups.metric == "reward"
    assert refusal(write(tmp_path, ""), "algorithm.kl_ctrl=null").endswith("kl_ctrl is null; expected a mapping")
    assert refusal(write(tmp_path, ""), "algorithm.filter_groups.enable=null").endswith("null; expected true or false")


def test_every_field_is_explained() -> None:
    def walk(section: type) -> None:
        for name, field in section.model_fields.items():  # type: ignore[attr-defined]
            assert field.description, f"{section.__name__}.{name}"
            for inner in re.findall(r"\w+Config|ValKwargs|RolePlacement", str(field.annotation)):
                walk(getattr(__import__("hpcrl.config.schema", fromlist=[inner]), inner))

    walk(Config)


def test_one_file_may_stand_for_a_list_and_a_name_for_a_manager(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("data: {train_files: a.parquet}\nreward: {reward_manager: dapo}\n")
    config = load_config(str(file), ["data.val_files=b.parquet"])
    assert (config.data.train_files, config.data.val_files) == (["a.parquet"], ["b.parquet"])
    assert config.reward.reward_manager.name == "dapo"
    assert load_config(str(file), ["job.on_event=./a.sh --to me"]).job.on_event == ["./a.sh --to me"]


def test_loggers_are_named_as_in_verls_templates(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("trainer: {logger: [console, wandb], project_name: verl_examples, experiment_name: gsm8k}\n")
    assert load_config(str(file)).trainer.logger == ["console", "wandb"]
    assert load_config(str(file), ["trainer.logger=mlflow"]).trainer.logger == ["mlflow"]
    found = refusal(file, "trainer.logger=[console, swanlab]")
    assert "trainer.logger[1] is the text 'swanlab'" in found and "wandb or mlflow" in found
