"""Engines for the end-to-end tests, in this process, and the parity table that the run ends with."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer_plugin.verify.engine import VerifyEngine
from deepinfer_plugin.verify.engine import start_engine as verify_engine

VOCABULARY = 512
ROUNDING_OFF = {"activation_rounding": False, "kv_rounding": False}
PARITY: list[str] = []  # lines of the parity table


@dataclass(frozen=True)
class Answer:
    """One request's result. logits: fp32 [num_positions, VOCABULARY], of the generated tokens or of the prompt's."""

    token_ids: list[int]
    logits: torch.Tensor
    prompt_logits: torch.Tensor | None
    num_cached_tokens: int


class Engine(VerifyEngine):
    """A vLLM engine in this process, whose requests return raw logits."""

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def num_preemptions(self) -> int:
        return self.counts()["vllm:num_preemptions"]

    def chunks_of(self, num_tokens: int) -> AbstractContextManager[None]:
        """Limit every step to `num_tokens` rows, so that prompts are computed in chunks of that size."""
        return self.limits(rows=num_tokens, running=None)

    def ask(
        self, *prompts: list[int], max_tokens: int = 1, prompt_logits: bool = False, **options: Any
    ) -> list[Answer]:
        from vllm import SamplingParams

        defaults = {"temperature": 0.0, "ignore_eos": True, "logprobs": -1}
        sampling = SamplingParams(
            max_tokens=max_tokens, prompt_logprobs=-1 if prompt_logits else None, **{**defaults, **options}
        )
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return [
            Answer(
                list(output.outputs[0].token_ids),
                as_tensor(output.outputs[0].logprobs),
                as_tensor(output.prompt_logprobs[1:]) if prompt_logits else None,
                output.num_cached_tokens,
            )
            for output in outputs
        ]


def as_tensor(places: list[dict[int, Any]]) -> torch.Tensor:
    """vLLM's per-position {token: logprob} as [num_positions, VOCABULARY]; every token must be there."""
    rows = torch.full((len(places), VOCABULARY), float("nan"))
    for row, place in zip(rows, places, strict=True):
        row[torch.tensor(list(place))] = torch.tensor([entry.logprob for entry in place.values()])
    assert not rows.isnan().any()
    return rows


@contextmanager
def start_engine(folder: Path, deepinfer: dict[str, Any] | None = None, **options: Any) -> Iterator[Engine]:
    arguments = {
        "dtype": "float32",
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": 32,
        "enforce_eager": True,
        "max_logprobs": -1,
        "logprobs_mode": "raw_logits",
        "max_num_seqs": 16,
        "additional_config": {"deepinfer": deepinfer or {}},
    }
    with verify_engine(str(folder), **{**arguments, **options}) as started:
        yield Engine(started.llm)


def text_tokens(num_tokens: int, seed: int = 0) -> list[int]:
    """Reproducible token ids without special tokens: byte tokens and merges."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 480, (num_tokens,), generator=generator).tolist()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over all positions and tokens, relative to the largest wanted logit."""
    return float((got.double() - want.double()).abs().max() / want.abs().max())


def record(case: str, error: float, bitwise: bool | None, note: str = "") -> None:
    same = {True: "yes", False: "no", None: "-"}[bitwise]
    PARITY.append(f"{case:44}{error:12.2e}{same:>10}  {note}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if PARITY:
        terminalreporter.section("parity with the float64 oracle, fp32 engine, all logits")
        terminalreporter.write_line(f"{'case':44}{'max rel err':>12}{'bitwise':>10}  (to the whole prefill)")
        for line in PARITY:
            terminalreporter.write_line(line)
