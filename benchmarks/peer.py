"""Hold two engines' log-probabilities beside each other, and both beside the float64 oracle.

python -m benchmarks.peer collect MODEL OUT.pt [--native] [--dtype float32]     # ours, or vLLM's own V4.1
python -m benchmarks.peer compare MODEL OURS.pt NATIVE.pt ...     # a table; a few minutes for the oracle

MODEL is a checkpoint that both load: `deepinfer-plugin tiny --size parity DIR`. Log-probabilities are compared over the
whole vocabulary, at every place of every prompt.
"""

import argparse
import os
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

LENGTHS = (20, 150, 300, 700)


def prompts(vocabulary: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, vocabulary - 20) for _ in range(length)] for length in LENGTHS]


def collect(model: Path, out: Path, native: bool, dtype: str) -> None:
    """Save the engine's log-probabilities of every prompt: fp32 [length - 1, vocabulary]."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if native:
        os.environ["VLLM_PLUGINS"] = ""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model),
        dtype=dtype,
        max_model_len=1024,
        max_logprobs=-1,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
        limit_mm_per_prompt={"image": 0},
    )
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    asked = [{"prompt_token_ids": tokens} for tokens in prompts(vocabulary)]
    outputs = llm.generate(asked, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1))
    rows = [_as_tensor(output.prompt_logprobs[1:], vocabulary) for output in outputs]
    name = "vLLM's own V4.1" if native else f"deepinfer-plugin, {str(llm.llm_engine.model_config.dtype)[6:]}"
    torch.save({"engine": name, "log_probabilities": rows}, out)


def _as_tensor(places: list[dict[int, Any]], vocabulary: int) -> torch.Tensor:
    rows = torch.full((len(places), vocabulary), float("nan"))
    for row, place in zip(rows, places, strict=True):
        row[torch.tensor(list(place))] = torch.tensor([entry.logprob for entry in place.values()])
    return rows


def oracle_rows(model: Path, vocabulary: int) -> list[torch.Tensor]:
    from tests.oracle.model import Oracle, exact_rounding

    oracle = Oracle(model, exact_rounding)
    computed = (oracle.logits(tokens) for tokens in prompts(vocabulary))
    return [rows[:-1].log_softmax(-1) for rows in tqdm(computed, desc="float64 oracle", total=len(LENGTHS))]


def compare(model: Path, files: list[Path]) -> None:
    loaded = [torch.load(file) for file in files]
    tables = {f"{n + 1} {found['engine']}": found["log_probabilities"] for n, found in enumerate(loaded)}
    vocabulary = loaded[0]["log_probabilities"][0].shape[1]
    tables["float64 oracle"] = oracle_rows(model, vocabulary)
    print(f"{'':56} {'prompt':>6} {'mean':>9} {'largest':>9} {'KL':>9} {'same best':>9}")
    for (name, rows), (other_name, other_rows) in combinations(tables.items(), 2):
        for length, a, b in zip(LENGTHS, rows, other_rows, strict=True):
            a, b = a.double(), b.double()
            difference, best = (a - b).abs(), (a.argmax(1) == b.argmax(1)).double().mean()
            divergence = (b.exp() * (b - a)).sum(1).mean()
            print(
                f"{name + ' - ' + other_name:56} {length:6} {difference.mean():9.2e} {difference.max():9.2e} "
                f"{divergence:9.2e} {best:9.1%}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    collecting, comparing = commands.add_parser("collect"), commands.add_parser("compare")
    collecting.add_argument("model", type=Path)
    collecting.add_argument("out", type=Path)
    collecting.add_argument("--native", action="store_true")
    collecting.add_argument("--dtype", default="auto", help="of activations; default: bfloat16, the checkpoint's")
    comparing.add_argument("model", type=Path)
    comparing.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    if args.command == "collect":
        collect(args.model, args.out, args.native, args.dtype)
    else:
        compare(args.model, args.files)


if __name__ == "__main__":
    main()
