#!/usr/bin/env bash
# Make, once, an environment for the tests of an extra whose pins exclude those of others, and print its folder: its
# packages, and behind them those of the interpreter PYTHON (.venv/bin/python). Half a minute, 500 MB at most.
#   tools/extra_environment.sh openenv|reasoning-gym|verifiers
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { printf 'extra_environment.sh: error: %s\n' "$*" >&2; exit 1; }

extra=${1:?expected an extra of setup.py}
python=${PYTHON:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
comm -13 <("$python" tools/resolve.py --requirements "" | sort) <("$python" tools/resolve.py --requirements "$extra" | sort) \
    >"$work/requirements.in" # those of hpcrl are behind
behind=$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/hpcrl
folder=$cache/$extra-$(cat "$work/requirements.in" <("$python" -VV) <(printf '%s' "$behind") | sha256sum | cut -c-12)
mkdir -p "$cache"
exec 9>"$cache/$extra.lock"
flock 9
if [[ ! -e $folder/.hpcrl_stamp ]]; then
    source tools/uv.sh
    install_uv "$python" "$work/uv"
    uv=$work/uv/bin/uv
    "$uv" venv -q --clear --python "$python" "$folder"
    # A limit, because a download may hang
    limit=${HPCRL_EXTRA_SECONDS:-300}
    timeout "$limit" "$uv" pip install -q --python "$folder/bin/python" -r "$work/requirements.in" >"$work/log" 2>&1 ||
        die "cannot install $extra in $limit s: $(tr -s '[:space:]' ' ' <"$work/log" | tail -c 600)"
    printf 'import site; site.addsitedir("%s")\n' "$behind" >"$("$folder/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/zz_behind.pth"
    touch "$folder/.hpcrl_stamp"
fi
printf '%s\n' "$folder"
