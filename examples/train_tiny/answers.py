"""Count the trained tiny checkpoint's right answers, through vLLM, on questions that it was not trained on.

python examples/train_tiny/answers.py [--model DIR] [--questions N]

Runs on a CPU in a few minutes and writes results/answers.json, which the model card quotes. A right answer is the
wanted one word for word (JSON: the wanted value), up to spaces at the ends and a full stop.
"""

import argparse
import json
import os
import random
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process: starts in seconds

from generated import MAKERS  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

from deepinfer_plugin.model_executor.models.tiny import TRAINED  # noqa: E402

KINDS = ("arithmetic", "fact", "copying", "spelling", "json_answer")
FIRST_SEED = 10**7  # training used conversations of small numbers


def is_right(kind: str, answer: str, wanted: str) -> bool:
    answer = answer.rpartition("</think>")[2].strip()
    if kind != "json_answer":
        return answer.rstrip(".") == wanted.rstrip(".")
    try:
        return json.loads(answer) == json.loads(wanted)
    except json.JSONDecodeError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TRAINED))
    parser.add_argument("--questions", type=int, default=100, help="of each kind")
    args = parser.parse_args()
    llm = LLM(args.model, max_model_len=1024, kv_cache_memory_bytes=256 << 20, enforce_eager=True)
    makers = {maker.__name__.strip("_"): maker for maker in MAKERS}
    results: dict[str, dict[str, float]] = {}
    for mode in ("chat", "thinking"):
        for kind in KINDS:
            cases = [makers[kind](random.Random(FIRST_SEED + n)) for n in range(args.questions)]
            conversations = [[{"role": "user", "content": question}] for question, _, _ in cases]
            sampling = SamplingParams(temperature=0, max_tokens=200)
            outputs = llm.chat(conversations, sampling, chat_template_kwargs={"thinking": mode == "thinking"})
            right = sum(
                is_right(kind, output.outputs[0].text, wanted)
                for output, (_, _, wanted) in zip(outputs, cases, strict=True)
            )
            results.setdefault(mode, {})[kind] = right / args.questions
            print(f"{mode:10} {kind:12} {right} of {args.questions} right")
    path = Path(__file__).parent / "results" / "answers.json"
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
