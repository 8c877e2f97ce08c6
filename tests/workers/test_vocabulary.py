"""Which ids have a probability: the tokenizer's, those of config.json, and those that a run began with."""

from __future__ import annotations

import json
import logging
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli import load_job
from hpcrl.config.loader import dump_config
from hpcrl.config.schema import Config, ModelConfig
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.rollout.engines.tensorrt_llm.declaration import check_model as check_tensorrt_llm
from hpcrl.run.job_config import config_of
from hpcrl.run.start import warn_of_changes
from hpcrl.runtime.exits import InputError
from hpcrl.workers.team import policy_shape, shape_beside, shape_with, teacher_shape
from tests.model.families import make_model

TOKENIZER = Path(__file__).parents[2] / "configs" / "tokenizer"  # 25 tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of 50 rows with a tokenizer whose last token has the id 30; 25 to 29 have none."""
    folder = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(folder)
    shutil.copytree(TOKENIZER, folder, dirs_exist_ok=True)
    text = json.loads((folder / "tokenizer.json").read_text())
    text["model"]["vocab"]["last"] = 30
    (folder / "tokenizer.json").write_text(json.dumps(text))
    return folder


def section(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate(keys)


def test_a_tokenizer_of_fewer_ids_than_the_model_decides(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer(str(model))
    with caplog.at_level(logging.INFO):
        shapes = [shape_with(tokenizer, section(path=str(model), softmax_vocab=key)) for key in ("tokenizer", "config")]
    assert [(shape.softmax_size, shape.vocab_size) for shape in shapes] == [(31, 50), (50, 50)]
    first, holes, second, _ = (record.message for record in caplog.records)
    assert first == "vocabulary: 31 tokens of the tokenizer, 50 rows in the model; the other 19 are never drawn"
    assert "5 ids below 30," in holes and second.endswith("can be drawn (model.softmax_vocab=config)")
    with pytest.raises(InputError, match=r"vocab_size=20 is below the tokenizer's 31"):
        shape_with(tokenizer, section(vocab_size=20))
    assert shape_with(tokenizer, section()).vocab_size == 31


def test_models_beside_the_policy_have_its_set(model: Path) -> None:
    policy = shape_with(load_tokenizer(str(model)), section(path=str(model)))
    assert shape_beside(section(), policy).softmax_size == 31
    teacher = {"model": {"path": str(model), "max_position_embeddings": 256}}
    lengths = {"max_prompt_length": 8, "max_response_length": 8}
    loss = {"loss_mode": "forward_kl_topk", "topk": 40}
    config = Config.model_validate({"teacher": teacher, "data": lengths})
    assert teacher_shape(config, policy).softmax_size == 31
    config = Config.model_validate({"teacher": teacher, "data": lengths, "distillation": {"distillation_loss": loss}})
    with pytest.raises(InputError, match="topk=40 exceeds the vocabulary of 31 tokens"):
        teacher_shape(config, policy)
    with pytest.raises(InputError, match=r"draws from all 50 ids .* tokenizer has 31; use .*softmax_vocab=config"):
        check_tensorrt_llm(policy, 1)


def test_the_tokenizer_is_read_where_the_model_is_run(model: Path, tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"path": str(model)}})
    assert policy_shape(config, is_run=True).softmax_size == 31
    assert policy_shape(config, is_run=False).softmax_size == 50
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(model / name, tmp_path / "bare" / name)
    bare = Config.model_validate({"model": {"path": str(tmp_path / "bare")}})
    assert policy_shape(bare, is_run=True).softmax_size == 50


def test_a_run_keeps_the_set_that_it_began_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Runs of earlier versions, whose config.yaml lacks the key, have drawn from all ids."""
    job, run = load_job("train"), tmp_path / "runs" / "kept"
    path = tmp_path / "template.yaml"
    path.write_text(f"run: {{name: kept, dir: {tmp_path / 'runs'}}}\nmodel: {{tokenizer: tok, vocab_size: 64}}\n")

    def loaded(*overrides: str) -> Config:
        return job.load(Namespace(config=str(path), overrides=[*overrides]))

    assert loaded().model.softmax_vocab == "tokenizer"
    (run / "checkpoints" / "step_00000001").mkdir(parents=True)
    written = dump_config(loaded("model.softmax_vocab=config"))
    for text, expected in (
        (written.replace("  softmax_vocab: config\n", ""), "config"),
        (written, "config"),
        (written.replace("softmax_vocab: config", "softmax_vocab: tokenizer"), "tokenizer"),
    ):
        (run / "config.yaml").write_text(text)
        assert loaded().model.softmax_vocab == expected
        assert loaded("model.softmax_vocab=tokenizer").model.softmax_vocab == "tokenizer"
        schema = load_job("score").schema()
        assert config_of(str(run), str(tmp_path / "out"), [], schema).model.softmax_vocab == expected
        caplog.clear()
        warn_of_changes(run, loaded())
        warn_of_changes(run, loaded("model.softmax_vocab=tokenizer"))
        changed = [f"resuming with changed model.softmax_vocab: tokenizer, was {expected}"]
        assert [record.message for record in caplog.records] == changed * (expected != "tokenizer")
