"""Which drafts are verified when a number of them is: vLLM leaves the order of equals to `topk`, ours is fixed."""

from collections.abc import Callable
from typing import Any


def wrap(original: Callable[..., None]) -> Callable[..., None]:
    def _assign_draft_token_budget_compiled(
        confidence_probs: Any, idx_mapping: Any, capacities: Any, draft_budget: int, num_steps: int
    ) -> None:
        from deepinfer_plugin.spec_decode.verification.manager_v2 import assign

        assign(confidence_probs, idx_mapping, capacities, draft_budget, num_steps)

    return _assign_draft_token_budget_compiled
