#!/usr/bin/env bash
# Make or update .venv with pip alone. Quick when nothing changed. PYTHON=... chooses the interpreter (3.10 to 3.12).
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

make_venv() {
    say "making .venv with Python $(version "$1")"
    if ! "$1" -m venv --clear .venv >/dev/null 2>&1; then
        # Debian splits ensurepip off; the interpreter's own pip can install into the new environment
        "$1" -m venv --clear --without-pip .venv || die "'$1 -m venv' fails; install Python's venv module"
        "$1" -m pip --python .venv/bin/python install --quiet pip ||
            die "'$1 -m venv' has no pip and '$1 -m pip' cannot give it one; install Python's venv and pip modules"
    fi
}

python=$(choose_python)
stamp=.venv/.hpcrl_stamp
# the paths stand in the stamp because a copied or moved environment points to the old place
wanted="$(version "$python") $PWD $(cat setup.py pyproject.toml | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
if [[ -d hpcrl/kernels && -f $stamp && $(<"$stamp") == "$wanted" && $(version .venv/bin/python) == "$(version "$python")" ]]; then
    exit 0
fi

if [[ $(version .venv/bin/python) != "$(version "$python")" ]] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    make_venv "$python"
fi
rm -f "$stamp"
pip() {
    .venv/bin/python -m pip --disable-pip-version-check install -qq "$@" ||
        die "'pip install $*' failed; see above (is the package index reachable?)"
}
started=$SECONDS
torch=$(grep -om1 'torch==[0-9.]*' setup.py) # the CPU's, the first in the file
say "installing $torch (a few hundred megabytes the first time)"
pip "$torch"
say "installing hpcrl with its requirements"
pip -e '.[cpu,test]'
printf '%s\n' "$wanted" >"$stamp"
say "ready after $((SECONDS - started)) s"
