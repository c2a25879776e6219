"""Real speculative decoding with the trainer's networks: rounds of five drafts, coupled verification, no cache.

The text is the one that decoding without drafts gives: at every place the same noise decides, and a draft counts only if it
is what the target itself takes there.

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
    """Of every drafted place that was reached: place (0..k-1), the confidence's logit, whether it was accepted.

    Reached means that all drafts before it were accepted: only there does a confidence say anything.
    """

    places: Tensor
    logits: Tensor
    accepted: Tensor
    num_rounds: int

    @property
    def accepted_length(self) -> float:
        """Tokens a round, the target's own token included."""
        return 1 + float(self.accepted.sum()) / self.num_rounds


def speculate(network: Network, prompts: Tensor, num_tokens: int, temperature: float, seed: int) -> Rounds:
    """Continue each prompt by at least `num_tokens` tokens and record every round.

    Args:
        prompts: int64 [B, P].
        temperature: 0 takes the likeliest token; else target and drafter share one noise a position.
    """
    k, batch = network.shape.dspark_block_size, len(prompts)
    start = prompts.shape[1]
    generator = torch.Generator().manual_seed(seed)
    size = (start + num_tokens + 2 * k + 2, network.shape.vocab_size)
    noise = [-torch.empty(size).exponential_(generator=generator).log() for _ in range(batch)]

    def choose(logits: Tensor, row: int, position: Tensor | int) -> Tensor:
        return (logits if temperature == 0 else logits / temperature + noise[row][position]).argmax(-1)

    text = [prompts[row].tolist() for row in range(batch)]
    drafts: list[list[int]] = [[] for _ in range(batch)]  # of the round to verify
    confidences: list[list[float]] = [[] for _ in range(batch)]
    records: list[tuple[int, float, bool]] = []
    num_rounds = 0
    progress = tqdm(total=num_tokens, desc=f"speculate at temperature {temperature:g}", unit=" tokens")
    done = 0
    while (shortest := min(map(len, text)) - start) < num_tokens:
        progress.update(shortest - done)
        done = shortest
        rows = [tokens + proposed for tokens, proposed in zip(text, drafts, strict=True)]
        length = max(map(len, rows)) + 1
        length += length % 2
        padded = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        with torch.no_grad():
            target = network.forward(padded)
        anchors = []
        for row in range(batch):
            known, proposed = len(text[row]), drafts[row]
            for j in range(len(proposed) + 1):
                token = int(choose(target.logits[row, known - 1 + j], row, known + j))
                text[row].append(token)
                if j == len(proposed):
                    break
                records.append((j, confidences[row][j], proposed[j] == token))
                if proposed[j] != token:
                    break
            num_rounds += bool(proposed)
            anchors.append(len(text[row]) - 2)
        golden = torch.tensor([tokens[-1] for tokens in text])[:, None]
        with torch.no_grad():
            block = draft(network, target.features, torch.tensor(anchors)[:, None], golden)
            previous = golden
            drafts, confidences = [[] for _ in range(batch)], [[] for _ in range(batch)]
            for j in range(k):
                logits, confidence = markov(network, block, previous, j)
                for row in range(batch):
                    drafts[row].append(int(choose(logits[row, 0], row, len(text[row]) + j)))
                    confidences[row].append(float(confidence[row, 0]))
                previous = torch.tensor([d[-1] for d in drafts])[:, None]
    progress.close()
    places, logits, accepted = zip(*records, strict=True)
    return Rounds(torch.tensor(places), torch.tensor(logits), torch.tensor(accepted), num_rounds)


def calibration_error(probability: Tensor, accepted: Tensor, num_bins: int = 20) -> float:
    """Expected calibration error: the mean distance of confidence and acceptance over bins of equal width."""
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
