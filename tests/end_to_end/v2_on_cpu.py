"""vLLM's V2 runner on a CPU, its kernels and ours interpreted: the same requests in several ways, results as JSON.

python -m tests.end_to_end.v2_on_cpu CHECKPOINT RANKS, in the environment of `environment`
"""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# run by every Python process before anything else: vLLM looks for a Triton backend for CPUs
SITE = """
from types import SimpleNamespace

from triton.backends import backends

backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
"""
ORDINARY = ("batches of 16", "chunks of 7", "prefix hits", "preemptions")
SCHEDULED = ("what pays", "random budgets 0")
DRAFTS = {1: 5, 2: 4}  # on so many ranks, whose checkpoint drafts so many


def cases_on(ranks: int) -> set[str]:
    """By name; besides them the plainest."""
    drafted = [f"{DRAFTS[ranks]} drafts, {what}" for what in (*ORDINARY, *SCHEDULED)]
    return {*drafted, *ORDINARY} if ranks == 1 else {drafted[0], *drafted[-len(SCHEDULED) :]}


def environment(folder: Path, triton: Path) -> dict[str, str]:
    """For a process that runs this; `folder` gets what it needs, `triton` is the package's folder."""
    (folder / "triton").symlink_to(triton.resolve())  # and nothing else of that environment
    (folder / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {
        "PYTHONPATH": path,
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM's own binding wants a NUMA node for every rank
        "TORCHDYNAMO_DISABLE": "1",  # which would ask the interpreter for a device
        "OMP_NUM_THREADS": "1",
    }


def main(checkpoint: str, ranks: int) -> None:
    from deepinfer_plugin.verify.cases import with_drafts, without_drafts
    from deepinfer_plugin.verify.run import Verification

    options: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 64 << 20,
        "enforce_eager": True,
        "tensor_parallel_size": ranks,
    }
    cases = [replace(case, running=min(case.running, 4)) for case in (*without_drafts(), *with_drafts(DRAFTS[ranks]))]
    verification = Verification(checkpoint, 9, 12, options, lambda line: None)
    verification.run([cases[0], *(case for case in cases if case.name in cases_on(ranks))])
    print(json.dumps([asdict(result) | {"holds": result.holds} for result in verification.results]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
