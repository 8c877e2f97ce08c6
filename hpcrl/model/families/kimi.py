"""Kimi-K2: DeepSeek-V3 under a model type of its own. No torch."""

from __future__ import annotations

from hpcrl.model.families import deepseek

DEFAULTS = {"kimi_k2": deepseek.DEFAULTS["deepseek_v3"]}
FAMILIES = {"kimi_k2": deepseek.FAMILIES["deepseek_v3"]}
