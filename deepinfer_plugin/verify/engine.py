"""A vLLM engine in this process, whose scheduling can be bent while it runs."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm import LLM, TokensPrompt

from deepinfer_plugin.verify.requests import VerifyRequest

Text = list[int]  # the tokens that a request emitted


class VerifyEngine:
    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @contextmanager
    def limits(self, rows: int | None, running: int | None) -> Iterator[None]:
        """At most so many rows a step, so that prompts are computed in chunks, and so many requests at once."""
        asked = {"max_num_scheduled_tokens": rows, "max_num_active_reqs": running}
        saved = {name: getattr(self.scheduler, name) for name, most in asked.items() if most is not None}
        for name in saved:
            setattr(self.scheduler, name, asked[name])
        try:
            yield
        finally:
            for name, most in saved.items():
                setattr(self.scheduler, name, most)

    def forget(self) -> None:
        """Empty the prefix cache."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("verify: the prefix cache could not be emptied, requests are still running")

    def set_schedule(self, name: str, **values: int) -> None:
        """How many drafts are verified, see `spec_decode/verification/schedule.py`."""
        self.llm.collective_rpc("set_schedule", args=(name,), kwargs=values)

    def counts(self) -> dict[str, int]:
        """vLLM's counters: preemptions, drafts, accepted drafts, cached prompt tokens."""
        return {metric.name: int(metric.value) for metric in self.llm.get_metrics() if hasattr(metric, "value")}

    def verified_drafts(self) -> int:
        """Since the start."""
        return int(self.llm.collective_rpc("verified_drafts")[0])

    def run(
        self, requests: Sequence[VerifyRequest], done: Callable[[], object], preempt_every: int | None = None
    ) -> list[Text]:
        """Each request's tokens. `done` is called at the end of each; every so many steps all are thrown out."""
        core, texts, steps = self.llm.llm_engine, dict[str, Text](), 0
        for n, request in enumerate(requests):
            core.add_request(str(n), TokensPrompt(prompt_token_ids=request.prompt), request.params.clone())
        while core.has_unfinished_requests():
            for output in core.step():
                if output.finished:
                    texts[output.request_id] = list(output.outputs[0].token_ids)
                    done()
            steps += 1
            if preempt_every is not None and steps % preempt_every == 0:
                self.llm.reset_prefix_cache(reset_running_requests=True)
        return [texts[str(n)] for n in range(len(requests))]


@contextmanager
def start_engine(model: str, **options: Any) -> Iterator[VerifyEngine]:
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(model, disable_log_stats=False, **options)
    try:
        yield VerifyEngine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()
