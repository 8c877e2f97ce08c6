"""Blocks of layers: what the rest of the package may read of them, and what does not support them says so."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrl.model.blocks.micro_batch import seen_pairs
from hpcrl.model.blocks.norms import Norms
from hpcrl.model.shape import forward_flops
from hpcrl.rollout.engines.tensorrt_llm.declaration import check_model as check_tensorrt_llm
from hpcrl.runtime.exits import InputError
from tests.rollout.small_model import SHAPE

PACKAGE = Path(__file__).parents[2] / "hpcrl"
FLAGS = (
    *("mla", "qkv_bias", "qk_norm", "num_experts", r"moe_\w+", "dense_layers", "windows", "norms", "blocks"),
    *("head_dim", "v_head_dim", "num_query_groups", "num_attention_heads", "ffn_hidden_size", "softmax_scale"),
)


def test_no_file_outside_the_model_reads_what_only_a_block_has() -> None:
    flag = re.compile(rf"shape\.({'|'.join(FLAGS)})\b")
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "model"]
    assert len(files) > 200
    found = [f"{path.relative_to(PACKAGE)}: {match[0]}" for path in files for match in flag.finditer(path.read_text())]
    assert not found


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"norms": Norms(before=True, after=True)}, r"norms \(layer 0\)"),
        ({"norms": Norms(zero_centered=True)}, r"norms \(layer 0\)"),
        ({"windows": (None, 8)}, r"attention with a window \(layer 1\)"),
    ],
)
def test_tensorrt_llm_refuses_what_it_would_lose(change: dict[str, object], what: str) -> None:
    check_tensorrt_llm(SHAPE, 1)
    with pytest.raises(InputError, match=f"its layout of {what} is not known; use engine=native"):
        check_tensorrt_llm(replace(SHAPE, **change), 1)  # type: ignore[arg-type]


def test_operations_of_a_window_are_those_of_the_tokens_in_it() -> None:
    assert seen_pairs(5, 2) == sum(min(token, 2) for token in range(1, 6))
    full, half = (forward_flops(replace(SHAPE, windows=windows), [100], 0) for windows in ((), (None, 10)))
    each = 2.0 * 4 * (8 + 8)  # of a pair in one layer
    assert full - half == pytest.approx(each * (seen_pairs(100, None) - seen_pairs(100, 10)))
