"""Coupled verification: how many drafts of each request are the target's own choices, and the tokens that it emits."""

import torch

from deepinfer_plugin.kernels.dispatch import Dispatch

TABLE = Dispatch(__name__, cpu="reference", nvidia="triton_nvidia")


def accept_drafts(
    chosen: torch.Tensor, drafts: torch.Tensor, first_rows: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A request emits the target's choices up to the first that its draft does not foresee, that one included.

    Args:
        chosen: [num_rows], int64: the target's choice of each row. A request's rows follow each other, that of its
            newest token first, then those of its drafts.
        drafts: [num_rows], an integer dtype: the token that was the row's input; a negative one is no draft and ends
            what can be accepted. The first row of a request has none, whatever stands there.
        first_rows: [num_requests + 1], int32: of each request, and the end of the last one.
        width: of the result, at least the rows of any request.

    Returns:
        tokens [num_requests, width], int64, -1 behind what a request emits; and how many it emits, [num_requests],
        int32, at least 1.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: runtime specification, section 3.4.
    """
    if chosen.dim() != 1 or chosen.dtype != torch.int64:
        got = f"{chosen.dtype} {tuple(chosen.shape)}"
        raise ValueError(f"accept_drafts: chosen must be int64 [num_rows], got {got}")
    if drafts.shape != chosen.shape or drafts.is_floating_point():
        got = f"{drafts.dtype} {tuple(drafts.shape)}"
        raise ValueError(f"accept_drafts: drafts must be integers {list(chosen.shape)}, got {got}")
    if first_rows.dim() != 1 or first_rows.dtype != torch.int32 or not len(first_rows):
        got = f"{first_rows.dtype} {tuple(first_rows.shape)}"
        raise ValueError(f"accept_drafts: first_rows must be int32 [num_requests + 1], got {got}")
    if width < 1:
        raise ValueError(f"accept_drafts: width must be at least 1, got {width}")
    return TABLE(chosen, drafts, first_rows, width)
