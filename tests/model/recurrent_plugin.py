"""A family of a user's own: every other layer is a gated linear recurrence, whose state has a fixed size.

h_t = a h_{t-1} + v x_t and y_t = w h_t, with the decay a = sigmoid(d) of each channel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor

from hpcrl.model.blocks.attention import Attention, Rope
from hpcrl.model.blocks.block import Block, CachedState, Layer, Weight
from hpcrl.model.blocks.feed_forward import FeedForward
from hpcrl.model.blocks.norms import Norms
from hpcrl.model.families.config_json import register_family
from hpcrl.model.families.family import HF, LLAMA, MEGATRON, NO_BIAS, Family
from hpcrl.model.shape import ModelShape


@dataclass(frozen=True)
class Recurrence(Block):
    channels: int

    title = "a recurrence"

    @property
    def supports(self):
        return frozenset(("planned_cp",))

    def weights(self):
        yield Weight("self_attention.value.weight", (self.channels, self.hidden_size), "rows")
        yield Weight("self_attention.decay", (self.channels,), "rows")
        yield Weight("self_attention.output.weight", (self.hidden_size, self.channels), "cols")

    def divided(self):
        return {"channels": self.channels}

    def cached(self, tp_size):
        return CachedState(((self.channels // tp_size,),))

    def use(self, spec, groups, *, exact):
        spec.submodules.self_attention = ModuleSpec(RecurrentModule, params={"block": self})

    def step(self, weight, linear, eps, tp):
        return RecurrentStep(weight, linear)


def recur(inputs: Tensor, decay: Tensor, state: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return the states of all tokens of packed sequences (T, channels), and the last ones (sequences, channels)."""
    outputs, last = [], []
    for x, h in zip(inputs.split(lengths), state, strict=True):
        for token in x:
            h = torch.sigmoid(decay) * h + token
            outputs.append(h)
        last.append(h)
    return torch.stack(outputs), torch.stack(last)


class RecurrentModule(MegatronModule):
    def __init__(self, config, block, pg_collection, **_: Any) -> None:
        super().__init__(config)
        self.tp_group = tp = pg_collection.tp
        options = {"config": config, "init_method": config.init_method, "bias": False, "tp_group": tp}
        self.value = ColumnParallelLinear(block.hidden_size, block.channels, gather_output=False, **options)
        self.output = RowParallelLinear(
            block.channels, block.hidden_size, input_is_parallel=True, skip_bias_add=True, **options
        )
        self.decay = torch.nn.Parameter(torch.empty(block.channels // tp.size(), dtype=config.params_dtype))

    def forward(self, hidden_states, attention_mask, *, packed_seq_params, **_: Any):
        values = self.value(hidden_states)[0].squeeze(1)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        start = values.new_zeros(len(lengths), values.size(1))
        states, _ = recur(values[: sum(lengths)], self.decay, start, lengths)
        padded = torch.cat([states, values.new_zeros(len(values) - len(states), values.size(1))])
        return self.output(padded.unsqueeze(1))[0], None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        group = metadata["dp_cp_group"]
        own = {"decay": self.decay}
        found = make_sharded_tensors_for_checkpoint(
            own, prefix, {"decay": 0}, sharded_offsets, tp_group=self.tp_group, dp_cp_group=group
        )
        for name in ("value", "output"):
            child = getattr(self, name)
            found |= sharded_state_dict_default(
                child, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return found


class RecurrentStep:
    def __init__(self, weight, linear) -> None:
        self._value, self._decay, self._output = (
            weight(f"self_attention.{name}") for name in ("value.weight", "decay", "output.weight")
        )
        self._linear = linear

    def __call__(self, layer, x, attention, rotate):
        (state,), lengths = attention.states(layer), attention.lengths() or [1] * len(x)
        states, last = recur(self._linear(x, self._value), self._decay, state, lengths)
        attention.save_states(layer, (last,))
        return self._linear(states, self._output)

    def store(self, layer, x, attention, rotate) -> None:
        self(layer, x, attention, rotate)


def fields(config: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    mlp, norms = FeedForward(hidden, config["intermediate_size"]), Norms()
    rope = Rope(config["head_dim"], config.get("rope_theta", 10000.0))
    attention = Attention(hidden, rope, heads, config["num_key_value_heads"], config["head_dim"])
    recurrence = Recurrence(hidden, config["channels"])
    layers = range(config["num_hidden_layers"])
    return {"blocks": tuple(Layer(attention if layer % 2 else recurrence, mlp, norms) for layer in layers)}


def recurrent_shape(**sizes: Any) -> ModelShape:
    shape = ModelShape(**sizes)
    config = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "head_dim": shape.head_dim,
        "channels": 24,
    }
    return replace(shape, **fields(config))


SELF = f"{MEGATRON}self_attention."
NAMES = {
    **LLAMA,
    **{f"{SELF}{name}": (f"{HF}recurrence.{name}",) for name in ("value.weight", "decay", "output.weight")},
}
register_family(
    "toy_recurrent",
    Family("ToyForCausalLM", NAMES, NO_BIAS, fields, lambda shape: {"channels": shape.blocks[0].attention.channels}),
)
