"""Plot results of `benchmarks.engine`: a decode step of each engine beside the memory-bandwidth floor.

python -m benchmarks.plot_engine OURS.json NATIVE.json OUT.svg
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes


def bars(axes: Axes, results: list[dict], key: str) -> None:
    cases = list(results[0]["cases"])
    width = 0.8 / len(results)
    for n, result in enumerate(results):
        places = [i + (n - (len(results) - 1) / 2) * width for i in range(len(cases))]
        drawn = axes.bar(places, [result["cases"][case][key] for case in cases], width, label=result["engine"])
        axes.bar_label(drawn, padding=2, fontsize=8)
    axes.set_xticks(range(len(cases)), [case.replace("x", " x ") for case in cases])
    axes.set_xlabel("requests x prompt tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files, then the file of the plot")
    *files, out = parser.parse_args().results
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    figure, (decode, prefill) = plt.subplots(1, 2, figsize=(10, 4))
    bars(decode, results, "decode_ms")
    for i, case in enumerate(results[0]["cases"].values()):
        label = "floor: bytes / copy bandwidth" if i == 0 else None
        decode.hlines(case["floor_ms"], i - 0.45, i + 0.45, colors="black", linestyles="dashed", label=label)
    decode.set_ylabel("milliseconds a decode step")
    decode.legend(fontsize=8)
    bars(prefill, results, "prefill_tokens_per_s")
    prefill.set_ylabel("prompt tokens a second")
    first = results[0]
    figure.suptitle(f"{first['card']}, vLLM {first['versions']['vllm']}, {first['date']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main()
