"""log-probs of token sequences under a Hugging Face directory or a run"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from pydantic import Field, PositiveInt

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.packing import balanced_assignment
from hpcrl.batch.ragged import Ragged
from hpcrl.config.loader import quoted_path
from hpcrl.config.paths import PathStr
from hpcrl.config.roles import POLICY
from hpcrl.config.schema import Config, Section
from hpcrl.observe.record.progress import Progress
from hpcrl.run.job import WeightsJob, add_overrides
from hpcrl.run.job_config import config_of
from hpcrl.runtime.exits import DONE, InputError
from hpcrl.sandbox.new_files import create_in_place

if TYPE_CHECKING:
    from hpcrl.workers.frozen import PolicyWorker

log = logging.getLogger(__name__)

WAVE = 16  # micro-batches of every replica between two writes


class ScoreConfig(Section):
    """`hpcrl score`: log-probs of given token sequences."""

    tokens_path: PathStr | None = Field(None, description='JSONL file with {"tokens": [...]} per line (--tokens)')
    output_path: PathStr | None = Field(None, description='JSONL file of {"log_probs": [...]} per line (--out)')
    max_token_len_per_gpu: PositiveInt = Field(
        16384, description="tokens per micro-batch and replica; a longer sequence has one to itself"
    )


class Score(WeightsJob):
    """`hpcrl score MODEL --tokens IN.jsonl --out OUT.jsonl`: log-probs of all tokens but the first."""

    name = "score"
    section = ScoreConfig
    runs_model = True

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("model", metavar="MODEL", help="Hugging Face directory, run or checkpoint")
        parser.add_argument("--tokens", metavar="IN.jsonl", required=True, help='{"tokens": [ids]} per line')
        parser.add_argument("--out", metavar="OUT.jsonl", required=True, help='{"log_probs": [...]} per line')
        add_overrides(parser)

    @classmethod
    def load(cls, arguments: argparse.Namespace) -> Config:
        files = [
            f"score.tokens_path={quoted_path(arguments.tokens)}",
            f"score.output_path={quoted_path(arguments.out)}",
        ]
        return config_of(arguments.model, f"{arguments.out}.job", [*files, *arguments.overrides], cls.schema())

    def main(self) -> int:
        world, config = self.world, self.config
        source, target = config.section("score").tokens_path, config.section("score").output_path
        if source is None or target is None:
            raise InputError("score.tokens_path and score.output_path are null; name both", everywhere=True)
        if Path(target).is_dir():
            raise InputError(f"--out {target} is a folder; name a file", everywhere=True)
        team, weights = self.build([POLICY])
        shape = team.inputs.shape
        sequences = world.run_collectively(
            lambda: read_sequences(Path(source), shape.softmax_size, shape.max_position_embeddings)
        )
        policy = cast("PolicyWorker | None", team.workers.get("actor"))
        if weights is None and world.rank == 0:
            log.warning("model.path and model.init_from are null: these are the log-probs of random weights")
        if policy is not None and weights is not None:
            policy.load(str(weights), role="actor", weights_only=True)
        draft, file, progress = Path(f"{target}.tmp"), None, None
        if world.rank == 0:
            file = create_in_place(draft)
            progress = Progress(len(sequences), "score", unit="sequence")
        dp = self.derived.roles["actor"].dp
        budget = config.section("score").max_token_len_per_gpu
        for wave in waves(sequences, WAVE * dp * budget):
            share = log_probs_of(policy, [sequences[row] for row in wave], dp, budget) if policy is not None else {}
            parts = world.all_gather_object(share)
            if world.rank == 0:
                own = {index: log_probs for part in parts for index, log_probs in part.items()}
                assert file is not None and progress is not None
                for index in range(len(wave)):
                    file.write(json.dumps({"log_probs": [float(x) for x in own[index]]}) + "\n")
                progress.update(wave[-1] + 1)
        if file is not None:
            file.close()
            os.replace(draft, target)
            log.info("log-probs of %d sequences are in %s", len(sequences), target)
        return DONE


def read_sequences(path: Path, vocab_size: int, longest: int) -> list[np.ndarray]:
    """int32 token ids, one array per line. Raises InputError for a line without ids, or with ids that the model
    lacks."""
    try:
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--tokens {path} cannot be read: {error}") from None
    sequences = []
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
            raise InputError(f"{path}, line {number}: the vocabulary has ids 0 to {vocab_size - 1}, found others")
        if len(tokens) > longest:
            raise InputError(f"{path}, line {number}: {len(tokens)} tokens, more than the model's {longest}")
        sequences.append(tokens.astype(np.int32))
    if not sequences:
        raise InputError(f'--tokens {path} is empty; expected {{"tokens": [ids]}} per line')
    return sequences


def waves(sequences: list[np.ndarray], num_tokens: int) -> Iterator[range]:
    """Successive rows of about `num_tokens` tokens."""
    first, used = 0, 0
    for row, sequence in enumerate(sequences):
        used += len(sequence)
        if used >= num_tokens or row == len(sequences) - 1:
            yield range(first, row + 1)
            first, used = row + 1, 0


def log_probs_of(policy: PolicyWorker, sequences: list[np.ndarray], dp: int, budget: int) -> dict[int, np.ndarray]:
    """Index in `sequences` -> fp32 log-probs of all tokens but the first, of the sequences of this replica, on its
    leader."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    mine = np.flatnonzero(balanced_assignment(lengths, dp) == policy.groups.coord.dp)
    responses = lengths[mine] - 1
    batch = DataProto(
        {
            "input_ids": Ragged.from_rows([sequences[place] for place in mine], np.int32),
            "response_mask": Ragged.from_lengths(np.ones(int(responses.sum()), np.int32), responses),
        }
    )
    outputs = policy.engine.log_probs(batch, max_tokens=budget, temperature=1.0)
    if not policy.is_leader:
        return {}
    log_probs = outputs["log_probs"]
    return {int(place): log_probs.row(row) for row, place in enumerate(mine)}


JOB = Score
