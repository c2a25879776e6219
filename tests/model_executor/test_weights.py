"""`load_packed`: which bytes of a checkpoint's matrix a rank's parameter gets."""

import pytest
import torch

from deepinfer_plugin.model_executor.models.weights import load_packed


def parameter_of(rows: int, columns: int, shard_dim: int | None) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(rows, columns, dtype=torch.uint8), requires_grad=False)
    parameter.shard_dim = shard_dim
    return parameter


def matrix(rows: int, columns: int, first: int = 0) -> torch.Tensor:
    return (torch.arange(rows * columns) + first).to(torch.uint8).view(rows, columns)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_share_rows_or_columns(rank: int) -> None:
    whole = matrix(8, 6)
    by_rows, by_columns = parameter_of(4, 6, 0), parameter_of(8, 3, 1)
    load_packed(by_rows, whole, None, rank)
    load_packed(by_columns, whole, None, rank)
    assert torch.equal(by_rows.data, whole[4 * rank : 4 * rank + 4])
    assert torch.equal(by_columns.data, whole[:, 3 * rank : 3 * rank + 3])


@pytest.mark.parametrize("rank", [0, 1])
def test_two_matrices_of_a_parameter_lie_one_behind_the_other_on_every_rank(rank: int) -> None:
    first, second = matrix(4, 3), matrix(4, 3, first=100)
    parameter = parameter_of(4, 3, 0)
    load_packed(parameter, second, 1, rank)
    load_packed(parameter, first, 0, rank)
    assert torch.equal(parameter.data, torch.cat((first[2 * rank :][:2], second[2 * rank :][:2])))


def test_replicated_matrices_may_differ_in_height() -> None:
    first, second = matrix(5, 3), matrix(2, 3, first=100)
    parameter = parameter_of(7, 3, None)
    load_packed(parameter, first, 0, rank=1)
    load_packed(parameter, second, 1, rank=1)
    assert torch.equal(parameter.data, torch.cat((first, second)))
