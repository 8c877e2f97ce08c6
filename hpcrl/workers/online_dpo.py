"""Online DPO: the policy on pairs of its own responses."""

from __future__ import annotations

from hpcrl.algorithms.metrics import Metric
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.derive import Derived
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, register
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.groups import RoleGroups
from hpcrl.workers.model_worker import Updates
from hpcrl.workers.preference import PAIR, PreferencePolicy


class OnlineDpoActorWorker(PreferencePolicy):
    """The policy of `hpcrl online_dpo`; its log-probs are those of sampling, at rollout.temperature."""

    def __init__(
        self, groups: RoleGroups, shape: ModelShape, config: Config, derived: Derived, total_steps: int
    ) -> None:
        options = {"total_updates": total_steps * derived.actor_updates_per_step, "exact": config.rollout.exact}
        own, temperature = config.section("online_dpo"), config.rollout.temperature
        super().__init__(groups, shape, config, own, temperature=temperature, **options)
        actor = config.actor
        self.updates = Updates(actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle, config.run.seed)

    @register(Dispatch.DP_COMPUTE_METRIC, reads=(*PAIR, "rollout_log_probs", "routed_experts?", "prompt"), updates=True)
    def update_actor(self, batch: DataProto) -> list[dict[str, Metric]]:
        """All optimizer steps of a training step; the metrics of each mini-batch."""
        found: list[dict[str, Metric]] = []
        with self.engine.offload.on_device("parameters", "gradients", "optimizer"):
            for mini in self.updates.mini_batches(batch):
                if found:
                    mini.pop(["rollout_log_probs"])  # they are those of the weights before the first update
                found.append(self.train_pairs(mini))
        return found
