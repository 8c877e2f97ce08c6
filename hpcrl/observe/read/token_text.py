"""Token ids as text, with only the `tokenizers` package: for tools on a login node, without torch and transformers."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.sandbox.foreign_files import MOST_CONFIG, check_yaml, read_bytes, read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
LONGEST_CHARACTER = 8  # tokens; in UTF-8 four bytes
REPLACEMENT = "\ufffd"
MOST_GROWTH = 1000  # characters that a tokenizer may make of one


class TokenText:
    """Decodes token ids; without a tokenizer, an id is shown as its number and a space."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
        self._special = {index for index, token in added.items() if token.special}

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def is_special(self, token: int) -> bool:
        return token in self._special

    def decode(self, ids: Sequence[int]) -> str:
        """The text of all tokens, special tokens included."""
        if self._tokenizer is None:
            return "".join(f"{token} " for token in ids).rstrip()
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The part of the text that each token adds; joined, the text of all.

        Of a character that several tokens form, the last of them has the text and the others are empty.
        """
        if self._tokenizer is None:
            return [f"{token} " for token in ids]
        text = self.decode(ids)
        texts = self._streamed(ids)
        return texts if "".join(texts) == text else self._aligned(ids, text)

    def _streamed(self, ids: Sequence[int]) -> list[str]:
        """As far as the package's decoder for streams decodes them, which expects text that its tokenizer has made."""
        from tokenizers.decoders import DecodeStream

        stream, texts = DecodeStream(skip_special_tokens=False), []
        done = 0  # tokens whose text is complete
        for token in ids:
            try:
                texts.append(stream.step(self._tokenizer, token) or "")
            except Exception:  # the package raises bare Exception
                return []
            done = len(texts) if texts[-1] else done
            if len(texts) - done > LONGEST_CHARACTER:  # it decodes all of them at each step
                return []
        if done < len(texts):  # the last character is incomplete, or the last tokens have no text
            texts[-1] = self.decode(ids[done:])
        return texts

    def _aligned(self, ids: Sequence[int], text: str) -> list[str]:
        """`text` cut where the texts of single tokens are found in it: for what no tokenizer makes of a text, such as
        single bytes of characters. A token whose text is not found adds nothing, and the next one more."""
        texts, start, waiting = [], 0, 1
        for token in ids:
            own = self.decode([token])
            place = text.find(own, start, start + LONGEST_CHARACTER * waiting + len(own)) if own else -1
            end = start if place < 0 or REPLACEMENT in own else place + len(own)
            texts.append(text[start:end])
            waiting = 1 if end > start else waiting + 1
            start = end
        if texts:
            texts[-1] += text[start:]
        return texts


def token_text_of(run: Path) -> TokenText:
    """The texts of a run's tokens. Where its tokenizer is not found, logs one warning, and ids are shown as numbers."""
    config = read_config(run)
    model = config.get("model")
    model = model if isinstance(model, Mapping) else {}
    recorded = model.get("tokenizer") or model.get("path")
    folders = list(dict.fromkeys(tokenizer_folders(run, config, recorded)))
    for folder in folders:
        file = folder / TOKENIZER_FILE
        if not file.is_file():
            continue
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_buffer(read_bytes(file, run if run in file.parents else folder))
            check_growth(tokenizer)
            return TokenText(tokenizer)
        except Exception as error:  # the package raises bare Exception
            log.warning("%s cannot be read (%s)", file, " ".join(str(error).split())[:200])
    name = f"model.tokenizer={recorded}" if recorded else "config.yaml, which names none,"
    log.warning(
        "%s: found no %s for %s; token ids are shown in place of text: copy the tokenizer's folder to %s",
        *(run, TOKENIZER_FILE, name, run / "tokenizer"),
    )
    return TokenText(None)


def check_growth(tokenizer: Tokenizer) -> None:
    """Raise ValueError if a short text could fill the memory: replacements that follow each other multiply."""
    for part in filter(None, (tokenizer.normalizer, tokenizer.decoder)):
        growth, waiting = 1, [json.loads(part.__getstate__())]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict) and value.get("type") in ("Replace", "Prepend"):
                growth *= max(len(value.get("content") or value.get("prepend") or ""), 1)
            waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if growth > MOST_GROWTH:
            raise ValueError(f"its {type(part).__name__} makes more than {MOST_GROWTH} characters of one")


def read_config(run: Path) -> dict[str, Any]:
    """A run's config.yaml as plain values; {} if it is missing or damaged."""
    import yaml

    try:
        text = read_text(run / "config.yaml", most=MOST_CONFIG)
        try:
            tree = _loaded(getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text))
        except yaml.YAMLError:
            if "\\u" not in text:
                raise
            # libyaml, which is fast, rejects the escape of an unpaired surrogate
            tree = _loaded(yaml.SafeLoader(text))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _loaded(loader: Any) -> Any:
    root = loader.get_single_node()
    if root is None:
        return None
    check_yaml(root)
    return loader.construct_document(root)


def tokenizer_folders(run: Path, config: Mapping[str, Any], recorded: Any) -> Iterator[Path]:
    """Folders in which a run's tokenizer may be, the best first.

    A run that was copied has it in its bundle, or beside exported weights.

    Args:
        recorded: the path in its config: absolute, or relative to the folder in which the job ran.
    """
    if isinstance(recorded, str) and recorded:
        path = Path(recorded)
        if path.is_absolute():
            yield path
        else:
            yield from (base / path for base in (*working_folders(run, config), Path.cwd(), run))
        bundles = sorted(run.glob("bundle*"))
        inside = _inside_bundle(path)
        yield from (bundle / inside for bundle in bundles if inside is not None)
        yield from (bundle / "inputs" / path.relative_to(path.anchor) for bundle in bundles)
        if not path.is_absolute():
            yield Path(__file__).parents[3] / path
        yield from (run / name for name in (path.name, "tokenizer"))
    yield run
    yield from sorted(run.glob("checkpoints/step_*/huggingface"), reverse=True)


def working_folders(run: Path, config: Mapping[str, Any]) -> Iterator[Path]:
    """The folder from which the job wrote to a relative run.dir, seen from where the run is now."""
    section = config.get("run")
    recorded = section.get("dir") if isinstance(section, Mapping) else None
    if not isinstance(recorded, str) or os.path.isabs(recorded):
        return
    parts = Path(os.path.normpath(recorded)).parts
    above = run.resolve().parent
    if ".." not in parts and above.parts[len(above.parts) - len(parts) :] == parts:
        yield Path(*above.parts[: len(above.parts) - len(parts)])


def _inside_bundle(path: Path) -> Path | None:
    """The part of a path below a run's bundle; None for other paths."""
    for index, part in enumerate(path.parts):
        if part.startswith("bundle_") and path.parts[index + 1 : index + 2] == ("inputs",):
            return Path(*path.parts[index + 1 :])
    return None
