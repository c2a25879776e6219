"""Manifold-constrained hyper-connections: what happens to the residual streams between two sub-layers.

All three ops keep the streams in the model dtype and compute in fp32. m is the number of streams (`hc_mult`, V4.1: 4).
"""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch

MIX_STREAMS = Dispatch(__name__, "mix_streams", cpu="reference", nvidia="triton_nvidia")
STREAM_COEFFICIENTS = Dispatch(__name__, "stream_coefficients", cpu="reference", nvidia="triton_nvidia")
MIX_COLLAPSE_NORM = Dispatch(__name__, "mix_collapse_norm", cpu="reference", nvidia="triton_nvidia")
COLLAPSE_STREAMS = Dispatch(__name__, "collapse_streams", cpu="reference", nvidia="triton_nvidia")


def mix_streams(streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Return ``out[j] = post[j] * y + sum_i comb[i, j] * streams[i]``: i the source stream, j the destination.

    Args:
        streams: [num_tokens, m, hidden_size], bf16 or fp32.
        y: [num_tokens, hidden_size], the sub-layer's output; rounded to the dtype of `streams` first.
        post: [num_tokens, m], fp32, of `stream_coefficients` before that sub-layer.
        comb: [num_tokens, m, m], fp32, likewise.

    Returns:
        [num_tokens, m, hidden_size], dtype of `streams`, rounded once. A row does not depend on the other rows.

    Raises:
        ValueError: shapes that do not fit, or coefficients that are not fp32.

    Source: model specification, section 2.2, step 1.
    """
    _check_mix("mix_streams", streams, y, post, comb)
    return MIX_STREAMS(streams, y, post, comb)


def mix_collapse_norm(
    streams: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre_mix: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    round_to_fp8: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mix_streams`, then the next sub-layer's input: `rms_norm` of `collapse_streams` of the mixed streams.

    Args:
        streams, y, post, comb: as for `mix_streams`.
        pre_mix: as for `collapse_streams`.
        weight, eps: [hidden_size], as for `rms_norm`.
        round_to_fp8: the input is wanted rounded by `round_fp8` besides; hidden_size is a multiple of 32.

    Returns:
        The mixed streams, the input [num_tokens, hidden_size], and the input rounded to FP8, or else as it is; in the
        dtype of `streams`, rounded where the three ops round. A row does not depend on the other rows.

    Raises:
        ValueError: shapes that do not fit, coefficients that are not fp32, or a width that cannot be rounded.

    Source: model specification, section 2.2, steps 1, 4 and 5.
    """
    _check_mix("mix_collapse_norm", streams, y, post, comb)
    _check_pre_mix("mix_collapse_norm", streams, pre_mix)
    if weight.shape != streams.shape[2:]:
        raise ValueError(f"mix_collapse_norm: weight must be [{streams.shape[2]}], got {tuple(weight.shape)}")
    if round_to_fp8 and streams.shape[2] % 32:
        raise ValueError(f"mix_collapse_norm: to be rounded, rows must be multiples of 32, got {streams.shape[2]}")
    return MIX_COLLAPSE_NORM(streams, y, post, comb, pre_mix, weight, eps, round_to_fp8)


def stream_coefficients(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    num_iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mixing coefficients of a sub-layer, from the streams before it.

    With v the streams flattened stream-major, ``z = (fn @ v) * rsqrt(mean(v ** 2) + norm_eps)`` splits into m, m and
    m*m logits a, b, c, each scaled and shifted. ``pre = sigmoid(a) + hc_eps``, ``post = 2 * sigmoid(b)``, and ``comb``
    is c made doubly stochastic: softmax over the last dim, plus `hc_eps`; then `num_iters` column and ``num_iters - 1``
    row normalisations in turn, columns first, each dividing by the sum plus `hc_eps`.

    Args:
        streams: [num_tokens, m, hidden_size], bf16 or fp32.
        fn: [2m + m*m, m * hidden_size], fp32.
        scale: [3], fp32: of a, b and c.
        base: [2m + m*m], fp32.
        norm_eps: `rms_norm_eps` of the checkpoint's config.
        hc_eps: `hc_eps` of the checkpoint's config.
        num_iters: `hc_sinkhorn_iters` of the checkpoint's config, >= 1.

    Returns:
        pre [num_tokens, m], post [num_tokens, m] and comb [num_tokens, m, m] (row = source), fp32. `pre` is for the
        *next* sub-layer's `collapse_streams`. A row does not depend on the other rows.

    Raises:
        ValueError: shapes that do not fit, parameters that are not fp32, or `num_iters` below 1.

    Source: model specification, section 2.2, step 3.
    """
    _, num_streams, hidden_size = _stream_shape("stream_coefficients", streams)
    num_logits = num_streams * (2 + num_streams)
    if fn.shape != (num_logits, num_streams * hidden_size) or base.shape != (num_logits,) or scale.shape != (3,):
        want = f"[{num_logits}, {num_streams * hidden_size}], [3] and [{num_logits}]"
        got = f"{tuple(fn.shape)}, {tuple(scale.shape)} and {tuple(base.shape)}"
        raise ValueError(f"stream_coefficients: fn, scale and base must be {want}, got {got}")
    if fn.dtype != torch.float32 or scale.dtype != torch.float32 or base.dtype != torch.float32:
        got = f"{fn.dtype}, {scale.dtype} and {base.dtype}"
        raise ValueError(f"stream_coefficients: fn, scale and base must be fp32, got {got}")
    if num_iters < 1:
        raise ValueError(f"stream_coefficients: num_iters must be at least 1, got {num_iters}")
    return STREAM_COEFFICIENTS(streams, fn, scale, base, norm_eps, hc_eps, num_iters)


def collapse_streams(streams: torch.Tensor, pre_mix: torch.Tensor) -> torch.Tensor:
    """Return ``sum_i pre_mix[i] * streams[i]``: the sub-layer's input, before its norm.

    Args:
        streams: [num_tokens, m, hidden_size], bf16 or fp32.
        pre_mix: [num_tokens, m], fp32: `pre` of the *previous* sub-layer.

    Returns:
        [num_tokens, hidden_size], dtype of `streams`, rounded once. A row does not depend on the other rows.

    Raises:
        ValueError: shapes that do not fit, or `pre_mix` not fp32.

    Source: model specification, section 2.2, step 4.
    """
    _check_pre_mix("collapse_streams", streams, pre_mix)
    return COLLAPSE_STREAMS(streams, pre_mix)


def _check_mix(op: str, streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> None:
    num_tokens, num_streams, hidden_size = _stream_shape(op, streams)
    if y.shape != (num_tokens, hidden_size):
        raise ValueError(f"{op}: y must be {[num_tokens, hidden_size]}, got {tuple(y.shape)}")
    if post.shape != (num_tokens, num_streams) or comb.shape != (num_tokens, num_streams, num_streams):
        got = f"{tuple(post.shape)} and {tuple(comb.shape)}"
        raise ValueError(f"{op}: post must be [num_tokens, m] and comb [num_tokens, m, m], got {got}")
    if post.dtype != torch.float32 or comb.dtype != torch.float32:
        raise ValueError(f"{op}: post and comb must be fp32, got {post.dtype} and {comb.dtype}")


def _check_pre_mix(op: str, streams: torch.Tensor, pre_mix: torch.Tensor) -> None:
    num_tokens, num_streams, _ = _stream_shape(op, streams)
    if pre_mix.shape != (num_tokens, num_streams) or pre_mix.dtype != torch.float32:
        got = f"{tuple(pre_mix.shape)} {pre_mix.dtype}"
        raise ValueError(f"{op}: pre_mix must be {[num_tokens, num_streams]} fp32, got {got}")


def _stream_shape(op: str, streams: torch.Tensor) -> torch.Size:
    if streams.dim() != 3:
        raise ValueError(f"{op}: streams must be [num_tokens, m, hidden_size], got {tuple(streams.shape)}")
    return streams.shape
