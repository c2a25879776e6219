"""What top-k and top-p leave of a row, in Triton, without a sort.

Both leave the head of one total order: by score, then by id. So each is a bound: the lowest score that stays, and of
the tokens with that score the highest id. The score is found 4 bits a pass, every part of a row in a program of its
own; a pass begins with the sums of the one before, in a fixed order, so that a row does not depend on the others.
"""

import torch
import triton
import triton.language as tl

from deepinfer_plugin.kernels.triton_launch import chained, follow

PART: tl.constexpr = tl.constexpr(4096)  # tokens of a program
DIGIT: tl.constexpr = tl.constexpr(16)  # bounds that are tried at once
PASSES: tl.constexpr = tl.constexpr(8)
LOWEST: tl.constexpr = tl.constexpr(-0x80000000)
LAST: tl.constexpr = tl.constexpr(0x7FFFFFFF)


def find_bounds(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    maxima: torch.Tensor | None,
) -> torch.Tensor | None:
    """int32 [num_rows, 2]: the lowest score that stays, as `ordered`, and the last id of those that have it.

    maxima: fp32 [num_rows, parts], of the parts of the rows, needed with `top_p`. None if there is no limit.
    """
    bounds = None
    if top_k is not None:
        bounds = _find(logits, temperature, top_k, None, None, by_mass=False)
    if top_p is not None:
        bounds = _find(logits, temperature, top_p, maxima, bounds, by_mass=True)
    return bounds


def part_maxima(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """fp32 [num_rows, parts]: the highest score of each part; of rows with temperature 0 anything."""
    (num_rows, vocab_size), parts = logits.shape, triton.cdiv(logits.shape[1], PART.value)
    maxima = torch.empty(num_rows, parts, dtype=torch.float32, device=logits.device)
    _maxima[(num_rows, parts)](logits, temperature, maxima, logits.stride(0), vocab_size, num_warps=8, **chained())
    return maxima


def _find(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    limit: torch.Tensor,
    maxima: torch.Tensor | None,
    before: torch.Tensor | None,
    by_mass: bool,
) -> torch.Tensor:
    (num_rows, vocab_size), device = logits.shape, logits.device
    parts = triton.cdiv(vocab_size, PART.value)
    weights = torch.empty(2, num_rows, parts, DIGIT.value, dtype=torch.float32, device=device)
    found = torch.empty(PASSES.value + 1, num_rows, dtype=torch.int64, device=device)
    masses = torch.empty(PASSES.value + 1, num_rows, 2, dtype=torch.float32, device=device)
    ties = torch.empty(num_rows, parts, dtype=torch.int32, device=device)
    bounds = torch.empty(num_rows, 2, dtype=torch.int32, device=device)
    row = logits, temperature, limit, maxima, before
    options = {"PARTS": triton.next_power_of_2(parts), "BY_MASS": by_mass, "num_warps": 8, **chained()}
    for step in range(PASSES.value + 1):
        _pass[(num_rows, parts)](*(*row, weights, found, masses, ties, step, logits.stride(0), vocab_size), **options)
    _settle[(num_rows,)](*(*row, found, masses, ties, bounds, logits.stride(0), vocab_size), **options)
    return bounds


@triton.jit
def ordered(score):
    """Integers in the order of fp32 numbers; both zeros are one."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def scores(logits, token, inside, heat):
    """Of a part of a row, -inf outside."""
    return tl.load(logits + token, inside, -float("inf")) / heat


@triton.jit
def highest_score(maxima, row, num_parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(maxima + row * num_parts + part, part < num_parts, -float("inf")), 0)


@triton.jit
def _maxima(logits, temperature, maxima, logits_row, vocab_size):
    follow()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, heat = part * PART + tl.arange(0, PART), tl.load(temperature + row)
    if heat > 0:
        score = scores(logits + row * logits_row, token, token < vocab_size, heat)
        tl.store(maxima + row * tl.num_programs(1) + part, tl.max(score, 0))


@triton.jit
def _is_limited(temperature, limit, row, vocab_size, BY_MASS: tl.constexpr):
    value = tl.load(limit + row)
    limits = value < 1 if BY_MASS else (value >= 1) & (value < vocab_size)
    return (tl.load(temperature + row) > 0) & limits


@triton.jit
def _before(before, row):
    """The bound of the limit that came before."""
    lowest, last_id = tl.full([], LOWEST, tl.int32), tl.full([], LAST, tl.int32)
    if before is not None:
        lowest, last_id = tl.load(before + 2 * row), tl.load(before + 2 * row + 1)
    return lowest, last_id


@triton.jit
def _pass(
    logits,
    temperature,
    limit,
    maxima,
    before,
    weights,
    found,
    masses,
    ties,
    step,
    logits_row,
    vocab_size,
    PARTS: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    """Sums of what the tokens of a part weigh that lie at or above each of the next bounds; at last how many tokens
    have the score that was found."""
    follow()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_rows, num_parts = tl.num_programs(0), tl.num_programs(1)
    if _is_limited(temperature, limit, row, vocab_size, BY_MASS):
        digit, other = tl.arange(0, DIGIT), tl.arange(0, PARTS)
        bound = tl.full([], LOWEST, tl.int64)
        if step > 0:
            last = weights + (((step - 1) & 1) * num_rows + row) * num_parts * DIGIT
            sums = tl.load(last + other[:, None] * DIGIT + digit[None, :], other[:, None] < num_parts, 0.0)
            sums = tl.sum(sums, 0)
            above, wanted = 0.0, tl.load(limit + row).to(tl.float32)
            if step == 1:
                if BY_MASS:
                    wanted *= tl.sum(tl.where(digit == 0, sums, 0.0), 0)
            else:
                state = (step - 1) * num_rows + row
                bound = tl.load(found + state)
                above, wanted = tl.load(masses + 2 * state), tl.load(masses + 2 * state + 1)
            taken = tl.max(tl.where(sums >= wanted, digit, 0), 0)
            above = tl.where(taken + 1 < DIGIT, tl.sum(tl.where(digit == taken + 1, sums, 0.0), 0), above)
            bound += taken.to(tl.int64) << (32 - 4 * step)
            if part == 0:
                state = step * num_rows + row
                tl.store(found + state, bound)
                tl.store(masses + 2 * state, above)
                tl.store(masses + 2 * state + 1, wanted)
        lowest, last_id = _before(before, row)
        token, heat = part * PART + tl.arange(0, PART), tl.load(temperature + row)
        score = scores(logits + row * logits_row, token, token < vocab_size, heat)
        order = ordered(score)
        stays = (token < vocab_size) & ((order > lowest) | ((order == lowest) & (token <= last_id)))
        if step == PASSES:
            tl.store(ties + row * num_parts + part, tl.sum((stays & (order == bound)).to(tl.int32), 0))
        else:
            weight = tl.full([PART], 1.0, tl.float32)
            if BY_MASS:
                weight = tl.exp(score - highest_score(maxima, row, num_parts, PARTS))
            tried = bound + (digit.to(tl.int64) << (28 - 4 * step))
            is_above = order[None, :].to(tl.int64) >= tried[:, None]
            sums = tl.sum(tl.where(is_above & stays[None, :], weight[None, :], 0.0), 1)
            tl.store(weights + (((step & 1) * num_rows + row) * num_parts + part) * DIGIT + digit, sums)


@triton.jit
def _settle(
    logits,
    temperature,
    limit,
    maxima,
    before,
    found,
    masses,
    ties,
    bounds,
    logits_row,
    vocab_size,
    PARTS: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    """The score that was found, and the last id of the tokens with it that stay."""
    follow()
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    lowest, last_id = _before(before, row)
    bound, last = lowest, last_id
    if _is_limited(temperature, limit, row, vocab_size, BY_MASS):
        num_parts, part = tl.cdiv(vocab_size, PART), tl.arange(0, PARTS)
        state, heat = PASSES * num_rows + row, tl.load(temperature + row)
        bound = tl.load(found + state).to(tl.int32)
        above, wanted = tl.load(masses + 2 * state), tl.load(masses + 2 * state + 1)
        count = (wanted - above).to(tl.int32)
        if BY_MASS:
            bits = tl.where(bound < 0, bound ^ 0x7FFFFFFF, bound)
            each = tl.exp(bits.to(tl.float32, bitcast=True) - highest_score(maxima, row, num_parts, PARTS))
            count = tl.maximum(1, tl.ceil((wanted - above) / each).to(tl.int32))
        own = tl.load(ties + row * num_parts + part, part < num_parts, 0)
        count = tl.minimum(count, tl.sum(own, 0))
        up_to = tl.cumsum(own, 0)
        holder = tl.sum((up_to < count).to(tl.int32), 0)
        left = count - tl.sum(tl.where(part < holder, own, 0), 0)
        token = holder * PART + tl.arange(0, PART)
        order = ordered(scores(logits + row * logits_row, token, token < vocab_size, heat))
        stays = (token < vocab_size) & ((order > lowest) | ((order == lowest) & (token <= last_id)))
        is_tie = stays & (order == bound)
        last = tl.max(tl.where(is_tie & (tl.cumsum(is_tie.to(tl.int32), 0) <= left), token, 0), 0)
    tl.store(bounds + 2 * row, bound)
    tl.store(bounds + 2 * row + 1, last)
