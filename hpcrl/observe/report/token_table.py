"""The tokens of a step's update, for people and for notebooks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.observe.read.archive import Columns, read_step
from hpcrl.observe.record.archive import UPDATE_COLUMNS
from hpcrl.observe.record.writer import json_line
from hpcrl.sandbox.new_files import draft_of

SUFFIXES = (".jsonl", ".h5")
# Columns of an archive that have an entry per response token and say what the update did with it.
SHOWN = (
    *("response_mask", "rollout_log_probs", "old_log_probs", *UPDATE_COLUMNS),
    *("ref_log_prob", "values", "advantages", "returns", "rollout_is_weights", "loss_mask"),
)


def write_tokens(path: Path, archive: Path) -> None:
    """Write the response tokens of a step's archive, with the ratio of the probabilities at the update and whether the
    loss was clipped there.

    .jsonl: one object per sample, with a list per column. .h5: the archive, with the columns `ratio` (float32) and
    `clipped` (uint8). Raises ArchiveError.
    """
    tokens, samples, _ = read_step(archive)
    added = of_update(tokens)
    with draft_of(path) as draft:
        if path.suffix == ".h5":
            import h5py

            shutil.copyfile(archive, draft)
            with h5py.File(draft, "r+") as file:
                for name, (values, offsets) in added.items():
                    group = file["tokens"].create_group(name)
                    group.create_dataset("values", data=values)
                    group.create_dataset("offsets", data=offsets)
        else:
            with open(draft, "w", encoding="utf-8") as file:
                file.writelines(json_line(row) for row in rows({**tokens, **added}, samples))


def of_update(tokens: Columns) -> Columns:
    """Return `ratio`, the probability at the update over the old one, float32, and `clipped`, 1 where the loss has no
    gradient although the token counts and has an advantage, uint8; {} without the columns of the update."""
    if not {"update_log_probs", "loss_gradients", "old_log_probs", "advantages"} <= tokens.keys():
        return {}
    now, offsets = tokens["update_log_probs"]
    ratio = np.exp(now.astype(np.float64) - tokens["old_log_probs"][0]).astype(np.float32)
    counts = tokens["loss_mask" if "loss_mask" in tokens else "response_mask"][0] != 0
    clipped = (tokens["loss_gradients"][0] == 0) & (tokens["advantages"][0] != 0) & counts
    return {"ratio": (ratio, offsets), "clipped": (clipped.astype(np.uint8), offsets)}


def rows(tokens: Columns, samples: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """One object per sample."""
    ids, starts = tokens["input_ids"]
    shown = [name for name in (*SHOWN, "ratio", "clipped") if name in tokens]
    for index, uid in enumerate(samples["uid"]):
        prompt = int(samples["prompt_length"][index])
        row = {"uid": uid, "sample_index": int(samples["sample_index"][index]), "score": float(samples["score"][index])}
        row["token_ids"] = ids[starts[index] + prompt : starts[index + 1]].tolist()
        for name in shown:
            values, offsets = tokens[name]
            row[name] = values[offsets[index] : offsets[index + 1]].tolist()
        yield row
