"""The noise that decides what is sampled: a pure function of seed, stream, position and token, without any state.

So a token's noise is the same for a target and its drafter, in every batch, after a preemption, and on every device.
Source: runtime specification, section 3.3.
"""

import torch

MULTIPLIERS, KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF
ROUNDS = 10
# streams: of a target and of a drafter that is coupled to it; for the ratio test, its residual, and its drafter
TARGET, ACCEPTANCE, RESIDUAL, DRAFT = range(4)


def philox(counter: tuple[torch.Tensor, ...], seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10: four words from a counter of four words and a key of 64 bits; int64 tensors that broadcast."""
    a, b, c, d = counter
    low, high = seed & LOW, (seed >> 32) & LOW
    for _ in range(ROUNDS):
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # modulo 2**64: the bits are those of unsigned numbers
        a, b, c, d = (
            ((second >> 32) & LOW) ^ b ^ low,
            second & LOW,
            ((first >> 32) & LOW) ^ d ^ high,
            first & LOW,
        )
        low, high = (low + KEY_STEPS[0]) & LOW, (high + KEY_STEPS[1]) & LOW
    return a, b, c, d


def words(seeds: torch.Tensor, stream: int, positions: torch.Tensor, count: int) -> torch.Tensor:
    """The noise of tokens 0 to count - 1 at some places: int64 [n, count], 32 bits each.

    seeds: [n], int64, the 64 bits of each seed; positions: [n], int64, below 2**32.
    """
    blocks = torch.arange((count + 3) // 4, device=seeds.device)
    kind, zero = torch.full_like(blocks, stream), torch.zeros_like(blocks)
    four = philox((blocks, positions.unsqueeze(1), kind, zero), seeds.unsqueeze(1))
    return torch.stack(four, dim=2).flatten(1)[:, :count]


def log_race_time(word: torch.Tensor) -> torch.Tensor:
    """``log E`` of the exponential race time ``E = -log1p(-(word + 1/2) / 2**32)``, fp32; finest near E = 0.

    The choice of ``argmax(logit - log E)`` follows the softmax of the logits.
    """
    x = (word.float() + 0.5) * 2.0**-32
    return torch.log(-torch.log1p(-x))
