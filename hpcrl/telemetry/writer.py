"""Metrics and generations of a run: TensorBoard events, `metrics.jsonl`, JSON lines, Markdown; written by rank 0."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_generations(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One JSON object per row, all with the same keys: null where a row lacks one, or has a number JSON cannot hold.

    The file is whole or not there; one of an earlier attempt is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json_line({key: row.get(key) for key in keys}))
    os.replace(temporary, path)


def json_line(row: Mapping[str, Any]) -> str:
    """A JSON object and its line break: null for a number that JSON cannot hold, text for what it does not know."""
    return json.dumps(_finite(row), ensure_ascii=False, allow_nan=False, default=str) + "\n"


def generations_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown of the rows' `input`, `output` and `score`."""
    lines = ["| prompt | response | score |", "|---|---|---|"]
    lines += [f"| {_code(row['input'])} | {_code(row['output'])} | {row['score']:.3g} |" for row in rows]
    return "\n".join(lines)


def _code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "\\|").replace("\n", " ") + "`"


def _finite(value: Any) -> Any:
    """The value with null for numbers that JSON does not know, inside of lists and mappings too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

# Category -> chart -> regular expressions of tags; TensorBoard's "Custom Scalars" tab.
CHARTS = {
    "reward": {
        "reward": ["Multiline", ["critic/score/mean", "critic/rewards/mean"]],
        "validation accuracy": ["Multiline", [r"val-core/.*/mean@\d+"]],
    },
    "policy": {
        "KL": ["Multiline", ["actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty"]],
        "entropy": ["Multiline", ["actor/entropy"]],
        "loss": ["Multiline", ["actor/pg_loss", "critic/vf_loss", "train/loss"]],
    },
    "lengths": {
        "response length": ["Multiline", [r"response_length/(mean|max|min)"]],
        "responses at the limit": ["Multiline", ["response_length/clip_ratio"]],
    },
    "seconds per phase": {"seconds per phase": ["Multiline", [r"timing_s/[^/]+"]]},
    "rollout against training": {
        "probability difference": ["Multiline", [r"training/rollout_probs_diff_(max|mean|std)"]],
        "correlation": ["Multiline", ["training/rollout_actor_probs_pearson_corr"]],
    },
}


def without_nan(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics for JSON, which has neither NaN nor infinity."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def with_nan(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Metrics as `without_nan` was given them, with NaN for infinity too."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}


class MetricsWriter:
    """One line of `metrics.jsonl` and one set of TensorBoard scalars per step.

    A resumed run continues both so that they read as if it had never stopped: with `first_step` = k + 1, what an
    earlier attempt wrote for steps above k is dropped; with 0, everything.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only rank 0 has a writer

        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._last_step = _drop_steps_from(folder / METRICS_FILE, first_step)
        self._lines = open(folder / METRICS_FILE, "ab", buffering=0)
        self._waiting = b""  # lines that a full disk has not taken
        self._is_told = False
        self._board = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=first_step)
        self._board.add_custom_scalars(CHARTS)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write all metrics of `step`; a step is written once, steps rise. On return they survive a kill.

        A full disk does not end a run: lines that it does not take are written with a later one.
        """
        if step <= self._last_step:
            raise ValueError(f"metrics of step {step} come after those of step {self._last_step}; a step is one line")
        line: dict[str, float | int | None] = {"step": step}
        for tag, value in metrics.items():
            number = value if isinstance(value, int) else float(value)
            line[tag] = number if math.isfinite(number) else None
        self._last_step = step
        self._waiting += (json.dumps(line, allow_nan=False) + "\n").encode()
        self._write_lines()
        with self._without_disk():
            for tag, value in metrics.items():
                self._board.add_scalar(tag, float(value), step)
            self._board.flush()

    def _write_lines(self) -> None:
        end = os.fstat(self._lines.fileno()).st_size
        with self._without_disk():
            try:
                left = memoryview(self._waiting)
                while left:
                    left = left[self._lines.write(left) :]
                os.fsync(self._lines.fileno())
            except OSError:
                os.ftruncate(self._lines.fileno(), end)  # half a line would spoil the next one
                raise
            self._waiting = b""

    @contextmanager
    def _without_disk(self) -> Iterator[None]:
        """A warning, once, in place of an OSError."""
        try:
            yield
        except OSError as error:
            if not self._is_told:
                log.warning("metrics cannot be written: %s; the run goes on, and tries again", error)
            self._is_told = True

    def text(self, tag: str, step: int, markdown: str) -> None:
        with self._without_disk():
            self._board.add_text(tag, markdown, step)

    def hparams(self, config: Mapping[str, object], metrics: Mapping[str, float]) -> None:
        """Flat configuration and final metrics for TensorBoard's HParams tab; metrics appear as `hparam/<key>`."""
        from torch.utils.tensorboard.summary import hparams as hparams_summaries

        values = {key: v if isinstance(v, (bool, int, float, str)) else str(v) for key, v in config.items()}
        finals = {f"hparam/{key}": float(value) for key, value in metrics.items()}
        with self._without_disk():
            # SummaryWriter.add_hparams would open a second run in a folder named by the time of day.
            for summary in hparams_summaries(values, finals):
                self._board._get_file_writer().add_summary(summary)
            for key, value in finals.items():
                self._board.add_scalar(key, value, max(self._last_step, 0))
            self._board.flush()

    def close(self) -> None:
        self._write_lines()
        self._lines.close()
        with self._without_disk():
            self._board.close()


def _drop_steps_from(path: Path, step: int) -> int:
    """Keep the whole lines of steps below `step`, atomically; return the last step kept, or -1."""
    if not path.exists():
        return -1
    text = path.read_text(encoding="utf-8", errors="replace")
    kept, last = [], -1
    for line in text.splitlines(keepends=True):
        number = _step_of(line)
        if number is not None and last < number < step:
            kept.append(line)
            last = number
    if "".join(kept) != text:
        temporary = path.with_name(path.name + ".tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    return last


def _step_of(line: str) -> int | None:
    """None for a line that a kill has torn."""
    if not line.endswith("\n"):
        return None
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
