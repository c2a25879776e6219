"""Serve the same requests in every way, compare their tokens with the plainest way's, and say what differs."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from tqdm import tqdm

from deepinfer_plugin.verify.cases import DRAFTED, Case, with_drafts, without_drafts
from deepinfer_plugin.verify.engine import Text, VerifyEngine, start_engine
from deepinfer_plugin.verify.requests import VerifyRequest, make_requests

LONGEST = 100  # tokens of a prompt
ENGINE = {"max_num_seqs": 16, "block_size": 32, "enable_prefix_caching": True}  # hits on short prompts too


@dataclass(frozen=True)
class Result:
    """first: (request, place) of the first token that differs. shown: how often the case's counter rose."""

    case: str
    requests: int
    tokens: int
    drafts: int
    mismatches: int
    first: tuple[int, int] | None
    shown: int | None

    @property
    def holds(self) -> bool:
        return not self.mismatches and self.shown != 0

    @property
    def line(self) -> str:
        verdict = "same" if self.holds else "NOT TRIED" if not self.mismatches else f"{self.mismatches} DIFFER"
        where = f"  request {self.first[0]} from token {self.first[1]}" if self.first else ""
        return f"{self.case:52} {self.requests:8} {self.tokens:8} {self.drafts:8}  {verdict}{where}"


HEADER = f"{'case':52} {'requests':>8} {'tokens':>8} {'drafts':>8}"


def first_difference(got: Text, want: Text) -> int | None:
    """The first place where two texts differ, None if they do not."""
    if got == want:
        return None
    return next((n for n, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))


class Verification:
    """What the cases share: the requests, the plainest way's texts, and the way to report.

    options: keyword arguments of `vllm.LLM`. report: gets the table line by line.
    """

    def __init__(
        self, model: str, count: int, max_tokens: int, options: dict[str, Any], report: Callable[[str], object]
    ) -> None:
        self.model, self.count, self.max_tokens, self.options, self.report = model, count, max_tokens, options, report
        self.results: list[Result] = []
        self.wanted: list[Text] = []
        self.block_size = 0
        self.progress = tqdm(total=0, desc="verify", unit=" requests")

    def run(self, cases: list[Case]) -> None:
        self.progress.total += self.count * sum(1 + case.again for case in cases)
        for drafts, group in groupby(cases, lambda case: case.drafts):
            speculation = {"method": "dspark", "num_speculative_tokens": drafts}
            more = {"speculative_config": speculation} if drafts else {}
            with start_engine(self.model, **{**ENGINE, **self.options, **more}) as engine:
                self._run(engine, list(group))

    def _run(self, engine: VerifyEngine, cases: list[Case]) -> None:
        config = engine.llm.llm_engine.model_config
        self.block_size = config.hf_config.dspark_block_size
        longest = min(LONGEST, config.max_model_len - self.max_tokens)
        if longest < 1:
            raise ValueError(f"verify: max_tokens must be below max_model_len = {config.max_model_len}")
        tokenizer, size = engine.llm.get_tokenizer(), config.get_vocab_size()
        requests = make_requests(tokenizer, size, self.count, self.max_tokens, longest)
        for case in cases:
            self.progress.set_postfix_str(case.name)
            texts, counted = serve(engine, case, requests, self.progress.update)
            self.wanted = self.wanted or texts
            self.results.append(compare(case, texts, self.wanted, counted))
            self.progress.clear()
            self.report(self.results[-1].line)


def verify(
    model: str,
    count: int,
    max_tokens: int,
    drafts: int | None,
    options: dict[str, Any],
    report: Callable[[str], object],
) -> list[Result]:
    """Every case. drafts: the most of a round, 0 for no speculation, None for the checkpoint's block size."""
    verification = Verification(model, count, max_tokens, options, report)
    report(HEADER)
    verification.run(without_drafts())
    if drafts != 0:
        verification.run(with_drafts(drafts or verification.block_size))
    verification.progress.close()
    return verification.results


def serve(
    engine: VerifyEngine, case: Case, requests: list[VerifyRequest], done: Callable[[], object]
) -> tuple[list[Text], dict[str, int]]:
    """The texts, and how far each counter rose."""
    engine.forget()
    if case.drafts:
        engine.set_schedule(case.schedule[0], **case.schedule[1])
    with engine.limits(case.rows, case.running):
        if case.again:
            engine.run(requests, done)
        before = counts(engine, case)
        texts = engine.run(requests, done, case.preempt_every)
    return texts, {name: value - before.get(name, 0) for name, value in counts(engine, case).items()}


def counts(engine: VerifyEngine, case: Case) -> dict[str, int]:
    return engine.counts() | ({DRAFTED: engine.verified_drafts()} if case.drafts else {})


def compare(case: Case, texts: list[Text], wanted: list[Text], counted: dict[str, int]) -> Result:
    places = [first_difference(got, want) for got, want in zip(texts, wanted, strict=True)]
    different = [(n, place) for n, place in enumerate(places) if place is not None]
    return Result(
        case.name,
        len(texts),
        sum(map(len, texts)),
        counted.get(DRAFTED, 0),
        len(different),
        different[0] if different else None,
        None if case.shown_by is None else counted.get(case.shown_by, 0),
    )


def main(model: str, count: int, max_tokens: int, drafts: int | None, options: dict[str, Any], as_json: bool) -> int:
    """The command. Returns the exit status: 1 if anything differs, or a case did not happen."""
    results = verify(model, count, max_tokens, drafts, options, (lambda line: None) if as_json else tqdm.write)
    failed = [result for result in results if not result.holds]
    if as_json:
        tqdm.write(json.dumps([asdict(result) | {"holds": result.holds} for result in results], indent=2))
    else:
        total = sum(result.mismatches for result in results)
        tqdm.write(f"{len(results)} cases, {sum(r.requests for r in results)} requests, {total} mismatches")
    return 1 if failed else 0
