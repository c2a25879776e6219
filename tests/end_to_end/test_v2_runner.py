"""DSpark behind vLLM's V2 runner, the one for GPUs, run on a CPU: its kernels and ours are interpreted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_plugin.model_executor.models.tiny import TRAINED
from tests.end_to_end.v2_on_cpu import cases_on, environment

TRITON = next(Path(".venv-kernels").glob("lib/python*/site-packages/triton"), None)


@pytest.mark.skipif(TRITON is None, reason="needs the Triton of .venv-kernels: make .venv-kernels/.ready")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_text_on_the_v2_runner(tmp_path: Path, tiny_checkpoint: Path, ranks: int) -> None:
    assert TRITON is not None
    checkpoint = TRAINED if ranks == 1 else tiny_checkpoint  # whose shared experts can be split
    done = subprocess.run(
        [sys.executable, "-m", "tests.end_to_end.v2_on_cpu", str(checkpoint), str(ranks)],
        env=environment(tmp_path, TRITON),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(results) == 1 + len(cases_on(ranks))
    assert [result for result in results if not result["holds"]] == []
    assert all(result["drafts"] > 0 for result in results if "drafts" in result["case"])
