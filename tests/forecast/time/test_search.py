"""The search finds what computing every candidate finds; what it returns fits, and can be written and read."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrl.config.loader import load_config
from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.forecast.memory.fixes import tightest
from hpcrl.forecast.memory.memory import TrainingPlan, with_keys
from hpcrl.forecast.time.candidates import Candidate
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.search import Result, Search
from hpcrl.forecast.time.search_command import Asked, describe, differences, nodes_of, write
from hpcrl.forecast.time.space import Knobs, Space
from hpcrl.forecast.time.step import predict
from hpcrl.jobs.sft import Sft
from hpcrl.jobs.train import Train
from hpcrl.runtime.exits import InputError, is_user_error
from tests.forecast.time.machines import gpu

ROOT = Path(__file__).parents[3]
MACHINE = gpu()
LENGTHS = Lengths.fixed(256, 768)
SMALL = {  # 1.3 B parameters on GPUs with 24 GiB: memory excludes some
    "model.num_layers": 8,
    "model.hidden_size": 2048,
    "model.ffn_hidden_size": 8192,
    "model.num_attention_heads": 16,
    "model.num_query_groups": 8,
    "model.vocab_size": 32000,
    "model.max_position_embeddings": 4096,
    "model.dtype": "bfloat16",
    "data.max_prompt_length": 256,
    "data.max_response_length": 768,
    "data.train_batch_size": 64,
    "actor.ppo_mini_batch_size": 32,
    "actor.ppo_max_token_len_per_gpu": 4096,
    "rollout.engine": "native",
    "rollout.max_num_seqs": 64,
    "job.gpus_per_node": 8,
    "job.gpu_memory_gib": 24.0,
    "job.nodes": 1,
}
EXPERTS = {
    "model.family": "mixtral",
    "model.rope_scaling": None,
    "model.num_experts": 4,
    "model.moe_topk": 2,
    "model.moe_ffn_hidden_size": 8192,
}


def small(ranks: int, **changes: object) -> Config:
    config = load_config(ROOT / "configs" / "grpo_8b.yaml")
    return with_keys(config, {**SMALL, "job.ntasks_per_node": ranks, **changes})


def brute_force(space: Space) -> dict[tuple[object, ...], float]:
    """Seconds of the fastest candidate of each placement and layout of actor and engine."""
    found: dict[tuple[object, ...], float] = {}
    search = Search(space, MACHINE, LENGTHS)
    for keys in space.jobs():
        job = Candidate(with_keys(space.template, keys), (), search._memo)
        try:
            row = tightest(job.rows())
        except Exception as error:
            if not is_user_error(error):
                raise
            continue
        if space.capacity is None or row.total <= space.capacity:
            layout = tuple((key, str(value)) for key, value in keys.items() if key.startswith(LAYOUT))
            seconds = predict(job, MACHINE, LENGTHS).seconds
            found[layout] = min(seconds, found.get(layout, seconds))
    return found


LAYOUT = ("placement.pools", "placement.actor", "placement.rollout", "async_training")
MANY_SEQUENCES = {"data.train_batch_size": 256, "rollout.max_num_seqs": 512}  # which the KV cache limits
FIXED = {"micro_batches": False, "offload": False, "kv_cache": False, "recompute": False}
CASES = [
    (4, {}, Knobs(("tp", "pp"), **{**FIXED, "offload": True}, pools=False)),
    (4, {}, Knobs(("tp",), **{**FIXED, "recompute": True}, pools=False)),
    (4, {}, Knobs(("tp",), **FIXED, modes=("one_step_off", "sync"))),
    (4, EXPERTS, Knobs(("ep", "etp"), **FIXED)),
    (8, {}, Knobs(("tp",), **FIXED)),
    (2, MANY_SEQUENCES, Knobs(("tp",), **{**FIXED, "kv_cache": True}, pools=False)),
    (4, {"job.gpus_per_node": 0}, Knobs(("tp", "pp"), **FIXED)),  # memory has no limit
]


@pytest.mark.parametrize(("ranks", "changes", "knobs"), CASES)
def test_search_finds_what_brute_force_finds(ranks: int, changes: dict[str, object], knobs: Knobs) -> None:
    space = Space(small(ranks, **changes), 1, knobs)
    expected = sorted(brute_force(space).values())[:5]
    found = Search(space, MACHINE, LENGTHS, most=float("inf")).run()
    assert expected
    assert [it.prediction.seconds for it in found.results] == pytest.approx(expected, rel=1e-9)
    assert found.counts.evaluated + found.counts.by_memory <= found.counts.all


def test_a_large_space_is_searched_to_its_end() -> None:
    """A candidate's bound is its step, so that few more are computed than are found."""
    found = Search(Space(load_config(ROOT / "configs" / "grpo_8b.yaml"), 4), MACHINE, LENGTHS).run()
    assert len(found.results) == 5 and found.counts.all > 10_000
    assert found.counts.evaluated <= 10
    assert found.bound >= found.results[-1].prediction.seconds * (1 - 1e-9)


def test_results_fit_and_are_valid() -> None:
    config = small(8)
    found, again = (Search(Space(config, 2), MACHINE, LENGTHS, most=10).run() for _ in range(2))
    assert found.results and [it.keys for it in found.results] == [it.keys for it in again.results]
    for result in found.results:
        job = TrainingPlan(with_keys(config, result.keys))
        row = tightest(job.rows())
        assert row.total <= job.capacity
        assert result.row.total == pytest.approx(row.total, rel=0.02)
        assert predict(job, MACHINE, LENGTHS).seconds == pytest.approx(result.prediction.seconds, rel=1e-9)


def test_the_file_that_is_written_is_read_back(tmp_path: Path) -> None:
    template, out = ROOT / "configs" / "grpo_8b.yaml", tmp_path / "best.yaml"
    base = Train.read_config(str(template))
    pools = {"placement.pools": {"all": "*", "generate": "0-7"}, "placement.rollout.pool": "generate"}
    changed = with_keys(base, {**pools, "placement.actor.tp": 2, "job.nodes": 4, "model.recompute.granularity": "full"})
    write(out, str(template), base, changed)
    assert Train.read_config(str(out)) == changed
    assert differences(base.model_dump(), base.model_dump()) == {}


@pytest.mark.parametrize("text", ["8..4", "0", "4..", "4-8", "x"])
def test_a_range_of_nodes_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--nodes"):
        nodes_of(text, 1)
    assert nodes_of("4..48", 1) == [4, 8, 16, 32, 48]


def asked(config: Config) -> Asked:
    return Asked("small.yaml", config, (), MACHINE, LENGTHS)


def test_the_objective_chooses_the_number_of_nodes() -> None:
    """Twice the nodes take less time per step, and more node-hours."""
    knobs, config = (
        Knobs(("tp",), **FIXED, pools=False),
        small(4, **{"job.time": "01:00:00", "job.signal_seconds": 300}),
    )
    few, many = (Search(Space(config, nodes, knobs), MACHINE, LENGTHS).run().results[0] for nodes in (1, 2))

    def best(objective: str, steps: int) -> Result:
        its = asked(with_keys(config, {"trainer.total_training_steps": steps}))
        its = replace(its, objective=objective)
        assert f"{steps} steps" in its.cost(few)
        return min((few, many), key=its.score)

    assert best("step", 10) is many and best("node-hours", 10) is few
    within = 3000 / few.prediction.seconds  # steps in an hour, with 300 s of set-up and as many at its end
    assert best("walltime", int(0.97 * within)) is few and best("walltime", int(1.03 * within)) is many


def test_a_search_for_what_is_faster() -> None:
    """Than the best: nothing. Within no time: nothing either, and the bound says that nothing is known."""
    space = Space(small(4), 1, Knobs(("tp", "pp"), **FIXED, pools=False))
    best = Search(space, MACHINE, LENGTHS).run().results[0].prediction.seconds
    assert not Search(space, MACHINE, LENGTHS, faster_than=best).run().results
    found = Search(space, MACHINE, LENGTHS, kept=1, faster_than=best * 1.001).run().results
    assert [it.prediction.seconds for it in found] == [best]
    stopped = Search(space, MACHINE, LENGTHS, seconds=0.0).run()
    assert not stopped.results and stopped.bound == 0.0


def test_of_a_model_that_fits_nowhere_the_line_has_the_nodes_that_it_needs() -> None:
    config = small(2, **{"job.gpu_memory_gib": 6.0})
    assert not Search(Space(config, 1), MACHINE, LENGTHS).run().results
    line = asked(config).fits_nowhere(1)
    nodes = int(re.search(r"use --nodes (\d+)", line)[1])  # type: ignore[index]
    assert "small.yaml fits on 1 node in no layout" in line and "more than there are" in line
    assert Search(Space(config, nodes), MACHINE, LENGTHS).run().results
    assert "does not fit on 1024 nodes either" in asked(small(2, **{"job.gpu_memory_gib": 0.5})).fits_nowhere(512)


@pytest.mark.parametrize(
    ("job", "changes", "text"),
    [
        (Train, {"machine": None}, "without --machine"),
        (Train, {"machine": "none_such"}, "no machine none_such"),
        (Train, {"nodes": "8..4"}, "--nodes 8..4 is empty"),
        (Train, {"modes": "async"}, "--modes async"),
        (Sft, {}, "is for jobs of `hpcrl train`"),
    ],
)
def test_bad_input_is_one_line(job: type[Train], changes: dict[str, object], text: str) -> None:
    options = {"machine": "dgx_h100", "nodes": None, "modes": None, "response_lengths": None, "out": None}
    options["objective"] = "step"
    with pytest.raises((ConfigError, InputError)) as caught:
        describe(job, str(ROOT / "configs" / "grpo_8b.yaml"), [], argparse.Namespace(**{**options, **changes}))
    assert text in str(caught.value) and "\n" not in str(caught.value)
