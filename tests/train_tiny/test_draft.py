"""The trainer's draft blocks are the float64 oracle's, at many anchors of one sequence at once."""

import pytest
import torch

from tests.oracle.draft import draft as oracle_draft
from tests.oracle.model import Oracle, exact_rounding, no_rounding
from tests.train_tiny.test_network import network_of, shared_tables


@pytest.mark.parametrize("rounded", [False, True])
def test_drafts_are_the_oracles(varied_checkpoint, rounded):
    from draft import draft, markov

    tokens = torch.randint(3, 480, (60,), generator=torch.Generator().manual_seed(6))
    anchors = [0, 5, 15, 16, 40]  # before, at and beyond the window of 16
    oracle = Oracle(varied_checkpoint, exact_rounding if rounded else no_rounding)
    network = network_of(varied_checkpoint, torch.float64, rounded=rounded)
    network.tables = shared_tables(oracle.config)
    golden = tokens[torch.tensor(anchors) + 1][None]
    with torch.no_grad():
        features = network.forward(tokens[None]).features
        drafts = draft(network, features, torch.tensor([anchors]), golden)
        wanted = [
            oracle_draft(oracle, tokens[: a + 1].tolist(), int(tokens[a + 1]), network.shape.dspark_block_size)
            for a in anchors
        ]
        previous = torch.tensor([[w.tokens for w in wanted]]).roll(1, -1)
        previous[..., 0] = golden
        logits, confidence = markov(network, drafts, previous, slice(None))
    for n, want in enumerate(wanted):
        assert (logits[0, n] - want.logits).abs().max() < 1e-9 * want.logits.abs().max()
        assert (confidence[0, n] - want.confidence).abs().max() < 1e-9 * want.confidence.abs().max().clamp(min=1)
