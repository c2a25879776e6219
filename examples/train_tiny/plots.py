"""Draw the training: python examples/train_tiny/plots.py [--folder DIR] writes results/loss.png from DIR/log.csv."""

import argparse
import csv
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from prepare import FOLDER

RESULTS = Path(__file__).parent / "results"
SMOOTH = 25  # logged steps in a running mean


def read_log(file: Path) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(stage, quantity) -> its (step, value) pairs."""
    series: dict[tuple[str, str], list[tuple[int, float]]] = {}
    with file.open(newline="") as lines:
        for stage, step, *values in csv.reader(lines):
            for name, value in (text.split("=") for text in values):
                series.setdefault((stage, name), []).append((int(step), float(value)))
    return series


def draw(axis: plt.Axes, points: list[tuple[int, float]], label: str, smooth: int = SMOOTH) -> None:
    steps, values = np.array(points).T
    smooth = min(smooth, len(values))
    axis.plot(steps[smooth - 1 :], np.convolve(values, np.ones(smooth) / smooth, "valid"), label=label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of log.csv")
    args = parser.parse_args()
    series = read_log(args.folder / "log.csv")
    figure, (first, second) = plt.subplots(1, 2, figsize=(10, 4))
    draw(first, series["network", "loss"], "training")
    draw(first, series["network", "heldout"], "held out", smooth=1)
    first.set(title="text network", xlabel="step", ylabel="nats a token", ylim=(1, 3))
    first.legend()
    draw(second, series["draft", "accepted_length"], "tokens a round, coupled sampling")
    second.set(title="draft blocks", xlabel="step", ylabel="accepted length on training text")
    figure.tight_layout()
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "loss.png", dpi=80)


if __name__ == "__main__":
    main()
