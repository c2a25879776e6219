"""`vllm serve` as a user starts it: processes of its own, OpenAI's client, good and bad requests."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import jsonschema
import pytest
from openai import BadRequestError, OpenAI

from deepinfer_plugin.install import MODEL_CLASS
from deepinfer_plugin.model_executor.models.tiny import TRAINED

START_SECONDS = 300
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "capital": {"type": "boolean"}},
    "required": ["city", "capital"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Which city is the capital of France?"}]


class Server:
    def __init__(self, process: subprocess.Popen, port: int, log: Path) -> None:
        self.process, self.log = process, log
        self.url = f"http://127.0.0.1:{port}"
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def get(self, path: str) -> str:
        return urllib.request.urlopen(self.url + path, timeout=10).read().decode()

    def metric(self, name: str) -> float:
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(name + "{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-6000:]}")


@pytest.fixture(scope="module")
def server(tiny_checkpoint, tmp_path_factory) -> Iterator[Server]:
    with serving(tiny_checkpoint, tmp_path_factory.mktemp("server") / "log") as started:
        yield started


@contextmanager
def serving(checkpoint: Path, log: Path, *flags: str) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(checkpoint), "--port", str(port), *flags]
    command += ["--served-model-name", "v4.1-flash", "--max-model-len", "1024", "--kv-cache-memory-bytes", "64M"]
    command += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "deepseek_v41", "--reasoning-parser", "deepseek_v41"]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        started = Server(process, port, log)
        try:
            started.wait()
            yield started
        finally:
            process.terminate()
            process.wait(60)


def test_the_log_says_who_serves(server):
    assert f"DeepseekV41ForCausalLM is served by {MODEL_CLASS}" in server.log.read_text()
    assert f"{MODEL_CLASS} built" in server.log.read_text()


def test_chat(server):
    answer = server.client.chat.completions.create(model="v4.1-flash", messages=QUESTION, max_tokens=12, temperature=0)
    assert answer.usage.completion_tokens == 12 or answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens > 10


def test_completion_streamed_and_whole_are_the_same(server):
    def ask(stream: bool):
        return server.client.completions.create(
            model="v4.1-flash", prompt="Once upon a time", max_tokens=16, temperature=0, stream=stream
        )

    pieces = [chunk.choices[0].text for chunk in ask(True)]
    assert len(pieces) > 1
    assert "".join(pieces) == ask(False).choices[0].text


def test_chat_streams_in_pieces(server):
    chunks = list(
        server.client.chat.completions.create(model="v4.1-flash", messages=QUESTION, max_tokens=12, stream=True)
    )
    assert len(chunks) > 2


def test_an_answer_follows_its_json_schema(server):
    answer = server.client.chat.completions.create(
        model="v4.1-flash",
        messages=QUESTION,
        max_tokens=200,
        extra_body={"chat_template_kwargs": {"thinking": False}},  # with thinking the schema starts after </think>
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


def test_a_second_identical_prompt_of_400_tokens_hits_the_cache_and_says_the_same(server):
    prompt = [3 + (5 * i) % 250 for i in range(400)]
    ask = lambda: server.client.completions.create(  # noqa: E731
        model="v4.1-flash", prompt=prompt, max_tokens=8, temperature=0
    )
    before = server.metric("vllm:prefix_cache_hits_total")
    first = ask()
    between = server.metric("vllm:prefix_cache_hits_total")
    second = ask()
    assert (between - before, server.metric("vllm:prefix_cache_hits_total") - between) == (0, 384)
    assert first.choices[0].text == second.choices[0].text


BAD = {
    "too long": ({"prompt": [5] * 2000}, "maximum context length is 1024"),
    "out of the vocabulary": ({"prompt": [5, 512]}, "512 is out of vocabulary"),
    "empty": ({"prompt": ""}, "empty"),
    "bad grammar": ({"prompt": "x", "extra_body": {"structured_outputs": {"regex": "(open"}}}, "regex"),
    "bad temperature": ({"prompt": "x", "temperature": -1}, "temperature"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_fails_alone_among_good_ones(server, case):
    options, message = BAD[case]

    def good(seed: int) -> str:
        prompt = [3 + (seed * i) % 250 for i in range(30)]
        answer = server.client.completions.create(model="v4.1-flash", prompt=prompt, max_tokens=12, temperature=0)
        return answer.choices[0].text

    alone = [good(seed) for seed in (1, 2)]
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(good, seed) for seed in (1, 2)]
        with pytest.raises(BadRequestError, match=message):
            server.client.completions.create(model="v4.1-flash", **{"max_tokens": 4, **options})
        assert [answer.result() for answer in running] == alone
    assert server.get("/health") is not None


def test_metrics_say_what_becomes_of_drafts(tmp_path):
    speculation = json.dumps({"method": "dspark", "num_speculative_tokens": 3})
    with serving(TRAINED, tmp_path / "log", "--speculative-config", speculation) as server:
        answer = server.client.chat.completions.create(
            model="v4.1-flash", messages=QUESTION, max_tokens=40, temperature=0
        )
        by_place = {
            name: [
                sum(
                    float(line.rpartition(" ")[2])
                    for line in server.get("/metrics").splitlines()
                    if line.startswith(f"deepinfer:dspark_{name}_tokens_total") and f'position="{place}"' in line
                )
                for place in range(3)
            ]
            for name in ("drafted", "scheduled", "verified", "accepted")
        }
        requests, emitted = (server.metric(f"deepinfer:dspark_{name}_total") for name in ("requests", "emitted_tokens"))
        assert len(set(by_place["drafted"])) == 1 and by_place["drafted"][0] >= requests > 0
        for more, fewer in (("drafted", "scheduled"), ("scheduled", "verified"), ("verified", "accepted")):
            assert all(a >= b for a, b in zip(by_place[more], by_place[fewer], strict=True))
        assert sum(by_place["accepted"]) > 0
        assert requests < emitted == requests + sum(by_place["accepted"])
        assert emitted <= answer.usage.completion_tokens + 3  # vLLM cuts what a stop token makes superfluous
        assert server.metric("deepinfer:dspark_rounds_total") == requests  # one request at a time
        assert (
            server.metric("deepinfer:dspark_cost_error") >= 0
            and server.metric("deepinfer:dspark_calibration_error") >= 0
        )
