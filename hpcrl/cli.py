"""`hpcrl COMMAND ...`: subcommands, the one line that a bad command line gets, and nothing heavy until it is needed."""

from __future__ import annotations

import difflib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from hpcrl.runtime import exits
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from hpcrl.config.derive import Derived, DerivedGenerate, DerivedModel, DerivedRm, DerivedSft
    from hpcrl.config.schema import Config
    from hpcrl.runtime.world import World

Values = TypeVar("Values", "Derived", "DerivedGenerate", "DerivedModel", "DerivedRm", "DerivedSft")

HELP = """\
usage: hpcrl COMMAND ...

  train CONFIG [key=value ...]      PPO, GRPO and relatives
  sft CONFIG [key=value ...]        supervised warm start
  rm CONFIG [key=value ...]         reward model, from preferences
  generate CONFIG [key=value ...]   samples of data.val_files' prompts, into a JSONL file
  evaluate CONFIG [key=value ...]   the validation of a training run, of the weights in model.init_from
  score MODEL --tokens IN.jsonl --out OUT.jsonl [key=value ...]
                                    log-probs of token sequences; MODEL is a Hugging Face directory or a run
  convert SOURCE TARGET [key=value ...]
                                    a Hugging Face directory into a run, or a run's policy into such a directory
  plan CONFIG [key=value ...]       whether a training job fits its GPUs, and what it costs; needs neither MPI nor GPU
  plan --refit CONFIG [key=value ...]
                                    bytes and memory of a refit
  check [--trtllm]                  what is installed here, and what is wrong with it
  check --job [CONFIG [key=value ...]]
                                    the nodes of an allocation; on all ranks of the job
  submit [COMMAND:]CONFIG ... [--dry-run]
                                    a Slurm job, checked and with all it reads; submit --help

CONFIG is a YAML file; key=value overrides one of its keys, as in actor.optim.lr=2e-6.
Run it on several ranks with mpiexec -n N python -m hpcrl ..., or with srun."""

JOBS = ("train", "sft", "rm", "generate", "evaluate")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        _refuse(f"a command is missing; expected one of {', '.join(COMMANDS)}")
    name, *rest = arguments
    if name in ("-h", "--help", "help") or (name in JOBS and rest[:1] in (["-h"], ["--help"])):
        print(HELP)
        sys.exit(0)
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"expected one of {', '.join(COMMANDS)}"
        _refuse(f"unknown command {name!r}; {hint}")
    COMMANDS[name](rest)


def _run_job(
    name: str,
    job: Callable[[World, Config], int],
    arguments: list[str],
    *,
    inside_run: bool = False,
    resumable: bool = False,
) -> NoReturn:
    """Run `job` on all ranks with the config that rank 0 reads. `inside_run`: a job in a folder of its own in <run>.
    `resumable`: on a signal it saves and leaves with the code that asks for another slice."""
    usage = f"hpcrl {name} CONFIG [key=value ...]"
    option = next((argument for argument in arguments if argument.startswith("-")), None)
    if option is not None:
        _refuse(f"unknown option {option!r}; {name} has none: {usage}")
    if not arguments:
        _refuse(f"{name} needs a YAML file: {usage}")
    path, *overrides = arguments
    if "=" in path and not Path(path).exists():
        _refuse(f"found the override {path!r} in place of a YAML file: {usage}")

    from hpcrl.plan import dry_run

    if dry_run.requested(os.environ):
        dry_run.main(name, path, overrides)
    from hpcrl.runtime.job import run_spmd

    run_spmd(
        partial(_load, path, overrides, inside=name if inside_run else None),
        job,
        handles_signals=resumable,
        memory_advice=partial(_memory_advice, name),
    )


def _load(path: str, overrides: list[str], inside: str | None) -> Config:
    from hpcrl.config.loader import load_config
    from hpcrl.trainer.prepare import with_presets

    config = with_presets(load_config(path, overrides))
    if inside is None:
        return config
    from hpcrl.trainer.inference import inside_run

    return inside_run(config, inside)


def _memory_advice(name: str, config: Config, num_ranks: int, rank: int, role: str | None, phase: str | None) -> str:
    from hpcrl.plan.out_of_memory import advice

    return advice(name, config, num_ranks, rank, role, phase)


def _train(world: World, config: Config) -> int:
    from hpcrl.config.algorithm_rules import without_effect
    from hpcrl.trainer import ppo, prepare

    derived = _print_derived(world, lambda: prepare.derive(config, world.size))
    if world.rank == 0:
        for line in without_effect(config):
            logging.getLogger("hpcrl").warning("%s", line)

    return ppo.run(world, config, derived)


def _sft(world: World, config: Config) -> int:
    from hpcrl.config import derive

    derived = _print_derived(world, lambda: derive.check_sft(config, world.size))
    from hpcrl.trainer import sft

    return sft.run(world, config, derived)


def _rm(world: World, config: Config) -> int:
    from hpcrl.config import derive

    derived = _print_derived(world, lambda: derive.check_rm(config, world.size))
    from hpcrl.trainer import rm

    return rm.run(world, config, derived)


def _generate(world: World, config: Config) -> int:
    from hpcrl.config import derive

    derived = _print_derived(world, lambda: derive.check_generate(config, world.size))
    from hpcrl.trainer import generate

    return generate.run(world, config, derived)


def _evaluate(world: World, config: Config) -> int:
    from hpcrl.config import derive

    derived = _print_derived(world, lambda: derive.check_evaluate(config, world.size))
    from hpcrl.trainer import evaluate

    return evaluate.run(world, config, derived)


def _score(arguments: list[str]) -> NoReturn:
    usage = "hpcrl score MODEL --tokens IN.jsonl --out OUT.jsonl [key=value ...]"
    paths, rest = {"--tokens": "score.tokens_path", "--out": "score.output_path"}, list(arguments)
    named: dict[str, str] = {}
    words: list[str] = []
    while rest:
        option, equals, value = (word := rest.pop(0)).partition("=")
        if option in paths:
            if not equals and not rest:
                _refuse(f"{option} has no value; {usage}")
            named[option] = value if equals else rest.pop(0)
        elif word.startswith("-"):
            _refuse(f"unknown option {word!r}; {usage}")
        else:
            words.append(word)
    if not words or "=" in words[0] or len(named) < len(paths):
        _refuse(f"score needs a model, --tokens and --out; {usage}")
    model, *overrides = words
    from hpcrl.runtime.job import run_spmd

    def load() -> Config:
        from hpcrl.config.loader import quoted
        from hpcrl.trainer.of_weights import config_of

        files = [f"{paths[option]}={quoted(value)}" for option, value in named.items()]
        return config_of(model, f"{named['--out']}.job", [*files, *overrides])

    def job(world: World, config: Config) -> int:
        from hpcrl.config import derive

        derived = _print_derived(world, lambda: derive.check_model(config, world.size))
        from hpcrl.trainer import score

        return score.run(world, config, derived)

    run_spmd(load, job)


def _convert(arguments: list[str]) -> NoReturn:
    usage = "hpcrl convert SOURCE TARGET [key=value ...]"
    if len(arguments) < 2 or any("=" in word or word.startswith("-") for word in arguments[:2]):
        _refuse(f"convert needs a source and a target; {usage}")
    source, target, *overrides = arguments
    from hpcrl.runtime.job import run_spmd

    def load() -> Config:
        from hpcrl.trainer.of_weights import config_of, folder_of

        return config_of(source, folder_of(source, target), overrides)

    def job(world: World, config: Config) -> int:
        from hpcrl.config import derive

        derived = _print_derived(world, lambda: derive.check_model(config, world.size))
        from hpcrl.trainer import convert

        return convert.run(world, config, derived, target)

    run_spmd(load, job)


def _print_derived(world: World, compute: Callable[[], Values]) -> Values:
    """Refuse an impossible job before anything is built; every rank computes the same, so all refuse together."""
    from hpcrl.config.derive import describe

    try:
        derived = compute()
    except ValueError as error:
        if exits.is_user_error(error):
            raise InputError(str(error), everywhere=True) from None
        raise
    if world.rank == 0:
        logging.getLogger("hpcrl").info("%s", describe(derived))
    return derived


def _plan(arguments: list[str]) -> NoReturn:
    from hpcrl.plan import command

    command.main(arguments)


def _check(arguments: list[str]) -> NoReturn:
    if arguments[:1] == ["--job"]:
        _check_job(arguments[1:])
    from hpcrl.rollout.tensorrt_llm.check import findings
    from hpcrl.runtime import check

    check.main(arguments, findings)


def _check_job(arguments: list[str]) -> NoReturn:
    from hpcrl.checkpoint.manifest import verify
    from hpcrl.runtime import check_job

    def folder() -> str:
        if not arguments:
            return ""
        from hpcrl.config.loader import load_config

        run = load_config(arguments[0], arguments[1:]).run
        return str(Path(run.dir, run.name))

    check_job.main(folder, partial(verify, with_links=True))


def _submit(arguments: list[str]) -> NoReturn:
    from hpcrl.slurm import submit

    submit.main(arguments, _check_plan)


def _check_plan(command: str, config: Config, ranks: int) -> None:
    """What the job itself checks first; without torch, as on a login node, what needs torch is left to the job."""
    from hpcrl.config.derive import CHECKS

    if command == "train" and find_spec("torch") and find_spec("megatron"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # megatron's, of what a login node lacks
            from hpcrl.trainer import prepare

            prepare.derive(prepare.with_presets(config), ranks)
    else:
        CHECKS[command](config, ranks)


def _refuse(line: str) -> NoReturn:
    exits.exit_with_error(InputError(line))


COMMANDS: dict[str, Callable[[list[str]], NoReturn]] = {
    "train": partial(_run_job, "train", _train, resumable=True),
    "sft": partial(_run_job, "sft", _sft, resumable=True),
    "rm": partial(_run_job, "rm", _rm, resumable=True),
    "generate": partial(_run_job, "generate", _generate, inside_run=True),
    "evaluate": partial(_run_job, "evaluate", _evaluate, inside_run=True),
    "score": _score,
    "convert": _convert,
    "plan": _plan,
    "check": _check,
    "submit": _submit,
}
