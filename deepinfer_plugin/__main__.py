"""The command `deepinfer-plugin`, which is `python -m deepinfer_plugin`."""

import argparse
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, got {text!r}")
    return int(text)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"must be JSON, got {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="deepinfer-plugin", description="DeepSeek-V4.1-Flash in an existing vLLM.")
    parser.add_argument("--version", action="version", version=f"deepinfer-plugin {version('deepinfer-plugin')}")
    commands = parser.add_subparsers(dest="command", required=True)

    tiny = commands.add_parser("tiny", help="write a tiny V4.1 checkpoint with random or trained weights")
    tiny.add_argument("folder", type=Path, metavar="DIR")
    tiny.add_argument("--trained", action="store_true", help="the trained one of this package, 17 MB")
    tiny.add_argument("--size", choices=["tiny", "parity"], help="of random weights; parity: heads for GPU kernels")
    tiny.add_argument("--seed", type=int, help="of random weights; equal seeds give equal bytes")

    doctor = commands.add_parser("doctor", help="who would serve V4.1 here, and how; exit status 1 if not us")
    doctor.add_argument("--model", help="folder or name whose configuration is asked; default: the tiny one")
    doctor.add_argument("--json", action="store_true", help="for programs")

    verify = commands.add_parser(
        "verify", help="prove that the text does not depend on how it is made; status 1 if it does"
    )
    verify.add_argument("model", metavar="MODEL", help="folder or name")
    verify.add_argument("--requests", type=positive, default=216, metavar="N", help="default: 216")
    verify.add_argument("--max-tokens", type=positive, default=24, metavar="N", help="of each request; default: 24")
    verify.add_argument(
        "--drafts", type=int, metavar="N", help="0: no speculation; default: the checkpoint's block size"
    )
    verify.add_argument(
        "--engine", type=json_object, default={}, metavar="JSON", help='arguments of vllm.LLM, {"dtype": "float32"} say'
    )
    verify.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args(arguments)
    if args.command == "tiny" and args.trained and (args.size is not None or args.seed is not None):
        tiny.error("--trained: not allowed with argument --size or --seed, which random weights have")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.command == "tiny":
        from deepinfer_plugin.model_executor.models.tiny import write_tiny, write_trained

        try:
            if args.trained:
                write_trained(args.folder)
            else:
                write_tiny(args.folder, args.seed or 0, args.size or "tiny")
        except (ValueError, OSError) as error:
            sys.stderr.write(f"deepinfer-plugin tiny: {error}\n")
            return 1
        sys.stdout.write(
            f"wrote a {args.size or 'tiny'} V4.1 checkpoint with {'trained' if args.trained else 'random'} weights "
            f"to {args.folder}\n"
        )
        return 0

    if "vllm" not in sys.modules:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the answer, not vLLM's way to it
    if args.command == "verify":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler must be in reach
        from deepinfer_plugin.verify.run import main as run_verify

        return run_verify(args.model, args.requests, args.max_tokens, args.drafts, args.engine, args.json)

    from deepinfer_plugin.doctor import run

    return run(args.model, args.json, sys.stdout.write)


if __name__ == "__main__":
    sys.exit(main())
