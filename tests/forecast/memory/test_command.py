"""`hpcrl plan CONFIG`: the table of templates against sizes worked out by hand, fixes, a refit, bad input."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpcrl.config.loader import load_config
from hpcrl.forecast.command import describe, describe_refit
from hpcrl.forecast.memory.fixes import cheapest_fix, tightest
from hpcrl.forecast.memory.memory import GIB, Row, TrainingPlan, with_keys
from hpcrl.forecast.memory.state import checkpoint_bytes, kept_checkpoints
from hpcrl.jobs.train import Train
from hpcrl.model.params import shards
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.runtime.exits import InputError

ROOT = Path(__file__).parents[3]
TEMPLATE = str(ROOT / "configs" / "ppo_70b.yaml")
QWEN2_5_VL = ROOT / "tests" / "forecast" / "memory" / "qwen2_5_vl_7b"  # the published config.json, without weights
TOWER_PARAMETERS = 676_550_144
LAYER = 8192 * (64 + 2 * 8) * 128 + 8192 * 8192 + 3 * 8192 * 28672 + 2 * 8192  # matrices and norms
VOCABULARY = 128256 * 8192
ON_DEVICE = [  # nothing is offloaded
    *(f"{role}.{part}_offload=false" for role in ("actor", "critic") for part in ("param", "grad", "optimizer")),
    "ref.param_offload=false",
]
ALL_KEPT = [*ON_DEVICE, "model.recompute.granularity=null"]


def row(job: TrainingPlan, phase: str, stage: int) -> Row:
    return next(it for it in job.rows() if it.phase == phase and it.place.stages["actor"] == stage)


def test_the_70b_template_fits() -> None:
    job = TrainingPlan(load_config(TEMPLATE))
    assert tightest(job.rows()).total < 0.75 * job.capacity
    kept = row(TrainingPlan(load_config(TEMPLATE, ALL_KEPT)), "update_actor", 0).activations
    inputs = 8 * 10 * 16384 * 2 * 8192 / 8  # of 10 layers, of 8 micro-batches that wait on the first stage
    assert inputs < row(job, "update_actor", 0).activations < 0.1 * kept


def test_a_judge_is_on_the_gpu_in_its_turn() -> None:
    """One with the policy's shape, split by 8: its weights and KV cache, or its weights on the host."""
    judge = ["reward.judge.enable=true", "placement.judge.tp=8", "reward.judge.kv_cache_gib=2.0"]
    without = TrainingPlan(load_config(TEMPLATE))
    resident = TrainingPlan(load_config(TEMPLATE, judge))
    away = TrainingPlan(load_config(TEMPLATE, [*judge, "reward.judge.param_offload=true"]))
    weights = 2 * (80 * LAYER + 2 * VOCABULARY) / 8
    for phase in ("rollout", "update_actor"):
        before = row(without, phase, 0).parameters
        assert row(resident, phase, 0).parameters - before == pytest.approx(weights, rel=1e-3)
        assert row(away, phase, 0).parameters == before
    for job in (resident, away):
        assert row(job, "judge", 0).kv_cache == 2 * GIB
        assert row(job, "judge", 0).parameters >= weights
    grown = max(away.on_hosts().values()) - max(without.on_hosts().values())
    assert grown == pytest.approx(8 * weights, rel=0.01)


def test_environments_take_host_memory() -> None:
    """A leader on each half of a node with 8 ranks, which has 10 environments open."""
    keys = [
        "rollout.multi_turn.enable=true",
        f"rollout.multi_turn.environment.path={__file__}",
        "placement.rollout.tp=4",
    ]
    keys += ["rollout.multi_turn.environment.max_open=10"]
    assert TrainingPlan(load_config(TEMPLATE, keys)).environments_on_host() == 2 * 10 * 4 * GIB
    said = "\n".join(describe(Train, TEMPLATE, keys))
    assert re.search(r"environments +at most 80.00 GiB of a node's host memory", said)
    assert TrainingPlan(load_config(TEMPLATE)).environments_on_host() == 0


def test_each_role_of_the_70b_template_is_on_the_gpu_in_its_turn() -> None:
    job, resident = TrainingPlan(load_config(TEMPLATE)), TrainingPlan(load_config(TEMPLATE, ON_DEVICE))
    found = {phase.name: row(job, phase.name, 0) for phase in job.phases}
    engine = found.pop("rollout")
    assert engine.gradients == 0 and engine.optimizer < 20
    assert engine.parameters == pytest.approx(2 * (80 * LAYER + 2 * VOCABULARY) / 8, rel=1e-3)
    assert engine.kv_cache > 2 * row(resident, "rollout", 0).kv_cache
    stage = 10 * LAYER / 8 + VOCABULARY / 8  # of the first
    for phase, at_work in found.items():
        assert at_work.parameters == pytest.approx(2 * stage + engine.parameters, rel=1e-3)
        assert at_work.gradients == pytest.approx(4 * stage * phase.startswith("update"), rel=1e-3)
        assert at_work.optimizer == pytest.approx(12 * stage * phase.startswith(("update", "save")), rel=1e-3, abs=20)
    of_a_node = 8 * (3 * 2 + 2 * 12) * stage  # weights of three models, optimizers of two
    assert max(job.on_hosts().values()) == pytest.approx(of_a_node, rel=0.01)
    assert set(resident.on_hosts().values()) == {0}


def test_the_70b_template_without_recomputation() -> None:
    job = TrainingPlan(load_config(TEMPLATE, ALL_KEPT))
    stage = 10 * LAYER / 8 + VOCABULARY / 8  # of the first
    first = row(job, "update_actor", 0)
    engine = 2 * (80 * LAYER + 2 * VOCABULARY) / 8
    assert first.parameters == pytest.approx(3 * 2 * stage + engine, rel=1e-3)
    assert first.gradients == pytest.approx(2 * 4 * stage, rel=1e-3)
    assert first.optimizer == pytest.approx(2 * 12 * stage, rel=1e-3)
    assert row(job, "update_actor", 3).activations < first.activations
    assert row(job, "rollout", 0).kv_cache <= 0.6 * (80 * GIB - first.parameters - first.gradients - first.optimizer)
    # 8 micro-batches wait on the first stage: 2 hidden states per norm, attention, 5 widths of the SwiGLU layer.
    token = 2 * (2 * 2 * 8192 / 8 + (3 * 64 + 2 * 8) * 128 / 8 + 5 * 28672 / 8)
    assert first.activations == pytest.approx(8 * 10 * 16384 * token, rel=0.05)
    # A chunk, the gradients of four in bf16, and those of the hidden states in fp32 and of the weight.
    head = 3 * 32 * 2**20 + 4 * 13108 * 8192 + 2 * 128256 / 8 * 8192
    assert row(job, "update_actor", 7).logits == pytest.approx(head, rel=1e-3)
    last = row(TrainingPlan(load_config(TEMPLATE, [*ALL_KEPT, "trainer.head_chunk_tokens=null"])), "update_actor", 7)
    assert last.logits == pytest.approx((3 * 4 + 2) * 13108 * 128256 / 8, rel=1e-3)
    assert tightest(job.rows()).total > job.capacity


def shown(*overrides: str) -> TrainingPlan:
    template = ROOT / "configs" / "vision" / "geometry3k_qwen2_5_vl_7b.yaml"
    return TrainingPlan(load_config(str(template), [f"model.path={QWEN2_5_VL}", *overrides]))


def test_the_geometry3k_template_fits() -> None:
    job = shown()
    assert tightest(job.rows()).total < 0.9 * job.capacity
    whole = sum(math.prod(shard.global_shape) for shard in shards(job.models["actor"].shape))
    assert whole == 8_292_166_656  # as published
    language = (whole - TOWER_PARAMETERS) / 4
    update, rollout = row(job, "update_actor", 0), row(job, "rollout", 0)
    assert update.gradients == pytest.approx(4 * language, rel=1e-3)
    # The features of a replica's 64 prompts, in bf16 and in fp32, and the actor's buffer of gathered hidden states.
    assert rollout.activations == 64 * 1024 * 3584 * (2 + 4) + 24576 * 3584 * 2


def test_a_trained_tower_needs_gradients_and_activations() -> None:
    frozen, trained = shown(), shown("model.vision.train=all")
    before, after = (row(job, "update_actor", 0) for job in (frozen, trained))
    assert after.gradients - before.gradients == pytest.approx(4 * TOWER_PARAMETERS, rel=1e-3)
    assert after.optimizer - before.optimizer == pytest.approx(12 * TOWER_PARAMETERS / 4, rel=1e-3)
    # 5 sequences with their patches fill a micro-batch, and one of 4 ranks has 2 pictures: of each block attention, MLP
    # and norms; the input.
    block = 7 * 1280 * 2 + 16 * 4 + 4 * 3420 * 2 + 2 * (1280 * 8 + 4)
    picture = 4 * 1024 * (32 * block + 1176 * 2)
    assert after.activations - before.activations == pytest.approx(2 * picture, rel=0.02)
    assert tightest(trained.rows()).total > trained.capacity
    change, then, _ = cheapest_fix(trained)
    assert change == {"actor.ppo_max_token_len_per_gpu": 24576 // 2} and then.total <= trained.capacity


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.engine=tensorrt_llm"], "tensorrt_llm with pictures is not supported; use native"),
        (
            [
                "reward.reward_model={enable: true, init_from: runs/rm}",
                "reward.reward_model.model={num_layers: 2, vocab_size: 152064}",
            ],
            "the model of reward.reward_model has no vision tower",
        ),
    ],
)
def test_what_does_not_work_with_pictures_is_one_line(overrides: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        shown(*overrides).rows()


FP8 = "model.transformer_engine.fp8=hybrid"


def test_8_bit_products_take_copies_of_large_weights_and_32_rows() -> None:
    """The copies leave the device with the weights."""
    template = str(ROOT / "configs" / "grpo_8b.yaml")
    options = ["actor.ppo_max_token_len_per_gpu=24584", "ref.param_offload=true", "actor.param_offload=true"]
    plain, fp8 = (TrainingPlan(load_config(template, [*options, *more])) for more in ([], [FP8]))
    large = 32 * 3 * 14336 * 4096 // 4  # fc1 and fc2 of a rank of four
    more = {it.phase: it.parameters - other.parameters for it, other in zip(fp8.rows(), plain.rows(), strict=True)}
    assert more == {
        phase: 2 * large * (phase in ("old_log_prob", "update_actor", "refit", "save_actor")) + large * (phase == "ref")
        for phase in more
    }
    assert [row.optimizer for row in fp8.rows()] == [row.optimizer for row in plain.rows()]
    tokens = [next(it.work.tokens for it in job.phases if it.name == "update_actor") for job in (plain, fp8)]
    assert tokens == [24584, 24608]


def test_disk() -> None:
    job = TrainingPlan(load_config(TEMPLATE))
    parameters = 80 * LAYER + 2 * VOCABULARY + 8192
    assert checkpoint_bytes(job.config, job.models)["actor"] == 14 * parameters
    assert kept_checkpoints(job.config.trainer, 500) == 4  # three, and the one that is written
    everything = with_keys(job.config, {"trainer.max_ckpt_to_keep": None})
    assert kept_checkpoints(everything.trainer, 500) == 50


@pytest.mark.parametrize(("quantization", "cached"), [(None, None), ("fp8", torch.float8_e4m3fn)], ids=["fp32", "fp8"])
def test_an_engine_has_the_planned_bytes(
    monkeypatch: pytest.MonkeyPatch, quantization: str | None, cached: torch.dtype | None
) -> None:
    monkeypatch.chdir(ROOT)
    job = TrainingPlan(
        load_config(
            "configs/ppo_countdown_cpu.yaml",
            [
                "placement.actor.tp=1",
                f"rollout.quantization={quantization or 'null'}",
                f"rollout.kv_cache_dtype={quantization or 'auto'}",
            ],
        )
    )
    generation, refit = (next(row for row in job.rows() if row.phase == name) for name in ("rollout", "refit"))
    shape: ModelShape = job.models["actor"].shape
    longest, seqs = job.derived.max_sequence_length, job.config.rollout.max_num_seqs
    engine = NativeEngine(
        *(shape, None, 0, 1, torch.float32),
        max_num_seqs=seqs,
        max_num_batched_tokens=64,
        max_model_len=longest,
        quantization=quantization,
        cache_dtype=cached,
    )
    cache = engine._cache
    assert generation.kv_cache == sum(plane.nbytes for plane in cache.planes[0].owned)
    states = [job.states[role, stage].parameters for role, stage in refit.place.stages.items() if role in job.models]
    weights = engine.weights()
    assert refit.parameters - sum(states) == sum(weight.nbytes for weight in weights.values())
    shared = [weights[it.name] for it in job.refit.shared(0) if isinstance(weights[it.name], Tensor)]
    assert refit.parameters - generation.parameters == sum(weight.nbytes for weight in shared) > 0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpcrl", "plan", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


PUBLISHED = "apertus_8b gemma3_12b glm_4_5_air gpt_oss_20b nemotron_3_nano qwen3_next_80b qwen3_5_35b".split()


@pytest.mark.parametrize(
    "template",
    [
        "ppo_70b",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in PUBLISHED),
        pytest.param("grpo_8b", marks=pytest.mark.exhaustive),
        pytest.param("vision/geometry3k_qwen2_5_vl_7b", marks=pytest.mark.exhaustive),
        pytest.param("ppo_countdown_cpu", marks=pytest.mark.slow),
    ],
)
def test_the_command_takes_less_than_a_minute(template: str) -> None:
    start = time.perf_counter()
    overrides = [f"model.path={QWEN2_5_VL}"] if template.startswith("vision/") else []
    done = run(f"configs/{template}.yaml", "--build", *overrides)
    assert time.perf_counter() - start < 60
    assert done.returncode == 0 and not done.stderr, done.stderr
    for found in ("update_actor", "tightest phase", "node-hours", "checkpoints", "built on the meta device"):
        assert found in done.stdout
    assert ", it fits; " in done.stdout or template == "ppo_countdown_cpu"  # no GPU whose memory is known
    assert ("269.00 GiB of a node's host memory" in done.stdout) == (template == "ppo_70b")


def test_the_arithmetic_needs_no_torch() -> None:
    program = (
        "import sys\nfrom hpcrl.config.loader import load_config\n"
        "from hpcrl.forecast.memory.memory import TrainingPlan\n"
        f"TrainingPlan(load_config({TEMPLATE!r})).rows()\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "mpi4py", "numpy", "megatron", "transformers"}.intersection(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([TEMPLATE, "placement.actor.tp=3"], "placement.actor.tp=3 does not divide"),
        ([TEMPLATE, "placement.critic.pp=16"], "does not divide the 64 ranks"),
        ([TEMPLATE, "actor.ppo_max_token_len_per_gpu=100"], "less than the longest sequence"),
        ([TEMPLATE, "job.gpu_memory_gb=80"], "gpu_memory_gib"),
        (["nowhere.yaml"], "no such config file"),
        (["--fast", TEMPLATE], "--fast"),
        (["--refit", TEMPLATE, "placement.actor.tp=3"], "placement.actor.tp=3 does not divide"),
        (["--refit", TEMPLATE, "placement.actor.ep=2"], "placement.actor.ep=2 divides experts, and model: has none"),
        (["--refit", TEMPLATE, "job.nodes=1"], "does not divide the 8 ranks"),
        (["--refit", TEMPLATE, "model.vocab_size=null", "model.tokenizer=null"], "model.vocab_size"),
        (["--refit", TEMPLATE, "model.path=/models/llama"], "/models/llama/config.json cannot be read"),
        (["--refit", TEMPLATE, "model.num_layer=2"], "num_layers"),
        (["--refit", "nowhere.yaml"], "no such config file"),
        (["--refit"], "arguments are required: [JOB:]CONFIG"),
        (["--refit", TEMPLATE, "--fast"], "--fast"),
        ([], "usage: hpcrl plan [-h] [--refit | --build | --search | --calibrate]"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments: list[str], found: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert found in done.stderr
    assert done.stderr.startswith("hpcrl: error: ")
    assert done.stderr.count("\n") == 1


def test_adapters_take_the_place_of_the_reference() -> None:
    """No second model, and a checkpoint with moments of the adapters alone."""
    job = TrainingPlan(load_config(TEMPLATE))
    lora = TrainingPlan(with_keys(job.config, {"model.lora_rank": 16, "placement.ref": job.config.placement.actor}))
    assert "ref" in job.models and "ref" not in lora.models
    assert next(phase.role for phase in lora.phases if phase.name == "ref") == "actor"
    update, smaller = (max(row.total for row in of.rows() if row.phase == "update_actor") for of in (job, lora))
    assert smaller < 0.9 * update
    parameters = 80 * LAYER + 2 * VOCABULARY + 8192
    adapters = 80 * 16 * (2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 28672))  # q, o; k, v; gate, up, down
    disk = checkpoint_bytes(lora.config, lora.models)
    assert disk["lora adapter"] == 2 * adapters and disk["actor"] == 2 * parameters + 14 * adapters


UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
MATRICES = LAYER - 2 * 8192
WEIGHTS = 2 * (80 * MATRICES + 2 * VOCABULARY)  # bytes, all but the norms


def sizes(lines: list[str], name: str) -> list[float]:
    """Minimum, mean and maximum in bytes."""
    line = next(line for line in lines if line.startswith(f"  {name}"))
    return [float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+) ([kMGT]?B)", line)]


@pytest.mark.parametrize("nodes", [8, 128])
def test_the_refit_of_the_70b_template(nodes: int) -> None:
    lines = describe_refit(Train, TEMPLATE, [f"job.nodes={nodes}"])
    stage, end = 2 * 10 * MATRICES / 8, 2 * (10 * MATRICES + VOCABULARY) / 8
    whole = WEIGHTS / 8
    assert sizes(lines, "engine's own weights") == pytest.approx([whole] * 3, rel=1e-3)
    assert sizes(lines, "received") == sizes(lines, "least to receive")
    assert sizes(lines, "received") == pytest.approx([whole - end, whole - WEIGHTS / 64, whole - stage], rel=1e-3)
    assert sizes(lines, "sent") == pytest.approx([7 * stage, whole - WEIGHTS / 64, 7 * end], rel=1e-3)
    assert sizes(lines, "copied") == pytest.approx([stage, WEIGHTS / 64, end], rel=5e-3)
    moved = 8 * nodes * (whole - WEIGHTS / 64)
    assert sizes(lines, "moved over all ranks") == pytest.approx([moved, moved], rel=1e-3)
    assert any("largest sender" in line and "1.000 x" in line for line in lines)
    assert any("peak extra memory" in line and "512 MiB" in line for line in lines)


def test_equal_layouts_are_aliased_where_that_is_allowed() -> None:
    same = ["rollout.engine=native", "placement.actor.pp=1", "actor.param_offload=false"]
    assert sizes(describe_refit(Train, TEMPLATE, same), "aliased") == pytest.approx([WEIGHTS / 8] * 3, rel=1e-3)
    assert sizes(describe_refit(Train, TEMPLATE, same), "engine's own weights") == [0, 0, 0]
    alias = "rollout.checkpoint_engine.alias=false"
    for refusal in ("rollout.dtype=float32", alias, "rollout.engine=tensorrt_llm", "actor.param_offload=true"):
        lines = describe_refit(Train, TEMPLATE, [*same, refusal])
        assert sizes(lines, "aliased") == [0, 0, 0]
        assert sizes(lines, "copied") == sizes(lines, "engine's own weights")
        assert sizes(lines, "received") == [0, 0, 0]


def test_disjoint_pools() -> None:
    pools = ["placement.pools.train=0-63", "placement.pools.sample=64-127", "job.nodes=16"]
    roles = ["placement.actor.pool=train", "placement.rollout.pool=sample"]
    traffic = TrainingPlan(load_config(TEMPLATE, [*pools, *roles])).refit.traffic()
    assert all(its.received == 0 < its.sent for rank, its in traffic.items() if rank < 64)
    assert all(its.sent == its.copied == 0 < its.received for rank, its in traffic.items() if rank >= 64)


def test_a_template_without_a_vocabulary_size_asks_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert any("rank" in line for line in describe_refit(Train, "configs/ppo_countdown_cpu.yaml"))


def run_and_list(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = (
        "import sys\nfrom hpcrl.cli import main\ntry:\n    main(['plan', *sys.argv[1:]])\nfinally:\n"
        "    print('loaded:', *{name.split('.')[0] for name in sys.modules})"
    )
    return subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True)


def test_a_login_node_needs_neither_torch_nor_mpi() -> None:
    done = run_and_list("--refit", TEMPLATE)
    assert done.returncode == 0, done.stderr
    assert "sent" in done.stdout
    loaded = done.stdout.rpartition("loaded:")[2].split()
    assert not {"torch", "mpi4py", "megatron", "transformers"}.intersection(loaded)
