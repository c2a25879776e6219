"""On a GPU: the same tokens with drafts and without, in batches, chunks, after hits and preemptions, graphs or not."""

from pathlib import Path

import pytest
import torch

from deepinfer_plugin.model_executor.models.tiny import write_tiny
from deepinfer_plugin.verify.cases import with_drafts, without_drafts
from deepinfer_plugin.verify.run import Verification
from tests.end_to_end.conftest import PARITY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

OPTIONS = {"dtype": "bfloat16", "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 30, "block_size": 64}
DRAFTS = 5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    write_tiny(folder, size="parity")
    return folder


@pytest.mark.parametrize("eager", [True, False])
def test_drafts_change_no_token(checkpoint: Path, eager: bool) -> None:
    verification = Verification(
        str(checkpoint), 36, 24, OPTIONS | {"enforce_eager": eager}, lambda line: PARITY.append(line)
    )
    verification.run([*without_drafts(), *(case for case in with_drafts(DRAFTS) if case.drafts == DRAFTS)])
    assert [result for result in verification.results if not result.holds] == []
