#!/usr/bin/env bash
# vLLM inside a rank beside the native engine on this machine's GPU: tokens, rollouts, decode steps, refit, GRPO of 1.5B.
#   PYTHON=.venv-vllm/bin/python tools/gpu/engines.sh [--rehearse] [--only PATTERN] [-o REPORT.md]
# PYTHON is of an environment with vLLM (tools/vllm_environment.sh). Options, variables and exit code: common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

run() { check "$1" "$2" "${one[@]}" -m tools.gpu.check tools.gpu.engines "$3"; }

run "vLLM draws the native engine's tokens" 120 tokens
run "rollouts" 150 rollouts
run "refit into vLLM" 60 refit
run "decode steps" 180 steps

"$python" tools/prepare_countdown.py --out "$work/data" --sft-rows 64 >/dev/null
job=(run.dir="$work/runs" "data.train_files=[$work/data/train.parquet]" trainer.total_training_steps=3)
if [[ $rehearsal == yes ]]; then
    job+=(model.num_layers=2 model.hidden_size=64 model.ffn_hidden_size=128 model.num_attention_heads=2)
    job+=(model.vocab_size=512 data.train_batch_size=4 actor.ppo_mini_batch_size=4 data.max_response_length=8)
    job+=(rollout.kv_cache_gib=0.1 model.dtype=float32)
fi
for engine in vllm native; do
    check "GRPO of three steps, $engine" 120 "${one[@]}" tools/gpu/job.py "grpo_$engine" "${job[@]}" "rollout.engine=$engine"
done
finish
