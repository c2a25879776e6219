"""DSpark behind vLLM's V2 runner, the one for GPUs, run on a CPU: its kernels and ours are interpreted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_plugin.model_executor.models.tiny import TRAINED

TRITON = next(Path(".venv-kernels").glob("lib/python*/site-packages/triton"), None)


@pytest.mark.skipif(TRITON is None, reason="needs the Triton of .venv-kernels: make .venv-kernels/.ready")
def test_the_same_text_on_the_v2_runner(tmp_path: Path) -> None:
    assert TRITON is not None
    (tmp_path / "triton").symlink_to(TRITON.resolve())  # and nothing else of that environment
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "tests.end_to_end.v2_on_cpu", str(TRAINED)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(results) == 12
    assert [result for result in results if not result["holds"]] == []
    drafted = [result for result in results if "drafts" in result["case"]]
    assert len(drafted) == 7 and all(result["drafts"] > 0 for result in drafted)
