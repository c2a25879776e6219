"""Two gloo ranks on this machine: tensor parallelism, and with it expert parallelism."""

import pytest

from tests.end_to_end.conftest import ROUNDING_OFF, record, relative_error, text_tokens
from tests.end_to_end.run_engine import run_engine
from tests.end_to_end.test_parity import TOLERANCE
from tests.oracle.model import Oracle, no_rounding

PROMPTS = [text_tokens(150), text_tokens(37, seed=1), text_tokens(3, seed=2)]


@pytest.mark.parametrize(
    "enable_expert_parallel, packed",
    [
        pytest.param(False, False, id="TP=2"),
        pytest.param(True, False, id="TP=2 with EP"),
        pytest.param(False, True, id="TP=2, packed"),
        pytest.param(True, True, id="TP=2 with EP, packed"),
    ],
)
def test_two_ranks_give_the_oracles_logits(varied_checkpoint, tmp_path, enable_expert_parallel, packed, request):
    got = run_engine(
        varied_checkpoint,
        tmp_path / "out.pt",
        PROMPTS,
        max_tokens=6,
        deepinfer=ROUNDING_OFF | {"packed_weights": packed},
        tensor_parallel_size=2,
        enable_expert_parallel=enable_expert_parallel,
        distributed_executor_backend="mp",
    )
    case, oracle = request.node.callspec.id, Oracle(varied_checkpoint, no_rounding)
    record(f"{case}, whole prefill", error := relative_error(got["prompt"], oracle.logits(PROMPTS[0])), None)
    assert error <= TOLERANCE
    for prompt, tokens, logits in zip(PROMPTS, got["tokens"], got["logits"], strict=True):
        wanted = oracle.logits(prompt + tokens)[len(prompt) - 1 : -1]
        assert wanted.argmax(1).tolist() == tokens
        record(f"{case}, decode after {len(prompt)}", error := relative_error(logits, wanted), None)
        assert error <= TOLERANCE
