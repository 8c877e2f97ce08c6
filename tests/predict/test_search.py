"""The search finds what computing every candidate finds; what it returns fits, is valid, and survives a YAML file."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config.loader import load_config
from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.jobs.train import Train
from hpcrl.plan.fixes import tightest
from hpcrl.plan.memory import TrainingPlan, with_keys
from hpcrl.predict.candidates import Candidate
from hpcrl.predict.lengths import Lengths
from hpcrl.predict.search import Search
from hpcrl.predict.search_command import differences, nodes_of, write
from hpcrl.predict.space import Knobs, Space
from hpcrl.predict.step import predict
from hpcrl.runtime.exits import is_user_error
from tests.predict.machines import gpu

ROOT = Path(__file__).parents[2]
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
CASES = [
    (4, {}, Knobs(axes=("tp", "pp"), micro_batches=False, kv_cache=False, recompute=False, pools=False)),
    (4, EXPERTS, Knobs(axes=("tp", "ep"), micro_batches=False, kv_cache=False, recompute=False, offload=False)),
    (8, {}, Knobs(axes=("tp",), micro_batches=False, kv_cache=False, offload=False, recompute=False)),
    (8, {"job.gpu_memory_gib": 16.0}, Knobs(axes=("tp",), kv_cache=False, offload=False, pools=False)),
    (4, {}, Knobs(axes=("tp",), micro_batches=False, kv_cache=False, offload=False, modes=("one_step_off",))),
]


@pytest.mark.parametrize(("ranks", "changes", "knobs"), CASES)
def test_search_finds_what_brute_force_finds(ranks: int, changes: dict[str, object], knobs: Knobs) -> None:
    space = Space(small(ranks, **changes), 1, knobs)
    expected = sorted(brute_force(space).values())[:5]
    found = Search(space, MACHINE, LENGTHS, most=float("inf")).run()
    assert expected
    assert [it.prediction.seconds for it in found.results] == pytest.approx(expected, rel=1e-9)
    assert found.counts.evaluated + found.counts.by_memory <= found.counts.all


def test_results_fit_and_are_valid() -> None:
    config = small(8)
    found = Search(Space(config, 2), MACHINE, LENGTHS, most=20).run()
    assert found.results
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
