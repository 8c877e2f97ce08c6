"""What `hpcrl generate` and `hpcrl evaluate` share: a job inside a run's folder, and weights that nothing trains."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from hpcrl.checkpoint.store import TRAINER_FILE, is_hugging_face
from hpcrl.config.derive import RoleLayouts, check_budget, check_lengths
from hpcrl.config.loader import dump_config
from hpcrl.config.placement import place
from hpcrl.config.plugins import check_algorithms
from hpcrl.config.roles import ACTOR, GENERATIONS, POLICY, REFIT, REWARD, ROLLOUT, SCORER, RoleSpec
from hpcrl.config.rules import check_rollout
from hpcrl.config.schema import Config
from hpcrl.controller.controller import Controller
from hpcrl.rollout_source.weight_sync import WeightSync
from hpcrl.run.start import Start, find_start
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.job import run_directory
from hpcrl.runtime.world import World
from hpcrl.telemetry.progress import PhaseTimers

log = logging.getLogger(__name__)

INFERENCE_ADVICE = "a smaller rollout.gpu_memory_utilization or rollout.max_num_seqs, a larger placement.rollout.tp"


@dataclass(frozen=True)
class DerivedGenerate(RoleLayouts):
    """Derived values of `hpcrl generate` and `hpcrl evaluate`; weights are read in the actor's layout."""

    needs_reward_model: bool
    max_sequence_length: int
    samples_per_prompt: int

    def rows(self) -> list[tuple[str, object, str]]:
        return [
            ("longest sequence", self.max_sequence_length, "tokens"),
            ("prompt", self.samples_per_prompt, "samples"),
        ]


def check_inference(config: Config, num_ranks: int, samples: int, *, scored: bool) -> DerivedGenerate:
    """Derived values of a job that draws `samples` per prompt; ConfigError for one that cannot run."""
    with_model = scored and config.reward.reward_model.enable
    roles = place(config, [ACTOR, ROLLOUT, *([REWARD] if with_model else [])], num_ranks)
    longest = check_lengths(config)
    check_rollout(config, roles)
    if scored:
        check_algorithms(config, {"reward": config.reward.reward_manager.name})
    if with_model:
        check_budget(f"{REWARD.path}.{REWARD.max_tokens}", REWARD.token_budget(config), longest)
    return DerivedGenerate(num_ranks, roles, with_model, longest, samples)


def inference_roles(derived: DerivedGenerate) -> list[RoleSpec]:
    """Roles of a job that samples without training."""
    reward = [REWARD] if derived.needs_reward_model else []
    return [POLICY, *reward, GENERATIONS, ROLLOUT, SCORER, REFIT]


def inside_run(config: Config, name: str) -> Config:
    """`config` for a job whose logs and exit.json are in <run>/<name>: those of the run itself may belong to a training
    job that is still under way."""
    folder = run_directory(config)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot make the run directory {folder}: {error.strerror}; change run.dir or run.name"
        raise InputError(why) from None
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folder), "name": name})})


def run_folder(config: Config) -> Path:
    """<run>, of a config that `inside_run` gave."""
    return run_directory(config).parent


def write_config(config: Config) -> None:
    """<run>/<name>/config.yaml, as the job was given it."""
    folder = run_folder(config)
    run = config.run.model_copy(update={"dir": str(folder.parent), "name": folder.name})
    text = dump_config(config.model_copy(update={"run": run}))
    (run_directory(config) / "config.yaml").write_text(text, encoding="utf-8")


def find_weights(world: World, config: Config, derived: DerivedGenerate) -> Start:
    """The weights that model.init_from or model.path, and reward.reward_model.init_from name; InputError where there
    are none."""
    reward = config.reward.reward_model.init_from
    start = find_start(world, config, frozen={"reward": reward} if derived.needs_reward_model and reward else None)

    def check() -> None:
        named = start.init_from
        if named is not None and not is_hugging_face(named) and not (named / "actor").is_dir():
            raise InputError(f"model.init_from: {named} holds no policy; name a run of `hpcrl train` or `hpcrl sft`")

    world.run_collectively(check)
    if world.rank == 0:
        _tell(config, start)
    return start


def step_of(start: Start) -> int:
    """The training step of the weights; 0 for random ones and for those of a Hugging Face directory."""
    if start.init_from is None or is_hugging_face(start.init_from):
        return 0
    return int(json.loads((start.init_from / TRAINER_FILE).read_text(encoding="utf-8"))["step"])


def load_engine(controller: Controller, start: Start, step: int, timers: PhaseTimers) -> dict[str, float]:
    """The weights, those of `step`, in the rollout engine and no longer anywhere else. Gives the refit's metrics."""
    actor = controller["actor"]
    if start.init_from is not None:
        actor.load(str(start.init_from), weights_only=True).get()
    if "reward" in start.frozen:
        controller["reward"].load_frozen(str(start.frozen["reward"])).get()
    engine = WeightSync(controller, timers)
    engine.update_to(step)
    actor.release().get()
    return engine.metrics


def close(controller: Controller) -> None:
    """Ends the processes of scorers and tools."""
    controller["scorer"].close().get()
    controller["rollout"].close().get()


def _tell(config: Config, start: Start) -> None:
    """Which weights these are: a template names those that training starts from, which are seldom the ones meant."""
    run = run_folder(config)
    own = run / "checkpoints"
    if start.init_from is None:
        log.warning("model.init_from and model.path are null: these are random weights")
    else:
        log.info("weights of %s", start.init_from)
    if own.is_dir() and (start.init_from is None or own.resolve() not in start.init_from.resolve().parents):
        log.warning("%s has checkpoints of its own; for those, model.init_from=%s", run, run)
