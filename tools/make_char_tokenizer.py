"""Builds the character tokenizers of the countdown task:

    python tools/make_char_tokenizer.py --out configs/tokenizer
    python tools/make_char_tokenizer.py --out configs/tool_tokenizer --tools

Three special tokens and 22 characters. The chat template writes the begin token, then every message's content, and an
end token after each assistant message, so that a countdown prompt is exactly begin + characters. A character outside
the vocabulary is an error, not a token that is silently dropped.

With --tools: all of ASCII that prints, so that a tool's errors can be read; the fixed parts of a hermes call of the
calculator as one token each, as a tokenizer that has seen many would have them; a template that puts the answers of
tools into <tool_response>.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
CHARACTERS = "0123456789+-*/()=: <>a"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)

PRINTABLE = "".join(map(chr, range(32, 127)))
TOOL_WORDS = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *('{"name": "', '", "arguments": {"', '": "', '"}}', "calculate", "expression"),
)
TOOL_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'tool' %}<tool_response>{{ message['content'] }}</tool_response>"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def build(characters: str, words: Sequence[str] = ()) -> str:
    """tokenizer.json as text: ids 0, 1, 2 are pad, begin and end, then characters and words in the given order."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, *characters, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B:1", special_tokens=[(BOS, vocabulary[BOS])]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, BOS, EOS)])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    return tokenizer.to_str(pretty=True)


def config(chat_template: str = CHAT_TEMPLATE) -> dict[str, object]:
    """tokenizer_config.json; the class name is one that transformers 4 and 5 both know."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 4096,
        "chat_template": chat_template,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("configs/tokenizer"), help="folder to write")
    parser.add_argument("--characters", help=f"the alphabet; {CHARACTERS!r}, or with --tools what prints")
    parser.add_argument("--tools", action="store_true", help="with the words of tool calls")
    args = parser.parse_args(arguments)
    characters = args.characters or (PRINTABLE if args.tools else CHARACTERS)
    words, template = (TOOL_WORDS, TOOL_CHAT_TEMPLATE) if args.tools else ((), CHAT_TEMPLATE)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "tokenizer.json").write_text(build(characters, words) + "\n", encoding="utf-8")
    (args.out / "tokenizer_config.json").write_text(json.dumps(config(template), indent=2) + "\n", encoding="utf-8")
    print(f"{args.out}: {len(characters) + len(words) + 3} tokens")


if __name__ == "__main__":
    main()
