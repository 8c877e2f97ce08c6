"""Steps of TRL's GRPO, for tools/bench_step.py: `python trl_step.py request.json answer.json`, in TRL's environment."""

from __future__ import annotations

import json
import sys
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Seconds of each optimizer step, sampling included, and the end of each."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, args, state, control, **_) -> None:
        self.ends.append(time.time())

    def on_step_end(self, args, state, control, **_) -> None:
        self.ends.append(time.time())


def main() -> None:
    request = json.load(open(sys.argv[1]))
    torch.set_num_threads(request["threads"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(request["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
    prompts, n = request["prompts"], request["n"]
    lengths: list[int] = []

    def reward(completion_ids, **_) -> list[float]:
        lengths.append(sum(map(len, completion_ids)))
        return [sum(ids) % 97 / 97 for ids in completion_ids]

    fixed = {"min_new_tokens": request["response_length"]} if request["ignore_eos"] else {}
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=request["micro_batch"],
            gradient_accumulation_steps=len(prompts) * n // request["micro_batch"],
            steps_per_generation=len(prompts) * n // request["micro_batch"],
            num_generations=n,
            max_completion_length=request["response_length"],
            generation_kwargs=fixed,
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            max_steps=request["steps"],
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            gradient_checkpointing=False,
            disable_tqdm=True,
            seed=0,
        )
        clock = Clock()
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts * request["steps"]}),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    seconds = [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)]
    json.dump({"seconds": seconds, "tokens": lengths}, open(sys.argv[2], "w"))


if __name__ == "__main__":
    main()
