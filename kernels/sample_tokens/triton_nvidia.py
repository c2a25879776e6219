"""`sample_tokens` in Triton, without a sort.

What top-k and top-p leave is the head of one total order: by score, then by id. So each is a bound: the lowest score
that stays, and of the tokens with that score the highest id. A row's program finds it 4 bits a pass. Then every part of
every row races, and the winners of the parts race once more.
"""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.triton_launch import chained, follow

PART = 4096  # tokens of a program of the race, and of a step of the search
DIGIT = tl.constexpr(16)  # bounds that are tried at once


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
    bounds = shares = None
    if top_k is not None or top_p is not None or min_p is not None:
        bounds = torch.empty(num_rows, 2, dtype=torch.int32, device=device)
        shares = torch.empty(num_rows, 2, dtype=torch.float32, device=device)
        _bounds[(num_rows,)](
            *(logits, temperature, top_k, top_p, min_p, bounds, shares, logits.stride(0), vocab_size),
            ID_BITS=4 * triton.cdiv(vocab_size.bit_length(), 4),
            PART=PART,
            num_warps=8,
            **chained(),
        )
    parts = triton.cdiv(vocab_size, PART)
    winners = torch.empty(num_rows, parts, dtype=torch.int64, device=device)
    _race[(num_rows, parts)](
        *(logits, temperature, seeds, positions, bounds, shares, winners, logits.stride(0), vocab_size, stream, PART),
        num_warps=8,
        **chained(),
    )
    _last_race[(num_rows,)](winners, out, parts, PARTS=triton.next_power_of_2(parts), num_warps=1, **chained())
    return out


@triton.jit
def _ordered(score):
    """Integers in the order of fp32 numbers; both zeros are one."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _scores(logits, token, inside, heat):
    """Of a part of a row, -inf outside."""
    return tl.load(logits + token, inside, -float("inf")) / heat


@triton.jit
def _weight(score, highest, BY_MASS: tl.constexpr):
    return tl.exp(score - highest) if BY_MASS else tl.full(score.shape, 1.0, tl.float32)


@triton.jit
def _lowest_score(
    logits, heat, highest, lowest, last_id, wanted, vocab_size, BY_MASS: tl.constexpr, PART: tl.constexpr
):
    """(the highest bound at or above which the tokens weigh as much as wanted, what lies above it weighs)."""
    token, digit = tl.arange(0, PART), tl.arange(0, DIGIT)
    bound = tl.full([], -0x80000000, tl.int64)
    above = 0.0
    for step in range(8):
        shift = 28 - 4 * step
        tried = bound + (digit.to(tl.int64) << shift)
        weights = tl.zeros([DIGIT], tl.float32)
        for first in range(0, vocab_size, PART):
            inside = first + token < vocab_size
            score = _scores(logits + first, token, inside, heat)
            order = _ordered(score)
            stays = inside & ((order > lowest) | ((order == lowest) & (first + token <= last_id)))
            weight = tl.where(stays, _weight(score, highest, BY_MASS), 0.0)
            weights += tl.sum(tl.where(order[None, :].to(tl.int64) >= tried[:, None], weight[None, :], 0.0), 1)
        taken = tl.max(tl.where(weights >= wanted, digit, 0), 0)
        above = tl.where(taken + 1 < DIGIT, tl.sum(tl.where(digit == taken + 1, weights, 0.0), 0), above)
        bound += taken.to(tl.int64) << shift
    return bound.to(tl.int32), above


@triton.jit
def _last_id(logits, heat, bound, lowest, last_id, count, vocab_size, ID_BITS: tl.constexpr, PART: tl.constexpr):
    """The id of the count-th token, by id, whose score is the bound."""
    token, digit = tl.arange(0, PART), tl.arange(0, DIGIT)
    below = tl.full([], 0, tl.int32)
    for step in range(ID_BITS // 4):
        shift = ID_BITS - 4 - 4 * step
        tried = below + ((digit + 1) << shift)  # ids below it
        counts = tl.zeros([DIGIT], tl.int32)
        for first in range(0, vocab_size, PART):
            inside = first + token < vocab_size
            order = _ordered(_scores(logits + first, token, inside, heat))
            stays = inside & (order == bound) & ((order > lowest) | (first + token <= last_id))
            counts += tl.sum((stays[None, :] & ((first + token)[None, :] < tried[:, None])).to(tl.int32), 1)
        below += tl.sum((counts < count).to(tl.int32), 0) << shift
    return below


@triton.jit
def _bounds(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    bounds,
    shares,
    logits_row,
    vocab_size,
    ID_BITS: tl.constexpr,
    PART: tl.constexpr,
):
    """Of a row: the lowest score that stays, as `_ordered`, and the last id of those that have it; in `shares`: the
    highest score, and the least share of its weight that stays."""
    follow()
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    heat = tl.load(temperature + row)
    token = tl.arange(0, PART)
    lowest, last_id = tl.full([], -0x80000000, tl.int32), tl.full([], 0x7FFFFFFF, tl.int32)
    highest = tl.full([], -float("inf"), tl.float32)
    least = tl.full([], 0.0, tl.float32)
    is_limited = heat < 0
    if top_k is not None:
        is_limited |= (tl.load(top_k + row) >= 1) & (tl.load(top_k + row) < vocab_size)
    if top_p is not None:
        is_limited |= tl.load(top_p + row) < 1
    if min_p is not None:
        is_limited |= tl.load(min_p + row) > 0
    if (heat > 0) & is_limited:
        for first in range(0, vocab_size, PART):
            score = _scores(logits + first, token, first + token < vocab_size, heat)
            highest = tl.maximum(highest, tl.max(score, 0))
        if top_k is not None:
            count = tl.load(top_k + row)
            if (count >= 1) & (count < vocab_size):
                bound, above = _lowest_score(
                    logits, heat, highest, lowest, last_id, count.to(tl.float32), vocab_size, False, PART
                )
                left = count - above.to(tl.int32)
                last_id = _last_id(logits, heat, bound, lowest, last_id, left, vocab_size, ID_BITS, PART)
                lowest = bound
        if top_p is not None:
            share = tl.load(top_p + row)
            if share < 1:
                total = 0.0
                for first in range(0, vocab_size, PART):
                    inside = first + token < vocab_size
                    score = _scores(logits + first, token, inside, heat)
                    order = _ordered(score)
                    stays = inside & ((order > lowest) | ((order == lowest) & (first + token <= last_id)))
                    total += tl.sum(tl.where(stays, tl.exp(score - highest), 0.0), 0)
                wanted = share * total
                bound, above = _lowest_score(logits, heat, highest, lowest, last_id, wanted, vocab_size, True, PART)
                bits = tl.where(bound < 0, bound ^ 0x7FFFFFFF, bound)
                each = tl.exp(bits.to(tl.float32, bitcast=True) - highest)
                count = tl.maximum(1, tl.ceil((wanted - above) / each).to(tl.int32))
                last_id = _last_id(logits, heat, bound, lowest, last_id, count, vocab_size, ID_BITS, PART)
                lowest = bound
        if min_p is not None:
            least = tl.load(min_p + row)
    tl.store(bounds + 2 * row, lowest)
    tl.store(bounds + 2 * row + 1, last_id)
    tl.store(shares + 2 * row, tl.where(least > 0, highest, 0.0))
    tl.store(shares + 2 * row + 1, least)


@triton.jit
def _race(
    logits, temperature, seeds, positions, bounds, shares, winners, logits_row, vocab_size, stream, PART: tl.constexpr
):
    """The winner of one part of a row: its score, in order, above its id, the smallest of which is the highest."""
    follow()
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = token < vocab_size
    heat = tl.load(temperature + row)
    if heat > 0:
        score = _scores(logits + row * logits_row, token, inside, heat)
        stays = inside
        if bounds is not None:
            order, lowest = _ordered(score), tl.load(bounds + 2 * row)
            stays &= (order > lowest) | ((order == lowest) & (token <= tl.load(bounds + 2 * row + 1)))
            highest, least = tl.load(shares + 2 * row), tl.load(shares + 2 * row + 1)
            stays &= tl.exp(score - highest) >= least
        word = _word(tl.load(seeds + row), stream, tl.load(positions + row), token)
        score = tl.where(stays, score - _log_race_time(word), -float("inf"))
    else:
        score = tl.load(logits + row * logits_row + token, inside, -float("inf"))
    place = (_ordered(score).to(tl.int64) << 32) | (0xFFFFFFFF - token.to(tl.int64))
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
