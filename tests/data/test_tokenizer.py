"""The shipped character tokenizer, and one line for one that cannot be loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.data.tokenizer import end_token_ids, load_tokenizer
from hpcrl.runtime.exits import InputError

CHARACTERS = "0123456789+-*/()=: <>a"
SHIPPED = Path(__file__).parents[2] / "configs" / "tokenizer"


def test_vocabulary(tokenizer: Any) -> None:
    assert len(tokenizer) == 25
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer(CHARACTERS, add_special_tokens=False)["input_ids"] == list(range(3, 25))


@given(text=st.text(alphabet=CHARACTERS, max_size=60))
def test_round_trip(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([1, *ids, 2, 0], skip_special_tokens=True) == text


def test_template_is_begin_content_and_end_after_an_answer(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "5 8 5 2 6:"}]
    for generation_prompt in (True, False):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
        assert text == "<|bos|>5 8 5 2 6:"
    messages.append({"role": "assistant", "content": "<a>8+5-5-2</a>"})
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|bos|>5 8 5 2 6:<a>8+5-5-2</a><|eos|>"


def test_the_shipped_files_are_what_the_tool_builds(tmp_path: Path, tool: Callable[[str], ModuleType]) -> None:
    tool("make_char_tokenizer").main(["--out", str(tmp_path)])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((SHIPPED / name).read_text())


def test_what_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    no_eos = tmp_path / "no_eos"
    no_eos.mkdir()
    config = json.loads((SHIPPED / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (no_eos / "tokenizer_config.json").write_text(json.dumps(config))
    (no_eos / "tokenizer.json").write_text((SHIPPED / "tokenizer.json").read_text())
    garbage = tmp_path / "garbage"
    garbage.mkdir()
    (garbage / "tokenizer.json").write_text("{")
    (garbage / "tokenizer_config.json").write_text("{}")
    for path, said in [
        (str(tmp_path / "absent"), "no such directory"),
        (str(bad), "expected a directory with tokenizer.json"),
        (str(garbage), "expected a directory with tokenizer.json"),
        (str(no_eos), "no eos_token"),
    ]:
        with pytest.raises(InputError) as error:
            load_tokenizer(path)
        assert said in str(error.value) and "\n" not in str(error.value)


def test_a_response_ends_with_each_id_that_generation_config_names(tmp_path: Path) -> None:
    def ends(folder: str, generation_config: str | None) -> tuple[int, ...]:
        shutil.copytree(SHIPPED, tmp_path / folder)
        if generation_config is not None:
            (tmp_path / folder / "generation_config.json").write_text(generation_config)
        return end_token_ids(load_tokenizer(str(tmp_path / folder)))

    assert ends("none", None) == (2,)
    assert ends("one", '{"eos_token_id": 7}') == (2, 7)
    assert ends("more", '{"eos_token_id": [9, 2, 7]}') == (2, 9, 7)
    with pytest.raises(InputError, match=r"names/generation_config.json: eos_token_id is \['a'\]; expected an id"):
        ends("names", '{"eos_token_id": "a"}')
    with pytest.raises(InputError, match=r"broken/generation_config.json cannot be read"):
        ends("broken", "{")


RUNS_CODE = """
import pathlib
pathlib.Path({trace!r}).touch()
from transformers import PreTrainedTokenizerFast, AutoImageProcessor
class Own(PreTrainedTokenizerFast):
    pass
"""
LOADS = """
import sys
from hpcrl.data.images import ImageProcessor
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.runtime.exits import InputError
for folder in sys.argv[1:]:
    try:
        if folder.endswith("pictures"):
            print(ImageProcessor.of_model(folder, None, None))
        else:
            print(len(load_tokenizer(folder)))
    except InputError as error:
        print(error)
"""
AUTO = {"AutoTokenizer": ["own.Own", None], "AutoConfig": "own.Own", "AutoImageProcessor": "own.Own"}
TOKENIZER, PICTURES = "tokenizer_config.json", "preprocessor_config.json"


def test_python_of_a_model_is_not_run(tmp_path: Path) -> None:
    """Even if standard input agrees to it. Where a class of transformers does as well, that one is taken."""
    trace, home = tmp_path / "it ran", tmp_path / "home"  # where transformers copies the code to
    cases: list[tuple[str, dict[str, Any], bool]] = [
        (TOKENIZER, {"auto_map": AUTO, "tokenizer_class": "Own"}, False),
        (TOKENIZER, {"auto_map": ["own.Own", "own.Own"], "tokenizer_class": "OwnTokenizer"}, False),
        (TOKENIZER, {"auto_map": AUTO}, True),
        ("config.json", {"auto_map": AUTO, "model_type": "own", "architectures": ["Own"]}, True),
        ("processor_config.json", {"auto_map": AUTO, "processor_class": "Own"}, True),
        (PICTURES, {"auto_map": AUTO, "image_processor_type": "Own"}, False),
    ]
    folders = []
    for number, (name, config, _) in enumerate(cases):
        folder = tmp_path / f"{number} {'pictures' if name == PICTURES else 'text'}"
        shutil.copytree(SHIPPED, folder)
        found = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(found | config))
        (folder / "own.py").write_text(RUNS_CODE.format(trace=str(trace)))
        folders.append(str(folder))
    done = subprocess.run(
        [sys.executable, "-c", LOADS, *folders],
        input="y\n" * 99, capture_output=True, text=True, timeout=200, env={**os.environ, "HF_HOME": str(home)},
    )  # fmt: skip
    assert not trace.exists() and not list(home.rglob("own.py")) and "[y/N]" not in done.stdout
    assert done.returncode == 0, done.stderr
    for line, folder, (name, _, is_loaded) in zip(done.stdout.splitlines(), folders, cases, strict=True):
        what = f"{folder}: {name} names code of its own, own.Own, which hpcrl does not run; convert it"
        assert line == "25" if is_loaded else line.removeprefix("model.tokenizer=").startswith(what), line


def test_a_file_that_is_a_link_or_a_pipe_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "private.json").write_text(json.dumps({"chat_template": "private"}))
    for number, (name, make) in enumerate(
        (
            ("tokenizer.json", lambda path: path.symlink_to(tmp_path / "private.json")),
            ("chat_template.jinja", os.mkfifo),
            ("special_tokens_map.json", os.mkfifo),
            ("additional_chat_templates/a.jinja", lambda path: path.symlink_to(tmp_path / "private.json")),
            ("vocab.txt", lambda path: path.symlink_to("/dev/zero")),
        )
    ):
        folder = tmp_path / str(number)
        shutil.copytree(SHIPPED, folder)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        with pytest.raises(InputError) as error:
            load_tokenizer(str(folder))
        assert f"{folder / name}: a " in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_replacements_that_multiply(tmp_path: Path, part: str) -> None:
    """A few characters would fill the memory."""
    folder = tmp_path / "bomb"
    shutil.copytree(SHIPPED, folder)
    found = json.loads((folder / "tokenizer.json").read_text())
    steps = [{"type": "Replace", "pattern": {"String": "1"}, "content": "1" * 60}] * 6
    found[part] = {"type": "Sequence", f"{part}s": steps}
    (folder / "tokenizer.json").write_text(json.dumps(found))
    with pytest.raises(InputError, match="makes more than 1000 characters of one"):
        load_tokenizer(str(folder))


def test_a_tokenizer_in_the_hub_cache(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    for number, path in enumerate(SHIPPED.iterdir()):
        shutil.copyfile(path, blobs / str(number))
        (folder / path.name).symlink_to(f"../../blobs/{number}")
    assert len(load_tokenizer(str(folder))) == 25
