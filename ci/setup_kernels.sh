#!/usr/bin/env bash
# Make or refresh .venv-kernels: torch and Triton without vLLM, to interpret and to compile the GPU kernels on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.11}
[ -x .venv-kernels/bin/python ] || "$python" -m venv .venv-kernels
.venv-kernels/bin/python -m pip --disable-pip-version-check --no-input install --quiet --progress-bar on --no-deps \
  -r requirements/kernels.lock
touch .venv-kernels/.ready
