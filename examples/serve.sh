#!/usr/bin/env bash
# Serve V4.1-Flash with vLLM's OpenAI server, ask it one chat question, and stop it again.
#   examples/serve.sh                    the trained tiny checkpoint of the package
#   examples/serve.sh DIR_OR_NAME [flags of vllm serve]
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
port=${PORT:-8000}
work=$(mktemp -d)
trap 'kill "${server:-}" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$work"' EXIT

model=${1:-}
if [ -z "$model" ]; then
  model=$work/tiny
  deepinfer-plugin tiny --trained "$model"
  set -- "$model" --max-model-len 2048 --kv-cache-memory-bytes 256M --max-num-seqs 16
fi
shift

vllm serve "$model" --served-model-name v4.1-flash --port "$port" --enforce-eager \
  --enable-auto-tool-choice --tool-call-parser deepseek_v41 --reasoning-parser deepseek_v41 "$@" &
server=$!
until curl -sf "http://127.0.0.1:$port/health" >/dev/null; do
  kill -0 "$server" || exit 1
  sleep 1
done

python examples/client.py --base-url "http://127.0.0.1:$port/v1"
