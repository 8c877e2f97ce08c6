# What the scripts share, to be sourced first: options, environment, and checks that write a report.
#   tools/gpu/SCRIPT.sh [--rehearse] [--again] [--only PATTERN] [-o REPORT.md]
# PATTERN is an extended regular expression: checks with other titles are left out. Checks that have passed in a report
# of the same commit and GPU are not run again, so that a second command continues where the first one ended; --again
# runs all of them and begins a new report.
# PYTHON names the interpreter (.venv/bin/python, else python3), WHEELS the folder that wheels.sh filled (.wheels).
# Exit code: 0 all checks passed, 1 one of them failed, 2 there is no GPU or a wrong argument.
# LOGS names a folder that keeps the output of each check.
# It sets: rehearsal (yes, no), python, one and two (commands that start a program on as many ranks; two may be empty).
source "$(dirname "${BASH_SOURCE[0]}")/report.sh"

if [[ $rehearsal == no ]]; then
    hardware=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")') ||
        die "'$python' cannot import torch; name the interpreter that has it: PYTHON=/path/to/python"
    [[ -n $hardware ]] || die "torch finds no GPU; --rehearse goes through the checks without one"
fi

install=("$python" -m pip install --quiet --no-index --no-deps --no-compile --find-links "${WHEELS:-.wheels}")
PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_BREAK_SYSTEM_PACKAGES=1 "${install[@]}" --requirement tools/gpu/wheels.txt ||
    die "packages of tools/gpu/wheels.txt are missing; run tools/gpu/wheels.sh with a network and bring .wheels along"

own_folders "$python"

# One rank starts without a launcher, as an MPI singleton: mpiexec may fail where the host's name has no address.
one=("$python")
two=()
find_launcher
((${#launch[@]} == 0)) || two=("${launch[@]}" 2 "$python")

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

begin
