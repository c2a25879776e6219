"""Products of weights in the checkpoint's own bytes: against float64 on the decoded values, and row by row."""

import math

import pytest
import torch

from deepinfer_plugin.kernels.grouped_linear import grouped_linear
from deepinfer_plugin.kernels.linear_fp8 import linear_fp8
from deepinfer_plugin.kernels.moe_experts import moe_experts
from deepinfer_plugin.kernels.packed_weights import (
    Fp4Weight,
    Fp8Weight,
    fp4_in_order,
    fp4_interleaved,
    fp8_in_order,
    fp8_interleaved,
    scales_by_block,
    scales_in_order,
)
from deepinfer_plugin.kernels.quant_formats import encode_fp4, encode_fp8_blocks, round_fp8
from tests.kernels.row_subsets import assert_rows_are_independent

OPS = ["linear_fp8", "grouped_linear", "moe_experts"]
LIMIT = 10.0


def fp8_weight(n: int, k: int, device: str) -> Fp8Weight:
    """With scales far apart, so that a swapped block shows."""
    blocks = torch.randint(-6, 6, (-(-n // 32), k // 32)).repeat_interleave(32, 0)[:n].repeat_interleave(32, 1)
    codes, sf = encode_fp8_blocks(torch.randn(n, k) * torch.exp2(blocks.float()))
    return Fp8Weight(codes.view(torch.uint8).to(device), sf.view(torch.uint8).to(device))


def fp4_experts(count: int, n: int, k: int, device: str) -> Fp4Weight:
    groups = torch.randint(-4, 1, (count * n, k // 32)).repeat_interleave(32, 1)
    codes, sf = encode_fp4(torch.randn(count * n, k) * torch.exp2(groups.float()))
    return Fp4Weight(
        codes.view(torch.uint8).view(count, n, -1).to(device), sf.view(torch.uint8).view(count, n, -1).to(device)
    )


def assert_is_product(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """An fp32 sum of K exact products in any order, then one rounding to the dtype of `got`."""
    want = x.double() @ weight.double().mT
    bound = x.shape[-1] * 2**-23 * (x.double().abs() @ weight.double().abs().mT)
    bound += 2**-8 * want.abs() * (got.dtype == torch.bfloat16)
    assert ((got.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 17, 70])
@pytest.mark.parametrize("n, k", [(40, 32), (64, 96), (40, 224), (100, 1280), (130, 2080)])
def test_fp8_products_equal_float64(n: int, k: int, num_tokens: int, dtype: torch.dtype, device: str) -> None:
    x, weight = torch.randn(num_tokens, k, device=device).bfloat16(), fp8_weight(n, k, device)
    got = linear_fp8(x, weight, dtype)
    assert got.shape == (num_tokens, n) and got.dtype == dtype
    assert_is_product(got, x, weight.decoded())


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_fp8_groups_equal_float64(num_tokens: int, device: str) -> None:
    x, weight = round_fp8(torch.randn(num_tokens, 3, 64, device=device).bfloat16()), fp8_weight(3 * 96, 64, device)
    got = grouped_linear(x, weight, torch.float32)
    for group, rows in enumerate(weight.decoded().split(96)):
        assert_is_product(got[:, group], x[:, group], rows)
    rounded = grouped_linear(x, weight, torch.bfloat16, True)
    assert torch.equal(rounded, round_fp8(grouped_linear(x, weight, torch.bfloat16)))


def test_every_fp8_code_and_scale_is_exact(device: str) -> None:
    """One product a sum: each code that is a number, with every scale that a kernel takes."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8, device=device)
    for byte in (10, 90, 127, 134):
        weight = torch.zeros(len(codes), 32, dtype=torch.uint8, device=device)
        weight[:, 5] = codes
        packed = Fp8Weight(weight, torch.full((-(-len(codes) // 32), 1), byte, dtype=torch.uint8, device=device))
        x = torch.zeros(1, 32, device=device).bfloat16()
        x[0, 5] = 1
        assert torch.equal(linear_fp8(x, packed, torch.float32)[0], packed.decoded()[:, 5])


def test_fp8_rows_are_independent(device: str) -> None:
    weight = fp8_weight(70, 2080, device)
    x = torch.randn(100, 2080, device=device).bfloat16()
    assert_rows_are_independent(lambda x: linear_fp8(x, weight, torch.bfloat16), x)


def routes(num_tokens: int, top_k: int, experts: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.rand(num_tokens, experts, device=device).argsort(dim=1)[:, :top_k].sort(dim=1).values
    return ids, torch.rand(num_tokens, top_k, device=device)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 40])
@pytest.mark.parametrize("start, count", [(0, 8), (3, 4)])
def test_fp4_experts_equal_float64(num_tokens: int, start: int, count: int, device: str) -> None:
    x = round_fp8(torch.randn(num_tokens, 96, device=device).bfloat16())
    w13, w2 = fp4_experts(count, 2 * 160, 96, device), fp4_experts(count, 96, 160, device)
    ids, weights = routes(num_tokens, 3, 8, device)
    got = moe_experts(x, w13, w2, ids, weights, start, LIMIT, True)
    gate, up = torch.einsum("td,eid->tei", x.double(), w13.decoded().double()).chunk(2, dim=-1)
    share = torch.zeros(num_tokens, 8, dtype=torch.float64, device=device).scatter_(1, ids, weights.double())
    share = share[:, start : start + count, None]
    activation = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT) * share
    rounded = round_fp8(activation.float()).double()
    want = torch.einsum("tei,edi->td", rounded, w2.decoded().double())
    # An activation beside a rounding boundary may fall on its other side: one step of 1/8 of it, of a few at most.
    step = torch.einsum("tei,edi->ted", rounded.abs() / 8, w2.decoded().double().abs()).amax(1)
    close = (got.double() - want).abs() <= 1e-4 * want.abs() + 1e-4
    assert got.shape == x.shape and ((got.double() - want).abs() <= 1e-4 * want.abs() + 1e-4 + step / 8).all()
    assert close.double().mean() > 0.99 or not num_tokens


@pytest.mark.parametrize("byte", [2, 100, 128])
def test_every_fp4_code_and_scale_is_exact(byte: int, device: str) -> None:
    """All 256 bytes of two codes. Gate and up are clamped, so the activation is one FP8 number for all 32 channels."""
    x = torch.zeros(1, 256, device=device).bfloat16()
    x[0, 0] = 1
    first = torch.zeros(1, 64, 128, dtype=torch.uint8, device=device)
    first[0, :, 0] = 7  # gate = up = 6 * 2
    w13 = Fp4Weight(first, torch.full((1, 64, 8), 128, dtype=torch.uint8, device=device))
    second = torch.zeros(1, 256, 16, dtype=torch.uint8, device=device)
    second[0, :, 7] = torch.arange(256, device=device)
    w2 = Fp4Weight(second, torch.full((1, 256, 1), byte, dtype=torch.uint8, device=device))
    ids, weights = torch.zeros(1, 1, dtype=torch.int64, device=device), torch.ones(1, 1, device=device)
    got = moe_experts(x, w13, w2, ids, weights, 0, LIMIT, True)
    activation = round_fp8(torch.full((1, 32), LIMIT * LIMIT / (1 + math.exp(-LIMIT))))[0, 0].item()
    assert torch.equal(got[0], activation * w2.decoded()[0, :, 14:16].sum(1))


def test_fp4_rows_are_independent(device: str) -> None:
    w13, w2 = fp4_experts(8, 2 * 96, 160, device), fp4_experts(8, 160, 96, device)
    x, (ids, weights) = torch.randn(100, 160, device=device).bfloat16(), routes(100, 2, 8, device)
    assert_rows_are_independent(
        lambda x, ids, weights: moe_experts(x, w13, w2, ids, weights, 0, LIMIT, True), x, ids, weights
    )


def test_refuses(device: str) -> None:
    codes, sf = torch.zeros(64, 64, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)
    for args in ((codes[0], sf), (codes.int(), sf), (codes, sf[:1]), (codes[:, :33], sf), (codes, sf.int())):
        with pytest.raises(ValueError, match="Fp8Weight: "):
            Fp8Weight(*args)
    ids, weights = routes(1, 1, 8, device)
    w13, w2 = fp4_experts(8, 128, 64, device), fp4_experts(8, 64, 64, device)
    with pytest.raises(ValueError, match="moe_experts: w13 and w2 must be stored alike"):
        moe_experts(torch.zeros(1, 64, device=device), w13, w2.decoded(), ids, weights, 0, LIMIT, True)
    codes, sf = torch.zeros(2, 8, 16, dtype=torch.uint8), torch.zeros(2, 8, 1, dtype=torch.uint8)
    for args in ((codes[0], sf), (codes, sf[:, :, 0]), (codes.int(), sf), (codes, sf.int())):
        with pytest.raises(ValueError, match="Fp4Weight: "):
            Fp4Weight(*args)
    with pytest.raises(ValueError, match=r"at most 2\*\*1, got 2\*\*2"):
        Fp4Weight(codes, sf + 129).check_scales()
    with pytest.raises(ValueError, match=r"at most 2\*\*7, got 2\*\*8"):
        Fp8Weight(torch.zeros(32, 32, dtype=torch.uint8), torch.full((1, 1), 135, dtype=torch.uint8)).check_scales()


@pytest.mark.parametrize(
    "there, back, codes_in_byte", [(fp8_interleaved, fp8_in_order, 1), (fp4_interleaved, fp4_in_order, 2)]
)
@pytest.mark.parametrize("width", [32, 128, 96, 320])
def test_interleaving_keeps_every_bit_inside_its_block(
    there, back, codes_in_byte: int, width: int, device: str
) -> None:
    codes = torch.randint(256, (5, 3, width // codes_in_byte), dtype=torch.uint8, device=device)
    mixed = there(codes)
    assert torch.equal(back(mixed), codes) and not torch.equal(mixed, codes)
    num_bytes, places = codes.shape[2], set()
    whole = width // 128 * 128 // codes_in_byte
    ones = torch.zeros(8 * num_bytes, num_bytes, dtype=torch.uint8, device=device)
    for bit in range(8 * num_bytes):
        ones[bit, bit // 8] = 1 << bit % 8
    for bit, row in enumerate(there(ones)):
        (byte,) = row.nonzero().flatten().tolist()
        size = (128 if bit // 8 < whole else 32) // codes_in_byte
        assert (byte - whole) // size == (bit // 8 - whole) // size
        places.add((byte, int(row[byte])))
    assert len(places) == 8 * num_bytes


@pytest.mark.parametrize("k", [160, 256])
@pytest.mark.parametrize("fp4", [False, True])
def test_interleaving_in_place_is_the_same(fp4: bool, k: int, device: str) -> None:
    weight = fp4_experts(2, 40, k, device) if fp4 else fp8_weight(100, k, device)
    values, want = weight.decoded(), weight.interleave()
    got = weight.interleave(in_place=True)
    assert torch.equal(got.codes, want.codes) and got.codes.data_ptr() == weight.codes.data_ptr()
    assert torch.equal(got.sf, want.sf) and got.sf.data_ptr() == weight.sf.data_ptr()
    assert got.interleave() is got and torch.equal(got.decoded(), values)


def test_scales_of_neighbouring_rows_are_neighbours() -> None:
    sf = torch.arange(2 * 40 * 8).view(2, 40, 8)
    by_block = scales_by_block(sf)
    assert torch.equal(by_block.view(2, 2, 40, 4)[1, 1, 7], sf[1, 7, 4:])
    assert torch.equal(scales_in_order(by_block), sf)
    assert scales_by_block(sf[..., :5]) is not by_block and torch.equal(scales_by_block(sf[..., :5]), sf[..., :5])
