#!/usr/bin/env bash
# How does hpcrl run on 2 to 16 GPUs of 1 or 2 nodes? 20 minutes, one report to send back. In the checkout:
#   sbatch --nodes=2 --gpus-per-node=4 tools/gpu/multi.sh [--rehearse] [--only PATTERN] [-o REPORT.md]
#   bash tools/gpu/multi.sh ...      the same in an allocation (salloc), or on one node without Slurm by mpiexec
# Options and exit code: common.sh. Variables of a site (HPCRL_VENV, HPCRL_MODULES, HPCRL_MPI, ...): slurm/common.sh.
# With one GPU, two ranks share it, without NCCL. The report has no names of hosts and users and no absolute paths.
# --rehearse: four ranks without GPUs, small shapes.
#SBATCH --job-name=gpu_multi
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=20
#SBATCH --output=gpu_multi-%j.out
script=multi machine="several GPUs"
kit=$(dirname "${BASH_SOURCE[0]}")
[[ -f $kit/report.sh ]] || kit=${SLURM_SUBMIT_DIR:-.}/tools/gpu # sbatch runs a copy
[[ -f $kit/report.sh ]] || { echo "multi: error: no $kit/report.sh; submit from the checkout's folder" >&2; exit 2; }
source "$kit/report.sh"

line() { printf '%s\n' "$*" | private | tee -a "$report"; }

work=$(mktemp -d "${report%.md}.XXXXXX") # which all nodes see, as they see the report's folder
logs=${LOGS:-$work}
mkdir -p "$logs"
trap 'rm -rf "$work"' EXIT
again=yes # what another allocation has measured is another report

if [[ -n ${SLURM_JOB_ID:-} ]]; then
    [[ -z ${PYTHON:-} ]] || export HPCRL_VENV=${python%/bin/*}
    source slurm/common.sh
    set +euo pipefail # as its other callers have it
    hpcrl_start
    set -euo pipefail
    nodes=$SLURM_JOB_NUM_NODES
    # start RANKS_PER_NODE NODES: sets started, the start of a command
    start() {
        local cpus=$((SLURM_CPUS_ON_NODE > $1 ? SLURM_CPUS_ON_NODE / $1 : 1))
        started=(srun ${hpcrl_mpi:+--mpi="$hpcrl_mpi"} --disable-status --kill-on-bad-exit=1 --wait=60
            --nodes="$2" --ntasks="$(($1 * $2))" --ntasks-per-node="$1" --cpus-per-task="$cpus"
            --cpu-bind="${HPCRL_CPU_BIND:-cores}" "${hpcrl_srun_options[@]}" "${hpcrl_python[@]}")
    }
else
    nodes=1
    find_launcher
    ((${#launch[@]})) || die "mpiexec beside $python starts no ranks; use sbatch, or install MPI"
    start() { started=("${launch[@]}" "$1" "$python"); }
fi

seen='import os, platform, torch
count = torch.cuda.device_count()
gpu = torch.cuda.get_device_properties(0) if count else None
print(f"seen {platform.node()} {count} {gpu.total_memory / 2**30 if gpu else 0:.0f} {gpu.name if gpu else None}")'
start 1 "$nodes"
seen=$("${started[@]}" -c "$seen" | grep ^seen | sort) || die "torch cannot be imported on each node; see above"
mapfile -t hosts <<<"$(awk '{ print $2 }' <<<"$seen")"
private_names=$(removed_names "${hosts[@]}" "$(uname -n)")
read -r _ _ gpus gib name <<<"$(sort -n -k 3 <<<"$seen" | head -n 1)"
if [[ $rehearsal == yes ]]; then
    per_node=$((nodes > 1 ? 2 : 4)) gib=80
elif ((gpus == 0)); then
    die "torch finds no GPU on a node; sbatch needs --gpus-per-node, and --rehearse works without"
elif ((gpus * nodes == 1)); then
    export HPCRL_SHARE_GPU=1
    per_node=2 gib=$((gib / 2)) hardware="TWO RANKS SHARE ONE GPU, without NCCL: $name"
else
    per_node=$gpus hardware="$nodes x $gpus x $name of $gib GiB"
fi
start "$per_node" "$nodes"
all=("${started[@]}")
start 1 1
one=("${started[@]}")
own_folders "${one[@]}"
budget=1150 # seconds for all checks, of an allocation of 20 minutes
[[ $rehearsal == no ]] || budget=3600
if [[ -n ${HPCRL_END_TIME:-} ]]; then
    left=$((HPCRL_END_TIME - $(date +%s) + SECONDS - 20))
    ((budget < left)) || budget=$left
    unset HPCRL_END_TIME # no job is to end early by itself
fi
begin

# part TITLE SECONDS COMMAND...: a section of the report with one check
part() {
    [[ $1 =~ $only ]] || return 0
    line ""
    line "## $1"
    line ""
    check "$@"
}
# ranks TITLE SECONDS MODULE FUNCTION: a check of all ranks
ranks() { part "$1" "$2" "${all[@]}" -m tools.gpu.check "tools.gpu.$3" "$4"; }
# several TITLE SECONDS FUNCTION: a check of what a function of this script starts
several() { part "$1" "$2" bash -euo pipefail -c "$(declare -p all one work small large); $(declare -f "$3"); $3"; }

"${one[@]}" tools/prepare_countdown.py --out "$work/data" --sft-rows 64 >"$logs/data.log" 2>&1 ||
    die "no prompts: $(tail -n 1 "$logs/data.log")"
data=(run.dir="$work/runs" "data.train_files=[$work/data/train.parquet]")
read -ra sized <<<"$("${one[@]}" -m tools.gpu.models "$nodes" "$per_node" "$gib" | tail -n 1)"
large=(tools/gpu/grpo_8b.yaml "${data[@]}" "${sized[@]}")
read -ra sized <<<"$(HPCRL_GPU_REHEARSAL=1 "${one[@]}" -m tools.gpu.models "$nodes" "$per_node" "$gib" | tail -n 1)"
small=(tools/gpu/grpo_8b.yaml "${data[@]}" "${sized[@]}"
    run.full_determinism=true trainer.total_training_steps=6 trainer.save_freq=2)
export HPCRL_GPU_MACHINE=$work/measured.yaml

# With random weights: a run of six steps, whose rank 1 is killed at its first checkpoint, and a run without.
killed_and_resumed() {
    local run=$work/runs/killed steps
    "${all[@]}" -m hpcrl train "${small[@]}" run.name=straight
    if HPCRL_GPU_KILLED=$run "${all[@]}" tools/gpu/altered_train.py train "${small[@]}" run.name=killed; then
        echo "fail: the run whose rank was to be killed has ended by itself"
        return 1
    fi
    steps=$(wc -l <"$run/metrics.jsonl")
    "${all[@]}" -m hpcrl train "${small[@]}" run.name=killed
    "${one[@]}" -m tools.gpu.runs "$run" "$work/runs/straight"
    echo "pass: killed after $steps steps, resumed: the same metrics"
}

trained() {
    "${all[@]}" tools/gpu/altered_train.py train "${large[@]}"
    echo "pass: $(wc -l <"$work/runs/grpo_8b/metrics.jsonl") steps with ${large[*]:3}"
}

ranks "environment" 60 machine job
quick=()
[[ $rehearsal == no ]] || quick=(--rounds 1)
shown=70 part "hpcrl check --job, and the measured machine" 150 \
    "${all[@]}" -m hpcrl check --job --machine "$HPCRL_GPU_MACHINE" "${quick[@]}"
ranks "NCCL groups" 60 nccl groups
ranks "refit of 1.5B weights between layouts" 60 refit planned
ranks "TP, PP, CP, EP and DP against one rank" 100 parity layouts
ranks "overlap of communication and computation" 90 update overlap
several "kill -9 of a rank, and resume" 200 killed_and_resumed
several "GRPO of an 8B shape, 10 steps" 350 trained
part "measured beside predicted" 60 "${one[@]}" tools/gpu/job.py tools/gpu/grpo_8b.yaml --done "${large[@]:1}"
line ""
line "Please send this file: an issue of the kind 'Report from several GPUs'."
finish
