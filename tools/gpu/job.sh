#!/usr/bin/env bash
# What does a step of GRPO of a 1.5B model take on this machine's GPU? grpo_1_5b.yaml with 64 prompts x 8 x 1,024 tokens.
#   tools/gpu/job.sh [--rehearse] [--again] [--only PATTERN] [-o REPORT.md]   options and exit code: common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

"$python" tools/prepare_countdown.py --out "$work/data" --sft-rows 64 >/dev/null
common=(run.dir="$work/runs" "data.train_files=[$work/data/train.parquet]" trainer.total_training_steps=3)
short=(data.max_response_length=64 data.train_batch_size=16 actor.ppo_mini_batch_size=16 "trainer.profile_steps=[3]")

# run TITLE SECONDS NAME [key=value ...]
run() { check "$1" "$2" "${one[@]}" tools/gpu/job.py tools/gpu/grpo_1_5b.yaml "$3" "${common[@]}" "${@:4}"; }

run "a step of 16 prompts x 8 x 64 tokens, with a profile" 60 profiled "${short[@]}"
run "micro-batches of 16,384 tokens" 100 of_16384
# With a pass of its own for old log-probs, whose time, MFU and distance from the update's this reports.
run "micro-batches of 8,192 tokens" 100 of_8192 actor.ppo_max_token_len_per_gpu=8192 actor.separate_old_log_prob=true
run "micro-batches of 16,384 tokens, the KV cache stays" 100 cache_stays rollout.free_cache_engine=false
mkdir -p "${report%.md}_profile"
cp "$work"/runs/profiled/profile/* "${report%.md}_profile/" 2>/dev/null || true
finish
