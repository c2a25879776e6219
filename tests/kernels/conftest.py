"""`--kernels MODULE`: the op tests once more, on another implementation than the target's own."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import deepinfer_plugin.kernels
from deepinfer_plugin.kernels.dispatch import force, tables


def pytest_configure(config: pytest.Config) -> None:
    module = config.getoption("kernels")
    if module == "triton_nvidia" and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is defined
        from tests.kernels.interpreter import repair

        repair()
    for op, table in tables().items() if module else ():
        if find_spec(f"{table.package}.{module}"):
            force(op, module)


@pytest.fixture(autouse=True)
def _implemented(request: pytest.FixtureRequest) -> None:
    """Skip the tests of what has no such implementation."""
    module = request.config.getoption("kernels")
    if module != "triton_nvidia" and getattr(request.module, "TRITON_ONLY", False):
        pytest.skip("needs --kernels triton_nvidia")
    ops = getattr(request.module, "OPS", [request.path.stem.removeprefix("test_")])
    folder = Path(deepinfer_plugin.kernels.__path__[0])
    missing = [op for op in ops if not (folder / op / f"{module}.py").exists()] if module else []
    if missing or (module and getattr(request.module, "DECODED_ONLY", False)):
        pytest.skip(f"{', '.join(missing) or ops[0]}: no {module} for this")
