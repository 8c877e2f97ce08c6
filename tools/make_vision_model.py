"""Writes a Hugging Face directory of a small vision-language model with random weights:

    python tools/make_vision_model.py --out models/tiny_vl [--family qwen3_vl_moe] [--seed 0]

A Qwen2.5-VL (or Qwen3-VL, with or without experts) of about a million parameters for pictures of 32 x 32 pixels, as
`hpcrl data pictures` draws them: patches of 4 pixels, 16 tokens for a picture. The files are those of the large models:

    config.json, generation_config.json, model.safetensors
    preprocessor_config.json                what the image processor of transformers reads
    tokenizer.json, tokenizer_config.json   one token per character, Qwen's special tokens, a template with pictures

Nothing is trained here. The blocks of the tower start near the identity, so that its features are a random projection
of the pixels, from which a language model learns to read pictures even if the tower and its merger stay as they are.
The weights of the patch embedding and of the merger are larger than transformers draws them: the features vary more,
and the language model learns sooner.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from make_char_tokenizer import PRINTABLE

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIAL = (END_OF_TEXT, START, END, VISION_START, VISION_END, "<|vision_pad|>", IMAGE, VIDEO)
WORDS = ("system", "user", "assistant", "red", "green", "blue", "yellow", "pink", "white")  # one token each
TOKENS = (*SPECIAL, "\n", *PRINTABLE, *WORDS)
NUM_TOKENS = -(-len(TOKENS) // 16) * 16  # rows of the embedding, which tensor parallelism divides
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SIDE, PATCH, MERGE, FRAMES = 32, 4, 2, 2  # pixels, pixels, patches of a token's side, frames of a patch
TEXT = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": TOKENS.index(END),
    "pad_token_id": TOKENS.index(END_OF_TEXT),
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
MROPE_SECTION = [4, 6, 6]  # half of a head
TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": FRAMES,
    "out_hidden_size": TEXT["hidden_size"],
}
LARGER = {"patch_embed": 0.1, "merger": 0.06}  # standard deviation of random weights; of others 0.02
OPENAI_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def model_config(family: str) -> Any:
    """The configuration of transformers."""
    from transformers import Qwen2_5_VLConfig, Qwen3VLConfig, Qwen3VLMoeConfig

    ids = {
        f"{name}_token_id": TOKENS.index(token)
        for name, token in (
            ("image", IMAGE),
            ("video", VIDEO),
            ("vision_start", VISION_START),
            ("vision_end", VISION_END),
        )
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": MROPE_SECTION}
    if family == "qwen2_5_vl":
        tower = TOWER | {"window_size": 4 * PATCH, "fullatt_block_indexes": [TOWER["depth"] - 1]}
        text = TEXT | {"rope_parameters": rope}
        return Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **ids)
    tower = TOWER | {"num_position_embeddings": (SIDE // PATCH) ** 2, "deepstack_visual_indexes": [0]}
    text = TEXT | {"rope_parameters": rope | {"mrope_interleaved": True}, "head_dim": 2 * sum(MROPE_SECTION)}
    if family == "qwen3_vl_moe":
        return Qwen3VLMoeConfig(text_config=text | EXPERTS, vision_config=tower, tie_word_embeddings=True, **ids)
    return Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **ids)


def build_model(family: str, seed: int) -> Any:
    """A model with random weights, on the CPU, in fp32."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = model_config(family)
    return getattr(transformers, type(config).__name__.replace("Config", "ForConditionalGeneration"))(config)


def enlarge(tower: Any) -> None:
    """Draw the weights of LARGER anew."""
    import torch

    for name, weight in tower.named_parameters():
        for part, std in LARGER.items():
            if part in name and weight.dim() > 1:
                torch.nn.init.normal_(weight, std=std)


def tokenizer() -> str:
    """tokenizer.json as text: the ids are the places in TOKENS."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    built = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<|unknown|>"))
    built.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    built.decoder = decoders.Fuse()
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    built.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    return built.to_str(pretty=True) + "\n"


def tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": END_OF_TEXT,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": TEXT["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }


def preprocessor_config(family: str) -> dict[str, Any]:
    """As the large models have it, with small patches. Pictures are scaled to at least (SIDE / 2)^2 pixels and at most
    (2 SIDE)^2: 4 to 64 tokens."""
    common = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "merge_size": MERGE,
    }
    smallest, largest = SIDE**2 // 4, SIDE**2 * 4
    if family == "qwen2_5_vl":
        size = {"min_pixels": smallest, "max_pixels": largest}
        return common | size | OPENAI_CLIP | {"processor_class": "Qwen2_5_VLProcessor"}
    size = {"size": {"shortest_edge": smallest, "longest_edge": largest}}
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return common | size | half | {"processor_class": "Qwen3VLProcessor"}


def write_directory(out: Path, family: str, seed: int) -> int:
    """Write the files of the module's docstring, and return the number of parameters."""
    model = build_model(family, seed)
    enlarge(model.model.visual)
    model.save_pretrained(out)
    files = {
        "generation_config.json": {
            "eos_token_id": [TEXT["eos_token_id"], TEXT["pad_token_id"]],
            "pad_token_id": TEXT["pad_token_id"],
        },
        "preprocessor_config.json": preprocessor_config(family),
        "tokenizer_config.json": tokenizer_config(),
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (out / "tokenizer.json").write_text(tokenizer(), encoding="utf-8")
    return int(model.num_parameters())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("models/tiny_vl"), help="folder to write")
    parser.add_argument("--family", choices=("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), default="qwen2_5_vl")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    options = parser.parse_args(arguments)
    num_parameters = write_directory(options.out, options.family, options.seed)
    print(f"{options.out}: {options.family}, {num_parameters / 1e6:.2f} M parameters, {len(TOKENS)} tokens")


if __name__ == "__main__":
    main()
