"""One role's model: log-probs, values and optimizer steps over packed micro-batches, on any layout."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.batch.ragged import Ragged
from hpcrl.engine.microbatch import ROW_MULTIPLE, MicroBatch, make_micro_batches, needed_count
from hpcrl.engine.optim import build_optimizer, learning_rate, uses_distributed_optimizer
from hpcrl.engine.outputs import Outputs, VocabularyOutputs, scores, values
from hpcrl.engine.saved_parts import share_writing
from hpcrl.launch import platform
from hpcrl.model.build import build_model, local_shards
from hpcrl.model.params import OUTPUT_LAYER, SCALAR_HEADS, Head

from megatron.core.dist_checkpointing.mapping import ShardedObject  # isort: skip
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # isort: skip
from megatron.core.distributed import finalize_model_grads  # isort: skip
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # isort: skip

if TYPE_CHECKING:
    from hpcrl.batch.data_proto import DataProto
    from hpcrl.config.schema import OptimConfig
    from hpcrl.grid.groups import RoleGroups
    from hpcrl.model.shape import ModelShape


class Metric(Protocol):
    """A number that can be merged over micro-batches."""

    def merge(self, other: Any) -> Any: ...


Loss = Callable[[Outputs, "DataProto"], tuple[Tensor, dict[str, Metric]]]
# What becomes of a micro-batch's head outputs (R, ...) on the last stage: kept, or made into a loss.
Consume = Callable[[MicroBatch, Outputs], Any]
# The model's raw output (R, width) into the head outputs that are asked for.
Compute = Callable[[MicroBatch, Tensor], Outputs]


class TrainEngine:
    """A model on this rank's part of a layout, and its optimizer.

    Every method is collective over the role's ranks. The ranks of a replica pass the same samples, in the same order.
    """

    def __init__(
        self,
        shape: ModelShape,
        groups: RoleGroups,
        *,
        head: Head = "lm",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        optim: OptimConfig | None = None,
        total_steps: int = 0,
        exact: bool = False,
        on_micro_batch: Callable[[], None] | None = None,
    ) -> None:
        """`optim` None makes a frozen model; `total_steps` counts the optimizer steps of the whole run; `exact` gives
        log-probs the bits of the native engine's exact mode. `on_micro_batch()` is called as each begins."""
        self.shape, self.groups, self.head, self.dtype = shape, groups, head, dtype
        self.optim, self.total_steps = optim, total_steps
        self.steps = 0  # optimizer steps done
        self._on_micro_batch = on_micro_batch or (lambda: None)
        self.module = build_model(shape, groups, head=head, dtype=dtype, seed=seed, exact=exact)
        self.config = self.module.config
        self.model: torch.nn.Module = self.module
        self.optimizer = None
        if optim is None:
            self.module.requires_grad_(False)
        else:
            self.config.finalize_model_grads_func = _finalize_sum
            with platform.cpu_bridge():
                ddp_config = DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True, use_distributed_optimizer=uses_distributed_optimizer(optim)
                )
                self.model = DistributedDataParallel(self.config, ddp_config, self.module, pg_collection=groups.pgc)
                self.optimizer = build_optimizer(self.model, optim, groups, dtype)
        self._vocabulary = VocabularyOutputs(groups.tp, shape.vocab_size, exact)
        self._schedule = get_forward_backward_func(pp_size=groups.layout.pp, vp_size=None)
        self._p2p = P2PCommunicator(groups.pp, self.config) if groups.layout.pp > 1 else None

    def log_probs(
        self,
        batch: DataProto,
        *,
        max_tokens: int,
        temperature: float,
        entropy: bool = False,
        sum_pi_squared: bool = False,
    ) -> dict[str, Ragged]:
        """'log_probs' (and 'entropy', and 'sum_pi_squared', the sum of the vocabulary's squared probabilities) of the
        response tokens: fp32 on the CPU, in response space, in the batch's order.

        On every rank of the last stage; {} on the others. Reads input_ids and the lengths of response_mask.
        """
        options: dict[str, Any] = {"temperature": temperature, "entropy": entropy, "sum_pi_squared": sum_pi_squared}
        return self._forward(batch, max_tokens, partial(self._vocabulary.log_probs, **options))

    def topk_log_probs(self, batch: DataProto, *, max_tokens: int, temperature: float, k: int) -> dict[str, Ragged]:
        """'log_probs' of the response tokens, and at each of them the k likeliest tokens, the likeliest first.

        'topk_log_probs' fp32 and 'topk_ids' int32 hold k numbers per response token, end to end (see
        `Ragged.padded_vectors`). Otherwise as `log_probs`.
        """
        return self._forward(batch, max_tokens, partial(self._vocabulary.topk, temperature=temperature, k=k))

    def values(self, batch: DataProto, *, max_tokens: int) -> dict[str, Ragged]:
        """'values', the value before each response token; otherwise as `log_probs`."""
        return self._forward(batch, max_tokens, values)

    def scores(self, batch: DataProto, *, max_tokens: int) -> Tensor | None:
        """The reward head's number at the last token of each sequence: (N,) fp32 on the CPU, in the batch's order.

        On every rank of the last stage; None on the others. Reads input_ids.
        """
        found = self._forward(batch, max_tokens, scores)
        return found["scores"].values if found else None

    def train(
        self,
        batch: DataProto,
        *,
        max_tokens: int,
        loss: Loss,
        temperature: float = 1.0,
        entropy: bool = False,
        topk_ids: str | None = None,
        unit: int = 1,
    ) -> dict[str, Any]:
        """One optimizer step over the samples of all replicas.

        `loss` gets, on the last stage and per micro-batch that has response tokens, padded (b, T) outputs that carry
        gradients ({'log_probs', 'entropy'}, {'values'} or {'scores'} of shape (b, 1)) and the micro-batch's samples, of
        which `unit` successive ones are never parted. Its gradient is summed as it is over micro-batches and replicas:
        the loss is normalised by the global mini-batch already. `topk_ids` names a column of k token ids per response
        token, as `topk_log_probs` gives them: then there are also 'topk_log_probs' (b, T, k) at these ids, with
        gradients, and 'own_topk_ids' (b, T, k) int64, the likeliest of the model in training.
        Returns the loss's metrics merged over the micro-batches (last stage), and as floats on every rank 'grad_norm'
        (before clipping), 'lr', and 'skipped_updates': 1 where the norm is not finite and the weights stay as they are.
        """
        if self.optim is None or self.optimizer is None:
            raise RuntimeError("this engine was built without an optimizer; pass optim=... to train it")
        compute: Compute = values if self.head == "value" else scores
        if self.head == "lm":
            options: dict[str, Any] = {"temperature": temperature, "entropy": entropy}
            compute = partial(self._vocabulary.log_probs, **options)
            if topk_ids is not None:
                compute = partial(self._vocabulary.log_probs_at, topk_ids=batch.fetch(topk_ids), **options)

        def consume(micro: MicroBatch, outputs: Outputs) -> tuple[Tensor, Tensor, dict[str, Metric]]:
            if micro.num_outputs == 0:
                value = torch.stack([output.sum() for output in outputs.values() if output.requires_grad]).sum() * 0.0
                metrics: dict[str, Metric] = {}
            else:
                padded = {name: micro.padded(output) for name, output in outputs.items()}
                value, metrics = loss(padded, batch[micro.rows])
                value = value + 0.0  # the schedule frees the loss's memory, which a view would share
            return value, torch.tensor(0, dtype=torch.int), metrics

        self.model.zero_grad_buffer()  # type: ignore[operator]
        # Without this, gradients of FP32Optimizer's last step, aliases of the buffer, would be counted twice.
        self.optimizer.zero_grad()
        results = self._run(batch, max_tokens, compute, consume, forward_only=False, unit=unit)
        merged: dict[str, Any] = {}
        for part in results:
            for name, metric in part.items():
                merged[name] = merged[name].merge(metric) if name in merged else metric
        return merged | self._step()

    def named_shards(self) -> dict[str, Tensor]:
        """Global parameter name -> this rank's part, the live data in megatron's order."""
        parameters = dict(self.module.named_parameters())
        return {
            shard.name: parameters[shard.local_name].data for shard in local_shards(self.shape, self.groups, self.head)
        }

    def sharded_state_dict(self, *, optimizer: bool = True, is_loading: bool = False) -> dict[str, Any]:
        """Megatron's sharded state of the model and, where asked and present, of its optimizer, under global names.

        The optimizer's state is in the `fully_reshardable` form: one tensor per parameter and kind, in the parameter's
        shape, so that it can be loaded under any layout. The other entries ('steps') are the same on all ranks.
        For saving, tensors alias what is trained on; `replica_id` says who writes a weight.
        """
        metadata = {
            "dp_cp_group": self.groups.pgc.dp_cp,
            "non_homogeneous_layers": True,  # one key per layer instead of one stack of all layers
            "distrib_optim_sharding_type": "fully_reshardable",
        }
        with platform.cpu_bridge():
            model = self.module.sharded_state_dict(metadata=metadata)
            # Megatron's modules keep empty extra states, which would be written as pickles.
            model = {name: entry for name, entry in model.items() if not isinstance(entry, ShardedObject)}
            for entry in model.values():
                # Megatron pads the vocabulary by layout and so lets its size differ; ours does not depend on it.
                entry.allow_shape_mismatch = False
            if self.head in SCALAR_HEADS and OUTPUT_LAYER in model:
                model[OUTPUT_LAYER].key = SCALAR_HEADS[self.head]
            if not is_loading:
                share_writing(model, self.groups.pgc.dp_cp.rank(), self.groups.pgc.dp_cp.size())
            state: dict[str, Any] = {"model": model, "steps": self.steps}
            if optimizer and self.optimizer is not None:
                # Megatron collects garbage here, 0.3 s of walking over modules that live on anyway.
                gc.freeze()
                state["optimizer"] = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
                gc.unfreeze()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was loaded for `sharded_state_dict(is_loading=True)`.

        Parameters without an entry keep their values; without 'optimizer' the optimizer starts anew from the weights.
        """
        parameters = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, tensor in state["model"].items():
                parameters[name].copy_(tensor)
        if self.optimizer is None:
            return
        with platform.cpu_bridge():
            if "optimizer" in state:
                self.optimizer.load_state_dict(state["optimizer"])
                self.steps = state["steps"]
            else:
                self.optimizer.reload_model_params()

    def _step(self) -> dict[str, float]:
        assert self.optim is not None and self.optimizer is not None
        lr = learning_rate(self.steps, self.optim, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with platform.cpu_bridge():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())  # over all ranks, so that all of them skip or none
            if math.isfinite(norm):
                self.optimizer.step()
                self.steps += 1
        return {"grad_norm": norm, "lr": lr, "skipped_updates": float(not math.isfinite(norm))}

    def _forward(self, batch: DataProto, max_tokens: int, compute: Compute) -> dict[str, Ragged]:
        def consume(micro: MicroBatch, outputs: Outputs) -> tuple[MicroBatch, Outputs]:
            return micro, outputs

        with torch.no_grad():
            results = self._run(batch, max_tokens, compute, consume, forward_only=True)
        if not results:
            return {}
        order = torch.cat([torch.as_tensor(micro.rows) for micro, _ in results]).argsort()
        return {
            name: Ragged.concat([micro.ragged(outputs[name]) for micro, outputs in results]).take(order)
            for name in results[0][1]
        }

    def _run(
        self,
        batch: DataProto,
        max_tokens: int,
        compute: Compute,
        consume: Consume,
        *,
        forward_only: bool,
        unit: int = 1,
    ) -> list[Any]:
        """Run megatron's schedule over the micro-batches of all replicas' common number; what `consume` returned (its
        last part when training), on the last stage."""
        micros = make_micro_batches(
            batch,
            self.shape,
            max_tokens=max_tokens,
            count=self._common_count(needed_count(batch, max_tokens, unit)),
            multiple=math.lcm(self.groups.layout.tp, ROW_MULTIPLE),
            same_size=self.groups.layout.pp > 1,
            device=platform.device(),
            wanted="last" if self.head == "reward" else "response",
            unit=unit,
        )

        def step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            self._on_micro_batch()
            micro = next(iterator)
            packed = micro.packed
            output = model(packed.input_ids, packed.position_ids, None, packed_seq_params=packed)
            return output, lambda raw, non_loss_data=False: consume(micro, compute(micro, raw))

        return self._schedule(
            forward_step_func=step,
            data_iterator=iter(micros),
            model=self.model,
            num_microbatches=len(micros),
            seq_length=micros[0].packed.input_ids.size(1),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            p2p_communicator=self._p2p,
            pg_collection=self.groups.pgc,
        )

    def _common_count(self, count: int) -> int:
        """The largest number of micro-batches that any replica needs."""
        if self.groups.layout.dp == 1:
            return count
        tensor = torch.tensor([count], device=platform.device())
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.groups.dp)
        return int(tensor)


def _finalize_sum(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients over replicas and tied embeddings, without its division by the token count."""
    finalize_model_grads(model, None, **kwargs)
