"""Builds the character tokenizer of the countdown task: `python tools/make_char_tokenizer.py --out configs/tokenizer`.

Three special tokens and 22 characters. The chat template writes the begin token, then every message's content, and an
end token after each assistant message, so that a countdown prompt is exactly begin + characters. A character outside
the vocabulary is an error, not a token that is silently dropped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
CHARACTERS = "0123456789+-*/()=: <>a"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def build(characters: str) -> str:
    """tokenizer.json as text: ids 0, 1, 2 are pad, begin and end, then the characters in the given order."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B:1", special_tokens=[(BOS, vocabulary[BOS])]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, BOS, EOS)])
    return tokenizer.to_str(pretty=True)


def config() -> dict[str, object]:
    """tokenizer_config.json; the class name is one that transformers 4 and 5 both know."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("configs/tokenizer"), help="folder to write")
    parser.add_argument("--characters", default=CHARACTERS, help="the alphabet")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "tokenizer.json").write_text(build(args.characters) + "\n", encoding="utf-8")
    (args.out / "tokenizer_config.json").write_text(json.dumps(config(), indent=2) + "\n", encoding="utf-8")
    print(f"{args.out}: {len(args.characters) + 3} tokens")


if __name__ == "__main__":
    main()
