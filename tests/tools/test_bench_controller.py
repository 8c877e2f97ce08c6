"""A small run of tools/bench controller: what passes through rank 0, and what moves from leader to leader. Its stubs
are registered as the workers that they stand for."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest

from hpcrl.batch.data_proto import DataProto
from hpcrl.config.roles import ACTOR, CRITIC, REF, REFIT, ROLLOUT, SCORER
from hpcrl.controller.controller import replica_column
from hpcrl.run.rollouts.choice import assign_to_replicas

TOOLS = Path(__file__).parents[2] / "tools"
RANKS, SAMPLES, TOKENS = 8, 256, (64, 1024, 1984)
COLUMN_AND_MESSAGE = 512  # bytes, at most, of a column in a message besides its values and offsets


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A row for each number of tokens, of the second of two steps."""
    path = tmp_path_factory.mktemp("bench") / "found.json"
    command = [sys.executable, str(TOOLS / "bench"), "controller", "--ranks", str(RANKS), "--samples", str(SAMPLES)]
    command += ["--tokens", *map(str, TOKENS), "--algorithms", "grpo", "--steps", "1", "--json", str(path)]
    subprocess.run(command, check=True, timeout=250, stdout=subprocess.DEVNULL)  # fails if a rank has imported torch
    (result,) = json.loads(path.read_text())["results"]
    assert result["imported"] == []
    return list(result["measured"])


def test_bytes_through_rank_0_do_not_depend_on_tokens(measured: list[dict[str, Any]]) -> None:
    short, *longer = measured
    for row in longer:
        for name in ("sent", "received"):  # the sizes of pickled numbers differ
            assert abs(row[name] - short[name]) < 0.02 * short[name]


def test_columns_move_once_from_leader_to_leader(
    measured: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside offsets and the frames of messages, these are the values of rows whose replica in the actor is not that of
    the rollout: four columns, read first by compute_log_prob and compute_advantage."""
    short, middle, long = (row["row_bytes"] for row in measured)
    assert long - middle == pytest.approx(middle - short, abs=16 * RANKS)
    monkeypatch.syspath_prepend(str(TOOLS))
    tool = import_module("bench.controller")
    for row in measured:
        planned, num_moved = _planned(tool, tool.Case("grpo", SAMPLES, row["tokens"], 1))
        offsets = 4 * 8 * num_moved
        frames = 4 * COLUMN_AND_MESSAGE * RANKS * (RANKS // 2)
        assert planned + offsets <= row["row_bytes"] <= planned + offsets + frames


def _planned(tool: Any, case: Any) -> tuple[int, int]:
    """Bytes of the values that the second step moves, and the number of its rows."""
    job = tool.make_job(case, RANKS)
    size = case.samples // tool.RESPONSES
    rows, _ = (job.sampler.next_rows(size), job.sampler.next_rows(size))[1]
    index = np.tile(np.arange(tool.RESPONSES), size)
    drawn = DataProto({}, {"row": np.repeat(rows, tool.RESPONSES), "sample_index": index})
    layouts = tool.layouts_of(job)
    found = tool.RolloutStub(layouts["rollout"], 0, case.tokens).generate(drawn, None)
    prompt = np.repeat(np.arange(size, dtype=np.int32), tool.RESPONSES)
    batch = DataProto({}, found.samples | {"prompt": prompt}, {"num_prompts": size, "step": 2})
    assign_to_replicas(batch, job.config, job.derived)
    actor, rollout = layouts["actor"], layouts["rollout"]
    owner = np.repeat(rollout.leaders, case.samples // RANKS)
    moves = owner != np.array(actor.leaders)[batch.samples[replica_column(actor.dp)]]
    prompts, responses = batch.samples["prompt_length"][moves], batch.samples["response_length"][moves]
    return int(4 * (prompts + 4 * responses).sum()), int(moves.sum())


@pytest.mark.parametrize("spec", [ACTOR, REF, CRITIC, ROLLOUT, SCORER, REFIT], ids=lambda spec: spec.name)
def test_stubs_are_registered_as_the_workers(spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    stub, worker = import_module("bench.controller").STUBS[spec.name], resolve_name(spec.worker)
    methods = [name for name, method in vars(stub).items() if hasattr(method, "registration")]
    assert methods
    for name in methods:
        assert getattr(stub, name).registration == getattr(worker, name).registration
