"""V4.1's defaults in vLLM's configuration, the user's own choices, and what is refused at the start."""

import logging

import pytest

from deepinfer_plugin.config_hook import BLOCK_SIZE


@pytest.fixture
def start(tiny_checkpoint):
    from vllm.engine.arg_utils import EngineArgs

    return lambda **options: EngineArgs(str(tiny_checkpoint), **options).create_engine_config()


def test_vllm_keeps_chunked_prefill_prefix_caching_and_our_block_size(start):
    config = start()
    assert config.scheduler_config.enable_chunked_prefill
    assert config.cache_config.enable_prefix_caching
    assert config.cache_config.block_size == BLOCK_SIZE
    assert config.model_config.quantization == "deepinfer"
    assert config.model_config.tokenizer_mode == "deepseek_v41"


def test_window_rows_are_kept_for_hits_at_every_block(start):
    assert start().cache_config.prefix_cache_retention_interval is None


def test_the_users_own_choices_stay(start):
    cache = start(block_size=32, prefix_cache_retention_interval=256).cache_config
    assert (cache.block_size, cache.prefix_cache_retention_interval) == (32, 256)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_dtypes_are_taken(start, dtype):
    assert str(start(dtype=dtype).model_config.dtype) == f"torch.{dtype}"


def test_half_precision_is_refused(start):
    with pytest.raises(Exception, match="float16"):
        start(dtype="float16")


def dspark(**options):
    return {"speculative_config": {"method": "dspark", "num_speculative_tokens": 3, **options}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, "a KV cache of dtype fp8, only auto"),
        ({"enable_prompt_embeds": True}, "prompt embeddings: Engram needs token ids"),
        ({"enable_lora": True}, "LoRA"),
        ({"enable_expert_parallel": True, "data_parallel_size": 2}, "expert parallelism over data-parallel ranks"),
        ({"use_fp64_gumbel": True}, "use_fp64_gumbel"),
        (dspark(rejection_sample_method="block"), "rejection_sample_method block, only standard"),
        (dspark(draft_sample_method="probabilistic"), "draft_sample_method probabilistic, only greedy"),
        (dspark(use_local_argmax_reduction=True), "use_local_argmax_reduction"),
    ],
)
def test_what_is_not_built_is_refused_by_name(start, options, message):
    with pytest.raises(Exception, match=message):
        start(**options)


def test_an_unknown_option_stops_the_start(start):
    with pytest.raises(Exception, match="unknown option 'overlap'"):
        start(additional_config={"deepinfer": {"overlap": True}})


def test_forcing_an_unknown_op_stops_the_start(start):
    with pytest.raises(Exception, match="unknown op 'softmax'; known: .*swiglu"):
        start(additional_config={"deepinfer": {"force_kernels": {"softmax": "reference"}}})


def test_forcing_a_module_that_does_not_exist_stops_the_start(start):
    with pytest.raises(Exception, match="swiglu has no module 'cuda', only .*reference"):
        start(additional_config={"deepinfer": {"force_kernels": {"swiglu": "cuda"}}})


@pytest.mark.parametrize("option", ["activation_rounding", "kv_rounding"])
def test_a_switch_that_changes_the_text_is_labelled(start, option):
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda line: lines.append(line.getMessage())
    logger = logging.getLogger("vllm.deepinfer_plugin.config_hook")
    logger.addHandler(handler)
    try:
        start(additional_config={"deepinfer": {option: False}})
    finally:
        logger.removeHandler(handler)
    assert [line for line in lines if option in line and "not the trained model's" in line]
