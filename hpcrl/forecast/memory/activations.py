"""What a pass of a model holds on a rank beside its state, in bytes: activations and logits. No torch.

It counts what autograd keeps for the layers that `hpcrl.model.build` makes: their norms, attention over packed
sequences, SwiGLU; of layers that are computed again, their inputs. Sequences are taken to be of one length, so that
attention pads none, and experts to get equally many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hpcrl.config.schema import MoeConfig, RecomputeConfig
from hpcrl.forecast.memory.generation import PicturePass
from hpcrl.forecast.memory.state import FP32, RoleModel
from hpcrl.kernels.budget import HEAD_CHUNK_BYTES, HEAD_CHUNKS
from hpcrl.model.params import stage_layers
from hpcrl.model.shape import PROJECTIONS, LatentAttention

INT16, INT64 = 2, 8


class Logits(NamedTuple):
    """Bytes of logits. raw: the head's output. kept: for the backward pass. forward, backward: peak of each pass, with
    what is kept."""

    raw: int
    kept: int
    forward: int
    backward: int


@dataclass(frozen=True)
class Pass:
    """Micro-batches of one role that run one after the other, the largest that there can be.

    tokens: of a micro-batch that this rank has, S. rows: of them, those whose head output is wanted, R. count: of the
    micro-batches, all of which are made before the first runs. on_gpu: kernels differ: the CPU's RMSNorm keeps more.
    longest: tokens of a sequence, which context parallelism may cut into pieces.

    A piece is what a rank runs at once of a micro-batch: its stage, or one of the chunks of its stage; they are
    numbered in the order of the model.
    """

    model: RoleModel
    tokens: int
    rows: int
    count: int
    on_gpu: bool
    entropy: bool = False
    chunk_tokens: int | None = None
    recompute: RecomputeConfig | None = None
    longest: int = 0
    moe: MoeConfig | None = None
    replays_routing: bool = False
    pictures: PicturePass | None = None

    def inputs(self) -> int:
        """Ids, positions, places and rotary angles of all micro-batches; for routers, which sequence a token is of, and
        its experts."""
        shape = self.model.shape
        each = 4 * INT64 + shape.rope_dim * FP32
        each += INT64 if shape.num_experts else 0
        each += INT16 * len(shape.moe_layers) * shape.moe_topk if self.replays_routing else 0
        return self.count * (self.tokens * each + self.rows * 2 * INT64)

    def pictures_of(self, stage: int) -> PicturePass | None:
        """Pictures of a micro-batch, which only the first stage embeds."""
        return self.pictures if stage == 0 else None

    def gathered(self) -> int:
        """The buffer into which sequence parallelism gathers a layer's input, which stays; frozen layers have none."""
        return self._all_hidden if self.model.lora is None else 0

    def pieces(self, stage: int) -> range:
        """Pieces of a pipeline stage, the first chunk first."""
        layout = self.model.layout
        return range(stage, layout.pp * layout.vpp, layout.pp)

    @property
    def _last(self) -> int:
        return self.model.layout.pp * self.model.layout.vpp - 1

    def _layers(self, piece: int) -> range:
        return stage_layers(self.model.shape.num_layers, piece, self._last + 1)

    def kept(self, piece: int) -> int:
        """Bytes that one micro-batch keeps between its forward and backward pass, without logits."""
        model, shape = self.model, self.model.shape
        units, whole = self._units(piece)
        total = len(units) * self._hidden + self._kept_of_layers(whole)
        if piece == 0 and model.layout.tp > 1:
            total += self.tokens * (INT64 + 1)  # ids of this rank's rows, and which those are
        if piece == 0 and self.pictures is not None:
            total += self.pictures.kept
            if self.recompute is not None and self.recompute.granularity is not None:
                total += self.pictures.deepstack  # the first layers may be computed again
        if piece > 0 and not self._norm_keeps_input:
            total += self._hidden  # received, and kept for its gradient
        if piece == self._last:
            total += self._norm(self._local, shape.hidden_size) - self._hidden
            # critics and reward models multiply in fp32
            total += self.rows * shape.hidden_size * (model.itemsize if model.head == "lm" else FP32)
        return total

    def _units(self, piece: int) -> tuple[list[range], range]:
        """Successive layers of a piece that are recomputed together, and those that keep everything."""
        layers = self._layers(piece)
        again = self.recompute
        if again is None or again.granularity != "full":
            return [], layers
        if again.method == "block":
            return [range(layer, layer + 1) for layer in layers[: again.num_layers]], layers[again.num_layers :]
        return [layers[first : first + again.num_layers] for first in range(0, len(layers), again.num_layers)], layers[
            :0
        ]

    def _again(self, piece: int) -> int:
        """Bytes that a unit, or a part of a layer, holds during recomputation, besides its input and what is kept: the
        layers after it have finished their backward passes by then."""
        is_moe = self.model.shape.is_moe_layer
        if self._parts_again:
            last = is_moe(self._layers(piece)[-1])
            # and the gradient of its output
            parts = max(self._attention() - self._kept_of_attention(), self._mlp(last) - self._kept_of_mlp(last))
            return parts + self._hidden
        units, whole = self._units(piece)
        largest = max((self._kept_of_layers(unit) for unit in units), default=0)
        return max(0, largest - self._hidden - self._kept_of_layers(whole))

    def logits(self, piece: int) -> Logits:
        """Logits of the piece; all 0 if it has no language-model head.

        The head's output, its value in fp32, and the exponentials in fp32; the second is kept. Backward adds the
        probabilities in fp32, with the entropy a factor, the padded gradient, and that in the head's dtype. Of chunks
        that the head computes at once, nothing is kept.
        """
        model = self.model
        if model.head != "lm" or piece < self._last:
            return Logits(0, 0, 0, 0)
        widest = model.shape.padded_vocab_size // model.layout.tp
        if self.on_gpu and self.chunk_tokens is not None:
            # By columns, whose gradients have the dtype of the weight, beside that of the hidden states in fp32.
            most = self.rows * widest
            raw, grad = (min(chunks * HEAD_CHUNK_BYTES // FP32, most) for chunks in (1, HEAD_CHUNKS))
            hidden = self.rows * model.shape.hidden_size
            return Logits(raw * FP32, 0, raw * FP32, (raw + hidden) * FP32 + grad * model.itemsize)
        chunk = self.rows if self.chunk_tokens is None else min(self.rows, self.chunk_tokens)
        raw, padded = chunk * widest * model.itemsize, chunk * widest * FP32
        whole = chunk * min(widest, model.shape.vocab_size) * FP32
        rounded = raw if model.itemsize < FP32 else 0
        kept = whole if self.chunk_tokens is None else 0
        return Logits(raw, kept, raw + 2 * whole, (3 if self.entropy else 2) * whole + padded + rounded)

    def in_flight(self, stage: int) -> int:
        """Peak of what micro-batches keep while they wait for their backward pass.

        Under 1F1B, and under the interleaved schedule, in which a stage runs pp micro-batches of one chunk before it
        turns to the next (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
        """
        pp, vpp = self.model.layout.pp, self.model.layout.vpp
        pieces = self.pieces(stage)
        turns = [pieces[turn // pp % vpp] for turn in range(self.count * vpp)]
        ahead = 2 * (pp - stage - 1) + (vpp - 1) * pp if vpp > 1 else pp - stage - 1
        kept = {piece: self.kept(piece) for piece in pieces}
        forward = [kept[piece] for piece in turns]
        backward = [kept[pieces[vpp - 1 - turn // pp % vpp]] for turn in range(self.count * vpp)]
        first = min(ahead + 1, len(turns))
        held = most = sum(forward[:first])
        for done, more in zip(backward, forward[first:], strict=False):
            held += more - done
            most = max(most, held)
        return most

    def training(self, stage: int) -> tuple[int, int]:
        """Peak of forward and backward passes: activations, logits.

        It is reached in the head's backward pass or in that of the stage's last layer.
        """
        resident = self.inputs() + self.gathered() + self.in_flight(stage)
        logits = self.logits(self.pieces(stage)[-1])
        shape, tp = self.model.shape, self.model.layout.tp
        weight = shape.padded_vocab_size // tp * shape.hidden_size * self.model.itemsize
        # Chunks add their gradients of the head's weight up beside it.
        at_head = max(logits.forward, logits.backward + (weight if logits.raw and self.chunk_tokens else 0))
        at_layer = max(self._backward(piece) + self._again(piece) for piece in self.pieces(stage))
        if (pictures := self.pictures_of(stage)) is not None:
            resident += self.count * pictures.inputs(on_gpu=self.on_gpu)
            embedding = self._hidden + pictures.embedding(self._hidden, on_gpu=self.on_gpu, trains=True)
            # The decoder layers keep nothing yet, or nothing any more.
            at_layer = max(at_layer, max(embedding, pictures.kept + pictures.backward) - self.kept(0))
        return (resident, at_head) if at_head >= at_layer else (resident + at_layer, 0)

    def forward(self, stage: int) -> tuple[int, int]:
        """Peak without gradients: activations, logits. The stage's output for the micro-batch before still exists."""
        shape, pieces = self.model.shape, self.pieces(stage)
        logits = self.logits(pieces[-1])
        resident = self.inputs() + self.gathered()
        layers = (shape.is_moe_layer(layer) for piece in pieces for layer in self._layers(piece))
        mlp = max(self._mlp(is_moe) + self._update(is_moe) for is_moe in layers)
        attention = self._attention_forward() + (self._all_hidden if self.model.lora is not None else 0)
        inside_layer = 3 * self._hidden + max(self._hidden + mlp, attention)
        if (pictures := self.pictures_of(stage)) is not None:
            resident += self.count * pictures.inputs(on_gpu=self.on_gpu)
            embedding = self._hidden + pictures.embedding(self._hidden, on_gpu=self.on_gpu)
            inside_layer = max(inside_layer + pictures.deepstack, embedding)
        again = self.count > 1
        if self.model.layout.vpp > 1:
            resident += 2 * self._hidden  # received ahead, and given by another chunk
        if stage < self.model.layout.pp - 1:
            return resident + inside_layer + again * self._hidden, 0
        if logits.forward >= inside_layer:
            return resident + (stage > 0) * self._hidden + again * self._wanted, logits.forward
        given = self._wanted if self.model.head == "lm" else 0  # scalar heads give one number per token
        return resident + inside_layer + again * given, 0

    @property
    def _shares_tokens(self) -> bool:
        return self.model.sequence_parallel and self.model.layout.tp > 1

    @property
    def _local(self) -> int:
        """Tokens of this rank between tensor-parallel regions."""
        return self.tokens // self.model.layout.tp if self._shares_tokens else self.tokens

    @property
    def _hidden(self) -> int:
        """One hidden state of the rank's tokens."""
        return self._local * self.model.shape.hidden_size * self.model.itemsize

    @property
    def _all_hidden(self) -> int:
        """Hidden states of all ranks' tokens, if tensor-parallel ranks share them."""
        return self._hidden * self.model.layout.tp if self._shares_tokens else 0

    @property
    def _wanted(self) -> int:
        """Hidden states of the tokens whose head output is needed: the output of a stage with a language-model head."""
        return self.rows * self.model.shape.hidden_size * self.model.itemsize

    @property
    def _norm_keeps_input(self) -> bool:
        """Whether a norm is one function, which keeps its input; otherwise it is several, which keep copies in fp32."""
        return self.on_gpu or self.model.itemsize == FP32

    def _norm(self, rows: int, width: int) -> int:
        """Input, scale and output of an RMSNorm; the CPU's in bf16 keeps its input in fp32, and for the gradient of its
        weight the normalised input too."""
        inside = self.model.itemsize * width if self._norm_keeps_input else self._norm_copies * FP32 * width
        return rows * (inside + FP32 + self.model.itemsize * width)

    @property
    def _norm_copies(self) -> int:
        return 2 if self.model.lora is None else 1

    @property
    def _parts_again(self) -> set[str]:
        """Parts of a layer that are recomputed while the rest is kept."""
        again = self.recompute
        return set(again.modules) if again is not None and again.granularity == "selective" else set()

    def _kept_of_layers(self, layers: range) -> int:
        experts = sum(map(self.model.shape.is_moe_layer, layers))
        counts = {True: experts, False: len(layers) - experts}
        return sum(count * self._kept_of_layer[is_moe] for is_moe, count in counts.items() if count)

    @cached_property
    def _kept_of_layer(self) -> dict[bool, int]:
        """Of a layer of each kind that the model has, by whether it has experts."""
        shape = self.model.shape
        norms_and_attention = 2 * self._norm(self._local, shape.hidden_size) + self._kept_of_attention()
        kinds = {*map(shape.is_moe_layer, range(shape.num_layers))}
        return {is_moe: norms_and_attention + self._kept_of_mlp(is_moe) + self._adapters(is_moe) for is_moe in kinds}

    def _kept_of_attention(self) -> int:
        """Bytes kept of an attention. If it is recomputed: queries, keys and values as its inputs, and the output."""
        if "core_attn" not in self._parts_again:
            return self._attention()
        shape, tp = self.model.shape, self.model.layout.tp
        query, key = (n // tp * shape.head_dim for n in (shape.num_attention_heads, shape.num_query_groups))
        return self.tokens * 2 * (query + key) * self.model.itemsize

    def _kept_of_mlp(self, is_moe: bool) -> int:
        return 0 if ("moe" if is_moe else "mlp") in self._parts_again else self._mlp(is_moe)

    def _adapters(self, is_moe: bool) -> int:
        """Bytes kept for adapters: the output of A is kept for B. Inputs of a matrix without adapters, counted
        elsewhere, are not kept."""
        model, shape, layout = self.model, self.model.shape, self.model.layout
        if model.lora is None:
            return 0
        hidden, query = shape.hidden_size, shape.num_attention_heads * shape.head_dim // layout.tp
        copies = self._local * shape.moe_topk * layout.etp
        ffn = shape.moe_ffn_hidden_size // layout.etp if is_moe else shape.ffn_hidden_size // layout.tp
        sizes = {  # rows of what A gives, rows and columns of the input
            "linear_qkv": (self.tokens, self._local, hidden),
            "linear_proj": (self._local, self.tokens, query),
            "linear_fc1": (copies, copies, hidden) if is_moe else (self.tokens, self._local, hidden),
            "linear_fc2": (copies, copies, ffn) if is_moe else (self._local, self.tokens, ffn),
        }
        total = 0
        for matrix, (low, rows, columns) in sizes.items():
            count = len(set(PROJECTIONS[matrix]).intersection(model.lora.targets))
            total += (count * low * model.lora.rank if count else -rows * columns) * model.itemsize
        return total

    def _attention(self) -> int:
        """Queries, keys, values, output and its logarithmic sums, and the packed output; with context parallelism keys
        and values of other ranks."""
        shape, tp, itemsize = self.model.shape, self.model.layout.tp, self.model.itemsize
        heads, groups = shape.num_attention_heads // tp, shape.num_query_groups // tp
        query, key = heads * shape.head_dim, groups * shape.head_dim
        packed = heads * shape.v_head_dim  # values are padded until then
        total = self.tokens * ((2 * query + 2 * key + packed) * itemsize + heads * FP32)
        tails = self._tails
        total += sum(looked_at for _, looked_at in tails) * 2 * key * itemsize
        if not self.on_gpu:  # where there is a mask
            total += sum(queries * looked_at for queries, looked_at in tails) * itemsize
        if shape.qk_norm:
            # The inputs are parts of the projection's output, which stays whole; the rest is as in `_norm`.
            both, whole = query + key, (query + 2 * key) * itemsize
            inside = whole if self._norm_keeps_input else self._norm_copies * both * FP32
            total += self.tokens * (inside + (heads + groups) * FP32)
        return total + (self._latents(shape.mla) if shape.mla else 0)

    @property
    def _tails(self) -> list[tuple[int, int]]:
        """Queries of sequences that began in an earlier chunk, and their keys, on the rank with most of them (see
        `hpcrl.model.gpt`)."""
        cp, length = self.model.layout.cp, self.longest
        if cp == 1:
            return []
        chunk = self.tokens // 2
        cut = [start % length for start in range(0, 2 * cp * chunk, chunk)]
        tails = [(min(chunk, length - before), before + min(chunk, length - before)) for before in cut]
        of_ranks = [[tails[place] for place in (rank, 2 * cp - 1 - rank) if cut[place]] for rank in range(cp)]
        return max(of_ranks, key=lambda tails: sum(queries * keys for queries, keys in tails))

    def _latents(self, mla: LatentAttention) -> int:
        """Norms of latent attention; the projection's output, an input of one of them, contains the shared key."""
        queries = self._norm(self._local, mla.q_lora_rank) if mla.q_lora_rank else 0
        shared_key = self._local * mla.qk_rope_head_dim * self.model.itemsize
        return queries + self._norm(self._local, mla.kv_lora_rank) + shared_key

    def _attention_forward(self) -> int:
        """Bytes of an attention's forward pass with the projection's output; the CPU's norm of queries in bf16 has four
        copies of them in fp32."""
        shape, tp = self.model.shape, self.model.layout.tp
        query, key = (n // tp * shape.head_dim for n in (shape.num_attention_heads, shape.num_query_groups))
        projected = self.tokens * (query + 2 * key) * self.model.itemsize
        norm = 4 * self.tokens * query * FP32 if shape.qk_norm and not self._norm_keeps_input else 0
        inside = self.tokens * (3 * query + 2 * key) * self.model.itemsize
        if shape.mla:
            # Queries, keys, and the product that values and a part of the keys are taken from; the packed output.
            heads, from_latent = shape.num_attention_heads // tp, shape.mla.qk_nope_head_dim + shape.mla.v_head_dim
            projected = self.tokens * (query + key + heads * from_latent) * self.model.itemsize
            inside += self.tokens * heads * shape.v_head_dim * self.model.itemsize
        if self.model.layout.cp > 1:
            queries, looked_at = max(self._tails, default=(0, 0))
            gathered = (self.model.layout.cp + 2) * self.tokens + looked_at
            inside += (2 * key * gathered + self.tokens * query) * self.model.itemsize
            inside += self.tokens * (query + key) * self.model.itemsize if shape.qk_norm else 0
            inside += 0 if self.on_gpu else queries * looked_at * self.model.itemsize
        return projected + max(norm, inside)

    def _mlp(self, is_moe: bool) -> int:
        """SwiGLU keeps gate and up together, the gate's activation, a copy of up (megatron adds an offset of 0), and
        their product."""
        shape, layout, itemsize = self.model.shape, self.model.layout, self.model.itemsize
        if not is_moe:
            return self.tokens * 5 * shape.ffn_hidden_size // layout.tp * itemsize
        # Routing: probabilities and which experts; ids, weights and order of those that were chosen.
        routing = self._local * (shape.num_experts * (FP32 + 1) + shape.moe_topk * (2 * INT64 + FP32))
        if self.moe is not None:
            # Probabilities and each one's weight; the logits.
            planes = 2 * bool(self.moe.aux_loss_coeff) + bool(self.moe.z_loss_coeff)
            routing += self._local * shape.num_experts * planes * FP32
        copies = self._local * shape.moe_topk * layout.etp
        expert = shape.hidden_size + 6 * shape.moe_ffn_hidden_size // layout.etp  # weighting the product makes a sixth
        shared = self.tokens * 5 * shape.moe_shared_ffn_hidden_size // layout.tp * itemsize
        return routing + copies * (expert * itemsize + FP32) + shared

    def _update(self, is_moe: bool) -> int:
        """Bytes of a model with adapters: the gathered input, and the output of an adapter of gate or up before it is
        added, which is more than SwiGLU holds later. Experts run one after another."""
        model = self.model
        if is_moe or model.lora is None:
            return 0
        is_adapted = bool(set(PROJECTIONS["linear_fc1"]).intersection(model.lora.targets))
        width = model.shape.ffn_hidden_size // model.layout.tp
        return self._all_hidden + is_adapted * self.tokens * width * model.itemsize

    def _backward(self, piece: int) -> int:
        """Bytes besides what is kept, in the backward pass of the last layer of a piece, at its end, or in the
        embedding."""
        model, shape, layout = self.model, self.model.shape, self.model.layout
        is_moe = shape.is_moe_layer(self._layers(piece)[-1])
        width = shape.moe_ffn_hidden_size // layout.etp if is_moe else shape.ffn_hidden_size // layout.tp
        rows = self._local * shape.moe_topk * layout.etp if is_moe else self.tokens
        product = rows * width * model.itemsize
        weight = width * shape.hidden_size * model.itemsize
        if model.lora is not None:
            return 2 * self._hidden + product + max(self._all_hidden, product)
        at_layer = 2 * self._hidden + product + max(self.gathered() + weight, product)
        if piece > 0:
            return at_layer
        embedding = shape.padded_vocab_size // layout.tp * shape.hidden_size
        last = embedding * model.itemsize + self.gathered() + self._hidden - self.kept(0)
        return max(at_layer, last)
