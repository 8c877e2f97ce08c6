"""Parameters: each is a key of the schema once, and those of a plugin are checked in the same way."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.algorithms.parameters import param, parameters_of
from hpcrl.config import plugins
from hpcrl.config.derive import check
from hpcrl.config.loader import dump_config, load_config
from hpcrl.config.problems import keys_of
from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.rewards.manager import ScoreRequest
from hpcrl.runtime import exits

PLUGIN = """
from dataclasses import dataclass
from typing import Literal

from hpcrl.algorithms.aggregation import TokenLosses
from hpcrl.algorithms.advantages import register_adv_est
from hpcrl.algorithms.optimizers.adamw import Betas
from hpcrl.algorithms.optimizers.optimizer import Optimizer, register_optimizer
from hpcrl.algorithms.parameters import param
from hpcrl.algorithms.policy_losses import Clip, register_policy_loss
from hpcrl.rewards.manager import RewardManager, register_reward_manager


@dataclass(frozen=True)
class MyLoss(Clip):
    sharpness: float = param(2.0, gt=0, help="exponent of the ratio")
    side: Literal["low", "high"] = param("low", help="which side is clipped")


@register_policy_loss("my_loss", params=MyLoss)
def my_loss(log_prob, old_log_prob, advantages, response_mask, params):
    return TokenLosses(-advantages * ((log_prob - old_log_prob) * params.sharpness).exp(), {})


@dataclass(frozen=True)
class MyEstimator:
    scale: float = param(1.0, ge=0, help="of the advantages")


@register_adv_est("my_estimator", params=MyEstimator)
def my_estimator(token_level_rewards, response_mask, *, params):
    return token_level_rewards * params.scale, token_level_rewards


@dataclass(frozen=True)
class Bonus:
    bonus: float = param(0.0, help="added to every score")


@register_reward_manager("my_manager", params=Bonus)
class MyManager(RewardManager):
    def shape(self, result, request):
        result["score"] += self.params.bonus


@dataclass(frozen=True)
class Rate(Betas):
    rate: float = param(0.5, gt=0, help="of the steps")


@register_optimizer("my_optimizer", params=Rate)
class MyOptimizer(Optimizer):
    def state(self, *, is_matrix):
        return {"buffer": "bfloat16"}
"""
JOB = "data: {train_files: [train.parquet], train_batch_size: 256}\n"


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A job with the plugin, which other tests of this process do not see."""
    for family in plugins.FAMILIES.values():
        monkeypatch.setattr(family.registry, "_entries", dict(family.registry.entries()))
    (tmp_path / "my_loss.py").write_text(PLUGIN)
    path = tmp_path / "job.yaml"
    path.write_text(f"{JOB}run: {{plugins: [{tmp_path / 'my_loss.py'}]}}\n")
    yield path
    for name in [name for name in sys.modules if name.startswith("hpcrl_user_")]:
        del sys.modules[name]


def built_in() -> list[tuple[str, str]]:
    return [(path, name) for path, family in plugins.FAMILIES.items() for name in family.registry.names()]


@pytest.mark.parametrize(("path", "name"), built_in())
def test_every_parameter_is_a_key_of_the_schema_once(path: str, name: str) -> None:
    family = plugins.FAMILIES[path]
    keys = {".".join(key) for key in keys_of()}
    for parameter in parameters_of(family.registry.get(name).params):
        assert parameter.help, parameter
        found = [section for section in family.sections if f"{section}.{parameter.name}" in keys]
        assert len(found) == 1, (parameter, found)


@pytest.mark.parametrize(
    ("path", "name", "key", "value", "field"),
    [
        ("actor.optim", "muon", "actor.optim.muon_momentum", 0.5, "muon_momentum"),
        ("actor.optim", "muon", "actor.optim.betas", [0.5, 0.6], "betas"),
        ("actor.policy_loss", "dppo_tv", "actor.clip_ratio_c", 7.0, "clip_ratio_c"),
        ("actor.policy_loss", "vanilla", "actor.clip_ratio", 0.3, "clip_ratio_high"),
        ("actor.policy_loss", "clip_cov", "actor.policy_loss.clip_cov_lb", 0.5, "clip_cov_lb"),
        ("actor.policy_loss", "bypass_mode", "algorithm.rollout_correction.loss_type", "reinforce", "loss_type"),
        ("algorithm", "gae", "algorithm.lam", 0.5, "lam"),
        ("algorithm", "gdpo", "algorithm.gdpo_reward_keys", ["a"], "gdpo_reward_keys"),
        ("distillation.distillation_loss", "k3", "distillation.distillation_loss.clip_ratio", 0.1, "clip_ratio_low"),
    ],
)
def test_an_algorithm_gets_the_value_of_its_key(path: str, name: str, key: str, value: Any, field: str) -> None:
    found = plugins.parameters(load_config(None, [f"{key}={value}"]), path, name)
    assert getattr(found, field) == value


def test_a_plugins_parameters_come_from_its_mapping_or_from_what_it_inherits(template: Path) -> None:
    overrides = ["actor.policy_loss.my_loss.sharpness=3", "actor.policy_loss.loss_mode=my_loss", "actor.clip_ratio=0.4"]
    config = load_config(template, [*overrides, "algorithm.my_estimator.scale=2"])
    assert check(config, 2).loss_mode == "my_loss"
    found = plugins.parameters(config, "actor.policy_loss", "my_loss")
    assert (found.sharpness, found.side, found.clip_ratio_low) == (3.0, "low", 0.4)
    assert plugins.parameters(config, "algorithm", "my_estimator").scale == 2.0
    again = template.with_name("again.yaml")
    again.write_text(dump_config(config))
    assert load_config(again) == config


def test_a_plugins_optimizer_is_that_of_any_section(template: Path) -> None:
    overrides = ["critic.optim.optimizer=my_optimizer", "critic.optim.my_optimizer.rate=2", "critic.optim.eps=0.1"]
    config = load_config(template, overrides)
    check(config, 2)
    chosen = config.critic.optim.chosen()
    assert (chosen.params.rate, chosen.params.eps, chosen.state(is_matrix=True)) == (2, 0.1, {"buffer": "bfloat16"})
    assert type(config.actor.optim.chosen()).__name__ == "Adam"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["critic.optim.optimizer=muonn"],
            "critic.optim: unknown optimizer 'muonn'; did you mean 'muon'? there are adam",
        ),
        (
            ["actor.optim.my_optimizer.rat=1"],
            "unknown key actor.optim.my_optimizer.rat; did you mean actor.optim.my_optimizer.rate?",
        ),
        (
            ["actor.optim.optimizer=muon", "model.lora_rank=8"],
            "actor.optim.optimizer=muon with model.lora_rank=8: Muon of",
        ),
    ],
)
def test_an_optimizer_that_does_not_fit_gets_one_line(template: Path, overrides: list[str], line: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(load_config(template, overrides), 2)
    assert exits.is_user_error(caught.value)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_a_reward_manager_of_a_plugin_gets_its_parameters(template: Path) -> None:
    overrides = ["reward.reward_manager=my_manager", "reward.my_manager.bonus=0.5"]
    config = load_config(template, overrides)
    check(config, 2)
    chosen = plugins.FAMILIES["reward"].registry.get("my_manager")
    manager = chosen.function(config.reward, plugins.parameters(config, "reward", "my_manager"))
    try:
        truth = {"numbers": [1, 2, 3, 4], "target": 10}
        assert manager.score([ScoreRequest("countdown", "<a>1+2+3+4</a>", truth)])[0].tolist() == [1.5]
    finally:
        manager.close()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "actor.policy_loss.my_loss.sharpnes=3",
            "unknown key actor.policy_loss.my_loss.sharpnes; did you mean actor.policy_loss.my_loss.sharpness?",
        ),
        (
            "actor.policy_loss.my_los.sharpness=3",
            "unknown key actor.policy_loss.my_los; did you mean actor.policy_loss",
        ),
        (
            "actor.policy_loss.my_loss.sharpness=0",
            "actor.policy_loss.my_loss.sharpness is 0; expected a number above 0",
        ),
        (
            "actor.policy_loss.my_loss.side=left",
            "actor.policy_loss.my_loss.side is the text 'left'; expected low or high",
        ),
        ("algorithm.my_estimator.scale=true", "algorithm.my_estimator.scale is true; expected a number"),
        ("reward.my_manager.bonu=1", "unknown key reward.my_manager.bonu; did you mean reward.my_manager.bonus?"),
        ("reward.reward_manager.name=my_managr", "unknown reward.reward_manager.name 'my_managr'; did you mean"),
        ("actor.policy_loss.vanilla.clip_ratio=1", "unknown key actor.policy_loss.vanilla; known here: "),
    ],
)
def test_a_wrong_parameter_of_a_plugin_gets_one_line(template: Path, override: str, line: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(load_config(template, [override]), 2)
    assert exits.is_user_error(caught.value)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


SAMPLER = """
from dataclasses import dataclass

import numpy as np

from hpcrl.algorithms.parameters import param
from hpcrl.data.curriculum import AbstractCurriculumSampler


class Strided(AbstractCurriculumSampler):
    @dataclass(frozen=True)
    class Parameters:
        stride: int = param(1, gt=0, help="rows from one prompt to the next")

    def choose(self, n):
        return np.arange(n) * self.params.stride
"""


def test_a_sampler_has_parameters(tmp_path: Path) -> None:
    from hpcrl.data.curriculum import load_class

    file = tmp_path / "strided.py"
    file.write_text(SAMPLER)
    (tmp_path / "job.yaml").write_text(JOB)
    chosen = [f"data.sampler.class_path={file}", "data.sampler.class_name=Strided"]
    config = load_config(tmp_path / "job.yaml", [*chosen, "data.sampler.Strided.stride=3"])
    check(config, 2)
    sampler = load_class(str(file), "Strided")([], config.data, 0)  # type: ignore[arg-type]
    assert sampler.choose(3).tolist() == [0, 3, 6]
    for override, line in (
        ("Strided.strid=3", "unknown key data.sampler.Strided.strid; did you mean data.sampler.Strided.stride?"),
        ("Strided.stride=0", "data.sampler.Strided.stride is 0; expected a number above 0"),
        ("Stride.stride=2", "unknown key data.sampler.Stride; did you mean data.sampler.Strided?"),
    ):
        with pytest.raises(ConfigError) as caught:
            check(load_config(tmp_path / "job.yaml", [*chosen, f"data.sampler.{override}"]), 2)
        assert str(caught.value) == line
    with pytest.raises(ConfigError, match="unknown key data.sampler.Strided; "):
        load_config(tmp_path / "job.yaml", ["data.sampler.Strided.stride=3"])


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("actor.policy_loss.my_loss.sharpness=3", "unknown key actor.policy_loss.my_loss; "),
        (
            "actor.policy_loss.los_mode=gspo",
            "unknown key actor.policy_loss.los_mode; did you mean actor.policy_loss",
        ),
        ("algorithm.gama=1", "unknown key algorithm.gama; did you mean algorithm.gamma?"),
    ],
)
def test_without_plugins_every_other_key_is_unknown_when_the_file_is_read(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert line in str(caught.value) and str(caught.value).startswith(f"override {override}: ")


def test_without_torch_the_parameters_of_a_plugin_that_needs_it_are_not_checked(
    template: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    file = template.with_name("my_loss.py")
    file.write_text("import torch\n" + PLUGIN)
    overrides = ["actor.policy_loss.loss_mode=my_loss", "actor.policy_loss.my_loss.sharpnes=3"]
    assert check(load_config(template, overrides), 2).loss_mode == "my_loss"
    assert [record.message for record in caplog.records] == [
        f"run.plugins: {file} needs torch, which is not installed here: its parameters are unchecked"
    ]
    file.write_text(PLUGIN)  # without the import it is checked here too
    with pytest.raises(ConfigError, match="unknown key actor.policy_loss.my_loss.sharpnes"):
        check(load_config(template, overrides), 2)


def test_a_declaration_is_a_frozen_dataclass_with_defaults() -> None:
    from dataclasses import dataclass

    from hpcrl.algorithms.policy_losses import register_policy_loss

    @dataclass(frozen=True)
    class NoDefault:
        sharpness: float

    with pytest.raises(TypeError, match="NoDefault.sharpness has no default"):
        register_policy_loss("no_default", params=NoDefault)(lambda *_: None)
    with pytest.raises(TypeError, match="expected a class with @dataclass"):
        register_policy_loss("no_dataclass", params=Config)(lambda *_: None)
    with pytest.raises(TypeError, match="expected gt, ge, lt or le"):
        param(1.0, help="", above=0)
