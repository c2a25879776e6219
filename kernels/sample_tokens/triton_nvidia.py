"""`sample_tokens` in Triton: every part of every row races, and the winners of the parts race once more."""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.sample_tokens.triton_limits import (
    PART,
    find_bounds,
    highest_score,
    ordered,
    part_maxima,
    scores,
)
from deepinfer_plugin.kernels.triton_launch import chained, follow


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    stream: int,
) -> torch.Tensor:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    temperature, seeds, positions = (vector.contiguous() for vector in (temperature, seeds, positions))
    top_k, top_p, min_p = (None if limit is None else limit.contiguous() for limit in (top_k, top_p, min_p))
    (num_rows, vocab_size), device = logits.shape, logits.device
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return out
    maxima = None if top_p is None and min_p is None else part_maxima(logits, temperature)
    bounds = find_bounds(logits, temperature, top_k, top_p, maxima)
    parts = triton.cdiv(vocab_size, PART.value)
    pieces = triton.next_power_of_2(parts)
    winners = torch.empty(num_rows, parts, dtype=torch.int64, device=device)
    _race[(num_rows, parts)](
        *(logits, temperature, seeds, positions, bounds, maxima, min_p, winners),
        *(logits.stride(0), vocab_size, stream),
        PARTS=pieces,
        num_warps=8,
        **chained(),
    )
    _last_race[(num_rows,)](winners, out, parts, PARTS=pieces, num_warps=1, **chained())
    return out


@triton.jit
def _race(
    logits,
    temperature,
    seeds,
    positions,
    bounds,
    maxima,
    min_p,
    winners,
    logits_row,
    vocab_size,
    stream,
    PARTS: tl.constexpr,
):
    """The winner of one part of a row: its score, in order, above its id, the smallest of which is the highest."""
    follow()
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = token < vocab_size
    heat = tl.load(temperature + row)
    if heat > 0:
        score = scores(logits + row * logits_row, token, inside, heat)
        stays = inside
        if bounds is not None:
            order, lowest = ordered(score), tl.load(bounds + 2 * row)
            stays &= (order > lowest) | ((order == lowest) & (token <= tl.load(bounds + 2 * row + 1)))
        if min_p is not None:
            highest = highest_score(maxima, row, tl.num_programs(1), PARTS)
            stays &= tl.exp(score - highest) >= tl.load(min_p + row)
        word = _word(tl.load(seeds + row), stream, tl.load(positions + row), token)
        score = tl.where(stays, score - _log_race_time(word), -float("inf"))
    else:
        score = tl.load(logits + row * logits_row + token, inside, -float("inf"))
    place = (ordered(score).to(tl.int64) << 32) | (0xFFFFFFFF - token.to(tl.int64))
    place = tl.where(inside, place, -0x8000000000000000)
    tl.store(winners + row * tl.num_programs(1) + tl.program_id(1), tl.max(place, 0))


@triton.jit
def _word(seed, stream, position, token):
    """The 32 bits of noise of each token."""
    counter = (token >> 2).to(tl.uint32)
    zero = tl.zeros(token.shape, tl.uint32)
    place = zero + position.to(tl.uint32)
    a, b, c, d = tl.philox(seed, counter, place, zero + stream.to(tl.uint32), zero)
    lane = token & 3
    return tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))


@triton.jit
def _log_race_time(word):
    x = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2**-32
    u = 1 - x
    log1p = tl.where(u == 1, x, -tl.log(u) * (x / (1 - u)))  # the rounding of u cancels
    return tl.log(log1p)


@triton.jit
def _last_race(winners, out, num_parts, PARTS: tl.constexpr):
    follow()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    best = tl.max(tl.load(winners + row * num_parts + part, part < num_parts, -0x8000000000000000), 0)
    tl.store(out + row, 0xFFFFFFFF - (best & 0xFFFFFFFF))
