"""Weights in the checkpoint's bytes, caches of records: the same logits, bit by bit, in a fraction of the memory."""

import pytest
import torch

from deepinfer_plugin.kernels.records import Record
from deepinfer_plugin.kernels.target import Target
from tests.end_to_end.conftest import Engine, start_engine, text_tokens

PROMPT = text_tokens(70)
OF_A_PRODUCT = ("wqkv_a", "wq_b", "wo_a", "wo_b", "wkv", "gate_up_proj", "down_proj", "w13", "w2")


def model_of(engine: Engine) -> torch.nn.Module:
    executor = engine.llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner.model


def test_packed_weights_give_the_same_logits(varied_checkpoint):
    answers, num_bytes = {}, {}
    for packed in (False, True):
        with start_engine(varied_checkpoint, {"packed_weights": packed}) as engine:
            (answers[packed],) = engine.ask(PROMPT, max_tokens=8, prompt_logits=True)
            parameters = dict(model_of(engine).named_parameters())
        quantised = {
            name: p
            for name, p in parameters.items()
            if name.removesuffix("_sf").removesuffix(".weight").rpartition(".")[2] in OF_A_PRODUCT
            and ".compressor." not in name
        }
        assert {p.element_size() for p in quantised.values()} == {1 if packed else 4}
        num_bytes[packed] = sum(p.numel() * p.element_size() for p in quantised.values())
    assert answers[True].token_ids == answers[False].token_ids
    assert torch.equal(answers[True].prompt_logits, answers[False].prompt_logits)
    assert torch.equal(answers[True].logits, answers[False].logits)
    assert 4 < num_bytes[False] / num_bytes[True] < 8  # FP8 is a quarter of fp32, FP4 an eighth, and scales


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_caches_give_the_same_logits(varied_checkpoint, dtype):
    answers, row_bytes = {}, {}
    for packed in (False, True):
        with start_engine(varied_checkpoint, {"packed_kv": packed}, dtype=dtype) as engine:
            whole = engine.ask(PROMPT, max_tokens=8, prompt_logits=True)
            engine.forget()
            with engine.chunks_of(7):
                chunked = engine.ask(PROMPT, max_tokens=8)
            hit = engine.ask(PROMPT[:64] + PROMPT[:20], max_tokens=8)
            answers[packed] = [*whole, *chunked, *hit]
            keys = model_of(engine).layers[0].attn.local_keys.kv_cache
            row_bytes[packed] = keys.shape[2] * keys.element_size()
    assert answers[True][2].num_cached_tokens == answers[False][2].num_cached_tokens > 0
    for got, want in zip(answers[True], answers[False], strict=True):
        assert got.token_ids == want.token_ids and torch.equal(got.logits, want.logits)
    assert torch.equal(answers[True][0].prompt_logits, answers[False][0].prompt_logits)
    width = row_bytes[False] // getattr(torch, dtype).itemsize
    assert row_bytes[True] == Record.FP8.num_bytes(width)


def test_interleaved_codes_give_the_same_logits(varied_checkpoint, monkeypatch):
    """GPUs want another order of the codes' bits; the loader makes it, and the definitions read it."""
    answers = {}
    for interleaves in (False, True):
        monkeypatch.setattr(Target, "interleaves", property(lambda _, on=interleaves: on))
        with start_engine(varied_checkpoint, {"packed_weights": True}) as engine:
            attention, experts = model_of(engine).layers[0].attn, model_of(engine).layers[0].ffn.experts
            weights = attention.wq_b.packed, attention.packed_wo_a, *experts.packed_weights
            assert {weight.interleaved for weight in weights} == {interleaves}
            (answers[interleaves],) = engine.ask(PROMPT, max_tokens=4, prompt_logits=True)
    assert torch.equal(answers[True].prompt_logits, answers[False].prompt_logits)


@pytest.mark.parametrize("packed", [False, True])
def test_dummy_weights_are_numbers(varied_checkpoint, packed):
    """`load_format=dummy`, for benchmarks: random codes, no NaN among them, and products of about the usual size."""
    with start_engine(varied_checkpoint, {"packed_weights": packed}, load_format="dummy") as engine:
        parameters = dict(model_of(engine).named_parameters())
        (answer,) = engine.ask(PROMPT, max_tokens=2, prompt_logits=True)
    assert answer.prompt_logits.isfinite().all()
    if packed:
        assert len(parameters["layers.0.ffn.experts.w13"].unique()) == 256
