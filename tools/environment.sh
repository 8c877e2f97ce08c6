#!/usr/bin/env bash
# Make or update .venv with pip alone. Quick when nothing changed. PYTHON=... chooses the interpreter (3.10 to 3.12). A
# torch that it has, or that .venv has, is taken where setup.py admits it; tools/resolve.py says what is downloaded.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'environment: %s\n' "$*" >&2; }
die() { printf 'environment: error: %s\n' "$*" >&2; exit 1; }

version() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true; }
fits() { [[ $(version "$1") =~ ^3\.1[0-2]\. ]]; }

choose_python() {
    if [[ -n ${PYTHON:-} ]]; then
        command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON is not a program; expected Python 3.10 to 3.12"
        fits "$PYTHON" || die "PYTHON=$PYTHON says version '$(version "$PYTHON")'; expected Python 3.10 to 3.12"
        printf '%s\n' "$PYTHON"
        return
    fi
    local candidate
    for candidate in .venv/bin/python python3 python3.12 python3.11 python3.10 python; do
        if command -v "$candidate" >/dev/null && fits "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "found no Python 3.10 to 3.12 (python3 says version '$(version python3)'); install one, or name it: PYTHON=/path/to/python"
}

# has_torch PYTHON: as a module of a supercomputer has it, in the range of setup.py
has_torch() {
    local range
    range=$(grep -om1 'torch>=[0-9.]*,<[0-9.]*' setup.py)
    "$1" - "$range" 2>/dev/null <<'PY'
import re
import sys
from importlib.metadata import version

least, bound = re.findall(r"[\d.]+", sys.argv[1])
key = lambda text: [int(part) for part in re.match(r"[\d.]+", text)[0].split(".")]
sys.exit(not key(least) <= key(version("torch")) < key(bound))
PY
}

make_venv() {
    local options=(--clear)
    if has_torch "$1"; then
        say "making .venv with Python $(version "$1") and the torch that it has"
        options+=(--system-site-packages)
    else
        say "making .venv with Python $(version "$1")"
    fi
    if ! "$1" -m venv "${options[@]}" .venv >/dev/null 2>&1; then
        # Debian splits ensurepip off; the interpreter's own pip can install into the new environment
        "$1" -m venv "${options[@]}" --without-pip .venv || die "'$1 -m venv' fails; install Python's venv module"
        "$1" -m pip --python .venv/bin/python install --quiet pip ||
            die "'$1 -m venv' has no pip and '$1 -m pip' cannot give it one; install Python's venv and pip modules"
    fi
}

python=$(choose_python)
stamp=.venv/.hpcrl_stamp
# the paths stand in the stamp because a copied or moved environment points to the old place
wanted="$(version "$python") $PWD $(cat setup.py pyproject.toml tools/resolve.py | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
if [[ -d hpcrl/kernels && -f $stamp && $(<"$stamp") == "$wanted" && $(version .venv/bin/python) == "$(version "$python")" ]]; then
    exit 0
fi

if [[ $(version .venv/bin/python) != "$(version "$python")" ]] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    make_venv "$python"
fi
rm -f "$stamp"
run_pip() {
    .venv/bin/python -m pip --disable-pip-version-check "$@" ||
        die "'pip $*' failed; see above (is the package index reachable?)"
}
started=$SECONDS
# pip of 2023, which Python 3.10 brings, tries versions for half an hour where a new one needs a minute
run_pip install -qq --upgrade pip
say "resolving hpcrl with its requirements"
pinned=$(mktemp)
trap 'rm -f "$pinned"' EXIT
.venv/bin/python tools/resolve.py cpu,test >"$pinned" ||
    die "pip cannot resolve the requirements; see above (is the package index reachable?)"
# Compiling 13,000 modules takes as long as all else here; the 2,000 that jobs import are compiled by importing them
[[ ! -s $pinned ]] || run_pip install -qq --no-compile --no-deps -r "$pinned"
run_pip install -qq --no-deps -e .
env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 .venv/bin/python -W ignore -c "
from hpcrl.runtime import platform
platform.import_megatron()
import hpcrl.engine.checkpoint.sharded_load, hpcrl.engine.checkpoint.sharded_save, hpcrl.jobs.train, hpcrl.jobs.sft, tensorboard" ||
    die "what is installed cannot be imported; see above"
printf '%s\n' "$wanted" >"$stamp"
say "ready after $((SECONDS - started)) s"
