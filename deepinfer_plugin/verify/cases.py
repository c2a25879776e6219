"""The ways in which the same requests are served, and what shows that a way was really taken."""

from dataclasses import dataclass

BATCHES = (1, 2, 4, 16)
PREEMPT_EVERY = 6  # steps
DRAFTED = "verified drafts"  # our count: vLLM's has its placeholders in it
CACHED = "vllm:prefix_cache_hits"
PREEMPTED = "vllm:num_preemptions"


@dataclass(frozen=True)
class Case:
    """name: for the table. drafts: num_speculative_tokens of the engine, 0 for none. schedule: see
    `spec_decode/verification/schedule.py`. running: requests at once. rows: most rows of a step, so that prompts are
    computed in chunks. again: serve twice, compare the second time. shown_by: a counter that must rise.
    """

    name: str
    drafts: int
    schedule: tuple[str, dict[str, int]] = ("everything", {})
    running: int = 16
    rows: int | None = None
    again: bool = False
    preempt_every: int | None = None
    shown_by: str | None = None


def without_drafts() -> list[Case]:
    """All against the first, which is the plainest: one request at a time, whole prompts."""
    cases = [Case(f"batches of {running}", 0, running=running) for running in BATCHES]
    cases += [Case(f"chunks of {rows}", 0, rows=rows) for rows in (7, 64)]
    cases += [Case("prefix hits", 0, again=True, shown_by=CACHED)]
    return cases + [Case("preemptions", 0, preempt_every=PREEMPT_EVERY, shown_by=PREEMPTED)]


def with_drafts(most: int) -> list[Case]:
    """most: the checkpoint's block size, or what the user wants."""
    shorter = [Case(f"{k} drafts", k, shown_by=DRAFTED) for k in range(1, most)]
    name = f"{most} drafts"
    whole = [Case(f"{name}, batches of {running}", most, running=running, shown_by=DRAFTED) for running in BATCHES]
    bent = [
        Case(f"{name}, what pays", most, ("pays", {}), shown_by=DRAFTED),
        *(
            Case(f"{name}, random budgets {seed}", most, ("random", {"seed": seed}), shown_by=DRAFTED)
            for seed in range(3)
        ),
        Case(f"{name}, random budgets, batches of 3", most, ("random", {"seed": 3}), running=3, shown_by=DRAFTED),
        *(Case(f"{name}, chunks of {rows}", most, rows=rows, shown_by=DRAFTED) for rows in (7, 64)),
        Case(f"{name}, prefix hits", most, again=True, shown_by=CACHED),
        Case(f"{name}, preemptions", most, preempt_every=PREEMPT_EVERY, shown_by=PREEMPTED),
        Case(
            f"{name}, random budgets, chunks, preemptions",
            most,
            ("random", {"seed": 4}),
            rows=33,
            preempt_every=PREEMPT_EVERY,
            shown_by=PREEMPTED,
        ),
    ]
    return shorter + whole + bent
