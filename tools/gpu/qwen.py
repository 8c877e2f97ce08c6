"""The model whose speed is measured, and a small one for rehearsals."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from hpcrl.config.loader import load_config
from hpcrl.model.architecture import shape_from_yaml
from hpcrl.model.shape import ModelShape

CONFIG = Path(__file__).with_name("grpo_1_5b.yaml")
SMALL = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 2, "vocab_size": 512}
REHEARSAL = os.environ.get("HPCRL_GPU_REHEARSAL") == "1"


def shape() -> ModelShape:
    """That of the job's template."""
    model = load_config(CONFIG).model
    assert model.vocab_size is not None
    whole = shape_from_yaml(model, model.vocab_size)
    return replace(whole, **SMALL, head_dim=32) if REHEARSAL else whole
