"""How many drafts are verified: the budget, what rounds cost, what confidences are worth, and what is said of it."""

import numpy as np
import pytest

from deepinfer_plugin.spec_decode import report
from deepinfer_plugin.spec_decode.verification.budget import best_budget
from deepinfer_plugin.spec_decode.verification.calibration import Calibration
from deepinfer_plugin.spec_decode.verification.cost_model import CostModel, Curve
from deepinfer_plugin.spec_decode.verification.schedule import Drafted, Load
from deepinfer_plugin.spec_decode.verification.state import Speculation


def test_the_budget_has_the_most_tokens_a_second_and_of_equals_the_smallest():
    rng = np.random.default_rng(0)
    for _ in range(500):
        survival, sampling = rng.choice([0.0, 0.25, 0.5, 0.75, 1.0], rng.integers(0, 9)), int(rng.integers(1, 4))
        table = rng.integers(1, 6, len(survival) + 1).astype(float)
        values = [(sampling + sum(sorted(survival)[::-1][:b])) / table[b] for b in range(len(table))]
        assert best_budget(survival, sampling, lambda drafts, table=table: table[drafts]) == values.index(max(values))


def observe(calibration: Calibration, logits: np.ndarray, verified: int, accepted: int) -> None:
    """One request's round."""
    calibration.observe(logits[None], np.array([verified]), np.array([accepted]))


def test_confidences_approach_what_is_accepted():
    rng, calibration = np.random.default_rng(0), Calibration(2)
    slope, offset = 0.5, -0.7
    for _ in range(20_000):
        logits = rng.normal(0, 2, 2)
        chances = 1 / (1 + np.exp(-(slope * logits + offset)))
        passed = rng.random(2) < chances
        observe(calibration, logits, 2, int(passed.cumprod().sum()))
    # a line fitted to some 700 observations of remembered rounds: its error is below 3 / sqrt(700 * 0.2) = 0.25
    assert np.abs(calibration.lines - [slope, offset]).max() < 0.25
    assert calibration.error().max() < 0.1


def test_only_places_that_were_reached_are_learnt_from():
    calibration = Calibration(3)
    observe(calibration, np.zeros(3), 2, 0)  # the second was verified behind a rejected first
    assert calibration.verified.sum(1).tolist() == [1, 0, 0] and calibration.accepted.sum() == 0
    observe(calibration, np.zeros(3), 2, 2)
    assert calibration.verified.sum(1).tolist() == [2, 1, 0] and calibration.accepted.sum(1).tolist() == [1, 1, 0]


def test_requests_of_a_round_count_as_one_after_the_other():
    rng, together, apart = np.random.default_rng(1), Calibration(4), Calibration(4)
    for _ in range(40):
        logits, verified = rng.normal(0, 3, (16, 4)), rng.integers(0, 5, 16)
        accepted = (verified * rng.random(16)).round().astype(int)
        together.observe(logits, verified, accepted)
        for row in zip(logits, verified, accepted, strict=True):
            observe(apart, *row)
    np.testing.assert_allclose(together.lines, apart.lines)
    np.testing.assert_allclose(together.error(), apart.error())


@pytest.mark.parametrize("logit", [np.nan, np.inf, -np.inf, 1e300])
def test_a_broken_confidence_breaks_nothing(logit):
    calibration = Calibration(1)
    for _ in range(600):
        observe(calibration, np.array([logit]), 1, 1)
    assert np.isfinite(calibration.lines).all() and np.isfinite(calibration.confidence(np.array([[logit]]))).all()


def test_costs_start_as_measured_and_follow_what_happens():
    curve = Curve()
    for size, seconds in ((1, 1.0), (8, 2.0), (64, 4.0)):
        curve.start(size, seconds)
    np.testing.assert_allclose(curve.seconds(np.array([1, 8, 36, 64])), [1, 2, 3, 4])
    assert curve.seconds(np.array([128]))[0] > 4  # larger than any: the rise goes on
    for _ in range(200):
        curve.add(8, 0.0, 3.0)
    np.testing.assert_allclose(curve.seconds(np.array([1, 8, 64])), [1.5, 3, 6])  # the others by the same factor
    curve.add(8, 0.0, 1000.0)  # one round that something interrupted
    assert curve.seconds(np.array([8]))[0] < 3.3


def test_context_costs_what_it_is_seen_to_cost():
    curve, rng = Curve(), np.random.default_rng(0)
    for _ in range(2000):
        context = float(rng.integers(0, 10_000))
        curve.add(4, context, 1.0 + 1e-4 * context)
    assert abs(curve.slope - 1e-4) < 2e-5


def test_larger_rounds_are_never_cheaper():
    curve = Curve()
    for size, seconds in ((1, 1.0), (8, 0.5), (64, 4.0)):
        curve.start(size, seconds)
    assert (np.diff(curve.seconds(np.arange(1, 100))) >= 0).all()


def test_the_error_of_the_costs_is_that_of_predictions():
    cost = CostModel()
    cost.observe_rows(4, 0.0, 1.0)  # nothing was predicted yet
    assert cost.measured == 0
    cost.observe_rows(4, 0.0, 1.5)
    assert (cost.error, cost.measured) == (0.5, 1.5)


@pytest.mark.parametrize("marginal, budget", [(1e-6, 10), (10.0, 0)])
def test_drafts_are_verified_if_rows_are_cheap(marginal, budget):
    speculation = Speculation(5, scheduled=True)
    for rows in (1, 2, 4, 8, 16):
        speculation.cost.rows.start(rows, 1 + marginal * (rows - 1))
    drafted = Drafted(["a", "b"], np.full((2, 5), 3.0), np.array([5, 5]))
    for _ in range(2):  # the second is decided by the first's confidences
        admitted = speculation.admit(drafted, Load(2, 2, 0.0))
    assert sum(admitted) == budget


def test_unknown_schedules_are_refused():
    with pytest.raises(ValueError, match="must be everything, pays or random, got 'all'"):
        Speculation(5, scheduled=True).set_schedule("all")


def test_a_line_of_the_log_says_what_was_drafted_and_what_became_of_it(monkeypatch, tmp_path):
    lines = []
    monkeypatch.setattr(report, "LINE_EVERY", 0.0)
    monkeypatch.setattr(report.logger, "info", lines.append)
    speculation = Speculation(3, scheduled=False)
    speculation.reporter = report.Reporter(tmp_path / "numbers", 3)
    speculation.admit(Drafted(["a", "b"], np.zeros((2, 3)), np.array([3, 1])), Load(2, 2, 0.0))
    counts = np.array([3, 1])
    speculation.observe(np.stack([speculation.logits_of(name) for name in "ab"]), counts, counts)
    assert len(lines) == 1
    assert "drafted 2/2/2, scheduled 2/1/1, verified 2/1/1, accepted 1/1/0" in lines[0]
    assert "2.00 tokens a verified request, 4.0 drafts a round" in lines[0]
    for name, values in speculation.numbers().items():  # as another process reads them
        np.testing.assert_array_equal(report.read(tmp_path / "numbers")[name], values)


def test_without_a_file_there_are_no_numbers(tmp_path):
    assert report.read(tmp_path / "numbers") is None
