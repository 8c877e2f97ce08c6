#!/usr/bin/env bash
# Run the tests, and say what they cost: those without MPI on all cores, then one SPMD pytest session under mpiexec for each
# of 4 and 2 ranks. Beside them, as tests wait for something a third of their time, run the sessions of 1 rank, of 3 for
# the torch.distributed backend and, with --all, of 8 for the layouts that need as many, then the tests on a private Slurm,
# which is installed where apt and root are there, those in a browser, and those of vLLM in an environment of their own. At
# last, with --all, those that need a quiet machine. Without a Slurm, a browser or vLLM their tests are left out, and the
# summary says so; HPCRL_REQUIRE_SLURM=1, HPCRL_REQUIRE_BROWSER=1 and HPCRL_REQUIRE_VLLM=1 make that a failure.
#   tools/test.sh [--all | --exhaustive | --changed] [-k EXPR] [--write-budgets]
# --all adds the tests marked slow, --exhaustive also those marked exhaustive; --changed runs only the files that test what
# differs from HPCRL_BASE (origin/main, else the last commit). HPCRL_TEST_COSTS=DIR keeps what the tables are made of.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage="expected tools/test.sh [--all | --exhaustive | --changed] [-k EXPR] [--write-budgets]"
options=()
report=()
seconds=${HPCRL_TEST_SECONDS:-300} # for one test, then it fails with every thread's stack
selected=no
all=no
exhaustive=no
changed=no
while (($#)); do
    case $1 in
    --all) all=yes options+=(-m "not exhaustive") seconds=${HPCRL_TEST_SECONDS:-900} ;;
    --exhaustive) all=yes exhaustive=yes options+=(-m "") seconds=${HPCRL_TEST_SECONDS:-3600} ;;
    --changed) changed=yes selected=yes ;;
    --write-budgets) report+=(--write-budgets) ;;
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

started=$SECONDS
logs=$(mktemp -d)
costs=${HPCRL_TEST_COSTS:-$logs/costs}
mkdir -p "$costs"
: >"$costs/parts.jsonl"
cores=$(env -u OMP_NUM_THREADS nproc) # which counts no more than OMP_NUM_THREADS says
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 # ranks outnumber cores
export HPCRL_TEST_SECONDS=$seconds # tests/mpi/conftest.py keeps time itself: it ends the job, not one rank
unset PYTHONDONTWRITEBYTECODE      # else every process of a job under test compiles the package anew
bin=.venv/bin ranks=$logs/ranks # of `world`: programs, and the socket of the server that forks ranks
python=$bin/python

files=(tests)
if [[ $changed == yes ]]; then
    mapfile -t files < <($python tools/changed_tests.py)
    ((${#files[@]})) || { echo "test.sh: no test file imports what has changed"; exit 0; }
fi

# chosen FOLDER [NOT]...: those of `files` that are in the folder and in none of the others
chosen() {
    local file folder=$1 other
    shift
    for file in "${files[@]}"; do
        [[ $file == tests ]] && { echo "$folder"; return; }
        [[ $file == "$folder"/* ]] || continue
        for other in "$@"; do
            [[ $file == "$other"/* || $file == "$other" ]] && continue 2
        done
        echo "$file"
    done
}

# part NAME COMMAND...: run it, note its seconds and pytest's last line
part() {
    local name=$1 started=$SECONDS code=0 closing
    shift
    mkdir -p "$costs/$name"
    printf '\n== %s\n' "$name"
    HPCRL_TEST_COSTS=$costs/$name "$@" 2>&1 | tee "$logs/$name" || code=$?
    closing=$(grep -E '^=+ .* in [0-9.]+s.* =+$' "$logs/$name" | tail -n 1 | sed 's/^=* //; s/ =*$//' || true)
    ((code != 5)) || [[ $selected == no ]] || code=0 # nothing is selected here
    printf '["%s", %d, %d, "%s"]\n' "$name" $((SECONDS - started)) "$code" "$closing" >>"$costs/parts.jsonl"
}

# world N TESTS...: rank 0 speaks, the other ranks are heard only when the session fails
world() {
    local size=$1 code=0 rank
    shift
    export RANK_LOGS=$ranks.$size
    mkdir "$RANK_LOGS"
    # shellcheck disable=SC2016 # each rank expands these for itself
    HPCRL_TEST_SERVER=$ranks bin=$bin "$bin/mpiexec" -n "$size" bash -c '
        rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-0}}
        [[ $rank == 0 ]] || exec >"$RANK_LOGS/$rank" 2>&1
        exec "$bin/python" -I -S tests/preloaded/rank.py -m pytest -p tests.costs "$@"
    ' pytest "$@" --timeout 0 "${options[@]}" </dev/null || code=$?
    if ((code != 0)) && ! ((code == 5 && ${#options[@]})); then
        for ((rank = 1; rank < size; rank++)); do
            printf '\n-- rank %d of %d, last lines\n' "$rank" "$size"
            tail -n 60 "$RANK_LOGS/$rank" 2>/dev/null || true
        done
    fi
    return "$code"
}

# serve PYTHON SOCKET: start tests/preloaded/server.py, which forks the sessions' ranks, and ends when this shell does, whose
# pipe it reads; variables of the interpreter as in tests/conftest.py
serve() {
    local interpret
    interpret=$([[ -e /dev/nvidiactl ]] || echo TRITON_INTERPRET=1 OPENBLAS_CORETYPE=Sandybridge)
    exec {server}> >(exec env $interpret PYTHONPATH="$PWD" "$1" tests/preloaded/server.py "$2" pytest hypothesis)
    until [[ -S $2 ]]; do
        kill -0 $! || { echo "test.sh: error: tests/preloaded/server.py has ended" >&2; exit 1; }
        sleep 0.05
    done
}

# vllm: whole jobs, then SPMD sessions, in an environment with vLLM
vllm() {
    local folder size sizes=(2) code=0 worst=5 # 5: nothing is selected
    if ! folder=$(tools/vllm_environment.sh cached); then
        echo "the tests of vLLM are left out"
        [[ ${HPCRL_REQUIRE_VLLM:-0} != 1 ]]
        return
    fi
    [[ $exhaustive == no ]] || sizes+=(1 3)
    bin=$folder/bin ranks=$logs/vllm_ranks
    export PYTHONPATH=$PWD # hpcrl is not installed there
    serve "$bin/python" "$ranks"
    HPCRL_TEST_SERVER=$ranks "$bin/python" -m pytest -p tests.costs "${options[@]}" --timeout "$seconds" -rs \
        tests/run/test_engine_jobs.py || code=$?
    ((code == 5)) || worst=$code
    for size in "${sizes[@]}"; do
        code=0
        world "$size" tests/mpi/test_engines.py || code=$?
        ((code == 5 || (worst != 5 && worst != 0))) || worst=$code
    done
    return "$worst"
}

mapfile -t plain < <(chosen tests tests/mpi tests/slurm tests/observe/browser)
mapfile -t spmd < <(chosen tests/mpi)
mapfile -t slurm < <(chosen tests/slurm)
mapfile -t pages < <(chosen tests/observe/browser)
pytest=("$python" -m pytest -p tests.costs "${options[@]}")

run_beside() {
    local why
    if ((${#spmd[@]})); then
        part "1 rank" world 1 "${spmd[@]}"
        [[ $changed == yes ]] || part "3 ranks" world 3 tests/mpi/test_mpi_backend.py
        [[ $all == no ]] || part "8 ranks" world 8 tests/mpi/test_layout_matrix.py
    fi
    if ((${#slurm[@]})); then
        why=$(tools/slurm_lab.sh install 2>&1) || printf '\n%s\n' "$why"
        part "Slurm" "${pytest[@]}" -n "$cores" --dist worksteal --timeout "$((3 * seconds))" -rs "${slurm[@]}"
    fi
    if [[ $all == yes ]] && ((${#pages[@]})); then
        why=$(tools/browser.sh install 2>&1) || printf '\n%s\n' "$why"
        part "browser" "${pytest[@]}" --timeout "$seconds" -rs "${pages[@]}"
    fi
    [[ $all == no ]] || part "vLLM" vllm
}
beside=
trap '[[ ! $beside ]] || kill -- "-$beside" 2>/dev/null || true; rm -rf "$logs"' EXIT

if ((${#spmd[@]})); then
    serve "$python" "$ranks"
fi
set -m # a process group of its own, which an interrupt does not reach
run_beside >"$logs/beside" 2>&1 </dev/null &
beside=$!
set +m
if ((${#plain[@]})); then
    pytest+=(--ignore=tests/mpi --ignore=tests/slurm --ignore=tests/observe/browser --timeout "$seconds")
    HPCRL_QUIET=no part "without MPI" "${pytest[@]}" -n "$cores" --dist loadfile "${plain[@]}"
fi
if ((${#spmd[@]})); then
    for size in 4 2; do
        part "$size ranks" world "$size" "${spmd[@]}"
    done
fi
wait "$beside"
beside=
cat "$logs/beside"
if [[ $all == yes ]] && ((${#plain[@]})); then
    mapfile -t quiet < <(grep -rlF --include=test_*.py --exclude-dir={mpi,slurm} pytest.mark.quiet "${plain[@]}")
    ((${#quiet[@]} == 0)) || HPCRL_QUIET=only part "quiet" "${pytest[@]}" "${quiet[@]}"
fi

$python tools/test_report.py "$costs" --seconds $((SECONDS - started)) "${report[@]}"
