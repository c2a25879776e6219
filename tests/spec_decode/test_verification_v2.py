"""What scheduled verification behind the V2 runner is made of; the whole of it runs in end_to_end/test_v2_runner.py."""

import numpy as np
import pytest
import torch

from deepinfer_plugin.spec_decode.verification.cost_model import CostModel
from deepinfer_plugin.spec_decode.verification.manager_v2 import assign
from deepinfer_plugin.spec_decode.verification.round_times import LAG, RoundTimes
from deepinfer_plugin.spec_decode.verification.verified import Verified


def test_a_round_costs_what_its_graph_computes():
    cost = CostModel(captured=(1, 8, 16))
    for rows, seconds in ((1, 1.0), (8, 2.0), (16, 3.0), (32, 7.0)):
        cost.rows.start(rows, seconds)
    assert cost.round(np.arange(2, 18), 0.0, 0).tolist() == pytest.approx([2.0] * 7 + [3.0] * 8 + [3.25])
    cost.observe_rows(5, 0.0, 2.5)  # seen in a graph of 8 rows
    assert cost.error == 0.5 and cost.round(np.array([2, 8]), 0.0, 0).tolist() == [2.5, 2.5]


def test_drafts_are_split_by_survival_among_those_that_requests_have():
    confidence = torch.tensor([[0.9, 0.9, 0.9], [0.5, 0.9, 0.9], [1.0, 1.0, 1.0]])
    capacities = torch.tensor([1, 3, 2], dtype=torch.int32)  # of slots 2, 0, 1
    assign(confidence, torch.tensor([2, 0, 1]), capacities, 4, 3)
    assert capacities.tolist() == [1, 3, 0]  # survivals: 1 | 0.9, 0.81, 0.73 | 0.5, 0.45


def test_times_are_read_some_rounds_later_and_rounds_without_an_end_never():
    times = RoundTimes(torch.device("cpu"))
    for rows in range(LAG + 2):
        times.begin()
        times.drafts(rows, 10.0 * rows, is_decode=True)
        times.end(drafting=rows % 2)
        times.begin()  # a round that fails in the middle
    done = list(times.finished())
    assert [d.rows for d in done] == [0, 1] and [d.context for d in done] == [0.0, 10.0]
    assert all(d.target_seconds > 0 and d.is_decode for d in done)
    assert done[0].draft_seconds == 0 and done[1].draft_seconds > 0
    assert list(times.finished()) == []


def test_what_became_of_drafts_arrives_as_it_was():
    logits = torch.tensor([[0.5, -1.0], [torch.nan, 2.0]])
    verified = Verified.fetch(logits, torch.tensor([3, 1], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32))
    got, emitted, rows = verified.values()
    np.testing.assert_array_equal(got, logits.numpy())
    assert emitted.tolist() == [3, 1] and rows.tolist() == [3, 3]
