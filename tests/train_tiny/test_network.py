"""The trainer's network is the float64 oracle's, with and without rounding, and can be differentiated."""

from pathlib import Path

import pytest
import torch

from tests.oracle.model import Oracle, exact_rounding, no_rounding, rope_frequencies


def network_of(folder: Path, dtype: torch.dtype, **options):
    from network import Network
    from weights import read_weights

    from deepinfer_plugin.model_executor.models.engram_vocabulary import class_table

    shape, weights = read_weights(folder)
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    return Network(shape, class_table(folder / "tokenizer.json", shape), weights, dtype, **options)


def shared_tables(config: dict) -> dict[bool, torch.Tensor]:
    """The oracle's own: NumPy's power function differs from torch's in the last bit of fp32."""
    positions = torch.arange(config["max_position_embeddings"], dtype=torch.float32)
    tables = {}
    for scaled in (False, True):
        angle = torch.outer(positions, torch.from_numpy(rope_frequencies(config, scaled))).double()
        tables[scaled] = torch.stack([angle.cos(), angle.sin()], 1)
    return tables


@pytest.mark.parametrize("rounded", [False, True])
def test_logits_are_the_oracles(varied_checkpoint, rounded):
    # 200 tokens: beyond the window (16), the selection (16 entries) and the candidate blocks (64 entries)
    tokens = torch.randint(3, 480, (200,), generator=torch.Generator().manual_seed(5))
    oracle = Oracle(varied_checkpoint, exact_rounding if rounded else no_rounding)
    want = oracle.logits(tokens.tolist())
    network = network_of(varied_checkpoint, torch.float64, rounded=rounded)
    network.tables = shared_tables(oracle.config)
    with torch.no_grad():
        got = network.forward(tokens[None]).logits[0]
    # float64 sums of a few hundred terms; the quantisers round from fp32, which moves no code in this case
    assert (got - want).abs().max() < 1e-9 * want.abs().max()
