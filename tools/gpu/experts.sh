#!/usr/bin/env bash
# How far are products, and a model with experts, from what this machine's GPU allows? Each part alone, in the order in
# which 15 minutes are best spent: an update and a decode step before a whole job.
#   tools/gpu/experts.sh [--rehearse] [--again] [--only PATTERN] [-o REPORT.md]   options and exit code: common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

run() { check "$1" "$2" "${one[@]}" -m tools.gpu.check "tools.gpu.$3" "$4"; }

run "ceilings" 40 rates ceilings
run "products of 1.5B" 60 rates products
run "grouped products of the mixture" 60 rates grouped
run "decode step of the mixture" 90 decode mixture
run "update of the mixture" 100 update mixture
"$python" tools/prepare_countdown.py --out "$work/data" --sft-rows 64 >/dev/null
job=(run.dir="$work/runs" "data.train_files=[$work/data/train.parquet]")
check "GRPO of the mixture, 3 steps" 100 "${one[@]}" tools/gpu/job.py tools/gpu/grpo_mixture.yaml mixture "${job[@]}"
finish
