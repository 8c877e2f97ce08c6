"""Gradients of a family of each kind of block: those of `transformers`, tensor by tensor, to 1e-5 of their norm."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from hpcrl.model.blocks.router import Routing
from hpcrl.model.build import build_model, named_parameters
from hpcrl.model.families.config_json import read_shape
from hpcrl.model.gpt import pack
from hpcrl.model.hf_files import Safetensors, hf_shards, whole_tensors
from hpcrl.model.params import shards
from hpcrl.runtime.groups import fake_rank
from hpcrl.runtime.layout import Layout
from tests.covering import slow_but
from tests.model.families import make_model

LENGTHS = [70, 3, 130]
# Of sums over tokens whose terms nearly cancel.
SUMS = ("A_log", "dt_bias", "mixer.D")
FAMILIES = ("qwen3.5", "nemotron-h", "gpt-oss", "apertus", "gemma3", "olmo3", "smollm3", "minimax-m2")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", slow_but("gemma3", FAMILIES))
def test_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Rounding in gated delta nets adds up to more: there float64 is the reference, and `transformers` the measure."""
    theirs = make_model(name, pad_token_id=49)  # a token of padding has no gradient there
    theirs.save_pretrained(tmp_path / "model")
    texts = [torch.arange(length) * 7 % 47 for length in LENGTHS]
    expected, rounding = their_gradients(theirs, texts, tmp_path / "gradients"), dict[str, float]()
    if name == "qwen3.5":
        exact = their_gradients(deepcopy(theirs).double(), texts, tmp_path / "exact")
        rounding = {key: 3 * float((expected[key] - tensor).norm() / tensor.norm()) for key, tensor in exact.items()}
        expected = exact
    for key, tensor in whole_tensors(gradients(tmp_path / "model", texts)).items():
        if not key.endswith("e_score_correction_bias"):  # which is not trained
            bound = max(rounding.get(key, 0.0), 1e-4 if key.endswith(SUMS) else 1e-5)
            assert (tensor - expected[key]).norm() <= bound * expected[key].norm(), key


def their_gradients(model: transformers.PreTrainedModel, texts: list[Tensor], folder: Path) -> dict[str, Tensor]:
    """Return the gradients under the names of files."""
    model = deepcopy(model)
    for text in texts:
        log_probs = model(text[None], attention_mask=torch.ones(1, len(text))).logits[0].log_softmax(-1)
        log_probs[:-1].gather(1, text[1:, None]).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def gradients(folder: Path, texts: list[Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the training model, under Hugging Face's names."""
    shape, size = read_shape(folder), 224
    with fake_rank(Layout((0,)), 0) as groups:
        chunks = build_model(shape, groups)
        parameters = named_parameters(chunks)
        weights = {shard.name: parameters[0, shard.local_name] for shard in shards(shape)}
        Safetensors(folder).load(shape, shards(shape), weights)
        lengths = torch.tensor([len(text) for text in texts])
        packed = pack(torch.cat(texts), lengths, shape, size=size)
        if shape.routed is not None:
            sequences = torch.repeat_interleave(
                torch.arange(len(texts) + 1), torch.tensor([*LENGTHS, size - sum(LENGTHS)])
            )
            packed.routing = Routing(sequences, lengths, shape.routed.layers)
        hidden = chunks[0](packed.input_ids, packed.position_ids, None, packed_seq_params=packed)
        log_probs = chunks[0].logits(hidden)[:, : shape.vocab_size].log_softmax(-1)
        for text, rows in zip(texts, log_probs[: sum(LENGTHS)].split(LENGTHS), strict=True):
            rows[:-1].gather(1, text[1:, None]).sum().backward(retain_graph=True)
    found = {its.local_name: torch.zeros(its.local_shape) for its in hf_shards(shape)}
    for its in hf_shards(shape):
        grad = weights[its.name].grad
        for box in its.boxes if grad is not None else ():
            part = grad.view(len(grad), -1)[slice(*box.global_rows)]
            found[its.local_name].view(its.local_shape[0], -1)[box.local_row : box.local_row + len(part)] = part
    return found
