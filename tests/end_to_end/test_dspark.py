"""DSpark in the engine: the text without drafts, whatever is asked of sampling; and what stops the start."""

import random
import shutil
import string

import pytest
from safetensors.torch import load_file, save_file

from deepinfer_plugin.model_executor.models.tiny import TRAINED
from tests.end_to_end.conftest import start_engine, text_tokens
from tests.end_to_end.run_engine import run_engine

SPECULATION = {"method": "dspark", "num_speculative_tokens": 5}
ALWAYS = {"scheduled_verification": False}
ASKED = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.05, "logit_bias": {7: 5.0, 40: -5.0}},
    {"temperature": 0.0, "repetition_penalty": 1.3, "bad_words": ["the"]},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.5, "min_tokens": 6},
    {"temperature": 1.0, "allowed_token_ids": list(range(60, 120)), "logprobs": 3},
]


def identifiers(count: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(string.ascii_letters + string.digits + "-_.", k=40)) for _ in range(count)]


def answers(engine, chunk=1024):
    """Texts, with the log-probabilities where they were asked for, of requests that join one after another."""
    from vllm import SamplingParams, TokensPrompt

    engine.forget()
    core, results = engine.llm.llm_engine, {}
    prompts = [text_tokens(length, seed=length) for length in (1, 40, 2, 90, 1, 31)]
    with engine.chunks_of(chunk):
        for n, (prompt, asked) in enumerate(zip(prompts, ASKED, strict=True)):
            params = SamplingParams(max_tokens=16, seed=n, **asked)
            core.add_request(str(n), TokensPrompt(prompt_token_ids=prompt), params)
            results |= {o.request_id: o for o in core.step() if o.finished}  # some are under way when the next joins
        while core.has_unfinished_requests():
            results |= {o.request_id: o for o in core.step() if o.finished}
    outputs = [results[str(n)].outputs[0] for n in range(len(ASKED))]
    logprobs = [{token: value.logprob for token, value in place.items()} for place in outputs[-1].logprobs]
    return [list(output.token_ids) for output in outputs], logprobs


def copies(engine) -> list[str]:
    """Fifty long identifiers at temperature 0, each given twice and begun a third time."""
    prompts = [f"{name} {name} {name[:6]}" for name in identifiers(50)]
    from vllm import SamplingParams

    outputs = engine.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def wanted():
    with start_engine(TRAINED, max_logprobs=5, logprobs_mode="raw_logprobs") as engine:
        return answers(engine), copies(engine)


@pytest.fixture(scope="module")
def drafting():
    options = {"max_logprobs": 5, "logprobs_mode": "raw_logprobs", "speculative_config": SPECULATION}
    with start_engine(TRAINED, ALWAYS, **options) as engine:
        yield engine


@pytest.mark.parametrize("chunk", [1024, 7])
def test_every_sampling_parameter_gives_the_text_without_drafts(wanted, drafting, chunk):
    """Seeded requests in chunks, and requests of one token that join a batch: vLLM pads these with drafts of -1."""
    before = drafting.verified_drafts()
    assert answers(drafting, chunk) == wanted[0]
    assert drafting.verified_drafts() > before


def test_fifty_identifiers_are_as_without_drafts(wanted, drafting):
    before = drafting.verified_drafts()
    assert copies(drafting) == wanted[1]
    assert drafting.verified_drafts() > before


def test_drafts_end_where_the_context_does(tiny_checkpoint):
    texts = []
    for options in ({}, {"speculative_config": {"method": "dspark", "num_speculative_tokens": 4}}):
        with start_engine(tiny_checkpoint, ALWAYS if options else {}, max_model_len=64, **options) as engine:
            (answer,) = engine.ask(text_tokens(50), max_tokens=14)
            texts.append(answer.token_ids)
    assert len(texts[0]) == 14 and texts[1] == texts[0]


def test_two_ranks_draft_together(tiny_checkpoint, tmp_path):
    prompts, tokens = [text_tokens(40), text_tokens(9, seed=1)], []
    for name, options in (("off", {}), ("on", {"speculative_config": SPECULATION | {"num_speculative_tokens": 3}})):
        got = run_engine(
            tiny_checkpoint,
            tmp_path / name,
            prompts,
            max_tokens=10,
            deepinfer=ALWAYS if options else None,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            **options,
        )
        tokens.append(got["tokens"])
    assert got["counts"]["vllm:spec_decode_num_draft_tokens"] > 0
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("verification", ["coupled", "ratio"])
def test_the_option_decides_how_drafts_are_verified(tiny_checkpoint, verification):
    options = ALWAYS | {"verification": verification}
    speculation = SPECULATION | {"num_speculative_tokens": 2}
    with start_engine(tiny_checkpoint, options, speculative_config=speculation) as engine:
        (answer,) = engine.ask(text_tokens(20), max_tokens=8, temperature=1.0, seed=3)
        runner = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        assert runner.is_coupled == (verification == "coupled") == (not runner.proposals)
    assert len(answer.token_ids) == 8


@pytest.mark.parametrize(
    ("speculation", "deepinfer", "message"),
    [
        ({"num_speculative_tokens": 9}, {}, "num_speculative_tokens must be at most dspark_block_size = [0-9]+"),
        ({"enable_adaptive_verification": True}, ALWAYS, "enable_adaptive_verification is true, but deepinfer"),
        ({}, {"verification": "typical"}, "verification"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(tiny_checkpoint, speculation, deepinfer, message):
    options = {"method": "dspark", "num_speculative_tokens": 2} | speculation
    with pytest.raises(Exception, match=message), start_engine(tiny_checkpoint, deepinfer, speculative_config=options):
        pass


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_other_draft_tensors_stop_the_start(tiny_checkpoint, tmp_path, change):
    folder = tmp_path / change
    shutil.copytree(tiny_checkpoint, folder)
    for index in folder.glob("*.index.json"):
        index.unlink()
    name = None
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        if names := sorted(n for n in tensors if n.startswith("mtp.")):
            name = names[0]
            tensor = tensors.pop(name) if change == "missing" else tensors[name]
            if change == "unknown":
                name = name.replace("mtp.0", "mtp.9")
                tensors[name] = tensor.clone()
            save_file(tensors, shard, metadata={"format": "pt"})
            break
    assert name
    speculation = {"method": "dspark", "num_speculative_tokens": 2}
    with pytest.raises(Exception, match=name), start_engine(folder, speculative_config=speculation):
        pass
