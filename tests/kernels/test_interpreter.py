"""The repaired interpreter rounds as a GPU does. Without the repair each of these fails."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed beside the CPU vLLM; `make test-kernels` has it")

import triton.language as tl  # noqa: E402

OPS: list[str] = []  # of the tests, not of the product

if not triton.knobs.runtime.interpret:
    pytest.skip("kernels run as they are, not interpreted", allow_module_level=True)


@triton.jit
def _cast(x, out, n, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    values = tl.load(x + place, place < n, 0.0)
    tl.store(out + place, values.to(out.dtype.element_ty), place < n)


@triton.jit
def _multiply_add(x, y, out, n, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    a, b = tl.load(x + place, place < n, 0.0), tl.load(y + place, place < n, 0.0)
    tl.store(out + place, tl.where(a > b, a * b, a + b), place < n)


@triton.jit
def _product(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    product = tl.dot(tl.load(a + m * K + k[None, :]), tl.load(b + k[:, None] * N + n))
    tl.store(out + m * N + n, product)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_casts_round_to_nearest_even(dtype: torch.dtype) -> None:
    x = torch.cat((torch.tensor([1.97, -1.97, 0.0, -0.0, 2**-9, 440.0]), torch.randn(1000) * 50))
    out = torch.empty(len(x), dtype=dtype)
    _cast[(1,)](x, out, len(x), 1024)
    want = x.to(dtype)
    assert torch.equal(out.float(), want.float()) and (dtype == torch.bfloat16 or out[0].float() == 2.0)


def test_bfloat16_arithmetic_is_torchs() -> None:
    x, y = torch.randn(500).bfloat16(), torch.randn(500).bfloat16()
    out = torch.empty_like(x)
    _multiply_add[(1,)](x, y, out, 500, 512)
    assert torch.equal(out, torch.where(x > y, x * y, x + y))


def test_bfloat16_products_are_exact_and_rows_do_not_see_each_other() -> None:
    a, b, out = torch.randn(64, 128).bfloat16(), torch.randn(128, 16).bfloat16(), torch.empty(64, 16)
    _product[(1,)](a, b, out, 64, 16, 128)
    bound = 128 * 2**-24 * (a.double().abs() @ b.double().abs())
    assert ((out.double() - a.double() @ b.double()).abs() <= bound).all()
    few = torch.empty(16, 16)
    _product[(1,)](a[17:33].contiguous(), b, few, 16, 16, 128)
    assert torch.equal(few, out[17:33])
