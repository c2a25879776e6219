"""vLLM's V2 runner on a CPU, its kernels and ours interpreted: the same requests in several ways, results as JSON.

python -m tests.end_to_end.v2_on_cpu CHECKPOINT
"""

import json
import os
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any


class Interpreter:
    """What vLLM asks of a Triton backend for CPUs."""

    @staticmethod
    def is_active() -> bool:
        return True


def main(checkpoint: str) -> None:
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=Interpreter)  # before vLLM looks
    from deepinfer_plugin.verify.cases import with_drafts, without_drafts
    from deepinfer_plugin.verify.run import Verification

    options: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 64 << 20,
        "enforce_eager": True,
    }
    wanted = {"batches of 16", "chunks of 7", "prefix hits", "preemptions"}
    wanted |= {f"5 drafts, {what}" for what in wanted}
    wanted |= {"5 drafts, what pays", "5 drafts, random budgets 0", "5 drafts, random budgets, chunks, preemptions"}
    cases = [replace(case, running=min(case.running, 4)) for case in (*without_drafts(), *with_drafts(5))]
    verification = Verification(checkpoint, 9, 12, options, lambda line: None)
    verification.run([cases[0], *(case for case in cases if case.name in wanted)])
    print(json.dumps([asdict(result) | {"holds": result.holds} for result in verification.results]))


if __name__ == "__main__":
    main(sys.argv[1])
