#!/usr/bin/env bash
# Does hpcrl compute the right thing on this machine's GPU? Checks in an order in which each builds on those before it.
#   tools/gpu/correct.sh [--rehearse] [--only PATTERN] [-o REPORT.md]   options, variables and exit code: common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# run TITLE SECONDS MODULE FUNCTION [--deterministic]: a check of one rank
run() { check "$1" "$2" "${one[@]}" -m tools.gpu.check "tools.gpu.$3" "${@:4}"; }

# run_two TITLE SECONDS ARGUMENT...: python with these arguments on two ranks that share the GPU
run_two() {
    if ((${#two[@]})); then
        HPCRL_SHARE_GPU=1 check "$1" "$2" "${two[@]}" "${@:3}"
    else
        line "- **skip** $1: mpiexec starts no ranks here"
    fi
}

workers=2
[[ $rehearsal == yes ]] || workers=6
kernels=(-q -p no:cacheprovider -n "$workers" --dist worksteal tests/kernels --ignore tests/kernels/test_compile_only.py)
mpi=(-m pytest -q -m "")

run "packages, chip, shared memory" 90 machine versions_with_tests
check "hpcrl check" 60 "${one[@]}" -m hpcrl check
# The others side by side: each needs little of the GPU, and a core or two for imports and compilation.
beside check "kernels against references" 200 "${one[@]}" -m pytest "${kernels[@]}"
beside check "memory of kernels" 240 "${one[@]}" -m tools.gpu.sanitizer
beside run "native engine, CUDA graphs, before and after sleep" 120 native graphs
beside run "GRPO, bf16" 180 runs grpo_bf16
beside run "training engine, bf16" 120 training bf16
beside run_two "refit between two ranks" 120 -m tools.gpu.check tools.gpu.refit layouts
beside run_two "TP2, PP2 and DP2 against one rank" 200 "${mpi[@]}" tests/mpi/test_training.py -k layouts_agree
beside run "save and resume against uninterrupted" 180 runs resume --deterministic
beside run "native engine, eager" 120 native eager
beside run "training engine, fp32" 120 training fp32
beside run "GRPO, fp32" 180 runs grpo_fp32
beside run "offload against none" 180 runs offload --deterministic
beside run_two "ten steps of a TP2 actor and a TP1 engine" 180 "${mpi[@]}" tests/mpi/test_training.py -k over_ten_steps
beside run "NCCL's timeout" 120 nccl timeout
wait
finish
