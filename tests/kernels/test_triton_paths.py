"""Two ways through a Triton kernel, chosen by the number of tokens, give the same bits."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed beside the CPU vLLM; `make test-kernels` has it")

from deepinfer_plugin.kernels import triton_matmul
from deepinfer_plugin.kernels.moe_experts import moe_experts, triton_tiles
from deepinfer_plugin.kernels.records import Record
from deepinfer_plugin.kernels.samples import SMALL, Inputs
from deepinfer_plugin.kernels.sparse_attention import triton_nvidia as attention
from tests.kernels.test_packed_weights import LIMIT, fp4_experts, fp8_weight, routes

OPS: list[str] = []
TRITON_ONLY = True


@pytest.fixture
def both_ways(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Compare the result under a module's own bound with the result where every number of tokens is above it."""

    def compare(module: object, bound: str, compute: Callable[[], torch.Tensor]) -> None:
        few = compute()
        monkeypatch.setattr(module, bound, 0)
        assert torch.equal(compute(), few)

    return compare


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tokens", [1, 20])
def test_pieces_of_a_product_add_up_the_same(tokens: int, packed: bool, device: str, both_ways) -> None:
    """By programs of their own, the last of which adds, and one after the other."""
    weight = fp8_weight(70, 2080, device) if packed else torch.randn(70, 2080, device=device).bfloat16()
    x = torch.randn(tokens, 1, 2080, device=device).bfloat16()
    both_ways(triton_matmul, "MAX_SPLIT_TOKENS", lambda: triton_matmul.matmul(x, weight, torch.float32))


def test_tiles_of_keys_merge_the_same(device: str, both_ways) -> None:
    make = Inputs(SMALL, 5, device)
    window, selected = (make.pages(SMALL.context, SMALL.head_dim, record) for record in (Record.FP8, Record.FP4_KV))
    # fp32, so that no rounding of the result hides another order
    query, sink = (
        make.normal(*shape, dtype=torch.float32) for shape in ((5, SMALL.heads, SMALL.head_dim), (SMALL.heads,))
    )
    args = make.integers(40, SMALL.context, 5), 40, selected, make.entries(70, SMALL.context), sink, 0.1
    both_ways(attention, "MAX_SPLIT_TOKENS", lambda: attention.sparse_attention(query, window, *args))


@pytest.mark.parametrize("start, count", [(0, 8), (3, 4)])
def test_routing_in_one_launch_and_by_sorting_gives_the_same(start: int, count: int, device: str, both_ways) -> None:
    w13, w2 = fp4_experts(count, 2 * 96, 160, device), fp4_experts(count, 160, 96, device)
    x, (ids, weights) = torch.randn(40, 160, device=device).bfloat16(), routes(40, 3, 8, device)
    both_ways(triton_tiles, "MAX_PAIRS", lambda: moe_experts(x, w13, w2, ids, weights, start, LIMIT, True))
