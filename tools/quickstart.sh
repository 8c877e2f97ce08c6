#!/usr/bin/env bash
# The main job on this machine, from nothing: environment, data, supervised warm start, PPO on 4 MPI ranks, and a table.
#   tools/quickstart.sh [key=value ...]     overrides of configs/ppo_countdown_cpu.yaml; give them a run.name=... too
# A run that was stopped goes on where it was; remove runs/ to start anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/environment.sh
bin=.venv/bin
started=$SECONDS
step() { printf '\n== %s\n' "$*"; }

job() { # hpcrl on 4 ranks
    local code=0
    $bin/mpiexec -n 4 $bin/python -m hpcrl "$@" || code=$?
    if ((code == 85)); then
        printf '\nstopped and saved; start this script again to continue\n'
    elif ((code != 0)); then
        printf '\nended with code %s; see docs/faults.md, and start this script again to continue\n' $code
    fi >&2
    return $code
}

step "countdown data"
[[ -f data/countdown/train.parquet ]] || $bin/python tools/prepare_countdown.py --out data/countdown --files train val sft

step "supervised warm start (4 ranks)"
job sft configs/sft_countdown_cpu.yaml

step "PPO: actor TP2 x DP2, critic PP2 x DP2, rollout 4 x TP1 (4 ranks)"
job train configs/ppo_countdown_cpu.yaml "$@"

step "results after $((SECONDS - started)) s"
run=runs/ppo_countdown
for override in "$@"; do
    [[ $override == run.name=* ]] && run=runs/${override#run.name=}
done
$bin/python -m hpcrl report runs/sft_countdown "$run" --text
$bin/python -m hpcrl report "$run" --out "$run/curves.png" >/dev/null
printf '\ncurves:      %s\nTensorBoard: %s/tensorboard --logdir %s\n' "$run/curves.png" "$bin" runs
