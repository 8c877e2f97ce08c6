"""Online DPO (Guo et al. 2024, arXiv:2402.04792): two responses per prompt, the scorer prefers one, DPO's loss.

mpiexec -n 4 python -m hpcrl run docs/examples/online_dpo_by_hand.py configs/grpo_countdown_cpu.yaml \
    run.name=online_dpo_by_hand rollout.n=2 online_dpo_by_hand.beta=0.05

`hpcrl online_dpo` has it built in, with all losses on pairs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.nn.functional import logsigmoid

from hpcrl.api import ActorWorker, DataProto, Dispatch, Field, RefWorker, Run, Section, Sum, Train, register


class OnlineDpoConfig(Section):
    """Online DPO."""

    beta: float = Field(0.1, gt=0, description="weight of the KL divergence from the reference")


class DpoActor(ActorWorker):
    @register(
        Dispatch.DP_COMPUTE_METRIC,
        reads=("input_ids", "response_mask", "ref_log_prob", "prompt", "score"),
        group_by="prompt",
        updates=True,
    )
    def update_dpo(self, batch: DataProto) -> dict[str, Any]:
        """One optimizer step on the pairs, (Rafailov et al. 2023, eq. 7). Pairs of equal scores count as 0."""
        samples = batch.samples
        pairs = batch[np.lexsort((-samples["score"], samples["prompt"]))]  # rows 2i, 2i + 1: preferred, rejected
        with self.engine.offload.on_device("parameters", "gradients", "optimizer"):
            return self.train(pairs, self._loss, loss_scale_factor=1.0, max_tokens=self.max_tokens, unit=2)

    def _loss(self, norm: Any) -> Callable[..., Any]:
        def loss(outputs: dict[str, Any], micro: Any) -> Any:
            ratio = (outputs["log_probs"] - micro.padded("ref_log_prob")) * micro.padded("response_mask")
            margin = self.config.online_dpo_by_hand.beta * (ratio.sum(1)[0::2] - ratio.sum(1)[1::2])
            score = micro.samples["score"]
            differs = margin.new_tensor(score[0::2] > score[1::2])
            value = -(logsigmoid(margin) * differs).sum() / (norm.global_batch_size / 2)
            return value, {"actor/dpo_loss": Sum(value.detach())}

        return loss


class OnlineDpo(Train):
    """DPO on pairs that the policy has just drawn."""

    name = "online_dpo_by_hand"
    section = OnlineDpoConfig
    own_roles = (DpoActor, RefWorker)

    def loop(self, run: Run) -> None:
        actor, ref = run.roles("actor", "ref")
        for step in run.steps():
            batch = self.rollouts.next(step)
            if batch is None or run.stops_before("ref", "update_dpo", "update_weights"):
                continue
            run.log({"critic/score/mean": float(batch.samples["score"].mean())})
            batch = ref.compute_ref_log_prob(batch).get()
            actor.update_dpo(batch)
            self.rollouts.update_weights(step)
            run.archive(batch)


JOB = OnlineDpo
