"""`sample_tokens`: its noise, its law, its limits, and row by row."""

import pytest
import torch

from deepinfer_plugin.kernels.noise import philox, words
from deepinfer_plugin.kernels.sample_tokens import sample_tokens
from tests.kernels.row_subsets import assert_rows_are_independent, is_interpreted

DRAWS = 20000 if torch.cuda.is_available() else 100 if is_interpreted else 3000
NUM_TIED = 60  # draws that see all of four


def rows_of(logits: torch.Tensor, count: int, device: str, heat: float = 1.0, first: int = 0) -> tuple:
    """`count` rows with the same logits, at one place after the other."""
    temperature = torch.full((count,), heat, device=device)
    seeds = torch.full((count,), 0x1234567890ABCDEF, device=device)
    return (
        logits.to(device).expand(count, -1).contiguous(),
        temperature,
        seeds,
        torch.arange(first, first + count).to(device),
    )


@pytest.mark.parametrize(
    "counter, key, want",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, key, want) -> None:
    """Random123's own vectors."""
    seed = key[0] | (key[1] << 32)
    got = philox(tuple(torch.tensor(c) for c in counter), torch.tensor(seed if seed < 2**63 else seed - 2**64))
    assert tuple(map(int, got)) == want


def test_noise_is_a_function_of_its_four_arguments() -> None:
    def noise(seed: int, stream: int, position: int, count: int = 1001) -> torch.Tensor:
        return words(torch.tensor([seed]), stream, torch.tensor([position]), count)[0]

    base = noise(5, 0, 7)
    assert torch.equal(base[:10], noise(5, 0, 7, 10)) and int(base.min()) >= 0 and int(base.max()) < 2**32
    for other in ((6, 0, 7), (5 + 2**40, 0, 7), (5, 1, 7), (5, 0, 8), (-5, 0, 7)):
        assert int((noise(*other) == base).sum()) <= 1
    both = words(torch.tensor([5, 6]), 0, torch.tensor([7, 2**32 - 1]), 1001)
    assert torch.equal(both[0], base) and torch.equal(both[1], noise(6, 0, 2**32 - 1))


def chi_square(tokens: torch.Tensor, law: torch.Tensor) -> tuple[float, float]:
    """(the statistic, what it exceeds once in 10**6)."""
    expected = law.double() * len(tokens)
    kept = expected > 5
    seen = torch.bincount(tokens.cpu(), minlength=len(law)).double()
    assert not seen[law == 0].any()
    terms = ((seen - expected) ** 2 / expected)[kept]
    if bool((~kept & (law > 0)).any()):
        terms = torch.cat((terms, ((seen - expected)[~kept].sum() ** 2 / expected[~kept].sum()).view(1)))
    freedom = max(1, len(terms) - 1)
    return float(terms.sum()), freedom * (1 - 2 / (9 * freedom) + 4.753 * (2 / (9 * freedom)) ** 0.5) ** 3


LAWS = {
    "flat": torch.zeros(8),
    "geometric": -0.5 * torch.arange(40.0),
    "zipf": -torch.log(torch.arange(1.0, 1001.0)),
    "sparse": torch.where(torch.arange(1030) % 103 == 7, 1.0, -torch.inf),
}


@pytest.mark.parametrize("heat", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("law", LAWS)
def test_draws_follow_the_softmax(law: str, heat: float, device: str) -> None:
    logits = LAWS[law]
    statistic, bound = chi_square(sample_tokens(*rows_of(logits, DRAWS, device, heat)), (logits / heat).softmax(0))
    assert statistic < bound


def test_the_law_is_what_the_test_above_sees() -> None:
    logits = LAWS["geometric"]
    tokens = torch.multinomial((logits / 1.1).softmax(0), 20000, replacement=True)
    statistic, bound = chi_square(tokens, logits.softmax(0))
    assert statistic > bound


def test_limits_leave_the_law_of_what_they_leave(device: str) -> None:
    logits = LAWS["geometric"]
    share = logits.softmax(0)
    for limits, left in (
        ({"top_k": torch.tensor(5, dtype=torch.int32)}, 5),
        ({"top_p": torch.tensor(0.7)}, int((share.cumsum(0) - share < 0.7).sum())),
        ({"min_p": torch.tensor(0.2)}, int((share >= 0.2 * share[0]).sum())),
    ):
        given = {name: value.expand(DRAWS).contiguous().to(device) for name, value in limits.items()}
        tokens = sample_tokens(*rows_of(logits, DRAWS, device), **given)
        statistic, bound = chi_square(tokens, logits[:left].softmax(0))
        assert int(tokens.max()) == left - 1 and statistic < bound, limits


@pytest.mark.parametrize("vocab_size", [7, 4096, 5000])
def test_equals_the_definition(vocab_size: int, device: str) -> None:
    from deepinfer_plugin.kernels.sample_tokens.reference import sample_tokens as definition

    count = 5 if is_interpreted else 24
    logits = torch.randn(count, vocab_size, device=device).mul(4).round().div(4)  # many that are equal
    logits[:, 3] = -torch.inf
    heat = torch.rand(count, device=device).add(0.3)
    heat[::5] = 0
    seeds, positions = torch.randint(2**62, (count,), device=device), torch.randint(2**20, (count,), device=device)
    top_k = torch.randint(-1, vocab_size + 2, (count,), dtype=torch.int32, device=device)
    top_p, min_p = torch.rand(count, device=device).add(0.3).clamp(max=1), torch.rand(count, device=device).mul(0.1)
    for limits in (
        (None, None, None),
        (top_k, None, None),
        (None, top_p, None),
        (None, None, min_p),
        (top_k, top_p, min_p),
    ):
        for stream in (0, 3):
            args = logits, heat, seeds, positions, *limits, stream
            assert torch.equal(sample_tokens(*args), definition(*args))


def test_greedy_takes_the_smallest_of_equal_ids(device: str) -> None:
    logits = torch.tensor(
        [[0.0, 2.0, 2.0, -1.0], [-torch.inf, -torch.inf, -5.0, -5.0], [-0.0, 0.0, 0.0, -0.0]], device=device
    )
    nothing = torch.zeros(3, dtype=torch.int64, device=device)
    assert sample_tokens(logits, torch.zeros(3, device=device), nothing, nothing).tolist() == [1, 2, 0]


def test_ties_of_limits_go_to_smaller_ids(device: str) -> None:
    logits = torch.zeros(50).index_fill_(0, torch.tensor([10]), 1.0)
    rows = rows_of(logits, NUM_TIED, device)
    top_k = torch.full((NUM_TIED,), 4, dtype=torch.int32, device=device)
    assert set(sample_tokens(*rows, top_k=top_k).tolist()) == {0, 1, 2, 10}
    share = float(logits.softmax(0)[10] + 2.5 * logits.softmax(0)[0])
    assert set(sample_tokens(*rows, top_p=torch.full((NUM_TIED,), share, device=device)).tolist()) == {0, 1, 2, 10}


def test_rows_are_independent(device: str) -> None:
    count, vocab_size = 100, 300 if is_interpreted else 5000
    logits, heat = torch.randn(count, vocab_size, device=device), torch.rand(count, device=device)
    seeds, positions = torch.randint(2**62, (count,), device=device), torch.randint(2**20, (count,), device=device)
    top_k, top_p = (
        torch.randint(1, 99, (count,), dtype=torch.int32, device=device),
        torch.rand(count, device=device).clamp(0.1),
    )
    assert_rows_are_independent(sample_tokens, logits, heat, seeds, positions)
    assert_rows_are_independent(sample_tokens, logits, heat, seeds, positions, top_k, top_p)


def test_takes_strided_arguments(device: str) -> None:
    logits, heat, seeds, positions = rows_of(torch.randn(9), 4, device)
    seeds, top_k = seeds + positions, torch.tensor([3, 5, 7, 9], dtype=torch.int32, device=device)
    top_p = torch.tensor([0.5, 0.6, 0.7, 0.8], device=device)
    want = sample_tokens(logits, heat, seeds, positions, top_k, top_p)
    apart = [torch.stack((part, 3 * part + 1), 1)[:, 0] for part in (heat, seeds, positions, top_k, top_p)]
    assert torch.equal(sample_tokens(torch.stack((logits, logits + 1), 2)[:, :, 0], *apart), want)


def test_refuses(device: str) -> None:
    logits, heat, seeds, positions = rows_of(torch.zeros(4), 2, device)
    for args in (
        (logits[0], heat, seeds, positions),
        (logits.bfloat16(), heat, seeds, positions),
        (logits, heat[:1], seeds, positions),
        (logits, heat, seeds.int(), positions),
        (logits, heat, seeds, positions, seeds),
        (logits, heat, seeds, positions, None, heat[:1]),
    ):
        with pytest.raises(ValueError, match="sample_tokens: "):
            sample_tokens(*args)
