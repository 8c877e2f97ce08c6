"""Supervised training: SFT on answers, a reward model on pairs of answers, and the data of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from hpcrl.algorithms.aggregation import LossNorm, agg_loss
from hpcrl.algorithms.metrics import Metric, Sum, to_floats
from hpcrl.algorithms.value_loss import bradley_terry_loss
from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.batch.tensors import TensorBatch
from hpcrl.config.roles import ACTOR, REWARD
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, register
from hpcrl.grid.groups import RoleGroups
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.workers.model_worker import ModelWorker
from hpcrl.workers.records import InputsWorker

SEQUENCE = ("input_ids", "response_mask")  # columns of a prompt and its answer


class SftDataWorker(InputsWorker):
    @register(Dispatch.DP_COMPUTE_PROTO, reads=("row",), writes=SEQUENCE, phase="data")
    def load(self, batch: DataProto) -> DataProto:
        """Sequences of the rows, prompt then answer; the mask covers the answer."""
        return answer_columns([self.inputs.answers.pair(row) for row in batch.samples["row"].tolist()])


class SftActorWorker(ModelWorker):
    """The policy of `hpcrl sft`: the actor's engine, with cross-entropy on the answer's tokens."""

    spec = ACTOR

    def __init__(self, groups: RoleGroups, shape: ModelShape, config: Config, *_: object) -> None:
        sft, lora = config.section("sft"), Lora.from_config(config.model)
        super().__init__(groups, shape, config, optim=sft.optim, total_updates=sft.total_training_steps, lora=lora)
        self.max_tokens = sft.max_token_len_per_gpu

    @register(Dispatch.DP_COMPUTE_METRIC, reads=SEQUENCE, phase="update_actor", updates=True)
    def update(self, batch: DataProto) -> dict[str, Metric]:
        """One optimizer step on prompts and answers."""

        def objective(norm: LossNorm) -> Callable[..., tuple[torch.Tensor, dict[str, Metric]]]:
            def loss(outputs: dict[str, torch.Tensor], micro: TensorBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
                mask = micro.padded("response_mask").float()
                nll = agg_loss(-outputs["log_probs"], mask, "token-mean", norm)
                return nll, {"train/loss": Sum(nll.detach())}

            return loss

        return self.train(batch, objective, loss_scale_factor=1.0, max_tokens=self.max_tokens)


class PreferenceWorker(ModelWorker):
    """The reward model of `hpcrl rm`, where rows 2i and 2i + 1 of a batch are a pair: chosen, rejected."""

    spec = REWARD

    def __init__(self, groups: RoleGroups, shape: ModelShape, config: Config, *_: object) -> None:
        rm = config.section("rm")
        super().__init__(groups, shape, config, optim=rm.optim, total_updates=rm.total_training_steps)
        self.max_tokens = rm.max_token_len_per_gpu

    @register(Dispatch.DP_COMPUTE_METRIC, reads=SEQUENCE, phase="update", updates=True)
    def update(self, batch: DataProto) -> dict[str, Metric]:
        """One optimizer step on the pairs of all replicas."""

        def objective(norm: LossNorm) -> Callable[..., tuple[torch.Tensor, dict[str, Metric]]]:
            def loss(outputs: dict[str, torch.Tensor], micro: TensorBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
                return pair_loss(outputs["scores"].squeeze(1), norm.global_batch_size / 2, "train")

            return loss

        return self.train(batch, objective, loss_scale_factor=1.0, max_tokens=self.max_tokens, unit=2)

    @register(Dispatch.DP_COMPUTE_METRIC, reads=SEQUENCE)
    def evaluate(self, batch: DataProto) -> dict[str, Metric]:
        """Metrics of `update` under `val/`, without a step."""
        num_pairs = self.global_norm(batch, 1.0).global_batch_size / 2
        scores = self.engine.scores(batch, max_tokens=self.max_tokens)
        return {} if scores is None else to_floats(pair_loss(scores, num_pairs, "val")[1])


class PreferenceDataWorker(InputsWorker):
    """Pairs as columns, made on the leaders of the trained model's replicas."""

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
        pairs, samples = self.inputs.pairs[batch.meta_info["split"]], batch.samples
        answers = zip(samples.get("answer_row", samples["row"]).tolist(), samples["side"].tolist(), strict=True)
        prompts = [pairs.prompts.prompt_ids(row) for row in samples["row"].tolist()]
        found = list(zip(prompts, (pairs.answer(row, side) for row, side in answers), strict=True))
        return whole_columns(found) if batch.meta_info.get("nll_of_prompt") else answer_columns(found)


def answer_columns(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> DataProto:
    """Columns `input_ids`, prompt then answer, and `response_mask`. pairs: (prompt, answer), int32 ids each."""
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
    return DataProto(
        {
            "input_ids": Ragged.from_rows([np.concatenate(pair) for pair in pairs], np.int32),
            "response_mask": Ragged.from_rows(masks, np.int32),
            "loss_mask": Ragged.from_rows([np.ones_like(mask) for mask in masks], np.int32),
        }
    )


def pair_loss(scores: torch.Tensor, num_pairs: float, split: str) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The loss of scores (2 B,) in the order of a batch of pairs, and its metrics as `<split>/...`."""
    chosen, rejected = scores.view(-1, 2).unbind(1)
    loss, metrics = bradley_terry_loss(chosen, rejected, num_pairs)
    named = {f"{split}/{name}": metric for name, metric in metrics.items()}
    return loss, {f"{split}/loss": Sum(loss.detach()), **named}
