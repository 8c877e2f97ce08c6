"""Loading a Hugging Face tokenizer without the network."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from hpcrl.observe.read.token_text import check_growth
from hpcrl.runtime.exits import InputError
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
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and bare Exception alike
        if not os.path.isdir(path):
            found = "no such directory, and not in the Hugging Face cache"
        elif isinstance(error, ForeignFileError):
            raise InputError(f"model.tokenizer={path}: {error}") from None
        elif code := own_code(path, "AutoTokenizer"):
            raise InputError(f"model.tokenizer={path}: {code}; convert it, so that it has a tokenizer.json") from None
        else:
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise InputError(
            f"model.tokenizer={path}: {found}; expected a directory with tokenizer.json and tokenizer_config.json"
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
            found = read_json(os.path.join(folder, name)).get("auto_map")
        except (OSError, ValueError, AttributeError):
            continue
        code = found.get(kind) if isinstance(found, dict) else found
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
