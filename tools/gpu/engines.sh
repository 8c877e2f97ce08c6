#!/usr/bin/env bash
# vLLM inside a rank beside the native engine on this machine's GPU: tokens, rollouts, decode steps, refit, GRPO of 1.5B.
#   PYTHON=.venv-vllm/bin/python tools/gpu/engines.sh [--rehearse] [--again] [--only PATTERN] [-o REPORT.md]
# PYTHON is of an environment with vLLM (tools/vllm_environment.sh). Options, variables and exit code: common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

run() { check "$1" "$2" "${one[@]}" -m tools.gpu.check tools.gpu.engines "$3"; }

run "vLLM draws the native engine's tokens" 120 tokens
run "rollouts" 150 rollouts
run "refit into vLLM" 60 refit
run "decode steps" 180 steps

"$python" tools/prepare_countdown.py --out "$work/data" --sft-rows 64 >/dev/null
job=(run.dir="$work/runs" "data.train_files=[$work/data/train.parquet]" trainer.total_training_steps=3)
small=()
[[ $rehearsal == no ]] || small=(model.dtype=float32) # which vLLM has on a CPU
for engine in vllm native; do
    check "GRPO of three steps, $engine" 120 "${one[@]}" tools/gpu/job.py tools/gpu/grpo_1_5b.yaml \
        "grpo_$engine" "${job[@]}" "${small[@]}" "rollout.engine=$engine"
done
finish
