"""Hostile model directories, checkpoints, data and configs, for `attack.py`."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkout
from attack_place import Place, Reached, attack

TOKENIZER = checkout.ROOT / "configs" / "tokenizer"
MODEL, CHECKPOINT, DATA, CONFIG = "model directory", "checkpoint", "data", "config"
SHAPE: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 25, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
ROW = {
    "data_source": "countdown",
    "prompt": [{"role": "user", "content": "1 2 3 4 2:"}],
    "reward_model": {"style": "rule", "ground_truth": {"numbers": [1, 2, 3, 4], "target": 2}},
}
ALIASES = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9) if n else 1}]\n" for n in range(12))
DEEP = "[" * 200_000 + "]" * 200_000
SHOWN = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r</script><script>alert(1)</script>\n"


def model(place: Place, **files: Any) -> Path:
    """A model directory.

    Args:
        files: each a text, a value of JSON, or a function that makes the file; `__` in a name stands for a dot.
    """
    folder = place.theirs / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(TOKENIZER, folder)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    for name, value in files.items():
        path = folder / name.replace("__", ".")
        if callable(value):
            path.unlink(missing_ok=True)
            value(path)
        elif isinstance(value, bytes):
            path.write_bytes(value)
        else:
            content = json.loads(path.read_text()) if isinstance(value, dict) and path.exists() else {}
            path.write_text(value if isinstance(value, str) else json.dumps(content | value))
    return folder


def job(place: Place, **sections: Any) -> Path:
    """A small job of the user's, with the model in `theirs` if there is one."""
    data = place.root / "rows.jsonl"
    data.write_text(json.dumps(ROW) + "\n")
    own = {"tokenizer": str(TOKENIZER), "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48}
    theirs = place.theirs / "model"
    config = {
        "run": {"name": "attacked", "dir": str(place.out / "runs")},
        "model": {"path": str(theirs)} if theirs.exists() else {**own, "num_attention_heads": 4},
        "data": {
            "train_files": [str(data)], "train_batch_size": 1, "max_prompt_length": 16, "max_response_length": 8,
        },
        "rollout": {"n": 2},
        "actor": {"ppo_mini_batch_size": 1, "ppo_max_token_len_per_gpu": 128},
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {"total_training_steps": 1, "save_freq": 1},
        **sections,
    }  # fmt: skip
    path = place.root / "job.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


def show(place: Place, **files: Any) -> str:
    """`hpcrl data show`, which renders a row with the model's tokenizer."""
    model(place, **files)
    config = job(place)
    return place.hpcrl("data", "show", place.root / "rows.jsonl", "--job", "train", config)


@attack(MODEL, "Python named by tokenizer_config.json, config.json", "data show", is_fast=True)
def code_of_a_model(place: Place) -> None:
    for name, more in (("tokenizer_config__json", {"tokenizer_class": "Own"}), ("config__json", {"model_type": "own"})):
        auto = {"AutoTokenizer": ["own.Own", None], "AutoConfig": "own.Own"}
        show(place, **{name: {"auto_map": auto, **more}, "own__py": place.code + "class Own: pass\n"})


@attack(MODEL, "links, pipes and devices in place of files", "data show", is_fast=True)
def links_of_a_model(place: Place) -> None:
    kinds: tuple[Callable[[Path], None], ...] = (place.link, os.mkfifo, lambda path: path.symlink_to("/dev/zero"))
    for name in ("tokenizer__json", "config__json", "chat_template__jinja", "generation_config__json"):
        for make in kinds if name == "tokenizer__json" else kinds[1:2]:
            show(place, **{name: make})


@attack(MODEL, "chat templates: loops, powers, memory, Python", "data show")
def templates(place: Place) -> None:
    for text in (
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{{ 9**9**9 }}", "{{ 'x' * 10000000000 }}", "{{ (range(99999)|list|string) * 99999 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.system('touch x') }}",
        f"{{% include '{place.key}' %}}", f"{{{{ lipsum.__globals__['os'].popen('cat {place.key}').read() }}}}",
    ):  # fmt: skip
        show(place, chat_template__jinja=text)


@attack(MODEL, "tokenizer.json: depth, length, costly expressions", "data show")
def tokenizers(place: Place) -> None:
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    for changes in (
        {"pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": "(.*)*(.+)+$x"}, "behavior": "Isolated", "invert": False}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(1|2| |3)*"}, "content": "x" * 10**7}},
        {"normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Replace", "pattern": {"String": "1"}, "content": "1" * 99}] * 9}},
        {"added_tokens": [{"id": 2**31, "content": "1"}]},
    ):  # fmt: skip
        show(place, tokenizer__json=json.dumps(tokenizer | changes))
    show(place, tokenizer__json=DEEP)
    show(place, tokenizer_config__json=DEEP)
    show(place, tokenizer_config__json={"model_max_length": -1, "chat_template": [{"name": "a", "template": "{"}]})


@attack(MODEL, "config.json: depth, sizes, types", "plan", is_fast=True)
def configs_of_a_model(place: Place) -> None:
    for change in (
        DEEP, {"num_hidden_layers": 10**9}, {"vocab_size": 2**62, "hidden_size": "9"}, {"rope_theta": float("inf")},
        {"layer_types": ["full_attention"] * 10**6}, {"num_attention_heads": 0},
    ):  # fmt: skip
        model(place, config__json=change)
        place.hpcrl("plan", job(place))


@attack(MODEL, "weights: names of other files, pickles, damaged headers", "score")
def weights(place: Place) -> None:
    (place.root / "tokens").write_text('{"tokens": [3, 4, 5]}\n')
    shutil.copyfile(place.key, place.theirs / "x.safetensors")

    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {place.marker}",)

    header = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    for files in (
        {"model__safetensors__index__json": {"weight_map": {"model.embed_tokens.weight": "../x.safetensors"}}},
        {"model__safetensors__index__json": {"weight_map": {"model.embed_tokens.weight": str(place.key)}}},
        {"model__safetensors": place.link},
        {"model__safetensors": struct.pack("<Q", 2**60) + b"{"},
        {"model__safetensors": struct.pack("<Q", len(header)) + header},
        {"pytorch_model__bin": pickle.dumps(Code())},
        {"adapter_config__json": {"base_model_name_or_path": str(place.private), "auto_mapping": {"x": "own.Own"}},
         "adapter_model__bin": pickle.dumps(Code())},
    ):  # fmt: skip
        folder = model(place, **files)
        place.hpcrl("score", folder, "--tokens", place.root / "tokens", "--out", place.out / "scores")


@attack(MODEL, "generation_config.json, preprocessor_config.json", "library")
def configs_beside(place: Place) -> None:
    program = (
        "import sys; from hpcrl.data.tokenizer import end_token_ids, load_tokenizer; "
        "from hpcrl.data.images import ImageProcessor; from hpcrl.runtime.exits import one_line_for_user_errors\n"
        "with one_line_for_user_errors():\n"
        "    end_token_ids(load_tokenizer(sys.argv[1])); ImageProcessor.of_model(sys.argv[1], None, None)"
    )
    image = {"image_processor_type": "Own", "auto_map": {"AutoImageProcessor": "own.Own"}}
    for files in (
        {"generation_config__json": DEEP}, {"generation_config__json": place.link},
        {"preprocessor_config__json": image, "own__py": place.code}, {"preprocessor_config__json": place.link},
        {"preprocessor_config__json": os.mkfifo}, {"preprocessor_config__json": {"image_processor_type": "../own"}},
    ):  # fmt: skip
        place.python("-c", program, model(place, **files))


def checkpoint_of(place: Place) -> Path:
    """Checkpoint of a run in `theirs` that a job has made."""
    config = job(place, run={"name": "run", "dir": str(place.theirs)})
    place.hpcrl("train", config, codes=(0,))
    return place.theirs / "run" / "checkpoints" / "step_00000001"


@attack(CHECKPOINT, "pickles, links, paths and depth", "score")
def checkpoints(place: Place) -> None:
    from hpcrl.engine.checkpoint.manifest import MANIFEST, _hash_of_list, write_manifest

    whole = checkpoint_of(place)
    (place.root / "tokens").write_text('{"tokens": [3, 4, 5]}\n')

    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {place.marker}",)

    def path_out(folder: Path) -> None:
        entry = {"path": "../../../../private/key", "bytes": 32, "xxh3_128": "0" * 32}
        (folder / MANIFEST).write_text(json.dumps({"files": [entry], "xxh3_128": _hash_of_list([entry])}))

    changes: list[tuple[str, Callable[[Path], Any]]] = [
        ("actor/common.pt", lambda path: path.write_bytes(pickle.dumps(Code()))),
        ("actor/.metadata", lambda path: path.write_bytes(pickle.dumps(Code()))),
        ("actor/.metadata", lambda path: path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../../x.disc"))),
        ("actor/__0_0.distcp", place.link),
        ("trainer.json", lambda path: path.write_text(DEEP)),
        ("trainer.json", lambda path: path.write_text('{"step": "../x", "roles": 3, "versions": []}')),
        ("actor/metadata.json", lambda path: path.write_text(DEEP)),
        (MANIFEST, lambda path: path_out(path.parent)),
    ]
    for name, change in changes:
        folder = place.theirs / "copy" / "checkpoints" / whole.name
        shutil.rmtree(place.theirs / "copy", ignore_errors=True)
        shutil.copytree(whole.parents[1], place.theirs / "copy")
        change(folder / name)
        if name != MANIFEST:
            write_manifest(folder)
        place.hpcrl(
            *("score", place.theirs / "copy", "--tokens", place.root / "tokens", "--out", place.out / "scores"),
            lines=10,
        )


@attack(DATA, "JSON lines and Parquet: depth, false lengths, one text many times", "data check", is_fast=True)
def rows(place: Place) -> None:
    import pyarrow
    import pyarrow.parquet

    honest, given = place.theirs / "val.jsonl", place.theirs / "train.jsonl"
    honest.write_text(json.dumps(ROW) + "\n")
    for text in (DEEP, '{"prompt": ' + DEEP + "}", '{"prompt": NaN}', '{"prompt": [{"role": 3}]}', SHOWN):
        given.write_text(text)
        place.hpcrl("data", "check", "--train", given, "--val", honest)
    given = place.theirs / "train.parquet"
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, pyarrow.int32()), ["x" * 10**6])
    pyarrow.parquet.write_table(pyarrow.table({"prompt": texts}), given)
    place.hpcrl("data", "check", "--train", given, "--val", honest)
    given.write_bytes(b"PAR1" + b"\xff" * 99 + struct.pack("<I", 2**31 - 1) + b"PAR1")
    place.hpcrl("data", "check", "--train", given, "--val", honest)


@attack(DATA, "pictures: bombs, other formats, pipes, addresses", "library", is_fast=True)
def pictures(place: Place) -> None:
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    png = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(10**7)))
        + chunk(b"IEND", b"")
    )
    text = png[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**8))) + png[33:]
    for name, data in {
        "a.png": png,
        "b.png": text,
        "c.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "d.svg": b"<svg/>",
    }.items():
        (place.theirs / name).write_bytes(data)
    os.mkfifo(place.theirs / "pipe.png")
    names = ("a.png", "b.png", "c.eps", "d.svg", "pipe.png", "/dev/zero", "http://127.0.0.1/x.png", "data:,", place.key)
    program = (
        "import sys\nfrom hpcrl.data.pictures import BadImage, open_picture\nfor name in sys.argv[2:]:\n"
        "    try:\n        open_picture(name, sys.argv[1], 1 << 24)\n        print(name, 'was opened')\n"
        "    except BadImage as error:\n        pass\n"
    )
    if said := place.python("-c", program, place.theirs, *names):
        raise Reached(said)


@attack(CONFIG, "aliases, depth, pipes, circles; names that lead out", "plan")
def configs(place: Place) -> None:
    path = place.theirs / "job.yaml"
    os.mkfifo(place.theirs / "pipe.yaml")
    python = "a: !!python/object/apply:os.system [touch marker]"
    name = f"run: {{name: ../../private/run, dir: {place.out}}}"
    circle, pipe, device = f"extends: {path}", "extends: pipe.yaml", "extends: /dev/zero"
    for text in (ALIASES, DEEP, circle, pipe, device, python, SHOWN, name):
        path.write_text(text)
        place.hpcrl("plan", path, lines=30)
    place.hpcrl("plan", place.theirs / "pipe.yaml")
    place.hpcrl("plan", job(place, run={"name": "../private/run", "dir": str(place.out)}))


@attack(CONFIG, "machine and site files: aliases, depth, pipes", "plan, submit --dry-run")
def machines(place: Place) -> None:
    path, config = place.theirs / "file.yaml", job(place)
    makes: list[Callable[[Path], Any]] = [lambda path: path.write_text(ALIASES), lambda path: path.write_text(DEEP)]
    for make in (*makes, os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        path.unlink(missing_ok=True)
        make(path)
        place.hpcrl("plan", "--machine", path, config)
        place.hpcrl("submit", "--dry-run", "--site", path, config)
