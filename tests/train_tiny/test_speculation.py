"""Speculation with drafts gives the text that decoding without drafts gives."""

import pytest
import torch

from tests.train_tiny.test_network import network_of


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_do_not_change_the_text(tiny_checkpoint, temperature, monkeypatch):
    import speculation

    network = network_of(tiny_checkpoint, torch.float64)
    prompts = torch.randint(3, 480, (2, 20), generator=torch.Generator().manual_seed(0))
    want = speculation.speculate(network, prompts, 12, temperature, seed=3)
    # a drafter that is always wrong: every round gives the target's own token and nothing else
    monkeypatch.setattr(speculation, "markov", lambda n, b, previous, j: wrong(n, previous))
    got = speculation.speculate(network, prompts, 12, temperature, seed=3)
    assert got.accepted.sum() == 0
    assert torch.equal(got.text, want.text)


def wrong(network, previous):
    logits = torch.zeros(*previous.shape, network.shape.vocab_size, dtype=torch.float64)
    logits[..., 0] = 1e9
    return logits, torch.zeros(previous.shape)


def test_the_calibration_error_of_honest_and_of_boastful_confidence():
    from speculation import calibration_error

    generator = torch.Generator().manual_seed(0)
    honest = torch.rand(200_000, generator=generator)
    accepted = torch.rand(200_000, generator=generator) < honest
    # 15 bins of 13,333: the mean absolute deviation of a bin is below 0.8 * sqrt(1/4 / 13,333) = 0.0035
    assert calibration_error(honest, accepted) < 0.004
    assert abs(calibration_error(torch.full((1000,), 0.9), torch.arange(1000) % 2 == 0) - 0.4) < 1e-6
