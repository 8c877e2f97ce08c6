"""`hpcrl score`: the log-prob of every token of given sequences, under any layout."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from hpcrl.batch.balance import balanced_assignment
from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.config.derive import DerivedModel
from hpcrl.config.schema import Config
from hpcrl.roles.policy import PolicyWorker
from hpcrl.roles.team import build_policy, policy_shape
from hpcrl.runtime.exits import DONE, InputError
from hpcrl.runtime.world import World
from hpcrl.telemetry.progress import Progress
from hpcrl.trainer.run import find_start

log = logging.getLogger(__name__)

WAVE = 16  # micro-batches of every replica between two writes


def run(world: World, config: Config, derived: DerivedModel) -> int:
    """`hpcrl score` on every rank."""
    shape = world.run_collectively(lambda: policy_shape(config))
    start = find_start(world, config)
    source, target = config.score.tokens_path, config.score.output_path
    if source is None or target is None:
        raise InputError("score.tokens_path and score.output_path are null; name both", everywhere=True)
    if Path(target).is_dir():
        raise InputError(f"--out {target} is a folder; name a file", everywhere=True)
    sequences = world.run_collectively(
        lambda: read_sequences(Path(source), shape.vocab_size, shape.max_position_embeddings)
    )
    policy = build_policy(world, config, derived, shape)
    if start.init_from is None and world.rank == 0:
        log.warning("model.path and model.init_from are null: these are the log-probs of random weights")
    if policy is not None and start.init_from is not None:
        policy.load(str(start.init_from), role="actor", weights_only=True)
    draft, progress = Path(f"{target}.tmp"), None
    if world.rank == 0:
        draft.write_text("", encoding="utf-8")
        progress = Progress(len(sequences), "score", unit="sequence")
    dp = derived.roles["actor"].dp
    budget = config.score.max_token_len_per_gpu
    for wave in waves(sequences, WAVE * dp * budget):
        found = scored(policy, [sequences[row] for row in wave], dp, budget) if policy is not None else {}
        parts = world.all_gather_object(found)
        if world.rank == 0:
            own = {place: log_probs for part in parts for place, log_probs in part.items()}
            with open(draft, "a", encoding="utf-8") as file:
                for place in range(len(wave)):
                    file.write(json.dumps({"log_probs": [float(x) for x in own[place]]}) + "\n")
            assert progress is not None
            progress.update(wave[-1] + 1)
    if world.rank == 0:
        os.replace(draft, target)
        log.info("log-probs of %d sequences are in %s", len(sequences), target)
    return DONE


def read_sequences(path: Path, vocab_size: int, longest: int) -> list[np.ndarray]:
    """int32 token ids, one array per line; InputError for a line that has none, or some that the model lacks."""
    try:
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--tokens {path} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            tokens = np.array(json.loads(line)["tokens"])
            wrong = tokens.ndim != 1 or len(tokens) == 0 or tokens.dtype != np.int64
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            wrong = True
        if wrong:
            raise InputError(
                f'{path}, line {number}: expected {{"tokens": [ids]}} with an id at least, found {line[:80]}'
            )
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise InputError(f"{path}, line {number}: the model has token ids 0 to {vocab_size - 1}, found others")
        if len(tokens) > longest:
            raise InputError(f"{path}, line {number}: {len(tokens)} tokens, and the model attends to {longest}")
        found.append(tokens.astype(np.int32))
    if not found:
        raise InputError(f'--tokens {path} is empty; expected {{"tokens": [ids]}} per line')
    return found


def waves(sequences: list[np.ndarray], num_tokens: int) -> Iterator[range]:
    """Successive rows of about `num_tokens` tokens."""
    first, used = 0, 0
    for row, sequence in enumerate(sequences):
        used += len(sequence)
        if used >= num_tokens or row == len(sequences) - 1:
            yield range(first, row + 1)
            first, used = row + 1, 0


def scored(policy: PolicyWorker, sequences: list[np.ndarray], dp: int, budget: int) -> dict[int, np.ndarray]:
    """Place in `sequences` -> log-probs fp32 of all tokens but the first, of those that this replica's home has."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    mine = np.flatnonzero(balanced_assignment(lengths, dp) == policy.groups.coord.dp)
    rows = [torch.from_numpy(sequences[place]) for place in mine]
    responses = torch.from_numpy(lengths[mine] - 1)
    batch = DataProto(
        {
            "input_ids": Ragged.from_rows(rows, dtype=torch.int32),
            "response_mask": Ragged.from_lengths(torch.ones(int(responses.sum()), dtype=torch.int32), responses),
        }
    )
    outputs = policy.engine.log_probs(batch, max_tokens=budget, temperature=1.0)
    if not policy.is_home:
        return {}
    log_probs = outputs["log_probs"]
    return {int(place): log_probs.row(row).numpy() for row, place in enumerate(mine)}
