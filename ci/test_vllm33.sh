#!/usr/bin/env bash
# The plugin's surface and end-to-end tests against vLLM 0.33's Python code, which has no CPU build yet: its tree, without
# CUDA libraries, runs on the compiled extensions of the 0.32 CPU wheel. For developers; the wheel is 336 MB.
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.33.0
tree=build/vllm-$version
cpu=$(.venv/bin/python -c 'import importlib.util as u; print(u.find_spec("vllm").submodule_search_locations[0])')

if [ ! -f "$tree/.complete" ]; then
  rm -rf "$tree" && mkdir -p "$tree"
  .venv/bin/python -m pip download --no-deps --python-version 3.12 --only-binary :all: --dest build "vllm==$version"
  .venv/bin/python - "$tree" build/vllm-"$version"-*.whl <<'PYTHON'
import sys
import zipfile

tree, wheel = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(tree, [name for name in archive.namelist() if not name.endswith(".so") and ".dist-info/" not in name])
PYTHON
  .venv/bin/python -m pip install --quiet --no-deps --target "$tree" orjson  # its API server's one new dependency
  touch "$tree/.complete"
fi
cp "$cpu"/*.abi3.so "$tree/vllm/"

export PYTHONPATH=$PWD/$tree
.venv/bin/python -c 'import vllm; print("vLLM", vllm.__version__, vllm.__file__)'
# a process per file: once numba is imported (vLLM's n-gram proposer does), 0.33 cannot start an engine there
for tests in tests/plugin tests/end_to_end/test_*.py; do
  .venv/bin/python -m pytest "$tests" "$@"
done
