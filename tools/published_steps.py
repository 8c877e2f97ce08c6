"""Predict published steps of other programs, and compare: `python tools/published_steps.py` prints Markdown.

tools/published_steps.yaml has the figures, their sources, and what is assumed where a configuration is not published
in full. Each row becomes a job of hpcrl with the same model, samples, layouts and lengths, whose phases
`hpcrl.forecast.time.step.predict` predicts for a machine of configs/machines. It takes seconds on one core, without
a GPU, MPI or a network.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hpcrl.config.loader import load_config
from hpcrl.config.yaml_core import parse
from hpcrl.forecast.memory.memory import GIB, TrainingPlan, with_keys
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.phases import JobTimes
from hpcrl.forecast.time.step import Prediction, predict
from hpcrl.machine.machine_file import UNKNOWN_SPREAD, Machine, read_machine

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".yaml")
TEMPLATE = ROOT / "configs" / "grpo_8b.yaml"
SHARE = 0.6  # of a GPU's memory that an engine takes with its weights, if a row does not say
HALVINGS = 40  # of the interval in which the mean before the cut is looked for
NEAR = 1e-6


class Figure(NamedTuple):
    """A published figure beside its prediction: seconds, or a share. phase: what it is of, see the rows' `figures`.
    spread: its relative error by the machine file."""

    row: Mapping[str, Any]
    phase: str
    published: float
    predicted: float
    spread: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.published

    @property
    def band(self) -> tuple[float, float]:
        return self.predicted / (1 + self.spread), self.predicted * (1 + self.spread)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", action="store_true", help="all predicted phases of each row, instead of the table")
    tree = read()
    if parser.parse_args().phases:
        for row in tree["rows"]:
            found = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in predicted(row, tree).phases.items())
            print(f"{label(row, tree)}: {found}")
        return
    figures = [figure for row in tree["rows"] for figure in figures_of(row, tree)]
    print("\n".join([*table(figures, tree), "", *sources(tree), "", *summary(figures)]))


def read() -> dict[str, Any]:
    """The figures and what they are from."""
    found: dict[str, Any] = parse(TABLE.read_text(encoding="utf-8"), str(TABLE)).plain()
    return found


def predicted(row: Mapping[str, Any], tree: Mapping[str, Any], engine: Mapping[str, int] | None = None) -> Prediction:
    job = job_of(row, tree, engine)
    return predict(job, read_machine(row["machine"]), lengths_of(row, tree["sigma"]))


def job_of(row: Mapping[str, Any], tree: Mapping[str, Any], engine: Mapping[str, int] | None = None) -> TrainingPlan:
    """The row as a job.

    Args:
        engine: another layout of the engine.
    """
    machine = read_machine(row["machine"])
    job = TrainingPlan(with_keys(load_config(TEMPLATE), _keys(row, tree, machine, engine or row["engine"])))
    if (share := row.get("memory", SHARE)) is None:
        return job
    # vLLM's share is of the whole memory, hpcrl's of what the engine's weights leave
    weights = JobTimes(job, machine, Lengths.fixed(1, 1)).engine_bytes / job.layouts["rollout"].tp
    assert machine.device.memory_gib is not None
    cache_gib = max(1.0, share * machine.device.memory_gib - weights / GIB)
    return TrainingPlan(with_keys(job.config, {"rollout.kv_cache_gib": cache_gib}))


def _keys(
    row: Mapping[str, Any], tree: Mapping[str, Any], machine: Machine, engine: Mapping[str, int]
) -> dict[str, object]:
    """What the row has in place of the template's values, by dotted key."""
    ranks, samples, lengths, micro = row.get("ranks", 8), row["samples"], row["lengths"], row["micro"]
    apart = row.get("apart")
    model = {key: value for key, value in tree["models"][row["model"]].items() if key != "name"}
    model["num_query_groups"] = row.get("kv_heads", model["num_query_groups"])
    keys: dict[str, object] = {f"model.{key}": value for key, value in model.items()}
    keys |= {
        "model.tokenizer": None,
        "model.init_from": None,
        "model.rope_scaling": None,
        "model.recompute.granularity": row.get("recompute"),
        "data.train_batch_size": samples["prompts"],
        "data.max_prompt_length": lengths["prompt"],
        "data.max_response_length": lengths["longest"] - lengths["prompt"],
        "rollout.engine": "native",
        "rollout.n": samples["n"],
        "rollout.max_num_seqs": 256,
        "actor.ppo_mini_batch_size": samples["mini_batch"],
        "actor.ppo_max_token_len_per_gpu": micro["update"],
        "actor.separate_old_log_prob": True,
        "ref.log_prob_max_token_len_per_gpu": micro["ref"],
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.save_rollouts": False,
        "job.nodes": row["nodes"],
        "job.ntasks_per_node": ranks,
        "job.gpus_per_node": ranks,
        "job.gpu_memory_gib": machine.device.memory_gib,
    }
    trains, generates = "all", "all"
    if row.get("algorithm") == "ppo":
        keys |= {
            "algorithm.adv_estimator": "gae",
            "reward.reward_model.enable": True,
            "reward.reward_model.init_from": "models/rm",
        }
    if apart is None:
        for key in ("actor.param_offload", "actor.grad_offload", "actor.optimizer_offload", "ref.param_offload"):
            keys[key] = row.get("offloads", True)
    else:
        # hpcrl's loop has a rank of its own in this mode: a node more, of which nothing else is used
        first, last = (row["nodes"] + 1 - apart["nodes"]) * ranks, (row["nodes"] + 1) * ranks
        trains, generates = "trainer", "engines"
        keys |= {
            "placement.pools": {trains: f"{ranks}-{first - 1}", generates: f"{first}-{last - 1}"},
            "async_training.mode": "bounded_staleness",
            "async_training.staleness_threshold": apart["age"],
            "job.nodes": row["nodes"] + 1,
        }
    for role in ("actor", "critic", "ref", "reward"):
        keys |= _placed(role, trains, row["trained"])
    return keys | _placed("rollout", generates, engine)


def _placed(role: str, pool: str, layout: Mapping[str, int]) -> dict[str, object]:
    sizes = {axis: layout.get(axis, 1) for axis in ("tp", "pp", "cp", "ep")}
    return {f"placement.{role}.{key}": value for key, value in {"pool": pool, **sizes}.items()}


def lengths_of(row: Mapping[str, Any], sigma: float) -> Lengths:
    """Log-normal responses whose mean is the row's after those above the longest one were cut."""
    its = row["lengths"]
    prompt, response, longest = its["prompt"], its["response"], its["longest"] - its["prompt"]
    if response >= longest:
        return Lengths.fixed(prompt, longest)
    low, high = float(response), 100.0 * longest
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        lengths = Lengths.log_normal(prompt, middle, sigma, longest)
        low, high = (middle, high) if lengths.response < response else (low, middle)
        if high / low < 1 + NEAR:
            break
    return lengths


def figures_of(row: Mapping[str, Any], tree: Mapping[str, Any]) -> Iterator[Figure]:
    machine, prediction = read_machine(row["machine"]), predicted(row, tree)
    beside = predicted(row, tree, row["beside"]) if "beside" in row else None
    for phase, published in row["figures"].items():
        if phase == "step":
            yield Figure(row, phase, published, prediction.seconds, prediction.spread(machine))
            continue
        names = phase.split("+")
        spread = max(machine.spread.get(name, UNKNOWN_SPREAD) for name in names)
        seconds, whole = (sum(it.phases[name] for name in names) for it in (prediction, beside or prediction))
        yield Figure(row, phase, published, seconds / whole if beside else seconds, spread)


def table(figures: Sequence[Figure], tree: Mapping[str, Any]) -> Iterator[str]:
    """Markdown, a line for each figure."""
    yield "| source | model | machine | what | published | predicted | ratio | error band | notes |"
    yield "|---|---|---|---|---:|---:|---:|---|---|"
    before = None
    for it in figures:
        row, (low, high) = it.row, it.band
        what, unit = it.phase.replace("+", ", "), "s"
        if "beside" in row:
            what, unit = f"{what}, tp {row['engine']['tp']} over tp {row['beside']['tp']}", ""
        head = f"{label(row, tree)} | {what}" if row is not before else f" | | | {what}"
        note = row["note"] if row is not before else ""
        cells = f"{it.published:g} {unit}", f"{it.predicted:.3g} {unit}", f"{it.ratio:.2f}", f"{low:.3g} to {high:.3g}"
        yield f"| {head} | {' | '.join(cell.strip() for cell in cells)} | {note} |"
        before = row


def label(row: Mapping[str, Any], tree: Mapping[str, Any]) -> str:
    """Its source, model and machine."""
    model = tree["models"][row["model"]]["name"] + (f", {row['apart']['age']} off" if "apart" in row else "")
    gpus = row["nodes"] * row.get("ranks", 8)
    return f"{tree['sources'][row['source']]['label']} | {model} | {gpus} of `{row['machine']}`"


def sources(tree: Mapping[str, Any]) -> Iterator[str]:
    for it in tree["sources"].values():
        yield f"- {it['label']}, {it['date']}: [{it['what']}]({it['address']}); {it['configuration']}"


def summary(figures: Sequence[Figure]) -> Iterator[str]:
    """By what the figures are of, of the logarithms of predicted over published: the median, the median of the absolute
    values, that of the distances from the median, the last two as a relative error; how many are inside the band."""
    yield "| of | figures | median ratio | median abs ln ratio | as an error | about the median | inside the band |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    grouped = defaultdict(list)
    for it in figures:
        grouped["gen, of two layouts" if "beside" in it.row else it.phase.replace("+", ", ")].append(it)
    for phase, its in [*grouped.items(), ("all", list(figures))]:
        logs = [math.log(it.ratio) for it in its]
        middle, typical = median(logs), median(map(abs, logs))
        about = math.expm1(median(abs(log - middle) for log in logs))
        inside = sum(it.band[0] <= it.published <= it.band[1] for it in its)
        yield (
            f"| {phase} | {len(its)} | {math.exp(middle):.2f} | {typical:.2f} | {math.expm1(typical):.0%} | "
            f"{about:.0%} | {inside} of {len(its)} |"
        )


if __name__ == "__main__":
    main()
