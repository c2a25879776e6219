"""The samples of every op: each runs, and its check finds the kernel right, or a spoilt one wrong."""

import pytest
import torch

from deepinfer_plugin.kernels import dispatch
from deepinfer_plugin.kernels.dispatch import Dispatch, tables
from deepinfer_plugin.kernels.samples import MAX_ERROR, SMALL, Case, cases, error_of, wrong_result

pytest.importorskip("triton", reason="Triton is not installed beside the CPU vLLM; `make test-kernels` has it")

OPS: list[str] = []
TRITON_ONLY = True


@pytest.mark.parametrize("tokens", [1, 5])
def test_every_case_is_right_and_counts_its_work(tokens: int, device: str) -> None:
    seen = set()
    for case in cases(SMALL, tokens, device):
        assert case.num_bytes > 0, case.name
        assert error_of(case, "triton_nvidia") <= MAX_ERROR, f"{case.op} {case.name}"
        seen.add(case.op)
    assert seen == tables().keys()


def test_a_wrong_result_is_seen(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, x = tables()["rms_norm"], torch.randn(3, 64, device=device)
    case = Case("rms_norm", "", (x, torch.ones(64, device=device), 1e-20, False), 1)
    right = table.load("triton_nvidia")
    monkeypatch.setitem(table._loaded, "triton_nvidia", lambda *args: right(*args) * 1.02)
    assert error_of(case, "triton_nvidia") > MAX_ERROR
    monkeypatch.setitem(table._loaded, "triton_nvidia", lambda *args: right(*args) * float("nan"))
    assert not error_of(case, "triton_nvidia") <= MAX_ERROR


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Dispatch:
    """The table of `swiglu` on an NVIDIA GPU of an architecture that nothing was ever run on."""
    table = tables()["swiglu"]
    monkeypatch.setattr(dispatch, "compute_capability", lambda: 89)
    monkeypatch.setattr(dispatch, "_forced", {})
    monkeypatch.setattr(table, "chosen", lambda: ("triton_nvidia", ""))
    monkeypatch.setattr(table, "_chosen", None)
    return table


@pytest.mark.parametrize("spoil", [lambda out: out * 1.02, lambda out: out.double() / 0, lambda out: None.out])
def test_a_kernel_that_is_wrong_where_it_never_ran_is_switched_off_loudly(
    spoil, table: Dispatch, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right, definition = table.load("triton_nvidia"), table.load("reference")
    monkeypatch.setitem(table._loaded, "triton_nvidia", lambda *args: spoil(right(*args)))
    monkeypatch.setattr("deepinfer_plugin.kernels.samples.wrong_result.__defaults__", (device,))
    monkeypatch.setattr(dispatch.logger, "propagate", True)
    x = torch.randn(3, 8, device=device)
    with caplog.at_level("WARNING", logger=dispatch.logger.name):
        assert torch.equal(table(x, 10.0, None, False), definition(x, 10.0, None, False))
        table(x, 10.0, None, False)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("swiglu: triton_nvidia is SWITCHED OFF on compute capability 89")


def test_a_kernel_that_is_right_where_it_never_ran_runs(
    table: Dispatch, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepinfer_plugin.kernels.samples.wrong_result.__defaults__", (device,))
    table(torch.randn(3, 8, device=device), 10.0, None, False)
    assert table._chosen is table.load("triton_nvidia")


def test_every_op_passes_its_own_check(device: str) -> None:
    assert {op: wrong_result(op, "reference", device) for op in tables()} == dict.fromkeys(tables())
