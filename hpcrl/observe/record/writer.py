"""Metrics and generations of a run: TensorBoard events, `metrics.jsonl`, JSON lines, Markdown. Rank 0 writes them."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcrl.observe.record.archive import fsync
from hpcrl.sandbox.foreign_files import writable
from hpcrl.sandbox.new_files import draft_of


def write_generations(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one JSON object per row, all with the same keys: null if a row lacks one, or has a number that JSON does
    not support.

    The file is replaced atomically.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    with draft_of(path) as draft, open(draft, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json_line({key: row.get(key) for key in keys}))


def json_line(row: Mapping[str, Any]) -> str:
    """Format a JSON object and its line break: null for numbers that JSON does not support, text for other types."""
    return writable(json.dumps(_finite(row), ensure_ascii=False, allow_nan=False, default=str)) + "\n"


def generations_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Format the rows' `input`, `output` and `score` as a Markdown table."""
    lines = ["| prompt | response | score |", "|---|---|---|"]
    lines += [f"| {_code(row['input'])} | {_code(row['output'])} | {row['score']:.3g} |" for row in rows]
    return "\n".join(lines)


def _code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "\\|").replace("\n", " ") + "`"


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not support by None, also inside lists and mappings."""
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
    """Convert metrics for JSON, which has neither NaN nor infinity: None instead."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def with_nan(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Inverse of `without_nan`; infinity becomes NaN, too."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}


class MetricsWriter:
    """Writes one line of `metrics.jsonl` and one set of TensorBoard scalars per step.

    A resumed run continues both as if it had not been interrupted: with `first_step` = k + 1, entries of an earlier
    attempt for steps above k are dropped; with 0, all of them.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import; only rank 0 has a writer

        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._last_step = _drop_steps_from(folder / METRICS_FILE, first_step)
        self._lines = open(folder / METRICS_FILE, "ab", buffering=0)
        self._waiting = b""  # lines that could not be written yet
        self._has_warned = False
        self._board = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=first_step)
        self._board.add_custom_scalars(CHARTS)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write all metrics of `step`, once per step, in order of steps. Afterwards they survive a kill.

        A full disk does not end a run: lines that cannot be written are retried at the next step.
        """
        if step <= self._last_step:
            raise ValueError(f"metrics of step {step} come after those of step {self._last_step}; steps must increase")
        numbers = {writable(tag): value if isinstance(value, int) else float(value) for tag, value in metrics.items()}
        line = {"step": step, **without_nan(numbers)}
        self._last_step = step
        self._waiting += (json.dumps(line, allow_nan=False) + "\n").encode()
        self._write_lines()
        with self._ignoring_disk_errors():
            for tag, value in numbers.items():
                self._board.add_scalar(tag, float(value), step)
            self._board.flush()

    def _write_lines(self) -> None:
        end = os.fstat(self._lines.fileno()).st_size
        with self._ignoring_disk_errors():
            try:
                unwritten = memoryview(self._waiting)
                while unwritten:
                    unwritten = unwritten[self._lines.write(unwritten) :]
                os.fsync(self._lines.fileno())
            except OSError:
                os.ftruncate(self._lines.fileno(), end)  # a partial line would corrupt the next one
                raise
            self._waiting = b""

    @contextmanager
    def _ignoring_disk_errors(self) -> Iterator[None]:
        """Context that turns an OSError into a warning, logged once."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                log.warning("metrics cannot be written: %s; the run continues and retries", error)
            self._has_warned = True

    def text(self, tag: str, step: int, markdown: str) -> None:
        with self._ignoring_disk_errors():
            self._board.add_text(tag, writable(markdown), step)

    def hparams(self, config: Mapping[str, object], metrics: Mapping[str, float]) -> None:
        """Write the flat configuration and final metrics for TensorBoard's HParams tab; metrics appear as
        `hparam/<key>`."""
        from torch.utils.tensorboard.summary import hparams as hparams_summaries

        values = {key: v if isinstance(v, (bool, int, float)) else writable(str(v)) for key, v in config.items()}
        finals = {f"hparam/{writable(key)}": float(value) for key, value in metrics.items()}
        with self._ignoring_disk_errors():
            # SummaryWriter.add_hparams would open a second run in a folder named by the time of day.
            for summary in hparams_summaries(values, finals):
                self._board._get_file_writer().add_summary(summary)
            for key, value in finals.items():
                self._board.add_scalar(key, value, max(self._last_step, 0))
            self._board.flush()

    def close(self) -> None:
        self._write_lines()
        self._lines.close()
        with self._ignoring_disk_errors():
            self._board.close()


def _drop_steps_from(path: Path, step: int) -> int:
    """Keep the whole lines of steps below `step`, atomically. Return the last step kept, or -1."""
    if not path.exists():
        return -1
    text = path.read_text(encoding="utf-8", errors="replace")
    whole_lines, last = [], -1
    for line in text.splitlines(keepends=True):
        number = _step_of(line)
        if number is not None and last < number < step:
            whole_lines.append(line)
            last = number
    if "".join(whole_lines) != text:
        with draft_of(path) as draft:
            draft.write_text("".join(whole_lines), encoding="utf-8")
            fsync(draft)
    return last


def _step_of(line: str) -> int | None:
    """Return the step of a line; None for a torn line."""
    if not line.endswith("\n"):
        return None
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
