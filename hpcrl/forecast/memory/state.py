"""What a role's model is, and what it holds between its passes, in bytes: weights, gradients, optimizer; what a run
writes to disk.

No torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

from hpcrl.algorithms.optimizers.optimizer import Optimizer
from hpcrl.config.derive import Derived
from hpcrl.config.roles import HOST_BLOCK, Part
from hpcrl.config.schema import Config, ModelConfig, OptimConfig, TrainerConfig
from hpcrl.config.yaml_core import ConfigError
from hpcrl.model.architecture import shape_from_yaml, with_training
from hpcrl.model.params import SCALAR_HEADS, Head, Shard, shards
from hpcrl.model.shape import Lora, ModelShape, is_adapter
from hpcrl.runtime.layout import FP8_ROWS, ROW_MULTIPLE, Layout
from hpcrl.runtime.node_memory import GENERATIONS, next_ranks

Node = TypeVar("Node", bound=Hashable)

# Megatron's alignment of a buffer that its distributed optimizer divides, in elements.
PARAMETER_MULTIPLE = 64
BUCKET_MULTIPLE = 128
FP32 = 4
ITEMSIZE = {"float32": 4, "bfloat16": 2}
# Tensors in fp32 of a projection's update, of its size and of the square of its shorter side.
WORK_MATRICES, WORK_SQUARES = 3, 2


def job_shape(config: Config) -> ModelShape:
    """The policy's shape, from its Hugging Face directory if the config names one."""
    model, num_tokens = config.model, 0
    if model.path is None and model.vocab_size is None and not model.hf_config:
        if model.tokenizer is None:
            raise ConfigError("model.vocab_size and model.tokenizer are null; name one, the weights depend on it")
        # takes seconds, and most large templates name vocab_size
        from hpcrl.data.tokenizer import load_tokenizer, token_ids

        num_tokens = max(token_ids(load_tokenizer(model.tokenizer))) + 1
    return model_shape(model, num_tokens)


def model_shape(model: ModelConfig, num_tokens: int) -> ModelShape:
    """The shape of a section `model:`, of a Hugging Face directory without a look at its weights."""
    if model.path is None:
        return with_training(shape_from_yaml(model, num_tokens), model)
    from hpcrl.model.families.config_json import read_shape

    return with_training(read_shape(Path(model.path)), model)


class State(NamedTuple):
    """Bytes of a role's state on a rank. scalars: small tensors of a megatron optimizer, a part of `optimizer` that is
    never offloaded. copies: 8-bit copies of weights, which are there from the first pass on and are no part of `total`;
    they are dropped when the weights are offloaded."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    scalars: int = 0
    copies: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def without(self, away: Collection[Part]) -> State:
        """The state that is left on the device."""
        left = self.parameters * ("parameters" not in away), self.gradients * ("gradients" not in away)
        optimizer = self.scalars if "optimizer" in away else self.optimizer
        return State(*left, optimizer, self.scalars, self.copies * ("parameters" not in away))

    def on_host(self, away: Collection[Part]) -> int:
        """Host memory for the offloaded parts; gradients are not kept."""
        kept = (self.parameters * ("parameters" in away), (self.optimizer - self.scalars) * ("optimizer" in away))
        return sum(_up(nbytes, HOST_BLOCK) for nbytes in kept)


@dataclass(frozen=True)
class RoleModel:
    """A role's model in its layout. `itemsize`: bytes of a weight or an activation. `optim` None: it is frozen.

    `sequence_parallel` and `lora` are those of `hpcrl.model.build.build_model`. `fp8`: products of large weights are
    8-bit.
    """

    shape: ModelShape
    layout: Layout
    head: Head
    itemsize: int
    optim: OptimConfig | None = None
    sequence_parallel: bool = True
    lora: Lora | None = None
    fp8: bool = False

    @property
    def row_multiple(self) -> int:
        """Micro-batches have a multiple of so many tokens, see `Layout.token_multiple`."""
        return FP8_ROWS if self.fp8 else ROW_MULTIPLE

    def shards(self, stage: int) -> list[Shard]:
        """Shards of a rank of a pipeline stage; all ranks of the stage have the same sizes."""
        rank = self.layout.rank_of(pp=stage)
        return shards(self.shape, self.layout, rank, head=self.head, lora=self.lora)

    def is_trained(self, shard: Shard) -> bool:
        return self.optim is not None and not shard.is_frozen and (self.lora is None or is_adapter(shard.name))

    @cached_property
    def chosen(self) -> Optimizer | None:
        return None if self.optim is None else self.optim.chosen()

    def kept(self, shard: Shard) -> int:
        """Bytes per element that an optimizer keeps of a trained parameter: its state, and a copy in fp32."""
        assert self.chosen is not None
        state = self.chosen.state(is_matrix=shard.is_matrix and self.chosen.is_sharded)
        return sum(ITEMSIZE[dtype] for dtype in state.values()) + FP32 * (self._itemsize(shard) < FP32)

    def state(self, stage: int, rank: int | None = None) -> State:
        """State of a rank of a stage: of `rank`, or the largest one."""
        return self._state(stage, rank)._replace(copies=self._copies(stage))

    def _copies(self, stage: int) -> int:
        """Bytes of 8-bit copies of large weights: as they are, and transposed for the backward pass."""
        large = sum(math.prod(shard.local_shape) for shard in self.shards(stage) if shard.is_large) if self.fp8 else 0
        return large * (1 if self.optim is None else 2)

    def _state(self, stage: int, rank: int | None) -> State:
        if self.chosen is None or not self.chosen.is_sharded:
            return self._undivided(stage)
        frozen = (shard for shard in self.shards(stage) if not self.is_trained(shard))
        buffers = list(self._buffers(stage))
        parameters = sum(buffer.itemsize * buffer.buckets[-1].end for buffer in buffers)
        parameters += sum(math.prod(shard.local_shape) * self._itemsize(shard) for shard in frozen)
        ranks = [rank] if rank is not None else [it for it in self.layout.ranks if self.layout.coord(it).pp == stage]
        # Dense weights and experts are divided over replicas of their own; context-parallel ranks are replicas here.
        coords = [(self.layout.coord(it), self.layout.expert_coord(it)) for it in ranks]
        places = {(dense.dp * self.layout.cp + dense.cp, expert.edp) for dense, expert in coords}
        if self.shape.routed is None:
            places = {(dense, 0) for dense, _ in places}
        most = max(sum(buffer.divided(place[buffer.is_expert]) for buffer in buffers) for place in places)
        scalars = len({buffer.is_expert for buffer in buffers}) * self._scalars
        gradients = FP32 * sum(buffer.buckets[-1].end for buffer in buffers)
        return State(parameters, gradients, most + scalars, scalars)

    def update(self, stage: int) -> int:
        """Bytes that an optimizer's step takes besides its state: where it needs whole matrices, this rank's ranges of
        them or the matrices that it updates, twice in fp32, and the work on the largest matrix."""
        if self.chosen is None or not self.chosen.operations(1, 1):
            return 0
        most = 0
        for is_expert in (False, True):
            trained = filter(self.is_trained, self.shards(stage))
            if own := [it for it in trained if it.is_matrix and it.is_expert == is_expert]:
                ranges = sum(math.prod(shard.local_shape) for shard in own) // replicas(self.layout)[is_expert]
                largest = max(own, key=lambda shard: math.prod(shard.global_shape))
                rows, cols = largest.global_shape
                blocks, each = largest.projection_rows(rows)
                outer = blocks * max(each.values())
                work = rows * cols + WORK_MATRICES * outer * cols + WORK_SQUARES * min(outer, cols) ** 2
                most = max(most, FP32 * (2 * max(ranges, rows * cols) + work))
        return most

    def merged(self, stage: int) -> int:
        """Bytes to merge adapters, one matrix at a time: in fp32, and rounded."""
        if self.lora is None:
            return 0
        matrices = [shard for shard in self.shards(stage) if len(shard.global_shape) == 2]
        merged = [it for it in matrices if any(own.name in self.lora.targets for own in it.projections)]
        largest = max(math.prod(shard.local_shape) for shard in merged)
        return largest * (FP32 + (self.itemsize if self.itemsize < FP32 else 0))

    def _undivided(self, stage: int) -> State:
        """State of a frozen model, or of an optimizer of which every replica holds all."""
        sizes = [(shard, math.prod(shard.local_shape)) for shard in self.shards(stage)]
        trained = [(shard, numel) for shard, numel in sizes if self.is_trained(shard)]
        parameters = sum(numel * self._itemsize(shard) for shard, numel in sizes)
        optimizer = sum(numel * self.kept(shard) for shard, numel in trained)
        scalars = len({shard.is_expert for shard, _ in trained}) * self._scalars
        return State(parameters, FP32 * sum(numel for _, numel in trained), optimizer + scalars, scalars)

    @property
    def _scalars(self) -> int:
        """Bytes of a loss scale and, of a sharded optimizer in fp32, an overflow flag."""
        if self.chosen is None:
            return 0
        return 8 if self.chosen.is_sharded and self.itemsize == FP32 else 4

    def _itemsize(self, shard: Shard) -> int:
        return FP32 if shard.name in SCALAR_HEADS.values() else self.itemsize

    def _buffers(self, stage: int) -> Iterator[_Buffer]:
        """Buffers of megatron's DistributedDataParallel: one for each chunk, dtype, and dense or expert weights."""
        groups: dict[tuple[int, bool, int], list[Shard]] = {}
        for shard in filter(self.is_trained, _as_made(self.shards(stage))):
            groups.setdefault((shard.chunk, shard.is_expert, self._itemsize(shard)), []).append(shard)
        for (_, is_expert, itemsize), members in groups.items():
            count = replicas(self.layout)[is_expert]
            yield _Buffer(itemsize, is_expert, count, list(self._buckets(members, count)))

    def _buckets(self, members: list[Shard], count: int) -> Iterator[_Bucket]:
        """Buckets from the last parameter to the first; tied embeddings of a pipeline have a bucket of their own."""
        may_be_tied = self.shape.tie_word_embeddings and self.head == "lm" and self.layout.pp > 1
        parts: list[list[Shard]] = [[]]
        for shard in reversed(members):
            if may_be_tied and "word_embeddings" in shard.name:
                parts += [[shard], []]
            else:
                parts[-1].append(shard)
        start = 0
        for part in filter(None, parts):
            inside, place = [], start
            for shard in part:
                first = _up(place, PARAMETER_MULTIPLE)
                place = first + math.prod(shard.local_shape)
                inside.append((first, place, self.kept(shard)))
            end = _up(place, math.lcm(count, BUCKET_MULTIPLE))
            yield _Bucket(start, end, inside)
            start = end


class _Bucket(NamedTuple):
    """A part of a buffer that is divided over the replicas; positions in elements. parameters: the first and behind the
    last element of each, and bytes per element of what the optimizer keeps."""

    start: int
    end: int
    parameters: list[tuple[int, int, int]]


class _Buffer(NamedTuple):
    itemsize: int
    is_expert: bool
    replicas: int
    buckets: list[_Bucket]

    def divided(self, replica: int) -> int:
        """Bytes of a replica's state, with a step counter per parameter and a copy in fp32 of other weights."""
        total = 0
        for bucket in self.buckets:
            size = (bucket.end - bucket.start) // self.replicas
            first = bucket.start + replica * size
            for start, end, each in bucket.parameters:
                if (own := min(end, first + size) - max(start, first)) > 0:
                    total += own * each + FP32
        return total


def _as_made(table: list[Shard]) -> list[Shard]:
    """Shards in the order in which megatron makes modules: of an attention, the output projection is first."""
    made: list[Shard] = []
    for shard in table:
        place = len(made)
        if shard.name.endswith("linear_proj.weight"):
            place = 1 + max(n for n, other in enumerate(made) if other.name.endswith("input_layernorm.weight"))
        made.insert(place, shard)
    return made


def replicas(layout: Layout) -> tuple[int, int]:
    """Ranks that divide the optimizer: of weights outside of experts, of which context-parallel ranks are replicas, and
    of experts."""
    return layout.dp * layout.cp, layout.edp


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# Of a response's tokens, in fp32 or int32, that advantages read or write, and that the rollout archive has beside the
# reference's and the critic's.
RESPONSE_COLUMNS = 8


def checkpoint_bytes(config: Config, models: Mapping[str, RoleModel]) -> dict[str, int]:
    """Bytes by role: weights and optimizer state of trained models; also of the Hugging Face directory and the
    adapter."""
    roles = {role: _saved(model) for role, model in models.items() if model.optim is not None}
    actor = models["actor"] if "actor" in roles else None
    if config.trainer.save_hf and actor is not None:
        roles["hugging face"] = _numel(replace(actor, lora=None)) * actor.itemsize
    if config.model.lora_rank > 0 and actor is not None:
        roles["lora adapter"] = _numel(actor, trained=True) * actor.itemsize
    return roles


def staged_bytes(model: RoleModel, stage: int) -> int:
    """Bytes that a rank of a pipeline stage writes in a save: its part is divided over the replicas."""
    state, dp = model.state(stage), model.layout.dp
    copy = state.gradients if model.itemsize == FP32 else 0  # the optimizer's own is written, too
    return state.parameters // dp + state.optimizer + copy // dp


def snapshot_bytes(models: Mapping[str, RoleModel], nodes: Sequence[Node]) -> dict[Node, int]:
    """Bytes of a run's snapshots by node: two of its ranks, and two copies of those of the node before.

    Args:
        nodes: the node of each rank.
    """
    own = [0] * len(nodes)
    for model in models.values():
        for rank in model.layout.ranks if model.optim is not None else ():
            own[rank] += staged_bytes(model, model.layout.coord(rank).pp)
    totals = dict.fromkeys(nodes, 0)
    for rank, destination in enumerate(next_ranks(nodes)):
        for node in {nodes[rank], nodes[rank if destination is None else destination]}:
            totals[node] += GENERATIONS * own[rank]
    return totals


def kept_checkpoints(trainer: TrainerConfig, steps: int | None, *, saves_last: bool = False) -> int | None:
    """Largest number of checkpoints that exist at once in a run of so many steps, the one being written included; None
    if it is not known.

    Args:
        saves_last: whether the job saves after its last step, whatever trainer.save_freq is.
    """
    options = trainer.checkpoint
    if trainer.save_freq == -1:
        return int(saves_last)
    written = None if steps is None else math.ceil(steps / trainer.save_freq)
    if trainer.max_ckpt_to_keep is None or (options.keep_every is not None and steps is None):
        return written
    count = trainer.max_ckpt_to_keep + (options.keep_best or 0) + 1
    if options.keep_every is not None and steps is not None:
        count += steps // options.keep_every
    return count if written is None else min(count, written)


def rollout_bytes(config: Config, derived: Derived) -> int:
    """Largest size of a step's archive, of its tokens."""
    columns = RESPONSE_COLUMNS + derived.needs_ref + derived.needs_critic + config.distillation.enabled
    each = FP32 * (derived.max_sequence_length + columns * config.data.max_response_length)
    return config.trainer.save_rollouts * derived.samples_per_step * each


def _numel(model: RoleModel, *, trained: bool = False) -> int:
    """Of all parameters, or of those that are trained."""
    table = shards(model.shape, head=model.head, lora=model.lora)
    return sum(math.prod(shard.global_shape) for shard in table if not trained or model.is_trained(shard))


def _saved(model: RoleModel) -> int:
    """Bytes of a saved model: the weights, and what the optimizer has; a sharded one also has fp32 weights."""
    assert model.chosen is not None
    nbytes = _numel(model) * model.itemsize
    for shard in filter(model.is_trained, shards(model.shape, head=model.head, lora=model.lora)):
        copy = FP32 * (model.chosen.is_sharded and model._itemsize(shard) == FP32)
        nbytes += math.prod(shard.global_shape) * (model.kept(shard) + copy)
    return nbytes
