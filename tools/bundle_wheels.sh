#!/usr/bin/env bash
# A wheelhouse for a machine without a network: hpcrl and all it requires as wheels, and a requirements.txt with their
# hashes. Run it where PyPI can be reached; the machine may have another Python than the cluster.
#   tools/bundle_wheels.sh OUT [EXTRAS] [--torch cpu|cuda] [--python 3.12] [--machine x86_64|aarch64] [--glibc 2.28] [--dry-run]
# EXTRAS: of setup.py, comma-separated; gpu, or cpu with --torch cpu, unless given. They need wheels on PyPI; trtllm's are not.
# --torch   cuda: PyPI's torch, 3 GB with CUDA (the default); cpu: the CPU build, which pip must be able to see: a wheel
#           in a folder of PIP_FIND_LINKS, or PyTorch's CPU index in PIP_EXTRA_INDEX_URL
# --python  of the cluster: 3.10, 3.11 or 3.12; this machine's unless given
# --glibc   of the cluster, as `ldd --version` prints it there
# --dry-run resolves, prints the versions, and downloads nothing
# Install it there: python3 -m venv ENV && ENV/bin/pip install --no-index --find-links OUT --require-hashes -r OUT/requirements.txt
set -euo pipefail
usage="expected tools/bundle_wheels.sh OUT [EXTRAS] [--torch cpu|cuda] [--python 3.12] [--machine x86_64|aarch64] [--glibc 2.28] [--dry-run]"
say() { printf 'bundle_wheels: %s\n' "$*" >&2; }
die() { printf 'bundle_wheels: error: %s\n' "$*" >&2; exit 2; }

positional=() torch=cuda python_version='' machine=x86_64 glibc=2.28 dry_run=no
while (($#)); do
    case $1 in
    --torch | --python | --machine | --glibc)
        (($# > 1)) || die "$1 has no value; $usage"
        case $1 in
        --torch) torch=$2 ;;
        --python) python_version=$2 ;;
        --machine) machine=$2 ;;
        --glibc) glibc=$2 ;;
        esac
        shift
        ;;
    --dry-run) dry_run=yes ;;
    -*) die "found '$1'; $usage" ;;
    *) positional+=("$1") ;;
    esac
    shift
done
((${#positional[@]} == 1 || ${#positional[@]} == 2)) || die "found ${#positional[@]} arguments; $usage"
[[ $torch =~ ^(cpu|cuda)$ ]] || die "--torch $torch; expected cpu or cuda"
[[ $machine =~ ^(x86_64|aarch64)$ ]] || die "--machine $machine; expected x86_64 or aarch64"
[[ $glibc =~ ^2\.(1[7-9]|[2-9][0-9])$ ]] || die "--glibc $glibc; expected a version such as 2.28"
extras=${positional[1]:-$([[ $torch == cpu ]] && echo cpu || echo gpu)}
[[ ,$extras, != *,trtllm,* ]] || die "the wheels of trtllm are not on PyPI; use NVIDIA's container (tools/container/hpcrl_trtllm.def)"

out=$(realpath -m "${positional[0]}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
[[ -n ${PYTHON:-} || ! -x .venv/bin/python ]] || python=.venv/bin/python
: "${python_version:=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')}"
[[ $python_version =~ ^3\.1[0-2]$ ]] || die "--python $python_version; expected 3.10, 3.11 or 3.12"
[[ $dry_run == yes || ! -e $out || -z $(find "$out" -name '*.whl' -print -quit) ]] || die "$out has wheels already; name a new folder"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=("$python" -m pip --disable-pip-version-check)
source tools/uv.sh
install_uv "$python" "$work/uv"
everywhere=()
if [[ $torch == cpu ]]; then
    for folder in ${PIP_FIND_LINKS:-}; do everywhere+=(--find-links "$folder"); done
    for index in ${PIP_EXTRA_INDEX_URL:-}; do everywhere+=(--extra-index-url "$index"); done
fi
compile() { # compile REQUIREMENTS OUTPUT [OPTION...]
    "$work/uv/bin/uv" pip compile -q "$1" -o "$2" --python "$python" --python-version "$python_version" \
        --python-platform "$machine-manylinux_${glibc/./_}" --only-binary :all: --no-annotate --no-header "${@:3}" ||
        die "there is no set of wheels for Python $python_version on $machine with glibc $glibc; see above"
}

say "resolving hpcrl[$extras] for Python $python_version on $machine, glibc $glibc, $torch build of torch"
"$python" tools/resolve.py --requirements "$extras" >"$work/requirements.in" || exit
if [[ $torch == cpu ]]; then
    # the CPU build is named, because a resolver takes the first index that has a torch; it asks for no triton
    "${pip[@]}" index versions torch --python-version "$python_version" --only-binary :all: >"$work/torch" 2>/dev/null || true
    build=$(grep -oE '[0-9.]+\+cpu' "$work/torch" | sort -Vu | tail -n 1)
    [[ -n $build ]] || die "pip sees no CPU build of torch for Python $python_version; name a folder with its wheel in PIP_FIND_LINKS, or PyTorch's CPU index in PIP_EXTRA_INDEX_URL"
    printf 'torch==%s\n' "${build%+cpu}" >"$work/torch.in"
    compile "$work/torch.in" "$work/torch.txt"
    { printf 'torch==%s\n' "$build"; grep -E '^triton==' "$work/torch.txt" || true; } >"$work/more.in"
    cat "$work/more.in" >>"$work/requirements.in"
    compile "$work/requirements.in" "$work/pinned.txt" "${everywhere[@]}" --index-strategy unsafe-best-match
else
    compile "$work/requirements.in" "$work/pinned.txt"
fi
sort -u -o "$work/pinned.txt" "$work/pinned.txt"
say "$(grep -c == "$work/pinned.txt") packages: $(grep -E '^(torch|triton|megatron-core|numpy|transformers|mpi4py|mpich)==' "$work/pinned.txt" | paste -sd' ')"
if [[ $dry_run == yes ]]; then
    cat "$work/pinned.txt"
    exit
fi

mkdir -p "$out"
platforms=()
for minor in $(seq "${glibc#2.}" -1 5); do platforms+=(--platform "manylinux_2_${minor}_$machine"); done
for tag in "manylinux2014_$machine" "manylinux2010_$machine" "manylinux1_$machine" "linux_$machine"; do platforms+=(--platform "$tag"); done
say "downloading to $out"
"${pip[@]}" download -qq --no-deps --only-binary :all: --dest "$out" --implementation cp --python-version "$python_version" \
    "${platforms[@]}" --requirement "$work/pinned.txt"
mkdir "$work/source" # setuptools leaves folders in a checkout, and takes old files from them
cp -RL hpcrl kernels setup.py pyproject.toml README.md LICENSE "$work/source"
cp -R --parents configs slurm docs/examples tools/prepare_countdown.py "$work/source" # TEMPLATES of setup.py
"${pip[@]}" wheel -qq --no-deps --wheel-dir "$out" "$work/source"
(
    cd "$out"
    for wheel in *.whl; do
        IFS=- read -r name version _ <<<"$wheel"
        printf '%s==%s --hash=sha256:%s\n' "${name//_/-}" "$version" "$(sha256sum "$wheel" | cut -d' ' -f1)"
    done >requirements.txt
)
say "$(find "$out" -name '*.whl' | wc -l) wheels, $(du -sh "$out" | cut -f1); install them with"
say "  pip install --no-index --find-links OUT --require-hashes -r OUT/requirements.txt"
