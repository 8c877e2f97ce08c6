#!/usr/bin/env bash
# Fetch the wheels of wheels.txt, 20 MB, for a machine with GPUs that has no network: Linux on x86-64, Python 3.12.
# Carry the folder along with the checkout; the three scripts install from it what is missing there.
#   tools/gpu/wheels.sh [FOLDER]      .wheels in the checkout unless given; PYTHON names the interpreter whose pip runs
set -euo pipefail
if (($# > 1)) || [[ ${1:-} == -* ]]; then
    echo "wheels: error: found '$*'; expected tools/gpu/wheels.sh [FOLDER]" >&2
    exit 2
fi
kit=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-$kit/../../.wheels}
mkdir -p "$folder"
rm -f "$folder"/*.whl # two versions of one package would leave the choice to pip

fetch=("${PYTHON:-python3}" -m pip download --quiet --only-binary=:all: --dest "$folder")
fetch+=(--implementation cp --python-version 3.12)
for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
    fetch+=(--platform "${platform}_x86_64")
done
# pydantic with what it requires, as it names one version of pydantic-core; the others without, as torch is there.
"${fetch[@]}" pydantic
grep -vE '^(#|annotated-types|pydantic|typing-)' "$kit/wheels.txt" | "${fetch[@]}" --no-deps --requirement /dev/stdin
ls -1 "$folder"
