"""Memory of forward and backward passes on a rank, without the model's state: activations and logits. No torch.

The bytes are sums over the blocks of `hpcrl.model.blocks`, which say what autograd keeps for each of them. A recomputed
layer keeps its input only. The estimate assumes that all sequences have the same length, so attention has no padding,
and that all experts get equally many tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hpcrl.config.schema import MoeConfig, RecomputeConfig
from hpcrl.forecast.memory.generation import PicturePass
from hpcrl.forecast.memory.state import RoleModel
from hpcrl.kernels import HEAD_CHUNK_BYTES, HEAD_CHUNKS
from hpcrl.model.blocks.block import Layer
from hpcrl.model.blocks.micro_batch import FP32, INT16, INT64, MicroBatch
from hpcrl.model.params import stage_layers


class Logits(NamedTuple):
    """Bytes of logits: the head's output, and the peak of each pass with what is kept for the backward pass."""

    raw: int
    forward: int
    backward: int


@dataclass(frozen=True)
class Pass:
    """The `count` micro-batches of one role in a pass, each as large as it can be.

    Each micro-batch has `tokens` tokens on this rank. The head computes outputs for `rows` of them. All micro-batches
    are in memory before the first one runs. The other fields are those of `MicroBatch`.

    A piece is the part of the model that a rank runs without interruption: its stage, or a chunk of its stage. Pieces
    are numbered in the order of the model.
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

    @cached_property
    def _batch(self) -> MicroBatch:
        model = self.model
        fixed = model.layout, self.tokens, model.itemsize, model.sequence_parallel, model.lora
        return MicroBatch(*fixed, self.on_gpu, self.longest, self.moe)

    def inputs(self) -> int:
        """Return the bytes of ids, positions and places of all micro-batches, and of what blocks have of each token."""
        shape = self.model.shape
        own = {name: nbytes for block in shape.kinds for name, nbytes in block.inputs().items()}
        each = 4 * INT64 + sum(own.values())
        if self.replays_routing and shape.routed is not None:
            each += INT16 * shape.routed.width
        return self.count * (self.tokens * each + self.rows * 2 * INT64)

    def gathered(self) -> int:
        """Return the bytes of the buffer into which sequence parallelism gathers a layer's input. It stays; frozen
        layers have none."""
        return self._batch.gathered(self.model.shape.hidden_size) if self.model.lora is None else 0

    def pieces(self, stage: int) -> range:
        """Return the pieces of a pipeline stage, the first chunk first."""
        layout = self.model.layout
        return range(stage, layout.pp * layout.vpp, layout.pp)

    @property
    def _last(self) -> int:
        return self.model.layout.pp * self.model.layout.vpp - 1

    def _layers(self, piece: int) -> tuple[Layer, ...]:
        shape = self.model.shape
        numbers = stage_layers(shape.num_layers, piece, self._last + 1)
        return shape.layers[numbers.start : numbers.stop]

    def kept(self, piece: int) -> int:
        """Return the bytes that one micro-batch keeps between its forward and backward pass, without logits."""
        model, shape = self.model, self.model.shape
        units, whole = self._units(piece)
        total = len(units) * self._hidden + self._kept_of_layers(whole)
        if piece == 0 and model.layout.tp > 1:
            total += self.tokens * (INT64 + 1)  # ids of this rank's rows, and which those are
        if piece == 0 and self.pictures is not None:
            total += self.pictures.kept
            if self.recompute is not None and self.recompute.granularity is not None:
                total += self.pictures.deepstack  # the first layers may be computed again
        if piece > 0 and not self._batch.norm_keeps_input:
            total += self._hidden  # received, and kept for its gradient
        if piece == self._last:
            total += self._batch.norm(self._batch.local, shape.hidden_size) - self._hidden
            # critics and reward models multiply in fp32
            total += self.rows * shape.hidden_size * (model.itemsize if model.head == "lm" else FP32)
        return total

    def _units(self, piece: int) -> tuple[list[tuple[Layer, ...]], tuple[Layer, ...]]:
        """Return successive layers of a piece that are recomputed together, and those that keep everything."""
        layers, again = self._layers(piece), self.recompute
        if again is None or again.granularity != "full":
            return [], layers
        if again.method == "block":
            return [(layer,) for layer in layers[: again.num_layers]], layers[again.num_layers :]
        return [layers[first : first + again.num_layers] for first in range(0, len(layers), again.num_layers)], ()

    def _again(self, piece: int) -> int:
        """Return the bytes that recomputing a unit, or a part of a layer, adds to its input and to what is kept. The
        layers after it have finished their backward passes by then."""
        if self._parts_again:
            # and the gradient of its output
            return self._layers(piece)[-1].held_again(self._batch, self._parts_again) + self._hidden
        units, whole = self._units(piece)
        largest = max((self._kept_of_layers(unit) for unit in units), default=0)
        return max(0, largest - self._hidden - self._kept_of_layers(whole))

    def logits(self, piece: int) -> Logits:
        """Return the bytes of a piece's logits, all 0 if it has no language-model head.

        The forward pass has the head's output, its value in fp32, which is kept, and the exponentials in fp32. The
        backward pass adds the probabilities in fp32, a factor for the entropy, the padded gradient, and the gradient in
        the head's dtype. If the head computes chunks of tokens, nothing is kept.
        """
        model = self.model
        if model.head != "lm" or piece < self._last:
            return Logits(0, 0, 0)
        widest = model.shape.padded_vocab_size // model.layout.tp
        if self.on_gpu and self.chunk_tokens is not None:
            # By columns, whose gradients have the dtype of the weight, beside that of the hidden states in fp32.
            most = self.rows * widest
            raw, grad = (min(chunks * HEAD_CHUNK_BYTES // FP32, most) for chunks in (1, HEAD_CHUNKS))
            hidden = self.rows * model.shape.hidden_size
            return Logits(raw * FP32, raw * FP32, (raw + hidden) * FP32 + grad * model.itemsize)
        chunk = self.rows if self.chunk_tokens is None else min(self.rows, self.chunk_tokens)
        raw, padded = chunk * widest * model.itemsize, chunk * widest * FP32
        whole = chunk * min(widest, model.shape.vocab_size) * FP32
        rounded = raw if model.itemsize < FP32 else 0
        return Logits(raw, raw + 2 * whole, (3 if self.entropy else 2) * whole + padded + rounded)

    def in_flight(self, stage: int) -> int:
        """Return the most bytes that micro-batches keep while they wait for their backward pass.

        The schedule is 1F1B, or the interleaved one, in which a stage runs pp micro-batches of one chunk before it
        turns to the next (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
        """
        pp, vpp = self.model.layout.pp, self.model.layout.vpp
        pieces = self.pieces(stage)
        turns = [pieces[turn // pp % vpp] for turn in range(self.count * vpp)]
        ahead = 2 * (pp - stage - 1) + (vpp - 1) * pp if vpp > 1 else pp - stage - 1
        piece_bytes = {piece: self.kept(piece) for piece in pieces}
        forward = [piece_bytes[piece] for piece in turns]
        backward = [piece_bytes[pieces[vpp - 1 - turn // pp % vpp]] for turn in range(self.count * vpp)]
        first = min(ahead + 1, len(turns))
        held = most = sum(forward[:first])
        for done, more in zip(backward, forward[first:], strict=False):
            held += more - done
            most = max(most, held)
        return most

    def _resident(self, stage: int) -> int:
        """Return the bytes of inputs, of pictures too, which the first stage embeds, and of the gathered buffer."""
        pictures = 0 if self.pictures is None or stage > 0 else self.pictures.inputs(on_gpu=self.on_gpu)
        return self.inputs() + self.gathered() + self.count * pictures

    def training(self, stage: int) -> tuple[int, int]:
        """Return the most bytes of forward and backward passes: activations, logits.

        It is reached in the head's backward pass or in that of the stage's last layer.
        """
        resident = self._resident(stage) + self.in_flight(stage)
        logits = self.logits(self.pieces(stage)[-1])
        shape, tp = self.model.shape, self.model.layout.tp
        weight = shape.padded_vocab_size // tp * shape.hidden_size * self.model.itemsize
        # Chunks add their gradients of the head's weight up beside it.
        at_head = max(logits.forward, logits.backward + (weight if logits.raw and self.chunk_tokens else 0))
        at_layer = max(self._backward(piece) + self._again(piece) for piece in self.pieces(stage))
        if (pictures := self.pictures) is not None and stage == 0:
            embedding = self._hidden + pictures.embedding(self._hidden, on_gpu=self.on_gpu, trains=True)
            # The decoder layers keep nothing yet, or nothing any more.
            at_layer = max(at_layer, max(embedding, pictures.kept + pictures.backward) - self.kept(0))
        return (resident, at_head) if at_head >= at_layer else (resident + at_layer, 0)

    def forward(self, stage: int) -> tuple[int, int]:
        """Return the most bytes without gradients: activations, logits. The stage's output for the previous micro-batch
        still exists."""
        pieces, resident = self.pieces(stage), self._resident(stage)
        logits, kinds = self.logits(pieces[-1]), {layer for piece in pieces for layer in self._layers(piece)}
        inside_layer = max(layer.peak(self._batch) for layer in kinds)
        if (pictures := self.pictures) is not None and stage == 0:
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
    def _hidden(self) -> int:
        """The bytes of one hidden state of the rank's tokens."""
        return self._batch.hidden(self.model.shape.hidden_size)

    @property
    def _wanted(self) -> int:
        """The bytes of the hidden states for which the head's output is wanted, which a stage with a language-model
        head returns."""
        return self.rows * self.model.shape.hidden_size * self.model.itemsize

    @property
    def _parts_again(self) -> set[str]:
        """The blocks of a layer that are recomputed while the rest is kept."""
        again = self.recompute
        return set(again.modules) if again is not None and again.granularity == "selective" else set()

    def _kept_of_layers(self, layers: Iterable[Layer]) -> int:
        return sum(self._kept_of_layer[layer] * count for layer, count in Counter(layers).items())

    @cached_property
    def _kept_of_layer(self) -> dict[Layer, int]:
        return {layer: layer.kept(self._batch, self._parts_again) for layer in {*self.model.shape.layers}}

    def _backward(self, piece: int) -> int:
        """Return the most bytes besides what is kept in the backward pass of a layer of a piece, or in the embedding.
        The layers after it have freed what they kept."""
        model, shape = self.model, self.model.shape
        at_layer, freed, peaks = 0, 0, dict[Layer, int]()
        for layer in reversed(self._layers(piece)):
            if layer not in peaks:
                peaks[layer] = layer.backward_peak(self._batch)
                at_layer = max(at_layer, peaks[layer] - freed)
            freed += self._hidden if self._units(piece)[0] else self._kept_of_layer[layer]
        if piece > 0 or model.lora is not None:
            return at_layer
        embedding = shape.padded_vocab_size // model.layout.tp * shape.hidden_size
        return max(at_layer, embedding * model.itemsize + self.gathered() + self._hidden - self.kept(0))
