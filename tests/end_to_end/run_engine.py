"""A few prompts through an engine in a process of its own: for several ranks, and for what leaves traces in a process.

python -m tests.end_to_end.run_engine CHECKPOINT OUT.pt '{"prompts": [[5, 6]], "max_tokens": 4, "engine": {...}}'
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.end_to_end.conftest import start_engine


def run_engine(
    checkpoint: Path,
    out: Path,
    prompts: list[list[int]],
    max_tokens: int,
    deepinfer: dict[str, Any] | None = None,
    **engine: Any,
) -> dict[str, Any]:
    """What `main` saves, from a process of its own."""
    job = {"prompts": prompts, "max_tokens": max_tokens, "deepinfer": deepinfer, "engine": engine}
    done = subprocess.run(
        [sys.executable, "-m", "tests.end_to_end.run_engine", str(checkpoint), str(out), json.dumps(job)],
        # unbound: vLLM's own binding wants a NUMA node for every rank
        env=os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return torch.load(out)


def main(checkpoint: str, out: str, job: str) -> None:
    """Save tokens and logits of every prompt, the first prompt's logits, and the counts of vLLM's metrics."""
    given = json.loads(job)
    with start_engine(Path(checkpoint), given["deepinfer"], **given["engine"]) as engine:
        answers = engine.ask(*given["prompts"], max_tokens=given["max_tokens"])
        counts = {metric.name: metric.value for metric in engine.llm.get_metrics() if hasattr(metric, "value")}
        (prompt,) = engine.ask(given["prompts"][0], prompt_logits=True)
    torch.save(
        {
            "tokens": [answer.token_ids for answer in answers],
            "logits": [answer.logits for answer in answers],
            "prompt": torch.cat([prompt.prompt_logits, prompt.logits]),
            "counts": counts,
        },
        out,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
