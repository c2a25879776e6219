"""Two gloo ranks on this machine: tensor parallelism, and with it expert parallelism."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.end_to_end.conftest import record, relative_error
from tests.end_to_end.run_parallel import PROMPTS
from tests.end_to_end.test_parity import TOLERANCE
from tests.oracle.model import Oracle, no_rounding


@pytest.mark.parametrize("enable_expert_parallel", [False, True], ids=["TP=2", "TP=2 with EP"])
def test_two_ranks_give_the_oracles_logits(varied_checkpoint, tmp_path, enable_expert_parallel, request):
    options = {
        "tensor_parallel_size": 2,
        "enable_expert_parallel": enable_expert_parallel,
        "distributed_executor_backend": "mp",
    }
    # one rank per NUMA node is what vLLM's binding wants
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.end_to_end.run_parallel", str(varied_checkpoint), str(tmp_path / "out.pt")]
    done = subprocess.run(
        [*command, json.dumps(options)],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    got, oracle = torch.load(tmp_path / "out.pt"), Oracle(varied_checkpoint, no_rounding)
    case = request.node.callspec.id
    wanted = oracle.logits(PROMPTS[0])
    record(f"{case}, whole prefill", error := relative_error(got["prompt"], wanted), None)
    assert error <= TOLERANCE
    for prompt, tokens, logits in zip(PROMPTS, got["tokens"], got["logits"], strict=True):
        wanted = oracle.logits(prompt + tokens)[len(prompt) - 1 : -1]
        assert wanted.argmax(1).tolist() == tokens
        record(f"{case}, decode after {len(prompt)}", error := relative_error(logits, wanted), None)
        assert error <= TOLERANCE
