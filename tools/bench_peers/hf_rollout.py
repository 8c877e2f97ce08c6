"""Rollouts by `generate` of transformers, for tools/bench_step.py: `python hf_rollout.py request.json answer.json`."""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


def main() -> None:
    request = json.load(open(sys.argv[1]))
    torch.set_num_threads(request["threads"])
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32).eval()
    eos = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = None  # it would take the place of a None of ours
    ids = torch.tensor([ids for ids in request["prompt_ids"] for _ in range(request["n"])])  # all of one length
    settings = GenerationConfig(
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        max_new_tokens=request["response_length"],
        pad_token_id=0,
        eos_token_id=None if request["ignore_eos"] else eos,
    )
    seconds, tokens = [], []
    for _ in range(request["steps"]):
        start = time.time()
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        seconds.append(time.time() - start)
        drawn = out[:, ids.shape[1] :]
        ends = (drawn == eos).cumsum(1).cumsum(1) <= 1 if not request["ignore_eos"] else torch.ones_like(drawn)
        tokens.append(int(ends.sum()))
    json.dump({"seconds": seconds, "tokens": tokens}, open(sys.argv[2], "w"))


if __name__ == "__main__":
    main()
