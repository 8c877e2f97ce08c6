"""Archives of small runs, written by what a job writes them with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from hpcrl.observe.record.archive import RolloutLog, finish_step, log_path

END = "<|end|>"


def byte_level() -> Tokenizer:
    """As GPT-2's, Llama 3's and Qwen's: characters outside ASCII are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the answer is 42, and the others are not", "a question"], trainer)
    return tokenizer


def sentence_piece() -> Tokenizer:
    """As Llama 2's and Mistral's: a space in front of words, bytes for unknown characters."""
    letters = {letter: index for index, letter in enumerate("\u2581abcdefghijklmnopqrstuvwxyz.,0123456789")}
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {letter: 256 + index for letter, index in letters.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    tokenizer.add_special_tokens([END])
    return tokenizer


def word_level() -> Tokenizer:
    """Without a decoder: tokens are joined by spaces."""
    words = {word: index for index, word in enumerate(("?", "one", "two", "three"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([END])
    return tokenizer


def write_config(run: Path, tokenizer: str | None, **sections: Any) -> None:
    run.mkdir(parents=True, exist_ok=True)
    config = {"run": {"dir": "runs", "name": run.name}, "model": {"tokenizer": tokenizer, "path": None}, **sections}
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def write_step(
    run: Path,
    step: int,
    texts: Sequence[tuple[str, str]],
    tokenizer: Tokenizer,
    *,
    scores: Sequence[float] | None = None,
    samples_per_prompt: int = 2,
    answered: slice = slice(0),
    columns: Sequence[str] = ("response_mask", "rollout_log_probs", "old_log_probs", "advantages", "entropies"),
    **samples: Sequence[Any],
) -> None:
    """Archive a step of (prompt, response) pairs; responses end with END. answered: tokens of each response that the
    model did not write. samples: further columns."""
    folder = run / "rollouts"
    log = RolloutLog(log_path(folder, step, 0))
    for position, (prompt, response) in enumerate(texts):
        before = tokenizer.encode(prompt, add_special_tokens=False).ids
        after = [*tokenizer.encode(response, add_special_tokens=False).ids, tokenizer.token_to_id(END)]
        tokens = {"input_ids": np.array(before + after, np.int32)}
        for number, name in enumerate(columns):
            tokens[name] = np.arange(len(after), dtype=np.float32) / 8 - number - position
        if "response_mask" in columns:
            tokens["response_mask"] = np.ones(len(after), np.int32)
            tokens["response_mask"][answered] = 0
        values = {
            "position": position,
            "uid": f"a.parquet:{position // samples_per_prompt}:0",
            "sample_index": position % samples_per_prompt,
            "data_source": "test",
            "prompt_length": len(before),
            "response_length": len(after),
            "finish_reason": "stop",
            "score": position / 4 if scores is None else scores[position],
            "acc": float(position % 2),
            "extras": json.dumps({"acc": float(position % 2), "format": 0.5, "note": "ok"}),
            **{name: column[position] for name, column in samples.items()},
        }
        log.append_sample(tokens, values)
    log.close()
    finish_step(folder, step, seed=1, weight_version=step, report=print)
