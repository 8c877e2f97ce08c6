#!/usr/bin/env bash
# Whether PyPI alone can install hpcrl: uv resolves the requirements for each supported Python from PyPI's metadata, without
# wheels and indexes of this machine, and installs nothing. Seconds; the Pythons themselves are not needed.
#   tools/check_resolution.sh [3.10 3.11 3.12]
# pip, which installs hpcrl, gives the same versions, but `pip install --dry-run` downloads 3.3 GB for each Python.
# One resolution of all extras of the native engine shows that each of them resolves, but for openenv, which excludes the
# mcp of the tests and has one of its own. `trtllm` is not on PyPI as a whole. Only wheels count, for the C library of the
# oldest clusters (glibc 2.28), so tools/bundle_wheels.sh finds all files, too; but for three that reasoning-gym requires.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
(($#)) || set -- 3.10 3.11 3.12
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
source tools/uv.sh
install_uv "$python" "$folder/uv"

"$python" tools/resolve.py --requirements cpu,gpu,math,reasoning-gym,wandb,mlflow,test >"$folder/all.in"
"$python" tools/resolve.py --requirements cpu,openenv >"$folder/openenv.in"
running=()
for version in "$@"; do
    for name in "$version-x86_64" "$version-aarch64" "$version-x86_64-openenv"; do
        IFS=- read -r _ machine set <<<"$name"
        "$folder/uv/bin/uv" pip compile -q --python "$python" --python-version "$version" --no-annotate --no-header \
            --only-binary :all: --no-binary cellpylib --no-binary pycosat --no-binary zss \
            --python-platform "$machine-manylinux_2_28" "$folder/${set:-all}.in" \
            -o "$folder/$name.txt" 2>"$folder/$name.err" &
        running+=("$name:$!")
    done
done
failed=0
for each in "${running[@]}"; do
    name=${each%%:*}
    if wait "${each##*:}"; then
        named=$(grep -E '^(torch|triton|megatron-core|numpy|transformers|mpi4py|mpich)==' "$folder/$name.txt" | paste -sd' ')
        printf 'Python %s: %d packages: %s\n' "$name" "$(grep -c == "$folder/$name.txt")" "$named"
    else
        failed=1
        printf 'check_resolution.sh: error: Python %s: PyPI alone cannot install it\n' "$name" >&2
        tail -n 15 "$folder/$name.err" >&2
    fi
done
exit "$failed"
