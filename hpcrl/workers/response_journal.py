"""Finished responses, written through to files, so that a step that is cut short does not pay for them twice."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.batch.pictures import Picture
from hpcrl.config.schema import Config
from hpcrl.observe.record.archive import Record, RecordLog, generation_log, generation_logs, read_records
from hpcrl.rollout.protocol import Request, SamplingParams, ToolPicture, Trajectory
from hpcrl.runtime import run_owner

log = logging.getLogger(__name__)

ARRAYS = {"token_ids": "<i4", "log_probs": "<f4", "mask": "<i4"}
ACTED = {"prompt_ids": "<i4", "rewards": "<f4", "states": "<i4", "sequence_starts": "<i4"}  # of conversations
FINISH_REASONS = ("stop", "length", "error")


class ResponseJournal:
    """One leader's log of responses. Each record has a hash of everything that determines a response: the weights'
    version, seed and step, the sampling parameters, and the prompt's tokens. A record with another hash is not used.

    Scores are not stored; they are computed again.
    """

    def __init__(self, folder: Path, rank: int, config: Config, origin: str = "") -> None:
        """`origin` identifies the weights of version 0; later versions are identified by the checkpoints before
        them."""
        self._folder = folder
        self._rank = rank
        self._settings = {
            "seed": config.run.seed,
            "model": config.model.model_dump(mode="json"),
            "multi_turn": config.rollout.multi_turn.model_dump(mode="json"),
        }
        self._origin = origin
        self._step: int | None = None
        self._version = 0
        self._drawing = b""  # hash of what all responses of this call share
        self._log: RecordLog | None = None
        self._has_failed = False
        self._found: dict[tuple[str, str], dict[str, Trajectory]] | None = None  # (uid, sample) -> by hash
        self.num_stale = 0  # responses asked for since `begin` that a log has, of other weights or settings

    def begin(self, sampling: SamplingParams, *, step: int, version: int, recall: bool) -> None:
        """Begin the responses of a step; with `recall`, those in logs of an earlier attempt are used."""
        if step != self._step:
            self._close()
            self._step, self._has_failed, self._found = step, False, None
        self._version, self.num_stale = version, 0
        weights = [version, self._origin if version == 0 else ""]
        drawing = {**self._settings, "sampling": asdict(sampling), "step": step, "weights": weights}
        self._drawing = json.dumps(drawing, sort_keys=True).encode()
        if not recall:
            self._found = None
        elif self._found is None:
            self._found = self._read(step)

    def recall(self, request: Request) -> Trajectory | None:
        """The response that an earlier attempt has drawn for this request, or None."""
        if self._found is None:
            return None
        known = self._found.get((request.uid, str(request.sample_index)), {})
        found = known.get(self._hash(request))
        self.num_stale += bool(known) and found is None
        return found

    def write(self, request: Request, done: Trajectory) -> None:
        """Write a response; on failure, log a warning and stop writing for this step."""
        if self._has_failed or self._step is None:
            return
        path = generation_log(self._folder, self._step, self._rank)
        try:
            if self._log is None:
                run_owner.check()
                self._log = RecordLog(path, keep=True)
            self._log.append(self._record(request, done))
        except OSError as error:
            self._has_failed = True
            self._close()
            log.warning(
                "%s: %s; the other responses of step %d are not kept, and a restart in the middle of it draws them "
                "again: free some space",
                *(path, error.strerror or error, self._step),
            )

    def _close(self) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):  # `write` has logged it
                self._log.close()
        self._log = None

    def _hash(self, request: Request) -> str:
        digest = blake2b(self._drawing, digest_size=16)
        digest.update(f"{request.uid}\0{request.sample_index}\0".encode())
        digest.update(np.asarray(request.prompt_ids, np.int32).tobytes())
        digest.update(np.array([picture.key for picture in request.pictures], np.int64).tobytes())
        return digest.hexdigest()

    def _record(self, request: Request, done: Trajectory) -> Record:
        experts = done.routed_experts
        routing = (
            {"routed_experts": experts.astype("<i2").tobytes(), "num_run": len(experts)} if experts is not None else {}
        )
        acted: Record = {
            name: np.asarray(getattr(done, name), dtype).tobytes()
            for name, dtype in ACTED.items()
            if getattr(done, name) is not None
        }
        if done.info is not None:
            acted["info"] = dict(done.info)
        return {
            "uid": request.uid,
            "sample_index": request.sample_index,
            "weight_version": self._version,
            "drawn_by": self._hash(request),
            **{name: getattr(done, name).astype(dtype).tobytes() for name, dtype in ARRAYS.items()},
            **routing,
            **acted,
            "pictures": [[picture.key, *picture.place, picture.png] for picture in done.pictures],
            "finish_reason": done.finish_reason,
            "num_turns": done.num_turns,
            "num_tool_calls": done.num_tool_calls,
            "turn_scores": list(done.turn_scores),
        }

    def _read(self, step: int) -> dict[tuple[str, str], dict[str, Trajectory]]:
        """Records of all ranks, because this attempt may have another layout."""
        found: dict[tuple[str, str], dict[str, Trajectory]] = {}
        paths = [path for its_step, path in generation_logs(self._folder) if its_step == step]
        for path in paths:
            for record in read_records(path, log.info):  # the log of a rank that was killed may well be torn
                done = trajectory_of(record)
                if done is not None:
                    key = str(record.get("uid")), str(record.get("sample_index"))
                    found.setdefault(key, {})[str(record.get("drawn_by"))] = done
        return found


def trajectory_of(record: Mapping[str, Any]) -> Trajectory | None:
    """The record's trajectory; None for a record in another format."""
    try:
        arrays = {name: np.frombuffer(record[name], dtype).copy() for name, dtype in ARRAYS.items()}
        experts = None
        if "routed_experts" in record:
            experts = np.frombuffer(record["routed_experts"], "<i2").reshape(int(record["num_run"]), -1).copy()
        done = Trajectory(
            **arrays,
            finish_reason=record["finish_reason"],
            num_turns=int(record["num_turns"]),
            num_tool_calls=int(record["num_tool_calls"]),
            turn_scores=tuple(float(score) for score in record["turn_scores"]),
            routed_experts=experts,
            pictures=tuple(ToolPicture(key, Picture.of(*place), png) for key, *place, png in record["pictures"]),
            info=record.get("info"),
            **{name: np.frombuffer(record[name], dtype).copy() for name, dtype in ACTED.items() if name in record},
        )
        is_whole = len({len(array) for array in arrays.values()}) == 1 and done.finish_reason in FINISH_REASONS
    except (KeyError, TypeError, ValueError):
        return None
    return done if is_whole else None
