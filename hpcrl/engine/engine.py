"""One role's model: log-probs, values and optimizer steps over packed micro-batches, on any layout."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.algorithms.metrics import Metric, merge
from hpcrl.batch.data_proto import DataProto, TensorBatch
from hpcrl.batch.ragged import Ragged
from hpcrl.engine.data_parallel import DataParallelChunks, Overlap, sums_weight_gradients
from hpcrl.engine.microbatch import MicroBatch, column_of, make_micro_batches, needed_count, recorded_experts
from hpcrl.engine.model_state import load_model_state, model_state, state_metadata
from hpcrl.engine.offload import offload_of
from hpcrl.engine.optim import build_optimizer, clip_gradients, gradient_norm, learning_rate, sum_gradients
from hpcrl.engine.outputs import Outputs, VocabularyOutputs, gather_outputs, scores, values
from hpcrl.model.adapters import MergedWeights
from hpcrl.model.blocks.router import RouterLosses
from hpcrl.model.build import build_model, local_shards, named_parameters
from hpcrl.model.hf_files import Safetensors
from hpcrl.model.params import SCALAR_HEADS, Head, Shard
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.runtime import platform
from hpcrl.runtime.accelerator import MegatronRanges, annotated
from hpcrl.runtime.layout import FP8_ROWS, ROW_MULTIPLE

from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # isort: skip

if TYPE_CHECKING:
    from hpcrl.config.roles import Part
    from hpcrl.config.schema import DdpConfig, MoeConfig, OptimConfig, RecomputeConfig, TransformerEngineConfig
    from hpcrl.model.blocks.mixture import RoutedExperts
    from hpcrl.runtime.groups import RoleGroups


Loss = Callable[[Outputs, TensorBatch], tuple[Tensor, dict[str, Metric]]]
# Handles a micro-batch's head outputs (R, ...) on the last stage: keeps them, or computes a loss.
Consume = Callable[[MicroBatch, Outputs], Any]
# Maps the model's raw output (R, width), hidden states for a language model, to head outputs.
Compute = Callable[[MicroBatch, Tensor], Outputs]

GRAD_NORM = "grad_norm"  # metric of an update, after the role's name


class TrainEngine:
    """A model on this rank's part of a layout, and its optimizer.

    Every method is collective over the role's ranks. The ranks of a replica pass the same samples, in the same order.

    Offloaded parts are loaded for the duration of a method. To save copies between several calls, make them inside
    `offload.on_device`; reading the model's tensors directly requires it.
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
        sequence_parallel: bool = True,
        recompute: RecomputeConfig | None = None,
        te: TransformerEngineConfig | None = None,
        lora: Lora | None = None,
        head_chunk_tokens: int | None = 1024,
        offload: Collection[Part] = (),
        moe: MoeConfig | None = None,
        ddp: DdpConfig | None = None,
        gradient_accumulation_fusion: bool | None = None,
        on_micro_batch: Callable[[], None] | None = None,
    ) -> None:
        """Build the model, and its optimizer if it is trained.

        Args:
            optim: None makes a frozen model.
            total_steps: optimizer steps of the whole run.
            exact: log-probs have the bits of the native engine's exact mode.
            sequence_parallel, recompute, te: as in `build_model`.
            lora: only the adapters are trained then.
            head_chunk_tokens: as in `VocabularyOutputs`.
            offload: the parts that are on the device only while they are in use.
            moe: the coefficients of the router's losses.
            ddp: as in `Overlap.of`.
            gradient_accumulation_fusion: as in `sums_weight_gradients`.
            on_micro_batch: called at the start of each micro-batch.
        """
        self.shape, self.groups, self.head, self.dtype, self.lora = shape, groups, head, dtype, lora
        self.optim, self.total_steps = optim, total_steps
        self.steps = 0  # optimizer steps done
        self._moe = moe
        self._on_micro_batch = on_micro_batch or (lambda: None)
        options: dict[str, Any] = {"exact": exact, "sequence_parallel": sequence_parallel, "recompute": recompute}
        options |= {"te": te, "lora": lora, "dtype": dtype, "seed": seed}
        options["fp32_gradients"] = sums_weight_gradients(gradient_accumulation_fusion, optim, dtype)
        self.chunks = build_model(shape, groups, head=head, **options)
        self._local = local_shards(shape, groups, head, lora)
        self.config = self.chunks[0].config
        self.config.timers = MegatronRanges()
        self.models: list[torch.nn.Module] = [*self.chunks]  # called by the schedule
        self.optimizer = None
        self._replicated: DataParallelChunks | None = None
        self._in_update = False
        if optim is None:
            for chunk in self.chunks:
                chunk.requires_grad_(False)
        else:
            self._make_optimizer(optim, ddp)
        self._vocabulary = VocabularyOutputs(
            self.chunks[-1], groups.tp, shape.softmax_size, chunk_rows=head_chunk_tokens, exact=exact
        )
        vpp = groups.layout.vpp if groups.layout.vpp > 1 else None
        self._schedule = get_forward_backward_func(pp_size=groups.layout.pp, vp_size=vpp)
        self._p2p = P2PCommunicator(groups.pp, self.config) if groups.layout.pp > 1 else None
        self.offload = offload_of(self.chunks, self.models, self.optimizer, offload)
        self.offload.unload()

    def _make_optimizer(self, optim: OptimConfig, ddp: DdpConfig | None) -> None:
        shape, groups, sharded = self.shape, self.groups, optim.chosen().is_sharded
        self.config.finalize_model_grads_func = sum_gradients
        overlap = Overlap.of(ddp, shape, groups, sharded=sharded, has_adapters=self.lora is not None)
        with platform.cpu_bridge():
            self._replicated = DataParallelChunks(self.chunks, self.config, groups, overlap, sharded=sharded)
            self.models = [*self._replicated.models]
            tower_lr = shape.vision.lr if shape.vision is not None and shape.vision.train != "none" else None
            parameters = named_parameters(self.chunks)
            shards: dict[Tensor, Shard] = {parameters[it.chunk, it.local_name]: it for it in self._local}
            self.optimizer = build_optimizer(
                self._replicated.models, optim, groups, self.dtype, shape, shards, tower_lr=tower_lr
            )

    def log_probs(
        self,
        batch: DataProto,
        *,
        max_tokens: int,
        temperature: float,
        entropy: bool = False,
        sum_pi_squared: bool = False,
        record_routing: bool = False,
    ) -> dict[str, Ragged]:
        """Return 'log_probs' (and 'entropy', and 'sum_pi_squared', the sum of the vocabulary's squared probabilities)
        of the response tokens: fp32 on the CPU, in response space, in the batch's order.

        On every rank of the last stage; {} on the others. Reads input_ids, the lengths of response_mask and, if
        present, routed_experts: the experts to use for each token (see `hpcrl.engine.microbatch`). `record_routing`
        adds 'routed_experts', the experts that were used.
        """
        compute = partial(
            self._vocabulary.log_probs, temperature=temperature, entropy=entropy, sum_pi_squared=sum_pi_squared
        )
        return self._forward(batch, max_tokens, compute, record_routing=record_routing)

    def topk_log_probs(self, batch: DataProto, *, max_tokens: int, temperature: float, k: int) -> dict[str, Ragged]:
        """Return 'log_probs' of the response tokens, and at each of them the k most likely tokens, in descending order.

        'topk_log_probs' fp32 and 'topk_ids' int32 hold k numbers per response token, end to end (see
        `Ragged.padded_vectors`). Otherwise as `log_probs`.
        """
        return self._forward(batch, max_tokens, partial(self._vocabulary.topk, temperature=temperature, k=k))

    def values(self, batch: DataProto, *, max_tokens: int) -> dict[str, Ragged]:
        """Return 'values', the value before each response token; otherwise as `log_probs`."""
        return self._forward(batch, max_tokens, values)

    def scores(self, batch: DataProto, *, max_tokens: int) -> Tensor | None:
        """Return the reward head's output at the last token of each sequence: (N,) fp32 on the CPU, in the batch's
        order.

        On every rank of the last stage; None on the others. Reads input_ids.
        """
        found = self._forward(batch, max_tokens, scores)
        return torch.from_numpy(found["scores"].values) if found else None

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
        columns: dict[str, Ragged] | None = None,
    ) -> dict[str, Any]:
        """Run one optimizer step over the samples of all replicas.

        On the last stage, `loss` is called per micro-batch that has response tokens, with padded (b, T) outputs that
        carry gradients ({'log_probs', 'entropy'}, {'values'} or {'scores'} of shape (b, 1)) and the micro-batch's
        samples as a `TensorBatch` on the device of the outputs. `unit` successive samples are never separated.
        Gradients are summed over micro-batches and replicas, because the loss is normalised by the global mini-batch
        already.

        `topk_ids` names a column of k token ids per response token, as returned by `topk_log_probs`: outputs then
        contain 'topk_log_probs' (b, T, k) at these ids, with gradients, and 'own_topk_ids' (b, T, k) int64, the most
        likely tokens of the trained model. `columns` receives 'log_probs' and 'entropy' of the weights before the step,
        as returned by `log_probs`.

        Returns the loss's metrics merged over the micro-batches (last stage), and as floats on every rank 'grad_norm'
        (before clipping), 'lr', 'skipped_updates' (1 if the norm is not finite and the weights were not changed), and
        `RouterLosses.metrics` for a model with experts.
        """
        if self.optim is None or self.optimizer is None or self._replicated is None:
            raise RuntimeError("this engine was built without an optimizer; pass optim=... to train it")
        compute: Compute = values if self.head == "value" else scores
        if self.head == "lm":
            ids = None if topk_ids is None else batch.fetch(topk_ids)
            compute = partial(self._vocabulary.log_probs, temperature=temperature, entropy=entropy, topk_ids=ids)

        micros = self._micro_batches(batch, max_tokens, unit)
        losses = self._router_losses(batch, self.shape.routed) if self.shape.routed is not None else None
        for micro in micros:
            if micro.packed.routing is not None:
                micro.packed.routing.losses = losses
        with self.offload.on_device("parameters", "gradients", "optimizer"):
            self._replicated.zero_gradients()
            # Else the gradients of FP32Optimizer's last step, aliases of the buffer, would be counted twice.
            self.optimizer.zero_grad()
            results = self._run(micros, compute, _with_loss(loss, batch), forward_only=False)
            step_metrics = self._step()
            if not self._in_update:
                self._replicated.gather_weights()
        merged: dict[str, Any] = dict(merge(part for part, _, _ in results))
        if columns is not None and results:
            columns |= _columns([(micro, outputs) for _, micro, outputs in results])
        if losses is not None:
            merged |= losses.metrics(self.groups.pgc.intra_dist_opt)
        return merged | step_metrics

    @contextmanager
    def update(self) -> Iterator[None]:
        """Context of several optimizer steps, with everything on the device. Only `train` may read the weights inside:
        those of a step may be gathered in the next one's forward pass. Collective."""
        with self.offload.on_device("parameters", "gradients", "optimizer"):
            self._in_update = True
            try:
                yield
            finally:
                self._in_update = False
            if self._replicated is not None:
                self._replicated.gather_weights()

    def named_shards(self) -> dict[str, Tensor]:
        """Return global parameter name -> this rank's part, aliasing the parameters, in the model's order.

        Read and write offloaded parameters inside `offload.on_device("parameters")`.
        """
        parameters = named_parameters(self.chunks)
        return {shard.name: parameters[shard.chunk, shard.local_name].data for shard in self._local}

    def merged_shards(self) -> Mapping[str, Tensor]:
        """As `named_shards`, of the equivalent model with merged adapters."""
        weights = self.named_shards()
        if self.lora is None:
            return weights
        return MergedWeights(weights, self._local, self.lora)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Context in which the model runs without its adapters."""
        for chunk in self.chunks:
            chunk.uses_adapters = False
        try:
            yield
        finally:
            for chunk in self.chunks:
                chunk.uses_adapters = True

    def sharded_state_dict(self, *, optimizer: bool = True, is_loading: bool = False) -> dict[str, Any]:
        """Return megatron's sharded state of the model and, if requested and present, of its optimizer, under global
        names.

        The optimizer's state is in the `fully_reshardable` form: one tensor per parameter and kind, in the parameter's
        shape, so that it can be loaded under any layout. The other entries ('steps') are the same on all ranks. Tensors
        alias the trained ones for saving, and may do so for loading: call this and use the result inside
        `offload.on_device("parameters", "optimizer")`. `replica_id` selects the writer of a weight.
        """
        metadata = state_metadata(self.groups, has_experts=self.shape.routed is not None)
        with platform.cpu_bridge():
            model = model_state(self.chunks, self.groups, self.head, metadata, is_loading=is_loading)
            state: dict[str, Any] = {"model": model, "steps": self.steps}
            if optimizer and self.optimizer is not None:
                # Megatron collects garbage here; freezing saves 0.3 s of walking over live modules.
                gc.freeze()
                state["optimizer"] = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
                gc.unfreeze()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `sharded_state_dict(is_loading=True)`.

        Parameters without an entry keep their values; without 'optimizer' the optimizer is reset from the weights.
        """
        load_model_state(self.chunks, state["model"])
        if self.optimizer is None:
            return
        with platform.cpu_bridge():
            if "optimizer" in state:
                self.optimizer.load_state_dict(state["optimizer"])
                self.steps = state["steps"]
            else:
                self.optimizer.reload_model_params()

    def load_hugging_face(self, source: Safetensors) -> None:
        """Load the weights of a Hugging Face directory; each rank reads its part.

        A critic's or reward model's head and adapters keep their values, and the optimizer is reset.
        """
        heads = SCALAR_HEADS.values()
        needed = [shard for shard in local_shards(self.shape, self.groups, self.head) if shard.name not in heads]
        with self.offload.on_device("parameters", "optimizer"):
            source.load(self.shape, needed, self.named_shards())
            if self.optimizer is not None:
                with platform.cpu_bridge():
                    self.optimizer.reload_model_params()

    def _step(self) -> dict[str, float]:
        assert self.optim is not None and self.optimizer is not None
        lr = learning_rate(self.steps, self.optim, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_mult"]
        with annotated("optimizer"), platform.cpu_bridge():
            self.optimizer.prepare_grads()
            norm = gradient_norm(self.optimizer)  # over all ranks, so that either all of them skip or none
            if math.isfinite(norm):
                if self.optim.clip_grad:
                    clip_gradients(self.optimizer, self.optim.clip_grad, norm)
                self.optimizer.step_with_ready_grads()
                self.steps += 1
        return {GRAD_NORM: norm, "lr": lr, "skipped_updates": float(not math.isfinite(norm))}

    def _forward(
        self, batch: DataProto, max_tokens: int, compute: Compute, *, record_routing: bool = False
    ) -> dict[str, Ragged]:
        micros = self._micro_batches(batch, max_tokens)
        if record_routing:
            for micro in micros:
                assert micro.packed.routing is not None, "a model without experts has no routing to record"
                micro.packed.routing.recorded = {}
        with torch.no_grad(), self.offload.on_device("parameters"):
            results = self._run(micros, compute, lambda micro, outputs: (micro, outputs), forward_only=True)
        choices = [recorded_experts(micro, self.groups) for micro in micros] if record_routing else []
        if not results:
            return {}
        columns = _columns(results)
        if record_routing:
            order = np.argsort(np.concatenate([micro.rows for micro in micros]))
            columns["routed_experts"] = Ragged.concat(choices).take(order)
        return columns

    def _micro_batches(self, batch: DataProto, max_tokens: int, unit: int = 1) -> list[MicroBatch]:
        """Make as many micro-batches as every other replica."""
        layout = self.groups.layout
        return make_micro_batches(
            batch,
            self.shape,
            max_tokens=max_tokens,
            count=layout.scheduled(self._common_count(needed_count(batch, max_tokens, unit, self.shape))),
            multiple=layout.token_multiple(FP8_ROWS if self.config.fp8 else ROW_MULTIPLE),
            same_size=layout.pp > 1,
            device=platform.device(),
            outputs_at="last" if self.head == "reward" else "response",
            unit=unit,
            cp_rank=self.groups.coord.cp,
            cp_size=layout.cp,
            embeds=self.groups.is_first_stage,
        )

    def _run(self, micros: list[MicroBatch], compute: Compute, consume: Consume, *, forward_only: bool) -> list[Any]:
        """Run megatron's schedule. Returns, on the last stage, the results of `consume` (their last part when
        training)."""

        def outputs_of(micro: MicroBatch, raw: Tensor) -> Outputs:
            if self._replicated is not None and self.head == "lm":
                self._replicated.wait_for(self.chunks[-1].output_weight())
            return gather_outputs(micro, compute(micro, raw), self.groups.pgc.cp)

        def step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            self._on_micro_batch()
            micro = next(iterator)
            packed = micro.packed
            output = model(packed.input_ids, packed.position_ids, None, packed_seq_params=packed)
            return output, lambda raw, non_loss_data=False: consume(micro, outputs_of(micro, raw))

        return self._schedule(
            forward_step_func=step,
            data_iterator=[iter(micros) for _ in self.models],
            model=self.models,
            num_microbatches=len(micros),
            seq_length=micros[0].packed.input_ids.size(1) * self.groups.layout.cp,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            p2p_communicator=self._p2p,
            pg_collection=self.groups.pgc,
        )

    def _router_losses(self, batch: DataProto, routed: RoutedExperts) -> RouterLosses:
        """Losses normalised by the sequences and tokens of all replicas."""
        device, num_tokens = platform.device(), int(batch.fetch("input_ids").lengths.sum()) if len(batch) else 0
        num_sequences = len(batch)
        if self.groups.layout.dp > 1:
            counts = torch.tensor([num_sequences, num_tokens], device=device)
            dist.all_reduce(counts, group=self.groups.dp)
            num_sequences, num_tokens = counts.tolist()
        return RouterLosses(routed, self._moe, num_sequences, num_tokens, device)

    def _common_count(self, count: int) -> int:
        """Return the largest number of micro-batches that any replica needs."""
        if self.groups.layout.dp == 1:
            return count
        tensor = torch.tensor([count], device=platform.device())
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.groups.dp)
        return int(tensor)


def _with_loss(loss: Loss, batch: DataProto) -> Consume:
    """Return what maps the outputs of a micro-batch to its loss, a count that megatron ignores, and (metrics,
    micro-batch, detached outputs)."""

    def consume(micro: MicroBatch, outputs: Outputs) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
        if micro.num_outputs == 0:
            value = torch.stack([output.sum() for output in outputs.values() if output.requires_grad]).sum() * 0.0
            metrics: dict[str, Metric] = {}
        else:
            padded = {name: micro.padded(output) for name, output in outputs.items()}
            value, metrics = loss(padded, TensorBatch(batch[micro.rows], platform.device()))
            value = value + 0.0  # the schedule frees the loss's memory, which a view would share
        detached = {name: outputs[name].detach() for name in ("log_probs", "entropy") if name in outputs}
        return value, torch.tensor(0, dtype=torch.int), (metrics, micro, detached)

    return consume


def _columns(results: list[tuple[MicroBatch, Outputs]]) -> dict[str, Ragged]:
    """Return the outputs of all micro-batches on the host, in the batch's order."""
    micros = [micro for micro, _ in results]
    return {name: column_of(micros, [outputs[name] for _, outputs in results]) for name in results[0][1]}
