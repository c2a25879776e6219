"""Real speculative decoding with the trainer's networks: rounds of five drafts, coupled verification, no cache.

The text is the one that decoding without drafts gives: at every place the same noise decides, and a draft counts only
if it is what the target itself takes there.

Source: runtime specification, sections 3.3 and 3.4.
"""

from dataclasses import dataclass

import torch
from draft import draft, markov
from network import Network
from torch import Tensor
from tqdm import tqdm


@dataclass
class Rounds:
    """text: int64 [B, P + num_tokens]. Of every draft that was reached: its place, its confidence's logit, its fate.

    Reached means that all drafts before it were accepted: only there does a confidence say anything.
    """

    text: Tensor
    places: Tensor
    logits: Tensor
    accepted: Tensor
    num_rounds: int


def speculate(network: Network, prompts: Tensor, num_tokens: int, temperature: float, seed: int) -> Rounds:
    """Continue each prompt by at least `num_tokens` tokens and record every round.

    Args:
        prompts: int64 [B, P].
        temperature: 0 takes the likeliest token; else target and drafter share one noise a position.
    """
    start, k = prompts.shape[1], network.shape.dspark_block_size
    generator = torch.Generator().manual_seed(seed)
    size = (len(prompts), num_tokens + 2 * k + 2, network.shape.vocab_size)
    noise = -torch.empty(size).exponential_(generator=generator).log()

    def choose(logits: Tensor, row: int, position: int) -> int:
        return int((logits if temperature == 0 else logits / temperature + noise[row, position - start]).argmax())

    text = prompts.tolist()
    drafts: list[list[int]] = [[] for _ in text]  # of the round to verify, and the logits of their confidences
    confidences: list[list[float]] = [[] for _ in text]
    records: list[tuple[int, float, bool]] = []
    num_rounds = 0
    progress = tqdm(total=len(text) * num_tokens, desc=f"speculate at temperature {temperature:g}", unit=" tokens")
    while rows := [row for row, tokens in enumerate(text) if len(tokens) < start + num_tokens]:
        with torch.no_grad():
            target = network.forward(_padded([text[row] + drafts[row] for row in rows]))
        for at, row in enumerate(rows):
            known = len(text[row])
            for j in range(len(drafts[row]) + 1):
                token = choose(target.logits[at, known - 1 + j], row, known + j)
                text[row].append(token)
                if j < len(drafts[row]):
                    records.append((j, confidences[row][j], drafts[row][j] == token))
                    if drafts[row][j] != token:
                        break
            num_rounds += bool(drafts[row])
            progress.update(len(text[row]) - known)
            drafts[row], confidences[row] = [], []
        golden = torch.tensor([[text[row][-1]] for row in rows])
        anchors = torch.tensor([[len(text[row]) - 2] for row in rows])
        with torch.no_grad():
            block, previous = draft(network, target.features, anchors, golden), golden
            for j in range(k):
                logits, confidence = markov(network, block, previous, j)
                for at, row in enumerate(rows):
                    drafts[row].append(choose(logits[at, 0], row, len(text[row]) + j))
                    confidences[row].append(float(confidence[at, 0]))
                previous = torch.tensor([[drafts[row][-1]] for row in rows])
    progress.close()
    places, logits, accepted = zip(*records, strict=True)
    return Rounds(
        torch.tensor([tokens[: start + num_tokens] for tokens in text]),
        torch.tensor(places),
        torch.tensor(logits),
        torch.tensor(accepted),
        num_rounds,
    )


def _padded(rows: list[list[int]]) -> Tensor:
    """Rows of one even length; what is added at an end changes nothing before it."""
    length = max(map(len, rows))
    length += length % 2
    return torch.tensor([row + [0] * (length - len(row)) for row in rows])


def calibration_error(probability: Tensor, accepted: Tensor, num_bins: int = 15) -> float:
    """Expected calibration error: the mean distance of confidence and acceptance over bins of equal width.

    Source: Guo et al., On calibration of modern neural networks, 2017, section 2, with their number of bins.
    """
    bins = (probability * num_bins).long().clamp(max=num_bins - 1)
    counts = torch.bincount(bins, minlength=num_bins).double()
    gap = torch.bincount(bins, weights=probability.double() - accepted.double(), minlength=num_bins)
    return float(gap.abs().sum() / counts.sum())


def fitted_temperatures(rounds: Rounds, num_places: int) -> Tensor:
    """The temperature of each place whose sigmoid has the smallest cross-entropy on `rounds`."""
    grid = torch.logspace(-1, 1, 201, base=4)
    best = []
    for place in range(num_places):
        at = rounds.places == place
        scaled = rounds.logits[at][None] / grid[:, None]
        wanted = rounds.accepted[at].float().expand_as(scaled)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scaled, wanted, reduction="none").mean(1)
        best.append(grid[loss.argmin()])
    return torch.stack(best)


def fitted_lines(rounds: Rounds, num_places: int) -> Tensor:
    """Slope and offset of each place, [num_places, 2], by which the product corrects the logits while it serves.

    Source: runtime specification, section 2.6: Newton's method, held towards slope 1 and offset 0.
    """
    lines = torch.tensor([[1.0, 0.0]] * num_places, dtype=torch.float64)
    plain = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for place, line in enumerate(lines):
        at = rounds.places == place
        inputs = torch.stack([rounds.logits[at].double(), torch.ones(int(at.sum()), dtype=torch.float64)], 1)
        for _ in range(20):
            p = torch.sigmoid(inputs @ line)
            gradient = inputs.T @ (p - rounds.accepted[at].double()) + (line - plain)
            curvature = (inputs * (p * (1 - p))[:, None]).T @ inputs + torch.eye(2, dtype=torch.float64)
            line -= torch.linalg.solve(curvature, gradient)
    return lines.float()
