"""How many of its drafts each request gets verified, when some number of drafts is to be verified in all."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


def verify_budget(survival: torch.Tensor, budget: int) -> torch.Tensor:
    """Admit the `budget` drafts that are most likely to be reached and accepted.

    Of equal survivals the earlier place comes first, then the request of the smaller index. So a draft never depends on
    the later ones of its own request, and every request's drafts are admitted from the first on.

    Args:
        survival: [num_requests, num_places], fp32: the product of a request's confidences up to each place, so that
            rows do not increase; -inf where there is no draft.
        budget: drafts to admit in all, >= 0; where there are fewer, all of them.

    Returns:
        [num_requests], int32.

    Raises:
        ValueError: survival is not an fp32 matrix, or `budget` is negative.

    Source: runtime specification, section 2.2.
    """
    if survival.dim() != 2 or survival.dtype != torch.float32:
        got = f"{survival.dtype} {tuple(survival.shape)}"
        raise ValueError(f"verify_budget: survival must be fp32 [num_requests, num_places], got {got}")
    if budget < 0:
        raise ValueError(f"verify_budget: budget must not be negative, got {budget}")
    return TABLE(survival, budget)
