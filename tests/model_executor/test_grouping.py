"""Groups of caches: nearly no room is lost at V4.1's sizes, and every cache is in one group."""

import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

from deepinfer_plugin.kernels.records import Record
from deepinfer_plugin.model_executor.caches.grouping import group_caches

BLOCK = 64


def specs() -> dict[str, MLAAttentionSpec | SlidingWindowMLASpec]:
    """V4.1-Flash's caches of packed records: 40 windows, 4 compressed sources, 3 of them with an open group."""
    common = {"num_kv_heads": 1, "max_tp_shards": 1}
    codes, fp32 = common | {"dtype": torch.uint8}, common | {"dtype": torch.float32, "block_size": BLOCK // 4}
    tokens = {"block_size": BLOCK, "head_size": 1, "dtype": torch.int32, "sliding_window": 4}
    window = {"block_size": BLOCK, "head_size": Record.FP8.num_bytes(512), "sliding_window": 128}
    found = {"tokens": SlidingWindowMLASpec(**tokens, **common)}
    found |= {f"{n}.local": SlidingWindowMLASpec(**window, **codes) for n in range(40)}
    for n in (2, 8, 14, 20):
        for name, record, width in (("entries", Record.FP4_KV, 512), ("keys", Record.FP4_INDEX, 128)):
            size, ratio = record.num_bytes(width), 1 if n == 20 else 2
            found[f"{n}.{name}"] = MLAAttentionSpec(block_size=BLOCK, head_size=size, tokens_per_state=ratio, **codes)
        if n != 20:
            found[f"{n}.carry"] = SlidingWindowMLASpec(head_size=1024, sliding_window=2, **fp32)
    return found


def test_every_cache_is_in_one_group() -> None:
    groups = group_caches(specs())
    assert sorted(name for group in groups for name in group.layer_names) == sorted(specs())


def test_a_block_is_little_wider_than_what_grows_with_a_request() -> None:
    """357 bytes of records for every entry, three entries for two tokens and one for each."""
    sizes = []
    for group in group_caches(specs()):
        each = group.kv_cache_spec.page_size_bytes
        sizes.append(each if "2.entries" in group.layer_names else each * len(group.layer_names))
    growing = BLOCK * 5 // 2 * (288 + 68)
    assert growing in sizes and max(sizes) <= 1.25 * growing


def test_windows_fill_their_blocks() -> None:
    width = max(group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in group_caches(specs())[1:])
    local = [group for group in group_caches(specs()) if "0.local" in group.layer_names]
    assert all(group.kv_cache_spec.page_size_bytes * len(group.layer_names) >= 0.9 * width for group in local)


def test_sliding_caches_keep_their_own_specs() -> None:
    for group in group_caches(specs()):
        if "2.entries" not in group.layer_names:
            assert all(specs()[name] == group.kv_cache_spec for name in group.layer_names)
