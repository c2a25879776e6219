"""What `deepinfer-plugin verify` asks of a worker, through vLLM's `collective_rpc`."""

from typing import Any


class SpeculationCalls:
    """Of a worker whose runner has a `speculation`, None without drafts."""

    model_runner: Any

    def set_schedule(self, name: str, **values: int) -> None:
        """How many drafts are verified from now on, by the names of `Speculation.set_schedule`."""
        if self.model_runner.speculation is not None:
            self.model_runner.speculation.set_schedule(name, **values)

    def verified_drafts(self) -> int:
        """Since the start, without the placeholders that vLLM counts as drafts."""
        speculation = self.model_runner.speculation
        return 0 if speculation is None else int(speculation.counts.verified.sum())
