# Options, checks that write a report, and the launcher, to be sourced by common.sh and multi.sh.
# It sets: rehearsal (yes, no), python, only, report.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
script=${script:-$(basename "$0" .sh)}
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
fi

# own_folders PYTHON...: a package `tests` or `tools` in site-packages is found before a folder without an __init__.py
own_folders() {
    local folder
    for folder in tests tools; do
        "$@" -c "import $folder, sys; sys.exit(getattr($folder, '__file__', None) is not None)" ||
            touch "$folder/__init__.py"
    done
}

# find_launcher: sets launch, a command that takes a number of ranks and a program; empty where it starts no ranks
find_launcher() {
    local mpiexec option
    mpiexec=$(dirname "$python")/mpiexec
    [[ -x $mpiexec ]] || mpiexec=mpiexec
    for option in "" "-localhost 127.0.0.1"; do
        read -ra launch <<<"$mpiexec $option -n"
        ! timeout 60 "${launch[@]}" 2 "$python" -c 'from mpi4py import MPI' </dev/null &>/dev/null || return 0
    done
    launch=()
}

# removed_names HOST...: a script of sed that removes them, the user's name and the account's
removed_names() {
    local number=0 word
    for word in "$@"; do
        printf 's/\\b%s(\\.[[:alnum:].-]+)?\\b/NODE%d/g\n' "${word%%.*}" "$number"
        number=$((number + 1))
    done
    for word in "$(id -un)" "${SLURM_JOB_ACCOUNT:-}" "${SLURM_CLUSTER_NAME:-}"; do
        [[ ${#word} -lt 2 ]] || printf 's/\\b%s\\b/NAME/g\n' "${word//[^[:alnum:]_-]/.}"
    done
}

# private: stdin without $private_names, addresses and absolute paths, of which the last part stays; //... is of the web
private() {
    local part='[[:alnum:]_.+@~-]+'
    sed -E -e "$private_names" -e 's#file://##g' -e "s#(^|[[:space:]\"'\`=(,:<])/$part(/$part)*/($part)#\1.../\3#g" \
        -e 's/\b[0-9]{1,3}(\.[0-9]{1,3}){3}\b/ADDRESS/g' -e 's/\b([0-9a-fA-F]{0,4}:){3,}[0-9a-fA-F:.]+/ADDRESS/g'
}

line() { printf '%s\n' "$*" | tee -a "$report"; } # at once, as checks may run side by side

# tables LOG: lines that begin with |, with an empty line before the head of another table
tables() {
    awk '/^\|/ { if (held != "") { if (/^\|---/ && count++) print ""; print held }; held = $0 } END { if (held) print held }' "$1"
}

# check TITLE SECONDS COMMAND...: run COMMAND for at most SECONDS and note how it ended. Its last line `pass: ...`,
# `fail: ...` or `skip: ...` is the detail, or its last line; lines that begin with | are a table for the report. The
# report has the last 25 lines of one that failed; with `shown=COUNT` so many of any.
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
    [[ $outcome != fail && -z ${shown:-} ]] || block+=$'\n```\n'$(tail -n "${shown:-25}" "$log" | cut -c 1-500)$'\n```'
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

# begin: the head of the report; what passed in it stays, if it is of this commit and $hardware
begin() {
    local kept commit
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
        line "# hpcrl on ${machine:-a GPU}: $script"
        line ""
        line "$(date -u '+%Y-%m-%d %H:%M UTC'), commit $commit, $hardware"
        line ""
    fi
}
