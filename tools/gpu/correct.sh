#!/usr/bin/env bash
# Does hpcrl compute the right thing on this machine's GPU? Checks in an order in which each builds on those before it.
#   tools/gpu/correct.sh [--rehearse] [--again] [--only PATTERN] [-o REPORT.md]   options and exit code: common.sh
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
[[ $rehearsal == yes ]] || workers=4
kernels=(-m pytest -q -p no:cacheprovider -n "$workers" --dist worksteal)
long=(tests/kernels/test_{decode_attention,linear_log_prob,packed_attention,rms_norm,sampling}.py)
short=(tests/kernels --ignore tests/kernels/test_compile_only.py "${long[@]/#/--ignore=}")
mpi=(-m pytest -q -m "")

run "packages, chip, shared memory" 60 machine versions_with_tests
check "hpcrl check" 60 "${one[@]}" -m hpcrl check
# The others side by side: each needs little of the GPU, and a core or two for imports and compilation.
beside check "kernels against references, long ones" 100 "${one[@]}" "${kernels[@]}" "${long[@]}"
beside check "kernels against references, the others" 100 "${one[@]}" "${kernels[@]}" "${short[@]}"
for part in 1 2 3; do
    beside check "memory of kernels, part $part" 100 "${one[@]}" -m tools.gpu.sanitizer "$part" 3
done
beside run "native engine, CUDA graphs, before and after sleep" 100 agreement graphs
beside run "GRPO, bf16" 100 runs grpo_bf16
beside run "training engine, bf16" 100 agreement bf16
beside run_two "refit between two ranks" 100 -m tools.gpu.check tools.gpu.refit layouts
beside run_two "TP2, PP2 and DP2 against one rank" 100 "${mpi[@]}" tests/mpi/test_training.py -k layouts_agree
beside run "save and resume against uninterrupted" 100 runs resume --deterministic
beside run "native engine, eager" 100 agreement eager
beside run "training engine, fp32" 100 agreement fp32
beside run "GRPO, fp32" 100 runs grpo_fp32
beside run "offload against none" 100 runs offload --deterministic
beside run_two "ten steps of a TP2 actor and a TP1 engine" 100 "${mpi[@]}" tests/mpi/test_training.py -k over_ten_steps
beside run "NCCL's timeout" 60 nccl timeout
wait
finish
