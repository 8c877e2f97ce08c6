#!/usr/bin/env bash
# Does hpcrl compute the right thing on this machine's GPU? Checks in an order in which each builds on those before it.
#   tools/gpu/correct.sh [--rehearse] [-o REPORT.md]      options, variables and exit code: common.sh
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
{
    check "kernels against references" 200 "${one[@]}" -m pytest "${kernels[@]}"
    check "memory of kernels" 200 "${one[@]}" -m tools.gpu.sanitizer
    run "NCCL's timeout" 120 nccl timeout
} & # beside the others, for which it has cores and memory enough
run "native engine, eager" 60 native eager
run "native engine, CUDA graphs, before and after sleep" 60 native graphs
run "training engine, fp32" 60 training fp32
run "training engine, bf16" 60 training bf16
run "GRPO, fp32" 90 runs grpo_fp32
run "GRPO, bf16" 90 runs grpo_bf16
run "save and resume against uninterrupted" 90 runs resume --deterministic
run "offload against none" 90 runs offload --deterministic
run_two "refit between two ranks" 60 -m tools.gpu.check tools.gpu.refit layouts
run_two "TP2, PP2 and DP2 against one rank" 120 "${mpi[@]}" tests/mpi/test_training.py -k layouts_agree
run_two "ten steps of a TP2 actor and a TP1 engine" 90 "${mpi[@]}" tests/mpi/test_training.py -k over_ten_steps
wait
finish
