"""Supervised training: SFT on answers, a reward model on pairs of answers, and the data of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpcrl.algorithms.aggregation import LossNorm, agg_loss, token_mean
from hpcrl.algorithms.metrics import Metric, Sum, to_floats
from hpcrl.algorithms.value_loss import bradley_terry_loss
from hpcrl.batch.data_proto import Columns, DataProto, TensorBatch
from hpcrl.batch.ragged import Ragged
from hpcrl.config.roles import ACTOR, REWARD
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, register
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.runtime.groups import RoleGroups
from hpcrl.workers.model_worker import SEQUENCE, ModelWorker
from hpcrl.workers.records import InputsWorker
from hpcrl.workers.scorer import responses_of

if TYPE_CHECKING:
    from hpcrl.data.image_loader import Dataset, ImageLoader
    from hpcrl.runtime.layout import Layout
    from hpcrl.workers.team import Inputs, Team


class DataWorker(InputsWorker):
    """Makes columns of datasets on the leaders. loaders: of the pictures of each split, of a vision-language model."""

    def __init__(self, layout: Layout, rank: int, inputs: Inputs, config: Config) -> None:
        super().__init__(layout, rank, inputs, config)
        self.loaders: Mapping[str, ImageLoader] = {}

    @classmethod
    def build(cls, team: Team, role: str) -> DataWorker | None:
        worker = super().build(team, role)
        if isinstance(worker, DataWorker) and worker.is_leader:
            worker.loaders = team.image_loaders(cls.datasets(team.inputs))
        return worker  # type: ignore[return-value]

    @staticmethod
    def datasets(inputs: Inputs) -> Mapping[str, Dataset]:
        """The datasets whose rows have columns, by split."""
        raise NotImplementedError

    @register(Dispatch.DP_ORDER, reads=("row",), leader_only=True)
    def load_ahead(self, batch: DataProto) -> None:
        """Start to decode the pictures of rows that `load` will be called with."""
        if self.loaders:
            self.loaders[batch.meta_info["split"]].load_ahead(batch.samples["row"].tolist())

    def with_pictures(self, columns: DataProto, split: str, rows: Sequence[int]) -> DataProto:
        """The columns of these rows, and of a vision-language model their pictures."""
        pictures: Columns = {"pictures": self.loaders[split].column(rows)} if self.loaders else {}
        return columns.union(DataProto(pictures))


class SftDataWorker(DataWorker):
    @staticmethod
    def datasets(inputs: Inputs) -> Mapping[str, Dataset]:
        return inputs.sequences

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("row",), writes=SEQUENCE, leader_only=True, phase="data")
    def load(self, batch: DataProto) -> DataProto:
        """Sequences of the rows of meta_info["split"]; the mask is 1 on tokens with loss."""
        split, rows = batch.meta_info["split"], batch.samples["row"].tolist()
        data = self.inputs.sequences[split]
        sequences = [data.sequence(row) for row in rows]  # none, if replicas outnumber rows
        columns = {
            "input_ids": [np.concatenate([prompt, response]) for prompt, response, _ in sequences],
            "response_mask": [mask for _, _, mask in sequences],
        }
        whole = DataProto({name: Ragged.from_rows(parts, np.int32) for name, parts in columns.items()})
        return self.with_pictures(whole, split, rows)


class SftActorWorker(ModelWorker):
    """The policy of `hpcrl sft`: the actor's engine, with cross-entropy on the assistant's tokens."""

    spec = ACTOR

    def __init__(
        self, groups: RoleGroups, shape: ModelShape, config: Config, derived: Any = None, total_steps: int = 0
    ) -> None:
        sft, lora = config.section("sft"), Lora.from_config(config.model)
        super().__init__(groups, shape, config, derived, total_steps, optim=sft.optim, lora=lora)
        self.max_tokens, self.loss_type = sft.max_token_len_per_gpu, sft.loss_type

    @register(Dispatch.DP_COMPUTE_METRIC, reads=SEQUENCE, phase="update_actor", updates=True)
    def update(self, batch: DataProto) -> dict[str, Metric]:
        """One optimizer step on the sequences of all replicas."""
        batch = batch.union(response_ids(batch))

        options = {"max_tokens": self.max_tokens, "topk_ids": "response_ids"}
        return self.train(batch, lambda norm: partial(self._loss, norm), loss_scale_factor=1.0, **options)

    def _loss(
        self, norm: LossNorm, outputs: dict[str, torch.Tensor], micro: TensorBatch
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        likeliest = outputs["own_topk_ids"].squeeze(2)
        return sft_loss(self.loss_type, outputs["log_probs"], likeliest, micro, norm, "train")

    @register(Dispatch.DP_COMPUTE_METRIC, reads=SEQUENCE)
    def evaluate(self, batch: DataProto) -> dict[str, Metric]:
        """Metrics of `update` under `val/`, without a step."""
        norm = self.global_norm(batch, 1.0)
        outputs = self.engine.topk_log_probs(batch, max_tokens=self.max_tokens, temperature=1.0, k=1)
        if not self.is_leader:
            return {}
        found = DataProto({name: outputs[name] for name in ("log_probs", "topk_ids")})
        whole = batch.union(found).union(response_ids(batch))
        log_probs, likeliest = whole.padded("log_probs"), whole.padded("topk_ids")
        return to_floats(sft_loss(self.loss_type, log_probs, likeliest, whole, norm, "val")[1])


def response_ids(batch: DataProto) -> DataProto:
    """Column `response_ids`: what the most likely tokens are compared with."""
    return DataProto({"response_ids": Ragged.from_rows(responses_of(batch), np.int32)})


def sft_loss(
    loss_type: str,
    log_probs: torch.Tensor,
    likeliest: torch.Tensor,
    batch: DataProto | TensorBatch,
    norm: LossNorm,
    split: str,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The mean over all tokens with loss of -log p, or for `dft` of -p log p with p as a constant; this part's share of
    it, and its metrics as `<split>/...`.

    log_probs fp32 and likeliest, the model's most likely tokens: (B, T), as `response_ids` and `response_mask`. The
    normalisation is that of TRL's SFTTrainer; dft is dynamic fine-tuning (Wu et al. 2025, arXiv 2508.05629, eq. 9).
    """
    mask = batch.padded("response_mask").float()
    weight = log_probs.detach().exp() if loss_type == "dft" else 1.0
    loss = agg_loss(-log_probs * weight, mask, "token-mean", norm)
    correct = (likeliest == batch.padded("response_ids", fill=-1)).float()
    metrics: dict[str, Metric] = {"loss": Sum(loss.detach()), "mean_token_accuracy": token_mean(correct, mask)}
    return loss, {f"{split}/{name}": metric for name, metric in metrics.items()}


class PreferenceWorker(ModelWorker):
    """The reward model of `hpcrl rm`, where rows 2i and 2i + 1 of a batch are a pair: chosen, rejected."""

    spec = REWARD

    def __init__(
        self, groups: RoleGroups, shape: ModelShape, config: Config, derived: Any = None, total_steps: int = 0
    ) -> None:
        rm = config.section("rm")
        super().__init__(groups, shape, config, derived, total_steps, optim=rm.optim)
        self.max_tokens = rm.max_token_len_per_gpu

    @register(Dispatch.DP_COMPUTE_METRIC, reads=SEQUENCE, phase="update", updates=True)
    def update(self, batch: DataProto) -> dict[str, Metric]:
        """One optimizer step on the pairs of all replicas."""

        def objective(norm: LossNorm) -> Callable[..., tuple[torch.Tensor, dict[str, Metric]]]:
            return lambda outputs, _: pair_loss(outputs["scores"].squeeze(1), norm.global_batch_size / 2, "train")

        return self.train(batch, objective, loss_scale_factor=1.0, max_tokens=self.max_tokens, unit=2)

    @register(Dispatch.DP_COMPUTE_METRIC, reads=SEQUENCE)
    def evaluate(self, batch: DataProto) -> dict[str, Metric]:
        """Metrics of `update` under `val/`, without a step."""
        num_pairs = self.global_norm(batch, 1.0).global_batch_size / 2
        scores = self.engine.scores(batch, max_tokens=self.max_tokens)
        return {} if scores is None else to_floats(pair_loss(scores, num_pairs, "val")[1])


class PreferenceDataWorker(DataWorker):
    """Pairs as columns, made on the leaders of the trained model's replicas."""

    @staticmethod
    def datasets(inputs: Inputs) -> Mapping[str, Dataset]:
        return inputs.pairs

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("row", "side", "answer_row?"),
        writes=(*SEQUENCE, "loss_mask?"),
        leader_only=True,
        phase="data",
    )
    def load(self, batch: DataProto) -> DataProto:
        """Sequences of meta_info["split"]: the prompt of `row`, then an answer, which the mask covers: that of (row,
        side), or of (answer_row, side) where the batch has that column.

        With meta_info["nll_of_prompt"] the response columns begin with the prompt's second token: `response_mask` is 0
        on the prompt, `loss_mask` is 1 on all tokens.
        """
        split, samples, rows = batch.meta_info["split"], batch.samples, batch.samples["row"].tolist()
        pairs = self.inputs.pairs[split]
        answers = zip(samples.get("answer_row", samples["row"]).tolist(), samples["side"].tolist(), strict=True)
        prompts = [pairs.prompt_ids(row) for row in rows]
        sequences = list(zip(prompts, (pairs.answer(row, side) for row, side in answers), strict=True))
        columns = whole_columns(sequences) if batch.meta_info.get("nll_of_prompt") else answer_columns(sequences)
        return self.with_pictures(columns, split, rows)


def answer_columns(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> DataProto:
    """Columns `input_ids`, prompt then answer, and `response_mask`.

    Args:
        pairs: (prompt, answer), int32 ids each.
    """
    lengths = [len(answer) for _, answer in pairs]
    return DataProto(
        {
            "input_ids": Ragged.from_rows([np.concatenate(pair) for pair in pairs], np.int32),
            "response_mask": Ragged.from_lengths(np.ones(sum(lengths), np.int32), lengths),
        }
    )


def whole_columns(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> DataProto:
    """As `answer_columns`, with a response of all tokens but the first: `response_mask` is 1 on the answer,
    `loss_mask` on the whole response."""
    masks = [np.repeat((0, 1), (len(prompt) - 1, len(answer))) for prompt, answer in pairs]
    found = answer_columns(pairs)
    found.tokens["response_mask"] = Ragged.from_rows(masks, np.int32)
    found.tokens["loss_mask"] = Ragged.from_rows([np.ones_like(mask) for mask in masks], np.int32)
    return found


def pair_loss(scores: torch.Tensor, num_pairs: float, split: str) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The loss of scores (2 B,) in the order of a batch of pairs, and its metrics as `<split>/...`."""
    chosen, rejected = scores.view(-1, 2).unbind(1)
    loss, metrics = bradley_terry_loss(chosen, rejected, num_pairs)
    named = {f"{split}/{name}": metric for name, metric in metrics.items()}
    return loss, {f"{split}/loss": Sum(loss.detach()), **named}
