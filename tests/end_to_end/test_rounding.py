"""fp32 engine logits against the float64 oracle with V4.1's rounding on, the product's default.

A value that lies beside a rounding boundary may fall to the other side in fp32; from there on the two differ by a code.
So the engine's roundings are recorded, inputs and outputs, and the oracle takes the engine's codes over. Each must be
the exact rounding of an input that equals the oracle's within fp32's error: then every code that differs from the
oracle's own is a boundary case by construction, and with these codes the logits must agree as without rounding.
"""

import sys
from collections import defaultdict
from importlib import import_module

import pytest
import torch

from deepinfer_plugin.install import MODULE
from deepinfer_plugin.kernels import quant_formats
from deepinfer_plugin.kernels.dispatch import tables
from tests.end_to_end.conftest import record, relative_error, start_engine, text_tokens
from tests.end_to_end.test_parity import TOLERANCE, prompt_logits
from tests.oracle.model import Oracle
from tests.oracle.quantisers import GROUP, ROUND

PROMPT = text_tokens(100)
KIND_OF = {"round_fp8": ("activation", "local_kv"), "round_fp4_kv": ("entry",), "round_fp4_index": ("index",)}
# share of codes that may differ: inputs differ by some 1e-6 of a group's largest value, codes are 2**-4 of their value
# or more apart, so about 2e-6 / 2**-4 of the values lie near enough to a boundary
RARE = 1e-3


@pytest.fixture
def roundings(monkeypatch) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """By oracle's kind: (input, output) of every rounding that the engine does, in groups."""
    import_module(MODULE)  # all modules that have the names must be there before the names are replaced
    for table in tables().values():
        table.load("reference")
    seen = defaultdict(list)

    def recorded(name):
        original = getattr(quant_formats, name)

        def wrapper(x):
            rounded = original(x)
            size = GROUP[KIND_OF[name][0]]
            for kind in KIND_OF[name]:
                seen[kind].append((x.reshape(-1, size).double(), rounded.reshape(-1, size).double()))
            return rounded

        return original, wrapper

    for name in KIND_OF:
        original, wrapper = recorded(name)
        for module in [m for n, m in sys.modules.items() if n.startswith("deepinfer_plugin.")]:
            if getattr(module, name, None) is original:
                monkeypatch.setattr(module, name, wrapper)
        monkeypatch.setitem(tables()[name]._loaded, "reference", wrapper)
        monkeypatch.setattr(tables()[name], "_chosen", wrapper)
    return seen


class EnginesCodes:
    """An oracle's rounder that takes each group's codes from the engine's nearest recorded rounding."""

    def __init__(self, seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]]) -> None:
        self.seen = {
            kind: tuple(torch.cat(parts) for parts in zip(*pairs, strict=True)) for kind, pairs in seen.items()
        }
        self.num_codes = self.num_flips = 0
        self.distance = 0.0  # of an input to the engine's, relative to the largest of its group

    def __call__(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        inputs, outputs = self.seen[kind]
        groups = x.reshape(-1, GROUP[kind])
        nearest = torch.cat([torch.cdist(part, inputs).argmin(1) for part in groups.split(256)])
        taken, own = outputs[nearest], ROUND[kind](groups)
        assert torch.equal(ROUND[kind](inputs[nearest]), taken), f"{kind}: the engine's rounding is not exact"
        largest = groups.abs().amax(1).clamp(min=1e-30)
        self.distance = max(self.distance, float(((groups - inputs[nearest]).abs().amax(1) / largest).max()))
        self.num_codes += groups.numel()
        self.num_flips += int((taken != own).sum())
        return taken.view(x.shape)


@pytest.mark.parametrize("chunk", [None, 7], ids=["whole", "chunks of 7"])
def test_logits_agree_wherever_no_code_lands_on_the_other_side(varied_checkpoint, roundings, chunk):
    # the reference kernels call the roundings one by one; faster ones are held against them bit by bit in tests/kernels
    with start_engine(varied_checkpoint) as engine:
        roundings.clear()  # what vLLM's warm-up did
        if chunk is None:
            logits = prompt_logits(engine, PROMPT)
        else:
            with engine.chunks_of(chunk):
                logits = prompt_logits(engine, PROMPT)
    codes = EnginesCodes(roundings)
    wanted = Oracle(varied_checkpoint, codes).logits(PROMPT)
    error = relative_error(logits, wanted)
    note = f"{codes.num_flips} of {codes.num_codes} codes differ, inputs within {codes.distance:.0e}"
    record(f"rounding on, {'whole prefill' if chunk is None else f'chunks of {chunk}'}", error, None, note)
    assert codes.distance <= TOLERANCE
    assert codes.num_flips <= RARE * codes.num_codes
    assert error <= TOLERANCE
