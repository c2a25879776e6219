"""Every Triton kernel compiles for every supported GPU, with the instructions that make it fast and without spilling.

Nothing runs: the ops are called on CPU tensors of V4.1's shapes, their launches are recorded and compiled.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed beside the CPU vLLM; `make test-kernels` has it")

import triton

from deepinfer_plugin.kernels import target
from deepinfer_plugin.kernels.packed_weights import Fp4Weight, Fp8Weight
from deepinfer_plugin.kernels.paged import Pages
from deepinfer_plugin.kernels.records import Record
from tests.kernels.ahead_of_time import launches_of, opcodes, stack_bytes

if triton.knobs.runtime.interpret:
    pytest.skip("kernels are being interpreted, not compiled", allow_module_level=True)

CAPABILITIES = [80, 89, 90, 100, 120]
TENSOR_CORE = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
PRODUCTS = {"_matmul", "_packed_matmul", "_expert_product", "_wide_matmul", "_wide_expert_product"}
BF16 = {"dtype": torch.bfloat16}
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
TOKENS = [1, 64, 512, 4096]
ROUNDINGS = ["round_fp8", "round_fp4_index", "round_fp4_kv"]
# On SM90 the addresses of operands in shared memory do not fit the registers beside 64 heads of 512 sums.
ATTENTION_STACK = {
    (90, 64, Record.FP8): 408,
    (90, 64, Record.FP4_KV): 408,
    (80, 64, Record.FP4_KV): 48,
    (89, 64, Record.FP4_KV): 16,
}
PRODUCT_STACK = {(80, "linear_fp8", tokens): 8 for tokens in (512, 4096)}  # one register of two sums of 64 by 64
SELECTION_STACK = 16  # a row's bounds, read once


def fp8_weight(n: int, k: int) -> Fp8Weight:
    return Fp8Weight(torch.zeros(n, k, dtype=torch.uint8), torch.zeros(n // 32, k // 32, dtype=torch.uint8))


def fp4_experts(count: int, n: int, k: int) -> Fp4Weight:
    codes, sf = (torch.zeros(count, n, k // channels, dtype=torch.uint8) for channels in (2, 32))
    return Fp4Weight(codes, sf)


def elementwise(tokens: int) -> dict[str, Callable[[], Any]]:
    from deepinfer_plugin.kernels.accept_drafts.triton_nvidia import accept_drafts
    from deepinfer_plugin.kernels.cache_slots.triton_nvidia import cache_slots
    from deepinfer_plugin.kernels.compress_kv.triton_nvidia import compress_kv
    from deepinfer_plugin.kernels.engram_gate.triton_nvidia import engram_gate
    from deepinfer_plugin.kernels.engram_lookup.triton_nvidia import engram_hash, engram_lookup
    from deepinfer_plugin.kernels.fake_quant import triton_nvidia as fake_quant
    from deepinfer_plugin.kernels.hyper_connection.triton_nvidia import (
        collapse_streams,
        mix_collapse_norm,
        mix_streams,
        stream_coefficients,
    )
    from deepinfer_plugin.kernels.moe_gate.triton_nvidia import moe_gate
    from deepinfer_plugin.kernels.norm_rope_store.triton_nvidia import norm_rope_store
    from deepinfer_plugin.kernels.rms_norm.triton_nvidia import rms_norm
    from deepinfer_plugin.kernels.rope.triton_nvidia import rope
    from deepinfer_plugin.kernels.sample_tokens.triton_nvidia import sample_tokens
    from deepinfer_plugin.kernels.store_kv_cache.triton_nvidia import store_kv_cache
    from deepinfer_plugin.kernels.swiglu.triton_nvidia import swiglu
    from deepinfer_plugin.kernels.verify_budget.triton_nvidia import verify_budget

    streams, hidden = torch.zeros(tokens, 4, 5120, **BF16), torch.zeros(tokens, 5120, **BF16)
    pre, comb = torch.zeros(tokens, 4), torch.zeros(tokens, 4, 4)
    value, ids = torch.zeros(tokens, 512), torch.zeros(tokens, 3, dtype=torch.int64)
    bias, primes = torch.zeros(384), torch.ones(2, 12, dtype=torch.int64)
    table, rows = torch.zeros(100, 256, dtype=torch.float8_e4m3fn), torch.zeros(tokens, 24, dtype=torch.int64)
    engram_norm, sf = torch.zeros(4, 5120, **BF16), torch.zeros(100, 8, dtype=torch.uint8)
    slots = torch.zeros(tokens, dtype=torch.int64)

    def store(record: Record) -> None:
        dtype = torch.bfloat16 if record is Record.PLAIN else torch.uint8
        cache = torch.zeros(4, 64, record.num_bytes(512), dtype=dtype)
        store_kv_cache(value.bfloat16(), cache, slots, record)

    def store_key(record: Record) -> None:
        cache = torch.zeros(4, 64, record.num_bytes(512), dtype=torch.uint8)
        args = torch.zeros(tokens, 64), cache, slots, record, Record.PLAIN
        norm_rope_store(value.bfloat16(), value[0].bfloat16(), 1e-20, *args)

    return {
        "rms_norm": lambda: rms_norm(hidden, hidden[0], 1e-20, True),
        "rope": lambda: rope(torch.zeros(tokens, 64, 512, **BF16), torch.zeros(tokens, 64), True, True),
        "swiglu": lambda: swiglu(torch.zeros(tokens, 4608), 10.0, None, True),
        "sample_tokens": lambda: sample_tokens(
            torch.zeros(tokens, 129280), value[:, 0], slots, slots, slots.int(), value[:, 0], value[:, 0], 0
        ),
        "accept_drafts": lambda: accept_drafts(slots, slots, slots.int(), 6),
        "verify_budget": lambda: verify_budget(torch.zeros(tokens, 5), 7),
        "mix_streams": lambda: mix_streams(streams, hidden, pre, comb),
        "mix_collapse_norm": lambda: mix_collapse_norm(streams, hidden, pre, comb, pre, hidden[0], 1e-20, True),
        "collapse_streams": lambda: collapse_streams(streams, pre),
        "stream_coefficients": lambda: stream_coefficients(
            streams, torch.zeros(24, 20480), torch.zeros(3), torch.zeros(24), 1e-20, 1e-6, 20
        ),
        "compress_kv": lambda: compress_kv(value, value, torch.zeros(tokens, 1024), value[0], 1e-20, torch.bfloat16),
        **{f"store_{record.value}": (lambda record=record: store(record)) for record in Record},
        **{
            f"norm_rope_store_{record.value}": (lambda record=record: store_key(record))
            for record in Record
            if record is not Record.PLAIN
        },
        "cache_slots": lambda: cache_slots(Pages(value.view(1, -1, 512), slots[None].int(), slots), slots),
        **{name: (lambda name=name: getattr(fake_quant, name)(hidden)) for name in ROUNDINGS},
        "moe_gate": lambda: moe_gate(
            torch.zeros(tokens, 384), bias, bias, torch.zeros(tokens).bool(), 6, 1.5, value[:, 0].bool()
        ),
        "engram_hash": lambda: engram_hash(ids, ids[0], primes, torch.zeros(24, dtype=torch.int64)),
        "engram_lookup": lambda: engram_lookup(rows, table, sf, 0),
        "engram_gate": lambda: engram_gate(
            streams, torch.zeros(tokens, 5, 5120, **BF16), engram_norm, engram_norm, 1e-20, None
        ),
    }


def products(tokens: int) -> dict[str, Callable[[], Any]]:
    from deepinfer_plugin.kernels.moe_experts.triton_nvidia import moe_experts
    from deepinfer_plugin.kernels.triton_matmul import matmul

    x = torch.zeros(tokens, 1, 5120, **BF16)
    ids, weights = torch.arange(6).expand(tokens, 6).contiguous(), torch.zeros(tokens, 6)
    w13, w2 = fp4_experts(8, 4608, 5120), fp4_experts(8, 5120, 2304)
    return {
        "moe_experts": lambda: moe_experts(x[:, 0], w13, w2, ids, weights, 0, 10.0, True),
        "linear": lambda: matmul(x, torch.zeros(384, 5120, **BF16), torch.float32),
        "linear_fp8": lambda: matmul(x, fp8_weight(1792, 5120), torch.bfloat16),
        "grouped_linear": lambda: matmul(
            torch.zeros(tokens, 8, 4096, **BF16), fp8_weight(8192, 4096), torch.bfloat16, True
        ),
    }


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("op", elementwise(1))
def test_elementwise_kernels_compile_without_spilling(op: str, capability: int, tmp_path: Path) -> None:
    for launch in launches_of(elementwise(64)[op]):
        compiled = launch.compile(capability)
        assert stack_bytes(compiled, tmp_path) == 0, launch.name


def attention(heads: int, shared: Record, tokens: int = 64) -> Callable[[], Any]:
    from deepinfer_plugin.kernels.sparse_attention.triton_nvidia import sparse_attention

    window, selected = (
        Pages(
            torch.zeros(4, 64, record.num_bytes(512), dtype=torch.uint8),
            torch.zeros(2, 32, dtype=torch.int32),
            torch.zeros(tokens, dtype=torch.int64),
            record,
        )
        for record in (Record.FP8, shared)
    )
    query, indices = torch.zeros(tokens, heads, 512, **BF16), torch.zeros(tokens, 512, dtype=torch.int32)
    positions = torch.zeros(tokens, dtype=torch.int64)
    return lambda: sparse_attention(query, window, positions, 128, selected, indices, torch.zeros(heads), 0.04)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("restricted", [False, True])
def test_the_indexer_uses_tensor_cores(restricted: bool, capability: int, tmp_path: Path) -> None:
    from deepinfer_plugin.kernels.index_topk.triton_nvidia import index_topk, index_topk_with_candidates

    record = Record.FP4_INDEX
    cache, ids = torch.zeros(4, 64, record.num_bytes(128), dtype=torch.uint8), torch.zeros(8, dtype=torch.int64)
    pages = Pages(cache, torch.zeros(2, 512, dtype=torch.int32), ids, record)
    row = torch.zeros(8, 64, 128, **BF16), torch.zeros(8, 64, **BF16), pages, ids
    blocks = torch.zeros(8, 2048, dtype=torch.int32)
    launches = launches_of(
        lambda: index_topk(*row, 512, blocks, 8) if restricted else index_topk_with_candidates(*row, 512, 2048, 8)
    )
    for launch in launches:
        compiled = launch.compile(capability)
        assert stack_bytes(compiled, tmp_path) <= SELECTION_STACK * (launch.name == "_select"), launch.name
        if launch.name == "_score":
            found = opcodes(compiled, tmp_path)
            assert any(name.startswith(TENSOR_CORE[capability]) for name in found), found
    assert {launch.name for launch in launches} >= {"_score", "_select"}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("shared", [Record.FP8, Record.FP4_KV], ids=lambda r: r.value)
@pytest.mark.parametrize("heads", [8, 64])
def test_attention_uses_tensor_cores(
    heads: int, shared: Record, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "compute_capability", lambda: capability)
    (launch,) = launches_of(attention(heads, shared))
    compiled = launch.compile(capability)
    found = opcodes(compiled, tmp_path)
    core = "HGMMA" if capability == 90 and heads == 64 else "HMMA"
    assert any(name.startswith(core) for name in found), found
    assert stack_bytes(compiled, tmp_path) <= ATTENTION_STACK.get((capability, heads, shared), 0)
    assert compiled.metadata.shared <= SHARED_BYTES[capability]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("shared", [Record.FP8, Record.FP4_KV], ids=lambda r: r.value)
def test_attention_tile_by_tile_does_not_spill(
    shared: Record, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "compute_capability", lambda: capability)
    launches = launches_of(attention(64, shared, tokens=8))
    assert [launch.name for launch in launches] == ["_sparse_attention", "_merge"]
    for launch in launches:
        compiled = launch.compile(capability)
        assert stack_bytes(compiled, tmp_path) == 0, launch.name
        assert compiled.metadata.shared <= SHARED_BYTES[capability]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("heads", [8, 64])
def test_attention_over_plain_fp32_caches_fits(
    heads: int, tokens: int, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of records are decoded to bf16; these are twice as large."""
    from deepinfer_plugin.kernels.sparse_attention.triton_nvidia import sparse_attention

    monkeypatch.setattr(target, "compute_capability", lambda: capability)
    cache, ids = torch.zeros(4, 64, 512), torch.zeros(tokens, dtype=torch.int64)
    pages = Pages(cache, torch.zeros(2, 32, dtype=torch.int32), ids)
    query, indices = torch.zeros(tokens, heads, 512), torch.zeros(tokens, 64, dtype=torch.int32)
    for launch in launches_of(
        lambda: sparse_attention(query, pages, ids, 128, pages, indices, torch.zeros(heads), 0.04)
    ):
        if heads == 8 or SHARED_BYTES[capability] > 200 << 10:  # elsewhere 64 heads in fp32 do not fit, and say so
            assert launch.compile(capability).metadata.shared <= SHARED_BYTES[capability], launch.name


@pytest.mark.parametrize("pairs", [1, 2, 6, 1000])
def test_routing_compiles_for_any_number_of_pairs(pairs: int) -> None:
    """Triton makes a constant of a 1, which has none of a number's methods."""
    from deepinfer_plugin.kernels.moe_experts.triton_tiles import pairs_in_tiles

    for launch in launches_of(lambda: pairs_in_tiles(torch.zeros(pairs, dtype=torch.int64), 0, 1, 16)):
        launch.compile(90)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("op", products(1))
def test_products_use_tensor_cores(
    op: str, tokens: int, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "compute_capability", lambda: capability)
    launches = launches_of(products(tokens)[op])
    for launch in launches:
        compiled = launch.compile(capability)
        assert stack_bytes(compiled, tmp_path) <= PRODUCT_STACK.get((capability, op, tokens), 0), launch.name
        if launch.name in PRODUCTS:
            found = opcodes(compiled, tmp_path)
            # two warps are too few for the instructions of a warp group, and eight tokens for Triton to take them
            few = dict(launch.options)["num_warps"] == 2 or dict(launch.constants)["TOKENS"] == 8
            core = "HMMA" if few else TENSOR_CORE[capability]
            assert any(name.startswith(core) for name in found), found
            assert compiled.metadata.shared <= SHARED_BYTES[capability]
    assert any(launch.name in PRODUCTS for launch in launches)
