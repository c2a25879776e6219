# The two commands of a newcomer are `make demo` and `make test`. Both set up .venv when it is missing or out of date.

PYTHON_IN_VENV := .venv/bin/python
READY := .venv/.ready

.PHONY: demo test test-vllm33 lint bench clean

demo: $(READY)
	$(PYTHON_IN_VENV) examples/offline_inference.py

test: $(READY)
	$(PYTHON_IN_VENV) -m pytest

test-vllm33: $(READY)
	ci/test_vllm33.sh

lint: $(READY)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench: $(READY)
	$(PYTHON_IN_VENV) -m benchmarks.cpu_step

clean:
	rm -rf .venv build dist *.egg-info

$(READY): requirements/cpu.lock requirements/test.lock pyproject.toml ci/setup.sh kernels/row_gemm.c ci/vllm-cpu-metadata/pyproject.toml
	ci/setup.sh
