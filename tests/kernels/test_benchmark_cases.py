"""The kernel benchmark's cases: each runs, and its check finds the kernel right, or a spoilt one wrong."""

import pytest
import torch

from benchmarks.kernels import MAX_ERROR, Case, Sizes, cases, error_of
from deepinfer_plugin.kernels.dispatch import tables

pytest.importorskip("triton", reason="Triton is not installed beside the CPU vLLM; `make test-kernels` has it")

OPS: list[str] = []
SMALL = Sizes(
    **{"hidden": 128, "heads": 4, "head_dim": 64, "rope_dim": 16, "q_rank": 64, "o_groups": 2, "o_rank": 64},
    **{"window": 16, "topk": 16, "context": 256, "index_heads": 4, "index_dim": 32, "candidate_blocks": 8},
    **{"experts": 8, "top_k": 2, "expert_width": 64, "vocab": 160, "page": 16},
)


@pytest.fixture(autouse=True)
def _interpreted(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("kernels") != "triton_nvidia":
        pytest.skip("needs --kernels triton_nvidia")


@pytest.mark.parametrize("tokens", [1, 5])
def test_every_case_is_right_and_counts_its_work(tokens: int, device: str) -> None:
    seen = set()
    for case in cases(SMALL, tokens, device):
        assert case.num_bytes > 0, case.name
        assert error_of(case, "triton_nvidia") <= MAX_ERROR, f"{case.op} {case.name}"
        seen.add(case.op)
    assert {"linear_fp8", "moe_experts", "sparse_attention", "index_topk", "stream_coefficients"} <= seen


def test_a_wrong_result_is_seen(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, x = tables()["rms_norm"], torch.randn(3, 64, device=device)
    case = Case("rms_norm", "", (x, torch.ones(64, device=device), 1e-20), 1)
    right = table.load("triton_nvidia")
    monkeypatch.setitem(table._loaded, "triton_nvidia", lambda *args: right(*args) * 1.02)
    assert error_of(case, "triton_nvidia") > MAX_ERROR
    monkeypatch.setitem(table._loaded, "triton_nvidia", lambda *args: right(*args) * float("nan"))
    assert not error_of(case, "triton_nvidia") <= MAX_ERROR
