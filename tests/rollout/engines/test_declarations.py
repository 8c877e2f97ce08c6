"""What engines declare, and that the rest of the package knows no engine by its name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrl.config.engines import ENGINES
from hpcrl.model.blocks.norms import Norms
from hpcrl.rollout.engines.vllm.declaration import Vllm
from hpcrl.runtime.exits import InputError
from tests.rollout.small_model import SHAPE

PACKAGE = Path(__file__).parents[3] / "hpcrl"
# Where a name in quotes or in a path is needed: a default, the command that checks TensorRT-LLM and its package's name,
# what a judge is drawn by, old paths, and torch's allocator "native".
MAY_NAME = {"config/schema.py", "cli.py", "machine/check.py", "workers/judge.py", "moved.py", "runtime/accelerator.py"}


def test_engines_are_named_in_their_folders() -> None:
    names = "|".join(ENGINES.names())
    code = re.compile(rf'["\'.]({names})["\'.]')
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    outside = [file for file in files if file.parts[:2] != ("rollout", "engines") or len(file.parts) == 3]
    found = {str(file) for file in outside if code.search((PACKAGE / file).read_text())}
    assert found == MAY_NAME, sorted(found ^ MAY_NAME)


def test_the_layout_in_vllm_has_each_element_once() -> None:
    shape = replace(SHAPE, vocab_size=100, tie_word_embeddings=False)
    for ranks in (1, 2):
        parts = [Vllm().shards(shape, rank, ranks) for rank in range(ranks)]
        for shards in zip(*parts, strict=True):
            area = lambda box: (box.global_rows[1] - box.global_rows[0]) * (box.global_cols[1] - box.global_cols[0])  # noqa: E731
            total = sum(area(box) for shard in shards for box in shard.boxes)
            whole = shards[0].global_shape
            rows = 100 if "embed" in shards[0].local_name or "lm_head" in shards[0].local_name else whole[0]
            copies = ranks if shards[0].tp_replicated else 1
            assert total == copies * rows * (whole[1] if len(whole) == 2 else 1), shards[0].local_name
        assert {shard.local_shape[0] for shard in parts[0] if "embed" in shard.local_name} == {128 // ranks}


@pytest.mark.parametrize(
    ("change", "what"),
    [({"norms": Norms(after=True)}, "norms"), ({"num_experts": 2, "moe_ffn_hidden_size": 8}, "mixture")],
)
def test_vllm_accepts_no_block_whose_layout_is_not_known(change: dict[str, object], what: str) -> None:
    with pytest.raises(InputError, match=f"rollout.engine=vllm: its layout of .*{what}.* is not known"):
        Vllm().shards(replace(SHAPE, **change), 0, 1)  # type: ignore[arg-type]
