"""Validation: sample the held-out prompts, score them, average."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from hpcrl.batch.data_proto import DataProto
from hpcrl.config.schema import DataConfig, ValKwargs
from hpcrl.controller.controller import Controller
from hpcrl.data.prompts import PromptDataset
from hpcrl.rollout.protocol import SamplingParams


class Validator:
    """Runs on rank 0. The same random numbers are used at every validation, so that a change is the model's."""

    def __init__(
        self,
        controller: Controller,
        prompts: PromptDataset,
        data: DataConfig,
        ways: Sequence[ValKwargs],
        eos_token_ids: tuple[int, ...],
        *,
        num_prompts: int | None = None,
        num_shown: int = 0,
    ) -> None:
        self.controller = controller
        self.prompts = prompts
        self.data = data
        self.ways = ways
        self.eos_token_ids = eos_token_ids
        self.rows = np.arange(min(num_prompts or len(prompts), len(prompts)), dtype=np.int64)
        self.num_shown = num_shown
        self.sources = np.array(prompts.source_of_rows(), object)[self.rows]

    def run(self) -> tuple[dict[str, float], str]:
        """Metrics, and a Markdown table of the first samples.

        `val-core/<source>/acc/mean@N` is the mean over prompts of the mean over N samples; `reward` in place of `acc`
        where the scorer gives no `acc` (verl's rule). A sample whose scoring failed counts as wrong.
        """
        metrics: dict[str, float] = {}
        shown = ""
        for way in self.ways:
            batch = self._sample(way)
            for source in sorted(set(self.sources.tolist())):
                rows = np.repeat(self.sources == source, way.n)
                reward, acc = (batch.samples[name][rows].astype(np.float64) for name in ("score", "acc"))
                columns = {"reward": reward} if np.isnan(acc).all() else {"acc": np.nan_to_num(acc), "reward": reward}
                for name, values in columns.items():
                    per_prompt = values.reshape(-1, way.n)
                    group = "val-core" if name == next(iter(columns)) else "val-aux"
                    metrics[f"{group}/{source}/{name}/mean@{way.n}"] = float(per_prompt.mean())
                    if way.n > 1:
                        metrics[f"val-aux/{source}/{name}/std@{way.n}"] = float(per_prompt.std(axis=1).mean())
            metrics[f"val-aux/response_length/mean@{way.n}"] = float(batch.samples["response_length"].mean())
            for name, count in _failures(batch).items():
                metrics[f"val-aux/{name}"] = metrics.get(f"val-aux/{name}", 0.0) + count
            shown = shown or self._table(batch)
        return metrics, shown

    def _sample(self, way: ValKwargs) -> DataProto:
        n = way.n
        rows = np.repeat(self.rows, n)
        samples = {
            "row": rows,
            "epoch": np.zeros(len(rows), np.int64),
            "sample_index": np.tile(np.arange(n, dtype=np.int64), len(self.rows)),
            "show": np.arange(len(rows)) < self.num_shown * n,
        }
        batch = DataProto({}, samples, {"split": "val", "step": 0})
        sampling = SamplingParams(
            max_new_tokens=self.data.max_response_length,
            temperature=way.temperature,
            top_k=way.top_k,
            top_p=way.top_p,
            eos_token_ids=self.eos_token_ids,
        )
        batch = batch.union(self.controller["rollout"].generate(batch, sampling).get())
        return batch.union(self.controller["reward"].score(batch).get())

    def _table(self, batch: DataProto) -> str:
        shown = np.flatnonzero(batch.samples["show"])
        lines = ["| prompt | response | score |", "|---|---|---|"]
        for row in shown.tolist():
            prompt, response = (_code(batch.samples[name][row]) for name in ("prompt_text", "response_text"))
            lines.append(f"| {prompt} | {response} | {batch.samples['score'][row]:.3g} |")
        return "\n".join(lines) if len(shown) else ""


def _code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "\\|").replace("\n", " ") + "`"


def _failures(batch: DataProto) -> dict[str, float]:
    """How many scores failed, summed over replicas."""
    counts: dict[str, float] = defaultdict(float)
    for part in batch.metrics:
        for name, metric in part.items():
            if name.startswith("reward/"):
                counts[name] += metric.finish()
    return dict(counts)
