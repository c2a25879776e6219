"""DSpark's numbers at /metrics, beside vLLM's own; entry point of group `vllm.stat_logger_plugins`."""

import atexit
from typing import Any

import numpy as np
from prometheus_client import Counter, Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from deepinfer_plugin.config_hook import is_ours
from deepinfer_plugin.spec_decode.report import metrics_file, read

LABELS = ("model_name", "engine")
TOTALS = {
    "rounds": ("requests", "Rounds of requests that verified drafts."),
    "emitted": ("emitted_tokens", "Tokens of these rounds: accepted drafts and the token behind them."),
    "engine_rounds": ("rounds", "Rounds of the engine with drafts."),
    "budget": ("budget", "Drafts admitted to verification, summed over the engine's rounds."),
}
BY_PLACE = {
    "drafted": "Drafts made.",
    "scheduled": "Drafts admitted to verification.",
    "verified": "Drafts that the target computed.",
    "accepted": "Drafts that were the target's own choice.",
}


class DSparkMetrics(StatLoggerBase):
    """Names begin with `deepinfer:`; those with `vllm:` vLLM takes off the registry when it builds its own logger."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        speculative = vllm_config.speculative_config
        is_first = vllm_config.parallel_config._api_process_rank <= 0  # of several API servers one counts
        self.is_on = speculative is not None and is_ours(speculative) and is_first
        if not self.is_on:
            return
        self.file = metrics_file(vllm_config, engine_index)
        atexit.register(self.file.unlink, missing_ok=True)  # vLLM ends its workers by a signal
        own = vllm_config.model_config.served_model_name, str(engine_index)
        self._counters: dict[str, list[Any]] = {}
        for key, (name, what) in TOTALS.items():
            self._counters[key] = [_metric(Counter, name, what).labels(*own)]
        places = range(speculative.num_speculative_tokens)
        for key, what in BY_PLACE.items():
            counter = _metric(Counter, f"{key}_tokens", what, "position")
            self._counters[key] = [counter.labels(*own, place) for place in places]
        calibration = _metric(
            Gauge, "calibration_error", "Mean distance of confidence and acceptance of a place.", "position"
        )
        cost = _metric(Gauge, "cost_error", "Mean distance of a round's predicted and real time, relative.")
        self._gauges = {
            "calibration_error": [calibration.labels(*own, place) for place in places],
            "cost_error": [cost.labels(*own)],
        }
        self._seen = {key: np.zeros(len(counters)) for key, counters in self._counters.items()}

    def record(self, *args: Any, **kwargs: Any) -> None:
        if not self.is_on or (numbers := read(self.file)) is None:
            return
        for key, counters in self._counters.items():
            now = np.atleast_1d(numbers[key])
            for counter, more in zip(counters, now - self._seen[key], strict=True):
                counter.inc(max(more, 0))  # a worker that starts over counts from 0
            self._seen[key] = now
        for key, gauges in self._gauges.items():
            for gauge, value in zip(gauges, np.atleast_1d(numbers[key]), strict=True):
                gauge.set(value)

    def log_engine_initialized(self) -> None:
        """vLLM's loggers say enough."""


_metrics: dict[str, Any] = {}


def _metric(kind: type, name: str, what: str, *more_labels: str) -> Any:
    """Engines of one process share a metric, and differ by label."""
    full = f"deepinfer:dspark_{name}"
    if full not in _metrics:
        options = {"multiprocess_mode": "mostrecent"} if kind is Gauge else {}
        _metrics[full] = kind(full, what, (*LABELS, *more_labels), **options)
    return _metrics[full]
