"""Ask a running server for a streamed chat answer and for an answer that follows a JSON schema."""

import argparse
import json

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
RECORD = "Give me JSON for a person: Clara, 31 years old, from Vienna."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="v4.1-flash")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    client = OpenAI(base_url=args.base_url, api_key="none")
    question = [{"role": "user", "content": "Which city is the capital of France?"}]

    print("chat, streamed: ", end="", flush=True)
    thinking = False
    for chunk in client.chat.completions.create(
        model=args.model, messages=question, max_tokens=args.max_tokens, temperature=0, stream=True
    ):
        delta = chunk.choices[0].delta
        thought = getattr(delta, "reasoning", None)
        if bool(thought) != thinking and (thought or delta.content):
            thinking = not thinking
            print("(thinks) " if thinking else " (says) ", end="")
        print(thought or delta.content or "", end="", flush=True)

    answer = client.chat.completions.create(
        model=args.model,
        messages=[{"role": "user", "content": f"{RECORD} Keys: name, age, city."}],
        max_tokens=args.max_tokens,
        temperature=0,
        extra_body={"chat_template_kwargs": {"thinking": False}},  # with thinking the schema starts after </think>
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    )
    content = answer.choices[0].message.content or ""
    print(f"\nJSON schema:    {json.loads(content)}")
    usage = answer.usage
    print(f"usage:          {usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated")


if __name__ == "__main__":
    main()
