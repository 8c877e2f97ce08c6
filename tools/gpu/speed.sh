#!/usr/bin/env bash
# How fast are hpcrl's kernels, its decode step and its refit on this machine's GPU, beside what the hardware allows?
#   tools/gpu/speed.sh [--rehearse] [--again] [--only PATTERN] [-o REPORT.md]   options and exit code: common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

run() { check "$1" "$2" "${one[@]}" -m tools.gpu.check "tools.gpu.$3" "$4"; }

run "refit of 1.5B weights in bf16" 60 refit speed
run "decode of 1.5B in bf16, 512 tokens of context" 90 decode native_short
run "decode of 1.5B in bf16, 2,048 tokens" 90 decode native_long
run "decode of 1.5B in fp8, 512 tokens" 90 decode native_fp8
run "update of 1.5B in bf16" 60 update dense
run "update of the adapters of 8B in bf16" 80 update lora
run "decode of 1.5B in bf16, without graphs" 80 decode native_eager
run "decode of 1.5B in bf16, transformers" 80 decode hugging_face_short
run "decode of 1.5B in bf16, transformers, 2,048 tokens" 80 decode hugging_face_long
bench=(tools/bench kernels)
if [[ $rehearsal == yes ]]; then
    bench+=(--rehearse)
    export HPCRL_KERNELS=triton # in its interpreter
fi
for kernel in decode_attention linear_log_prob sampling rms_norm rope store_heads swiglu pack checksum fp8_matrix; do # one may end its process
    check "$kernel" 60 "${one[@]}" "${bench[@]}" "$kernel"
done
finish
