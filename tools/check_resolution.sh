#!/usr/bin/env bash
# Whether PyPI alone can install hpcrl: pip resolves the requirements for each supported Python against PyPI's metadata,
# without wheels and indexes of this machine, and installs nothing. PyPI is needed; about a minute.
#   tools/check_resolution.sh [3.10 3.11 3.12]
# One resolution of all extras of the native engine shows that each of them resolves. `trtllm` is not on PyPI as a whole.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { printf 'check_resolution.sh: error: %s\n' "$*" >&2; exit 1; }

# interpreter VERSION: one on PATH, or one of pyenv's, whose shims fail without a choice
interpreter() {
    local candidate
    for candidate in "python$1" "$(pyenv root 2>/dev/null || echo /none)/versions/$1".*/bin/python; do
        if "$candidate" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' "$1" 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "found no Python $1; install it, or name the versions to check: tools/check_resolution.sh 3.11"
}

(($#)) || set -- 3.10 3.11 3.12
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
printf '[global]\nfind-links =\nextra-index-url =\n' >"$folder/pip.conf"
unset PIP_FIND_LINKS PIP_EXTRA_INDEX_URL
export PIP_CONFIG_FILE=$folder/pip.conf PIP_DISABLE_PIP_VERSION_CHECK=1

# one pip for all, as those that interpreters bring may be years old, and download whole wheels to read their metadata
.venv/bin/python -m pip install -qq --target "$folder/pip" pip
PYTHONPATH=$folder/pip .venv/bin/python -m pip wheel -qq --no-deps --wheel-dir "$folder" .
running=()
for version in "$@"; do
    python=$(interpreter "$version")
    PYTHONPATH=$folder/pip "$python" -m pip install -qq --dry-run --ignore-installed --report "$folder/$version.json" \
        "$(ls "$folder"/hpcrl-*.whl)[cpu,gpu,math,test]" 2>"$folder/$version.err" &
    running+=("$version:$!")
done
failed=0
for each in "${running[@]}"; do
    version=${each%%:*}
    if wait "${each##*:}"; then
        .venv/bin/python - "$folder/$version.json" "$version" <<'PY'
import json
import sys

found = {each["metadata"]["name"]: each["metadata"]["version"] for each in json.load(open(sys.argv[1]))["install"]}
named = ("torch", "triton", "megatron-core", "numpy", "transformers", "mpi4py", "mpich")
print(f"Python {sys.argv[2]}: {len(found)} packages:", ", ".join(f"{name} {found[name]}" for name in named))
PY
    else
        failed=1
        printf 'check_resolution.sh: error: Python %s: PyPI alone cannot install it\n' "$version" >&2
        tail -n 15 "$folder/$version.err" >&2
    fi
done
exit "$failed"
