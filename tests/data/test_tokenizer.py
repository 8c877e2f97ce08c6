"""The shipped character tokenizer, and one line for one that cannot be loaded."""

from __future__ import annotations

import json
import shutil
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
