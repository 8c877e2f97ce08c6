"""Rollouts by vLLM, for tools/bench_step.py: `python vllm_rollout.py request.json answer.json`, in its environment."""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    from vllm import LLM, SamplingParams

    request = json.load(open(sys.argv[1]))
    longest = max(map(len, request["prompt_ids"])) + request["response_length"]
    model = LLM(
        model=request["model"],
        dtype="float32",
        seed=0,
        max_model_len=longest,
        max_num_seqs=max(128, request["n"] * len(request["prompt_ids"])),
        enable_prefix_caching=True,
    )
    seconds, tokens = [], []
    for round_number in range(request["steps"]):
        sampling = SamplingParams(
            n=request["n"],
            temperature=1.0,
            max_tokens=request["response_length"],
            ignore_eos=request["ignore_eos"],
            logprobs=0,
            seed=round_number,
        )
        model.reset_prefix_cache()
        prompts = [{"prompt_token_ids": ids} for ids in request["prompt_ids"]]
        start = time.time()
        done = model.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.time() - start)
        tokens.append(sum(len(output.token_ids) for one in done for output in one.outputs))
    json.dump({"seconds": seconds, "tokens": tokens}, open(sys.argv[2], "w"))


if __name__ == "__main__":
    main()
