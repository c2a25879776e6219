"""What became of a round's drafts, on its way from the device to the host."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Verified:
    """packed: fp32 on the host, [num_requests, num_places + 2]; complete once `event` has happened."""

    packed: torch.Tensor
    event: torch.cuda.Event | None

    @classmethod
    def fetch(cls, logits: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> "Verified":
        """Start the copy.

        Args:
            logits: fp32 [num_requests, num_places], of the confidences.
            num_sampled: [num_requests], tokens that the requests emitted; num_rejected: rows behind these.
        """
        packed = torch.cat([logits, num_sampled[:, None].float(), num_rejected[:, None].float()], 1)
        if packed.device.type != "cuda":
            return cls(packed, None)
        host = packed.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(host, event)

    def values(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(logits, tokens emitted, rows of logits) of each request."""
        if self.event is not None:
            self.event.synchronize()
        packed = self.packed.numpy()
        emitted, rejected = packed[:, -2:].astype(np.int64).T
        return packed[:, :-2], emitted, emitted + rejected
