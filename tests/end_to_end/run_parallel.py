"""Logits and tokens of a few prompts from an engine with several ranks: a program, since vLLM starts worker processes.

python -m tests.end_to_end.run_parallel CHECKPOINT OUT.pt '{"tensor_parallel_size": 2}'
"""

import json
import sys
from pathlib import Path

import torch

from tests.end_to_end.conftest import ROUNDING_OFF, start_engine, text_tokens

PROMPTS = [text_tokens(150), text_tokens(37, seed=1), text_tokens(3, seed=2)]
MAX_TOKENS = 6


def main(checkpoint: str, out: str, options: str) -> None:
    with start_engine(Path(checkpoint), ROUNDING_OFF, **json.loads(options)) as engine:
        answers = engine.ask(*PROMPTS, max_tokens=MAX_TOKENS)
        (prompt,) = engine.ask(PROMPTS[0], prompt_logits=True)
    torch.save(
        {
            "tokens": [answer.token_ids for answer in answers],
            "logits": [answer.logits for answer in answers],
            "prompt": torch.cat([prompt.prompt_logits, prompt.logits]),
        },
        out,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
