"""`hpcrl plan --refit`: the table against sizes worked out by hand, and the lines that bad input gets."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.config.loader import load_config
from hpcrl.forecast.memory.refit import describe, question
from hpcrl.jobs.train import Train

ROOT = Path(__file__).parents[3]
TEMPLATE = str(ROOT / "configs" / "ppo_70b.yaml")
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
LAYER = 8192 * (64 + 2 * 8) * 128 + 8192 * 8192 + 3 * 8192 * 28672  # qkv, output, gate, up, down
VOCABULARY = 128256 * 8192  # of the embedding, and of the head
WEIGHTS = 2 * (80 * LAYER + 2 * VOCABULARY)  # bytes, all but the norms


def row(lines: list[str], name: str) -> list[float]:
    """Minimum, mean and maximum in bytes."""
    line = next(line for line in lines if line.startswith(f"  {name}"))
    return [float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+) ([kMGT]?B)", line)]


@pytest.mark.parametrize("nodes", [8, 128])
def test_the_70b_template(nodes: int) -> None:
    lines = describe(Train, TEMPLATE, [f"job.nodes={nodes}"])
    stage, end = 2 * 10 * LAYER / 8, 2 * (10 * LAYER + VOCABULARY) / 8
    whole = WEIGHTS / 8
    assert row(lines, "engine's own weights") == pytest.approx([whole] * 3, rel=1e-3)
    assert row(lines, "received") == row(lines, "least to receive")
    assert row(lines, "received") == pytest.approx([whole - end, whole - WEIGHTS / 64, whole - stage], rel=1e-3)
    assert row(lines, "sent") == pytest.approx([7 * stage, whole - WEIGHTS / 64, 7 * end], rel=1e-3)
    assert row(lines, "copied") == pytest.approx([stage, WEIGHTS / 64, end], rel=5e-3)
    moved = 8 * nodes * (whole - WEIGHTS / 64)
    assert row(lines, "moved over all ranks") == pytest.approx([moved, moved], rel=1e-3)
    assert any("largest sender" in line and "1.000 x" in line for line in lines)
    assert any("peak extra memory" in line and "512 MiB" in line for line in lines)


def test_equal_layouts_are_aliased_where_that_is_allowed() -> None:
    same = ["rollout.engine=native", "placement.actor.pp=1", "actor.param_offload=false"]
    assert row(describe(Train, TEMPLATE, same), "aliased") == pytest.approx([WEIGHTS / 8] * 3, rel=1e-3)
    assert row(describe(Train, TEMPLATE, same), "engine's own weights") == [0, 0, 0]
    alias = "rollout.checkpoint_engine.alias=false"
    for refusal in ("rollout.dtype=float32", alias, "rollout.engine=tensorrt_llm", "actor.param_offload=true"):
        lines = describe(Train, TEMPLATE, [*same, refusal])
        assert row(lines, "aliased") == [0, 0, 0]
        assert row(lines, "copied") == row(lines, "engine's own weights")
        assert row(lines, "received") == [0, 0, 0]


def test_disjoint_pools() -> None:
    pools = ["placement.pools.train=0-63", "placement.pools.sample=64-127", "job.nodes=16"]
    roles = ["placement.actor.pool=train", "placement.rollout.pool=sample"]
    traffic = question(load_config(TEMPLATE, [*pools, *roles])).resharding.traffic()
    assert all(its.received == 0 < its.sent for rank, its in traffic.items() if rank < 64)
    assert all(its.sent == its.copied == 0 < its.received for rank, its in traffic.items() if rank >= 64)


def test_a_template_without_a_vocabulary_size_asks_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert any("rank" in line for line in describe(Train, "configs/ppo_countdown_cpu.yaml"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = (
        "import sys\nfrom hpcrl.cli import main\ntry:\n    main(['plan', *sys.argv[1:]])\nfinally:\n"
        "    print('loaded:', *{name.split('.')[0] for name in sys.modules})"
    )
    return subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True)


def test_a_login_node_needs_neither_torch_nor_mpi() -> None:
    done = run("--refit", TEMPLATE)
    assert done.returncode == 0, done.stderr
    assert "sent" in done.stdout
    loaded = done.stdout.rpartition("loaded:")[2].split()
    assert not {"torch", "mpi4py", "megatron", "transformers"}.intersection(loaded)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--refit", TEMPLATE, "placement.actor.tp=3"], "placement.actor.tp=3 does not divide"),
        (["--refit", TEMPLATE, "placement.actor.ep=2"], "placement.actor.ep=2 divides experts, and model: has none"),
        (["--refit", TEMPLATE, "job.nodes=1"], "does not divide the 8 ranks"),
        (["--refit", TEMPLATE, "model.vocab_size=null", "model.tokenizer=null"], "model.vocab_size"),
        (["--refit", TEMPLATE, "model.path=/models/llama"], "/models/llama/config.json cannot be read"),
        (["--refit", TEMPLATE, "model.num_layer=2"], "num_layers"),
        (["--refit", "nowhere.yaml"], "no such config file"),
        (["--refit"], "arguments are required: [JOB.py:]CONFIG"),
        (["--refit", TEMPLATE, "--fast"], "--fast"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments: list[str], found: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert found in done.stderr
    assert done.stderr.startswith("hpcrl: error: ")
    assert done.stderr.count("\n") == 1
