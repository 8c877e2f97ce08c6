"""What the tests of engine and checkpoint share: a small model, samples, every layout, and how to compare them."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpcrl.batch.data_proto import DataProto, TensorBatch
from hpcrl.batch.ragged import Ragged
from hpcrl.config.roles import ACTOR
from hpcrl.config.schema import Config, MoeConfig, OptimConfig
from hpcrl.engine.checkpoint.sharded_save import SavedPart, ShardedSave, describe
from hpcrl.engine.engine import TrainEngine
from hpcrl.model.blocks.attention import Attention, RopeScaling
from hpcrl.model.blocks.block import half_layer, unsupported
from hpcrl.model.blocks.feed_forward import FeedForward
from hpcrl.model.blocks.gated_delta import GatedDelta
from hpcrl.model.blocks.mamba import Mamba
from hpcrl.model.blocks.mixture import MixtureOfExperts
from hpcrl.model.blocks.norms import Norms
from hpcrl.model.build import copy_boxes, local_shards, named_parameters
from hpcrl.model.families.config_json import shape_from_hf
from hpcrl.model.shape import LatentAttention, ModelShape
from hpcrl.runtime.groups import RoleGroups, make_groups
from hpcrl.runtime.layout import Layout
from hpcrl.workers.model_worker import ModelWorker

# Five layers do not divide evenly over two stages, nor over four chunks. Of 45 ids, padded to 64, the last of four
# shards holds none.
SHAPE = ModelShape(
    num_layers=5,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=8,
    num_query_groups=4,
    head_dim=8,
    vocab_size=45,
    init_std=0.1,
)
MIXTURE = replace(SHAPE, num_experts=8, moe_ffn_hidden_size=32, moe_topk=3, dense_layers=(1,), qk_norm=True)
DEEPSEEK = replace(
    SHAPE,
    num_query_groups=8,
    head_dim=12,
    mla=LatentAttention(24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6),
    rope_scaling=RopeScaling("yarn", 4.0, 64, mscale_all_dim=1.0),
    num_experts=8,
    moe_ffn_hidden_size=32,
    moe_shared_ffn_hidden_size=32,
    moe_topk=3,
    dense_layers=(0,),
    moe_score_function="sigmoid",
    moe_score_bias=True,
    moe_num_groups=4,
    moe_topk_groups=2,
    moe_group_best=2,
    moe_routed_scale=2.5,
)
GPT_OSS = shape_from_hf(
    {
        "model_type": "gpt_oss",
        "num_hidden_layers": 5,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "vocab_size": 45,
        "initializer_range": 0.1,
        "sliding_window": 7,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "swiglu_limit": 0.3,
    }
)
TIED = replace(SHAPE, tie_word_embeddings=True)
_NET = GatedDelta(SHAPE.hidden_size, num_k_heads=4, num_v_heads=8, head_k_dim=8, head_v_dim=12)
DELTA = replace(  # the fourth of five layers has attention
    SHAPE, blocks=tuple(it if n == 3 else replace(it, attention=_NET) for n, it in enumerate(SHAPE.layers))
)
_MAMBA = half_layer(Mamba(SHAPE.hidden_size, 8, 8, num_groups=4, state_dim=12), "attention", Norms())
_ATTENTION = half_layer(Attention(SHAPE.hidden_size, None, 8, 4, 8), "attention", Norms())
_MLP = half_layer(FeedForward(SHAPE.hidden_size, 96, "relu2", is_gated=False), "mlp", Norms())
_EXPERTS = MixtureOfExperts(
    SHAPE.hidden_size, 8, 32, 3, shared_ffn_hidden_size=32, score_function="sigmoid", is_gated=False
)
_MIXTURE = half_layer(_EXPERTS, "mlp", Norms())
# Every layer has one block. Stages and chunks begin and end with each kind, and each stage has experts.
HYBRID = replace(SHAPE, num_layers=6, blocks=(_MAMBA, _MIXTURE, _ATTENTION, _MLP, _MAMBA, _MIXTURE))
SIZES = {
    1: {"single": {}},
    2: {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {}, "cp2": {"cp": 2}, "pp2vpp2": {"pp": 2, "vpp": 2}},
    4: {
        "tp2dp2": {"tp": 2},
        "tp2pp2": {"tp": 2, "pp": 2},
        "pp2dp2": {"pp": 2},
        "tp4": {"tp": 4},
        "tp2cp2": {"tp": 2, "cp": 2},
        "pp2cp2": {"pp": 2, "cp": 2},
        "cp4": {"cp": 4},
        "pp2vpp2": {"pp": 2, "vpp": 2},
        "cp2dp2": {"cp": 2},
        "tp2pp2vpp2": {"tp": 2, "pp": 2, "vpp": 2},
        "pp2cp2vpp2": {"pp": 2, "cp": 2, "vpp": 2},
    },
}
EXPERT_SIZES = {  # of models with experts alone
    2: {"ep2": {"ep": 2}, "etp2": {"tp": 2, "etp": 2}, "tp2ep2": {"tp": 2, "ep": 2}},
    4: {
        "ep2": {"ep": 2},
        "tp2ep4": {"tp": 2, "ep": 4},
        "tp2ep2etp2": {"tp": 2, "ep": 2, "etp": 2},
        "pp2ep2": {"pp": 2, "ep": 2},
        "cp2ep2": {"cp": 2, "ep": 2},
        "pp2vpp2ep2": {"pp": 2, "vpp": 2, "ep": 2},
    },
}
LAYOUTS = [pytest.param(name, marks=pytest.mark.world(size)) for size, named in SIZES.items() for name in named]
SOME = ("single", "tp2", "pp2", "dp2", "cp2", "pp2vpp2", "tp2dp2", "tp2pp2", "pp2cp2vpp2")
SOME_LAYOUTS = [layout for layout in LAYOUTS if layout.values[0] in SOME]  # for what few of them could get wrong
EXPERT_LAYOUTS = [
    pytest.param(name, marks=pytest.mark.world(size)) for size, named in EXPERT_SIZES.items() for name in named
]
TOKENS = 400.0  # any normaliser; the loss is normalised by the global mini-batch, so it is a constant here
# Together they turn a mixture's gradient about as much as the policy's loss does.
ROUTER_LOSSES = {"moe": MoeConfig(aux_loss_coeff=0.3, z_loss_coeff=0.1)}
SGD = OptimConfig(optimizer="sgd", lr=0.1, clip_grad=0.0, weight_decay=0.0)


def has_layout(shape: ModelShape, name: str) -> bool:
    """Whether a model can have a layout."""
    return "cp" not in name or unsupported(shape.layers, "context_parallel") is None


@functools.cache
def role_groups(rank: int, size: int) -> dict[str, RoleGroups]:
    """This rank's groups of every layout of the whole world, and 'alone': the rank by itself. Collective, made once."""
    everyone = tuple(range(size))
    layouts = {
        name: Layout(everyone, **sizes) for of in (SIZES, EXPERT_SIZES) for name, sizes in of.get(size, {}).items()
    }
    layouts |= {f"alone{rank}": Layout((rank,)) for rank in everyone}
    layouts["first_half"] = Layout(everyone[: max(1, size // 2)], tp=max(1, size // 2))
    if size == 4:
        layouts |= {"dp4": Layout(everyone), "dp2_of_two": Layout(everyone[:2])}
    made = make_groups(layouts, rank)
    return {"alone" if name.startswith("alone") else name: of for name, of in made.items()}


def make_batch(num_samples: int = 9, seed: int = 0) -> DataProto:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 28, (num_samples,), generator=generator)
    responses = (lengths * torch.rand(num_samples, generator=generator)).long().clamp(min=1)
    ids = torch.randint(0, SHAPE.vocab_size, (int(lengths.sum()),), generator=generator, dtype=torch.int32)
    total = int(responses.sum())
    columns = {
        "response_mask": (torch.rand(total, generator=generator) < 0.9).float(),
        "advantages": torch.randn(total, generator=generator),
    }
    tokens = {name: Ragged.from_lengths(values, responses) for name, values in columns.items()}
    return DataProto({"input_ids": Ragged.from_lengths(ids, lengths), **tokens})


def save_sharded(engine: TrainEngine, folder: Path, groups: RoleGroups) -> None:
    """A save that is waited for; then the folder is a checkpoint."""
    finish_save(begin_save(engine, folder, groups), folder, groups)


def begin_save(
    engine: TrainEngine, folder: Path, groups: RoleGroups, memory: list[torch.Tensor] | None = None
) -> tuple[ShardedSave, list[SavedPart]]:
    told: list[SavedPart] = []
    return ShardedSave(engine, folder, groups, told.append, memory=memory), told


def finish_save(save: tuple[ShardedSave, list[SavedPart]], folder: Path, groups: RoleGroups) -> None:
    """What rank 0 of a job does when all ranks have told of their parts."""
    sharded, told = save
    sharded.join()
    assert told[0].problem is None
    ranks = groups.layout.ranks
    everyone = [None] * len(ranks) if groups.rank == ranks[0] else None
    dist.gather_object((sharded.plan, told[0]), everyone, dst=ranks[0], group=groups.pgc.intra_dist_opt)
    if everyone is not None:
        describe(folder, *zip(*everyone, strict=True))
    dist.barrier(group=groups.pgc.intra_dist_opt)  # before any rank loads it


def part_of(batch: DataProto, groups: RoleGroups) -> DataProto:
    return batch.chunk(groups.layout.dp)[groups.coord.dp]


def policy_loss(outputs: dict[str, torch.Tensor], batch: TensorBatch):
    mask, advantages = batch.padded("response_mask"), batch.padded("advantages")
    terms = outputs["log_probs"] * advantages + 0.1 * outputs["entropy"]
    return -(terms * mask).sum() / TOKENS, {}


def value_loss(outputs: dict[str, torch.Tensor], batch: TensorBatch):
    error = outputs["values"] - batch.padded("advantages")
    return (error.square() * batch.padded("response_mask")).sum() / TOKENS, {}


def value_engine(groups: RoleGroups, optim: OptimConfig | None = SGD) -> TrainEngine:
    engine = TrainEngine(SHAPE, groups, head="value", optim=optim, seed=5)
    for name, weight in engine.named_shards().items():
        if name == "value_head.weight":
            weight.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
    return engine


def gradients(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Of what is trained."""
    local = local_shards(engine.shape, engine.groups, engine.head, engine.lora)
    parameters = named_parameters(engine.chunks)
    found = {shard.name: parameters[shard.chunk, shard.local_name] for shard in local}
    return {name: each.main_grad.clone() for name, each in found.items() if each.requires_grad}


def slice_errors(
    engine: TrainEngine, mine: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]
) -> dict[str, float]:
    """How far `mine` are from being this rank's slices of `whole`, as shares of the norm over all parameters."""
    norm = torch.stack([tensor.norm() for tensor in whole.values()]).norm()
    errors = {}
    for shard in local_shards(engine.shape, engine.groups, engine.head, engine.lora):
        if shard.name in mine:
            expected = torch.empty(shard.local_shape)
            copy_boxes(whole[shard.name], expected, shard)
            errors[shard.name] = float((mine[shard.name] - expected).norm() / norm)
    return errors


def assert_slices(engine: TrainEngine, mine: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    """`mine` are this rank's slices of `whole`, to 1e-4 of the norm over all parameters."""
    for name, error in slice_errors(engine, mine, whole).items():
        assert error <= 1e-4, name


class Policy(ModelWorker):
    """A policy with no methods of its own."""

    spec = ACTOR


def seeded(seed: int) -> Config:
    return Config.model_validate({"run": {"seed": seed}})
