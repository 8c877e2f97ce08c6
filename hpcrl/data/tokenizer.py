"""Loading a Hugging Face tokenizer without the network, and texts as its tokens."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hpcrl.observe.read.token_text import check_growth
from hpcrl.runtime.exits import InputError, folded
from hpcrl.sandbox.foreign_files import ForeignFileError, check_folder, printable, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import ModelConfig

PLAIN = "PreTrainedTokenizerFast"


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a directory (or of the local hub cache); it must have an end-of-sequence token.

    The hub is used only if the user has set HF_HUB_OFFLINE=0. Code of a tokenizer is never run.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
    # Imported here: transformers takes seconds to import, and tools on login nodes do not need it.
    try:
        if os.path.isdir(path):
            check_folder(path)
        if _is_plain(path):
            tokenizer = _plain_class().from_pretrained(path, trust_remote_code=False)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        if hasattr(tokenizer, "backend_tokenizer"):
            check_growth(tokenizer.backend_tokenizer)
    except ModuleNotFoundError as error:
        raise InputError(
            f"{error.name} is not installed, which reads model.tokenizer={path}; pip install 'hpcrl[cpu]', or [gpu]"
        ) from None
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and bare Exception alike
        if not os.path.isdir(path):
            problem = "no such directory, and not in the Hugging Face cache"
        elif isinstance(error, ForeignFileError):
            raise InputError(f"model.tokenizer={path}: {error}") from None
        elif code := own_code(path, "AutoTokenizer"):
            raise InputError(f"model.tokenizer={path}: {code}; convert it, so that it has a tokenizer.json") from None
        else:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise InputError(
            f"model.tokenizer={path}: {problem}; expected a directory with tokenizer.json and tokenizer_config.json"
        ) from None
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"model.tokenizer={path}: no eos_token, which ends a response; set it in tokenizer_config.json"
        )
    return tokenizer


def tokenizer_of(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer that a section `model` names."""
    named = model.tokenizer or model.path
    if named is None:
        raise InputError("model.tokenizer and model.path are null; name a tokenizer directory")
    return load_tokenizer(named)


def has_tokenizer(folder: str) -> bool:
    """Whether a Hugging Face directory has a tokenizer beside its model."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("tokenizer.json", "tokenizer_config.json"))


def token_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids that have a token, added ones included."""
    return set(tokenizer.get_vocab().values())


def end_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a response: the tokenizer's eos_token, then others that generation_config.json beside it names, as
    for `transformers.generate`."""
    assert tokenizer.eos_token_id is not None
    return tuple(dict.fromkeys([int(tokenizer.eos_token_id), *_generation_ends(str(tokenizer.name_or_path))]))


@functools.cache
def _generation_ends(folder: str) -> list[int]:
    try:
        ids = read_json(os.path.join(folder, "generation_config.json")).get("eos_token_id")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{folder}/generation_config.json cannot be read: {error}") from None
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(i, int) for i in ids):
        raise InputError(f"{folder}/generation_config.json: eos_token_id is {ids}; expected an id or a list of ids")
    return ids


def _is_plain(path: str) -> bool:
    """Whether the directory names the base class. AutoTokenizer finds the same after loading all model tables, which
    takes more than a second per rank."""
    try:
        return read_json(os.path.join(path, "tokenizer_config.json")).get("tokenizer_class") == PLAIN
    except (OSError, ValueError, AttributeError):
        return False


def own_code(folder: str, kind: str) -> str | None:
    """What Python of its own a model's directory names for an `Auto*` class of transformers, in words; None for none.
    It is never run."""
    for name in ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json", "config.json"):
        try:
            auto_map = read_json(os.path.join(folder, name)).get("auto_map")
        except (OSError, ValueError, AttributeError):
            continue
        code = auto_map.get(kind) if isinstance(auto_map, dict) else auto_map
        if code:
            named = next((one for one in code if one), code) if isinstance(code, list) else code
            return (
                f"{name} names code of its own, {printable(str(named), one_line=True)[:100]}, which hpcrl does not run"
            )
    return None


def _plain_class() -> type[PreTrainedTokenizerBase]:
    """Import `PreTrainedTokenizerFast` without `transformers/__init__.py`, which reads the source of all models. A
    later import of transformers is complete and has the same class."""
    name = "transformers"
    if name not in sys.modules and (spec := importlib.util.find_spec(name)):
        package = sys.modules[name] = importlib.util.module_from_spec(spec)  # not executed
        package.__version__ = importlib.metadata.version(name)  # type: ignore[attr-defined]
        try:
            import transformers.tokenization_utils_tokenizers  # noqa: F401
        except ImportError:  # another version of transformers
            pass
        finally:
            del sys.modules[name]
        if module := sys.modules.get(f"{name}.tokenization_utils_tokenizers"):
            return module.PreTrainedTokenizerFast
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast


SURROGATE = re.compile("[\ud800-\udfff]")


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], places: list[str], add_special_tokens: bool
) -> list[list[int]]:
    """Return token ids of each text. Raises InputError, with the text's place, for text that has no tokens."""
    if not texts:
        return []
    try:
        ids = tokenizer(texts, add_special_tokens=add_special_tokens, return_attention_mask=False)["input_ids"]
    except Exception:  # of one of the texts; the loop finds it
        for text, where in zip(texts, places, strict=True):
            with encodable(tokenizer, text, where):
                tokenizer(text, add_special_tokens=add_special_tokens)
        raise
    for text, where in zip(texts, places, strict=True):
        check_characters(tokenizer, text, where)
    return ids


@contextmanager
def encodable(tokenizer: PreTrainedTokenizerBase, text: str, where: str) -> Iterator[None]:
    """Raise InputError for a text that the tokenizer, which encodes it inside, fails for or drops characters of."""
    check_characters(tokenizer, text, where)
    try:
        yield
    except Exception as error:  # the tokenizers library raises bare Exception
        raise InputError(
            f"{where}: the tokenizer cannot encode {text[:80]!r}: {folded(error)}; "
            "expected text in its vocabulary; use another model.tokenizer"
        ) from None


def check_characters(tokenizer: PreTrainedTokenizerBase, text: str, where: str) -> None:
    """Raise InputError for half of a surrogate pair, and for a character that the tokenizer would drop."""
    if not text.isascii() and (half := SURROGATE.search(text)):
        before = text[max(half.start() - 20, 0) : half.start()]
        raise InputError(
            f"{where}: found half of a surrogate pair, {half[0]!r}, after {before!r}; expected Unicode text; "
            "remove it, or the row"
        )
    if dropped := [character for character in sorted(set(text)) if _is_dropped(tokenizer, character)]:
        rest = _added_tokens(tokenizer).sub("", text)  # their characters need no token of their own
        for character in dropped:
            if character in rest:
                raise InputError(
                    f"{where}: the tokenizer has no token for {character!r} in {text[:80]!r}; "
                    "expected text in its vocabulary; use another model.tokenizer"
                )


@functools.lru_cache(16)
def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches the text of the tokens that are found before the model of the tokenizer runs, such as special ones."""
    return re.compile("|".join(map(re.escape, tokenizer.get_added_vocab())) or "(?!)")


@functools.lru_cache(2**16)
def _is_dropped(tokenizer: PreTrainedTokenizerBase, character: str) -> bool:
    """Whether the tokens of a character stand for less than its text: BPE drops what it has no token for."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE":
        return False
    if backend.model.unk_token is not None or backend.model.byte_fallback:
        return False
    text = backend.normalizer.normalize_str(character) if backend.normalizer else character
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] if backend.pre_tokenizer else [text]
    tokens = backend.encode(character, add_special_tokens=False).tokens
    return sum(map(len, tokens)) < sum(map(len, pieces))


def split_end(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[str, str]:
    """The text before the end-of-sequence tokens at its end, and the first of them, or ""; white space may follow."""
    match = _ends_at_the_end(tokenizer).search(text)
    return (text[: match.start()], match[1]) if match else (text, "")


def first_end(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The end-of-sequence token with which the text begins, or ""."""
    ends = [str(tokenizer.decode([token])) for token in end_token_ids(tokenizer)]
    return next((end for end in ends if end and text.startswith(end)), "")


def starts_with_special(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether the text begins with a special token."""
    return any(it.special and text.startswith(it.content) for it in tokenizer.added_tokens_decoder.values())


@functools.lru_cache(16)
def _ends_at_the_end(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    ends = "|".join(re.escape(end) for token in end_token_ids(tokenizer) if (end := str(tokenizer.decode([token]))))
    return re.compile(rf"({ends or '(?!)'})(?:\s|{ends or '(?!)'})*\Z")
