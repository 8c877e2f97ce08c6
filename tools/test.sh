#!/usr/bin/env bash
# Run the tests: those without MPI, then one SPMD pytest session under mpiexec for each of 1, 2 and 4 ranks, one of 3
# ranks for the torch.distributed backend, and with --all one of 8 for the layouts that need as many; at last those on a
# private Slurm, which is installed where apt and root are there. Without one they are left out, and the summary says
# so; HPCRL_REQUIRE_SLURM=1 makes that a failure.
#   tools/test.sh [--all | --exhaustive] [-k EXPR]
# --all adds the tests marked slow, --exhaustive also those marked exhaustive.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage="expected tools/test.sh [--all | --exhaustive] [-k EXPR]"
options=()
seconds=${HPCRL_TEST_SECONDS:-300} # for one test, then it fails with every thread's stack
selected=no
all=no
while (($#)); do
    case $1 in
    --all) all=yes options+=(-m "not exhaustive") seconds=${HPCRL_TEST_SECONDS:-900} ;;
    --exhaustive) all=yes options+=(-m "") seconds=${HPCRL_TEST_SECONDS:-3600} ;;
    -k)
        (($# > 1)) || { echo "test.sh: error: -k has no expression; $usage" >&2; exit 2; }
        options+=(-k "$2") selected=yes
        shift
        ;;
    *) echo "test.sh: error: unknown argument '$1'; $usage" >&2; exit 2 ;;
    esac
    shift
done

tools/environment.sh

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 # ranks outnumber cores
export HPCRL_TEST_SECONDS=$seconds # tests/mpi/conftest.py keeps time itself: it ends the job, not one rank
failed=0
summary=()

# part NAME COMMAND...: run it, note its seconds and pytest's last line
part() {
    local name=$1 started=$SECONDS code=0 closing
    shift
    printf '\n== %s\n' "$name"
    "$@" 2>&1 | tee "$logs/out" || code=$?
    closing=$(grep -E '^=+ .* in [0-9.]+s.* =+$' "$logs/out" | tail -n 1 | sed 's/^=* //; s/ =*$//' || true)
    if ((code == 5)) && [[ $selected == yes ]]; then
        code=0 # -k selects nothing here
    fi
    if ((code)); then
        failed=1
        closing="FAILED (exit code $code) $closing"
    fi
    summary+=("$(printf '%-14s %5d s  %s' "$name" $((SECONDS - started)) "$closing")")
}

# world N TESTS: rank 0 speaks, the other ranks are heard only when the session fails
world() {
    local size=$1 tests=$2 code=0 rank
    export RANK_LOGS=$logs/world_$size
    mkdir "$RANK_LOGS"
    # shellcheck disable=SC2016 # each rank expands these for itself
    .venv/bin/mpiexec -n "$size" bash -c '
        rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-0}}
        [[ $rank == 0 ]] || exec >"$RANK_LOGS/$rank" 2>&1
        exec .venv/bin/python -m pytest "$@"
    ' pytest "$tests" --timeout 0 "${options[@]}" </dev/null || code=$?
    if ((code != 0)) && ! ((code == 5 && ${#options[@]})); then
        for ((rank = 1; rank < size; rank++)); do
            printf '\n-- rank %d of %d, last lines\n' "$rank" "$size"
            tail -n 60 "$RANK_LOGS/$rank" 2>/dev/null || true
        done
    fi
    return "$code"
}

part "without MPI" .venv/bin/python -m pytest tests --ignore=tests/mpi --ignore=tests/slurm --timeout "$seconds" "${options[@]}"
for size in 1 2 4; do
    part "$size rank(s)" world "$size" tests/mpi
done
part "3 ranks" world 3 tests/mpi/test_mpi_backend.py
[[ $all == no ]] || part "8 ranks" world 8 tests/mpi/test_layout_matrix.py
why=$(tools/slurm_lab.sh install 2>&1) || printf '\n%s\n' "$why"
part "Slurm" .venv/bin/python -m pytest tests/slurm --timeout "$((3 * seconds))" -rs "${options[@]}"

printf '\n== summary\n'
printf '%s\n' "${summary[@]}"
exit "$failed"
