#!/usr/bin/env bash
# Are rows of bf16 products bit for bit the same beside any number of rows on this machine's GPU, and what does it take?
#   tools/gpu/exact.sh [--rehearse] [--again] [--only PATTERN] [-o REPORT.md]   options and exit code: common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# run TITLE SECONDS FUNCTION [VARIABLE=VALUE ...]: in a process of its own, which reads the variables of cuBLAS once
run() { check "$1" "$2" env "${@:4}" "${one[@]}" -m tools.gpu.check tools.gpu.exact "$3"; }

run "products, default workspaces" 60 products
run "products, CUBLAS_WORKSPACE_CONFIG=:16:8" 60 products CUBLAS_WORKSPACE_CONFIG=:16:8
run "products, CUBLASLT_WORKSPACE_SIZE=1" 60 products CUBLASLT_WORKSPACE_SIZE=1
run "products, both" 60 products CUBLAS_WORKSPACE_CONFIG=:16:8 CUBLASLT_WORKSPACE_SIZE=1
run "grouped products" 60 grouped
run "exact mode in bf16" 60 mode # skipped while it needs float32 on the CPU
finish
