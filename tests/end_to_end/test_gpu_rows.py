"""On a GPU: a row's logits have the same bits alone, among others, in chunks, after a hit, eager and in a graph."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepinfer_plugin.model_executor.models.tiny import write_tiny
from tests.end_to_end.conftest import PARITY, Answer, Engine, start_engine, text_tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

PROMPT, NEW_TOKENS = text_tokens(300, seed=1), 12
OPTIONS = {"dtype": "bfloat16", "block_size": 64, "max_num_seqs": 64, "kv_cache_memory_bytes": 4 << 30}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    write_tiny(folder, size="parity")
    return folder


@pytest.fixture(scope="module")
def graphs(checkpoint: Path) -> Iterator[Engine]:
    with start_engine(checkpoint, enforce_eager=False, **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(graphs: Engine) -> Answer:
    (answer,) = graphs.ask(PROMPT, max_tokens=NEW_TOKENS)
    graphs.forget()
    return answer


def check(case: str, got: Answer, want: Answer) -> None:
    """Compare, and write the case into the table that the run ends with."""
    differences = int((got.logits != want.logits).sum())
    PARITY.append(f"{case:48}{differences:8} differing logits of {want.logits.numel()}")
    assert got.token_ids == want.token_ids and differences == 0


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("batch", [2, 3, 8, 16, 17, 33, 64])
def test_among_others(batch: int, place: float, graphs: Engine, alone: Answer) -> None:
    others = [text_tokens(20 + 37 * n % 400, seed=10 + n) for n in range(batch - 1)]
    index = round(place * (batch - 1))
    answers = graphs.ask(*others[:index], PROMPT, *others[index:], max_tokens=NEW_TOKENS)
    graphs.forget()
    check(f"place {index} of a batch of {batch}", answers[index], alone)


@pytest.mark.parametrize("size", [1, 7, 16, 64, 130])
def test_in_chunks(size: int, graphs: Engine, alone: Answer) -> None:
    with graphs.chunks_of(size):
        (answer,) = graphs.ask(PROMPT, max_tokens=NEW_TOKENS)
    graphs.forget()
    check(f"chunks of {size}", answer, alone)


def test_after_a_prefix_hit(graphs: Engine, alone: Answer) -> None:
    graphs.ask(PROMPT[:200], max_tokens=1)
    (answer,) = graphs.ask(PROMPT, max_tokens=NEW_TOKENS)
    graphs.forget()
    assert answer.num_cached_tokens >= 128
    check(f"prefix hit of {answer.num_cached_tokens}", answer, alone)


def test_eager(checkpoint: Path, alone: Answer) -> None:
    with start_engine(checkpoint, enforce_eager=True, **OPTIONS) as engine:
        (answer,) = engine.ask(PROMPT, max_tokens=NEW_TOKENS)
    check("eager", answer, alone)


def test_with_vllms_batch_invariance(checkpoint: Path, alone: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM replaces torch's products then; none of ours is one of them."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with start_engine(checkpoint, enforce_eager=False, **OPTIONS) as engine:
        (answer,) = engine.ask(PROMPT, max_tokens=NEW_TOKENS)
    check("VLLM_BATCH_INVARIANT=1", answer, alone)
