# What the scripts share, to be sourced first: options, environment, and checks that write a report.
#   tools/gpu/SCRIPT.sh [--rehearse] [--again] [--only PATTERN] [-o REPORT.md]
# PATTERN is an extended regular expression: checks with other titles are left out. Checks that have passed in a report
# of the same commit and GPU are not run again, so that a second command continues where the first one ended; --again
# runs all of them and begins a new report.
# PYTHON names the interpreter (.venv/bin/python, else python3), WHEELS the folder that wheels.sh filled (.wheels).
# Exit code: 0 all checks passed, 1 one of them failed, 2 there is no GPU or a wrong argument.
# LOGS names a folder that keeps the output of each check.
# It sets: rehearsal (yes, no), python, one and two (commands that start a program on as many ranks; two may be empty).
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
script=$(basename "$0" .sh)
usage="expected tools/gpu/$script.sh [--rehearse] [--again] [--only PATTERN] [-o REPORT.md]"
die() { printf '%s: error: %s\n' "$script" "$*" >&2; exit 2; }

rehearsal=no
again=no
only=
report=gpu_$script.md
while (($#)); do
    case $1 in
    --rehearse) rehearsal=yes ;;
    --again) again=yes ;;
    -o | --only)
        (($# > 1)) || die "$1 has no value; $usage"
        if [[ $1 == -o ]]; then report=$2; else only=$2; fi
        shift
        ;;
    *) die "unknown argument '$1'; $usage" ;;
    esac
    shift
done
[[ $report == /* ]] || report=$here/$report
touch "$report" 2>/dev/null || die "cannot write $report"

python=${PYTHON:-}
if [[ -z $python ]]; then
    python=python3
    [[ -x .venv/bin/python ]] && python=.venv/bin/python
fi
python=$(command -v "$python") || die "${PYTHON:-python3} is not a program; name the interpreter: PYTHON=/path/to/python"

export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
ln -sfn ../kernels hpcrl/kernels # as setup.py does
if [[ $rehearsal == yes ]]; then
    export HPCRL_GPU_REHEARSAL=1 CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 TRITON_INTERPRET=1 # check.py reads the first
    hardware="no GPU: a rehearsal, whose figures mean nothing"
else
    unset HPCRL_GPU_REHEARSAL
    hardware=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")') ||
        die "'$python' cannot import torch; name the interpreter that has it: PYTHON=/path/to/python"
    [[ -n $hardware ]] || die "torch finds no GPU; --rehearse goes through the checks without one"
fi

install=("$python" -m pip install --quiet --no-index --no-deps --no-compile --find-links "${WHEELS:-.wheels}")
PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_BREAK_SYSTEM_PACKAGES=1 "${install[@]}" --requirement tools/gpu/wheels.txt ||
    die "packages of tools/gpu/wheels.txt are missing; run tools/gpu/wheels.sh with a network and bring .wheels along"

# A package `tests` or `tools` in site-packages is found before a folder without an __init__.py.
for folder in tests tools; do
    "$python" -c "import $folder, sys; sys.exit(getattr($folder, '__file__', None) is not None)" ||
        touch "$folder/__init__.py"
done

# One rank starts without a launcher, as an MPI singleton: mpiexec may fail where the host's name has no address.
one=("$python")
two=()
mpiexec=$(dirname "$python")/mpiexec
[[ -x $mpiexec ]] || mpiexec=mpiexec
for option in "" "-localhost 127.0.0.1"; do
    read -ra launch <<<"$mpiexec $option -n 2"
    if timeout 60 "${launch[@]}" "$python" -c 'from mpi4py import MPI' </dev/null &>/dev/null; then
        two=("${launch[@]}" "$python")
        break
    fi
done

budget=520 # seconds for all checks
[[ $rehearsal == no ]] || budget=3600 # nothing ends a rehearsal, which may have one slow core
work=$(mktemp -d) # for logs, runs and data
trap 'rm -rf "$work"' EXIT

logs=${LOGS:-$work}
mkdir -p "$logs"

# beside COMMAND...: start it in the background, when fewer than `lanes` are running.
lanes=$(($(nproc) - 2))
[[ $rehearsal == no ]] || lanes=1
((lanes > 0)) || lanes=1
beside() {
    while (($(jobs -rp | wc -l) >= lanes)); do wait -n || true; done
    "$@" &
}

line() { printf '%s\n' "$*" | tee -a "$report"; } # at once, as checks may run side by side

# tables LOG: lines that begin with |, with an empty line before the head of another table
tables() {
    awk '/^\|/ { if (held != "") { if (/^\|---/ && count++) print ""; print held }; held = $0 } END { if (held) print held }' "$1"
}

# check TITLE SECONDS COMMAND...: run COMMAND for at most SECONDS and note how it ended. Its last line `pass: ...`,
# `fail: ...` or `skip: ...` is the detail, or its last line; lines that begin with | are a table for the report.
check() {
    local title=$1 limit=$2 started=$SECONDS code=0 outcome=pass said left=$((budget - SECONDS)) log
    shift 2
    [[ $title =~ $only ]] || return 0
    if grep -qF -- "- **pass** $title (" "$report"; then
        printf 'passed before: %s\n' "$title"
        return
    fi
    if ((left < 5)); then
        line "- **fail** $title: not run: the time of all checks is used up"
        return
    fi
    log=$logs/$script.${title//[^[:alnum:]]/_}.log
    [[ $rehearsal == no ]] || limit=$((10 * limit))
    ((limit <= left)) || limit=$left
    timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1 </dev/null || code=$?
    said=$(grep -E '^(pass|fail|skip): ' "$log" | tail -n 1 || true)
    [[ -n $said ]] || said="pass: $(grep -vE '^ *$|^\|' "$log" | tail -n 1 || true)"
    # pytest ends with 0 where it has skipped every test
    [[ $code != 0 || " $* " != *" -m pytest "* || $said =~ [0-9]+\ passed ]] || said="fail: no test has passed: ${said#*: }"
    case $code,$said in
    0,pass:*) ;;
    77,skip:*) outcome=skip ;;
    *,fail:*) outcome=fail ;;
    124,* | 137,*) outcome=fail said="fail: not ended after $limit s" ;;
    *) outcome=fail said="fail: ended with code $code" ;;
    esac
    local block="- **$outcome** $title ($((SECONDS - started)) s): ${said#*: }" table
    table=$(tables "$log")
    [[ -z $table ]] || block+=$'\n\n'$table$'\n'
    [[ $outcome != fail ]] || block+=$'\n```\n'$(tail -n 25 "$log" | cut -c 1-500)$'\n```'
    line "$block"
}

# finish: the last line of the report, and the exit code
finish() {
    local outcome counts=()
    for outcome in pass fail skip; do
        counts+=("$(grep -c "^- \*\*$outcome\*\*" "$report" || true)")
    done
    line ""
    line "${counts[0]} passed, ${counts[1]} failed, ${counts[2]} skipped, in $SECONDS s"
    exit $((counts[1] > 0))
}

# What passed in the report stays, if it is of this commit and GPU.
commit=$(git describe --always --dirty --exclude '*' 2>/dev/null || echo unknown)
if [[ $commit == *-dirty || $commit == unknown ]]; then
    commit+=-$(find hpcrl kernels tests tools -type f \( -name '*.py' -o -name '*.sh' \) -print0 | sort -z | xargs -0 cat | cksum | cut -d ' ' -f 1)
fi
if [[ $again == no ]] && grep -qF "commit $commit, $hardware" "$report"; then
    kept=$(awk '/^- \*\*/ { keep = /^- \*\*pass/ } /^[0-9]+ passed, / { keep = 0 } NR <= 4 || keep' "$report")
    printf '%s\n\n' "$kept" >"$report"
    cat "$report"
else
    : >"$report"
    line "# hpcrl on a GPU: $script"
    line ""
    line "$(date -u '+%Y-%m-%d %H:%M UTC'), commit $commit, $hardware"
    line ""
fi
