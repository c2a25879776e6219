"""The definition of `verify_budget`: what every other module of this folder must equal."""

import torch


def verify_budget(survival: torch.Tensor, budget: int) -> torch.Tensor:
    num_requests, _ = survival.shape
    flat = survival.T.flatten()  # earlier places first, then requests by index: a stable sort keeps that order
    admitted = flat.sort(descending=True, stable=True).indices[:budget]
    admitted = admitted[flat[admitted] != -torch.inf]
    return torch.bincount(admitted % max(num_requests, 1), minlength=num_requests).int()
