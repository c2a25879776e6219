"""What becomes of a key between its projection and its cache: norm, rotation, rounding, store."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch
from deepinfer_plugin.kernels.records import Record

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


def norm_rope_store(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    record: Record,
    rounded_as: Record,
) -> None:
    """`rms_norm`, `rope`, then `store_kv_cache` of every row whose slot is not negative, each rounded as by itself.

    Args:
        x: [num_tokens, width], bf16 or fp32; width even.
        norm_weight: [width]; None = x is stored without a norm.
        eps: as for `rms_norm`.
        cos_sin: [num_tokens, R], fp32, as for `rope`.
        cache, slots, record: as for `store_kv_cache`.
        rounded_as: round rows as these records would, where `record` is PLAIN; PLAIN = do not.

    Raises:
        ValueError: shapes that do not fit, or a rounding beside a packed record, which rounds itself.

    Source: model specification, sections 2.4, 2.5 and 2.12.
    """
    width = record.width(cache.shape[2])
    if x.dim() != 2 or x.shape != (slots.shape[0], width) or width % 2 or cos_sin.shape[0] != slots.shape[0]:
        got = f"x {tuple(x.shape)}, slots {tuple(slots.shape)}, cos_sin {tuple(cos_sin.shape)}, rows of {width}"
        raise ValueError(f"norm_rope_store: x must be [n, even width] as slots, cos_sin and cache say, got {got}")
    if cos_sin.dim() != 2 or cos_sin.shape[1] % 2 or cos_sin.shape[1] > width or cos_sin.dtype != torch.float32:
        got = f"{tuple(cos_sin.shape)} {cos_sin.dtype}"
        raise ValueError(f"norm_rope_store: cos_sin must be fp32 [n, R], R even and at most {width}, got {got}")
    if norm_weight is not None and norm_weight.shape != (width,):
        raise ValueError(f"norm_rope_store: norm_weight must be [{width}], got {tuple(norm_weight.shape)}")
    if (record is Record.PLAIN) != (cache.dtype != torch.uint8):
        raise ValueError(f"norm_rope_store: a cache of {record.value} records cannot be {cache.dtype}")
    if rounded_as is not Record.PLAIN and record is not Record.PLAIN:
        raise ValueError(f"norm_rope_store: {record.value} records round by themselves, not as {rounded_as.value}")
    TABLE(x, norm_weight, eps, cos_sin, cache, slots, record, rounded_as)
