"""How many operators PyTorch runs, views included: each takes a host's time, whatever it computes.

Counted with `hpcrl.machine.measure_rank.CountOperators` on megatron-core's layers and on the native engine;
tests/predict/test_operators.py counts again.
"""

from __future__ import annotations

from typing import NamedTuple

from hpcrl.model.params import Head
from hpcrl.runtime.layout import Layout


class Operators(NamedTuple):
    """launches: how much longer one of them takes than the operator of a plain layer that `device.launch` is. layer: of
    a dense layer, and mixture of one with experts, besides `expert` for each expert of the rank. tensor_parallel,
    context_parallel, adapter: more of them in a layer, `adapter` for each pair of LoRA's. batch: of a micro-batch
    before its first layer, and with context parallelism `split` more. lm, scalar: of a head and what is computed from
    its outputs. sequence: what a sequence of a micro-batch takes, in the time of so many."""

    launches: float
    layer: float
    mixture: float
    expert: float
    qk_norm: float
    tensor_parallel: float
    context_parallel: float
    adapter: float
    batch: float
    split: float
    lm: float
    scalar: float
    sequence: float

    def of_layer(self, layout: Layout, num_experts: float, adapters: int = 0, *, qk_norm: bool = False) -> float:
        """num_experts: of the rank; 0: a dense layer. adapters: matrices, two for each pair."""
        found = self.mixture + self.expert * num_experts if num_experts else self.layer
        found += self.tensor_parallel * (layout.tp > 1) + self.context_parallel * (layout.cp > 1)
        return found + self.adapter * adapters / 2 + self.qk_norm * qk_norm

    def of_batch(self, layout: Layout) -> float:
        return self.batch + self.split * (layout.cp > 1)

    def of_head(self, head: Head) -> float:
        return self.lm if head == "lm" else self.scalar


# Measured on a Xeon, with so few tokens that nothing else counts: an operator of a plain layer takes 4 to 6 us, of
# megatron-core's modules 15 to 19 us without gradients and 15 to 26 us with them, of the native engine 7 us and 0.1 ms
# per sequence and step.
FORWARD = Operators(3.5, 82, 135, 9.75, 10, 6, 30, 8, 75, 70, 39, 10, 0)  # without gradients
TRAINING = Operators(4.2, 211, 305, 30, 56, 20, 65, 24, 83, 70, 100, 56, 0)  # forward and backward, with gradients
ENGINE = Operators(1.6, 55, 64, 8, 8, 5, 0, 0, 0, 0, 70, 0, 15)  # of the native engine; lm: with sampling
GRAPH = Operators(1.0, 13, 19, 0, 1, 2, 0, 0, 0, 0, 18, 0, 0)  # kernels of an engine's decode step in a CUDA graph
