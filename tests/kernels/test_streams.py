"""Work beside the current stream is done when joined, and a graph does not wait for what it does not hold."""

from contextlib import nullcontext

import pytest
import torch

from deepinfer_plugin.kernels import streams
from deepinfer_plugin.kernels.streams import beside, is_beside, join

OPS: list[str] = []


def test_results_made_beside_are_there_after_the_join(device: str) -> None:
    x = torch.ones(1 << 20, device=device)
    for _ in range(3):
        with beside(x.device):
            assert is_beside(x.device) == (x.device.type == "cuda")
            y = x.cumsum(0)
        assert not is_beside(x.device)
        join(x.device)
        x = y / y
        assert bool((x == 1).all())


class Stream:
    """Notes what it waits for."""

    def __init__(self, name: str, waits: list[str]) -> None:
        self.name, self.waits = name, waits

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append(f"{self.name} for {other.name}")


def test_every_join_waits_once_for_what_was_begun_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    main, side, device = Stream("main", waits), Stream("side", waits), torch.device("cuda", 0)
    monkeypatch.setattr(streams, "_second_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    join(device)
    assert not waits
    for _ in range(2):
        with beside(device):
            pass
    join(device)
    join(device)
    assert waits == ["side for main", "side for main", "main for side"]


def test_a_graph_may_begin_with_a_join(device: str) -> None:
    """As a model does that joins before its first layer. CUDA refuses to capture a wait for work outside the graph."""
    if device != "cuda":
        pytest.skip("needs a GPU: there are no graphs without one")
    x = torch.arange(4.0, device=device)

    def step() -> torch.Tensor:
        join(x.device)
        with beside(x.device):
            y = x + 1
        z = x * 2
        join(x.device)
        return y + z

    want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    assert torch.equal(got, want)
