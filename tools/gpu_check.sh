#!/usr/bin/env bash
# Check a machine for what needs several GPUs, Transformer Engine or TensorRT-LLM, and write a report, in an order in
# which each check builds on those before it; what one GPU can show is first checked by tools/gpu/correct.sh. Works in part
# with one GPU or without these packages, and says so. No root, no internet. None of these checks has ever run on a GPU: a
# failure may be the check's own fault.
#   tools/gpu_check.sh [-o REPORT.md] [-n RANKS]
# RANKS is one per GPU, up to 4, unless given. PYTHON names the interpreter, LAUNCH the launcher that takes the number
# of ranks as its next argument (LAUNCH="srun --mpi=pmix -n"), HPCRL_GPU_CHECK_IDLE_SECONDS the length of check 5.
# Exit code: 0 all that ran passed, 1 something failed, 2 there is no GPU or a wrong argument.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage="expected tools/gpu_check.sh [-o REPORT.md] [-n RANKS]"
die() { printf 'gpu_check: error: %s\n' "$*" >&2; exit 2; }

report=gpu_check.md
ranks=
while (($#)); do
    case $1 in
    -o | -n)
        (($# > 1)) || die "$1 has no value; $usage"
        if [[ $1 == -o ]]; then report=$2; else ranks=$2; fi
        shift
        ;;
    *) die "unknown argument '$1'; $usage" ;;
    esac
    shift
done

[[ $report == /* ]] || report=$here/$report
ln -sfn ../kernels hpcrl/kernels # as setup.py does
python=${PYTHON:-}
if [[ -z $python ]]; then
    python=python3
    [[ -x .venv/bin/python ]] && python=.venv/bin/python
fi
command -v "$python" >/dev/null || die "PYTHON=$python is not a program"
if [[ -n ${LAUNCH:-} ]]; then
    read -ra launch <<<"$LAUNCH"
elif [[ -x $(dirname "$(command -v "$python")")/mpiexec ]]; then
    launch=("$(dirname "$(command -v "$python")")/mpiexec" -n)
else
    launch=(mpiexec -n)
fi

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)' 2>/dev/null) ||
    die "'$python' cannot import torch; name the interpreter that hpcrl runs with: PYTHON=/path/to/python"
if ((gpus == 0)); then
    echo "gpu_check: no GPU can be used here (torch.cuda finds none); run it on a machine with one" >&2
    exit 2
fi
if [[ -z $ranks ]]; then
    ranks=$((gpus < 4 ? gpus : 4))
    ((ranks == 3)) && ranks=2
fi
[[ $ranks =~ ^[1-9][0-9]*$ ]] || die "-n $ranks is no number of ranks; $usage"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
export PYTHONPATH=$PWD HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
failed=0
limit=$((${HPCRL_GPU_CHECK_IDLE_SECONDS:-600} + 1200)) # seconds of a check, as ranks may wait for a lost one

line() { printf '%s\n' "$*" | tee -a "$report"; }

# note TITLE OUTCOME DETAIL
note() { line "- **$2** $1: $3"; }

# run TITLE RANKS MODULE FUNCTION: note the last line `pass: ...`, `fail: ...` or `skip: ...`; fail without one, and where
# the exit code contradicts it
run() {
    local title=$1 count=$2 module=$3 function=$4 code=0 said
    timeout "$limit" "${launch[@]}" "$count" "$python" -m tools.gpu.check "tools.$module" "$function" \
        >"$log" 2>&1 </dev/null || code=$?
    said=$(grep -E '^(pass|fail|skip): ' "$log" | tail -n 1 || true)
    local agrees=0
    case $said in
    pass:*) ((code == 0)) && agrees=1 ;;
    skip:*) ((code == 77)) && agrees=1 ;;
    fail:*) agrees=1 ;;
    esac
    if ((agrees)); then
        note "$title, $count rank(s)" "${said%%:*}" "${said#*: }"
        [[ $said == fail:* ]] && failed=1
        return 0
    fi
    failed=1
    note "$title, $count rank(s)" fail "ended with code $code"
    { echo '```'; tail -n 25 "$log"; echo '```'; } | tee -a "$report"
}

: >"$report"
line "# GPU check of hpcrl"
line ""
line "$(date -u '+%Y-%m-%d %H:%M UTC'), $(uname -n), $gpus GPU(s), launcher: ${launch[*]}"
line ""
line "## hpcrl on CUDA"
run "machine" 1 gpu.machine versions
if timeout 600 "${launch[@]}" "$ranks" "$python" -m hpcrl check >"$log" 2>&1 </dev/null; then
    note "hpcrl check, $ranks rank(s)" pass "ready"
else
    failed=1
    note "hpcrl check, $ranks rank(s)" fail "see below"
    { echo '```'; tail -n 40 "$log"; echo '```'; } | tee -a "$report"
fi
run "refit by NCCL" "$ranks" gpu.refit layouts
run "training engine with Transformer Engine" 1 gpu.agreement transformer_engine

line ""
line "## TensorRT-LLM"
if ! "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("tensorrt_llm") is None)'; then
    note "all eight checks" skip "tensorrt_llm is not installed for $python"
    exit "$failed"
fi
if timeout 600 "${launch[@]}" "$ranks" "$python" -m hpcrl check --trtllm >"$log" 2>&1 </dev/null; then
    note "hpcrl check --trtllm, $ranks rank(s)" pass "version and signatures as expected"
else
    failed=1
    note "hpcrl check --trtllm, $ranks rank(s)" fail "see below; what follows may mean nothing"
    { echo '```'; tail -n 40 "$log"; echo '```'; } | tee -a "$report"
fi
two=$((ranks < 2 ? ranks : 2))
run "1 import, more ranks than one engine has" "$ranks" gpu_check_trtllm imports
run "2 two engines in one world" "$((ranks < 4 ? two : 4))" gpu_check_trtllm groups
run "3 refit against reload() and transformers" "$two" gpu_check_trtllm oracle
run "4 a hundred refits under CUDA graphs" "$two" gpu_check_trtllm repeat
run "5 idle beside training" "$two" gpu_check_trtllm idle
run "6 KV cache released and taken" "$two" gpu_check_trtllm sleep
run "7 torch's share of the memory" "$two" gpu_check_trtllm fraction
run "8 log-probs, seeds, ends, aborts" "$two" gpu_check_trtllm definition
exit "$failed"
