"""Measure the trained tiny checkpoint on held-out text: bits per byte, expert load, and DSpark's drafts.

python examples/train_tiny/evaluate.py [--model DIR] [--master FILE] [--folder DIR]

Runs on a CPU in about ten minutes, on the trainer's network in fp32. Prepares the data if they are missing. Writes the
numbers to results/evaluation.json and the curves to results/calibration.png; the model card quotes them.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from network import Network, Weights
from ngram import KneserNey
from prepare import FOLDER, TRAINED
from speculation import calibration_error, fitted_lines, fitted_temperatures, speculate
from tokenizers import Tokenizer
from tqdm import tqdm
from weights import read_weights

from deepinfer_plugin.model_executor.models.engram_vocabulary import class_table

RESULTS = Path(__file__).parent / "results"
WINDOW, BATCH = 1024, 4
PROMPT, GENERATED = 128, 128


class Evaluation:
    """One checkpoint and the held-out tokens; every method measures one thing and prints it."""

    def __init__(self, model: Path, folder: Path, num_windows: int) -> None:
        self.shape, self.weights = read_weights(model)
        self.classes = class_table(model / "tokenizer.json", self.shape)
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.train = np.load(folder / "train.npy", mmap_mode="r")
        heldout = np.load(folder / "heldout.npy").astype(np.int64)
        self.windows = torch.from_numpy(heldout[: num_windows * WINDOW]).view(-1, WINDOW)
        text = self.tokenizer.decode_batch(self.windows.tolist(), skip_special_tokens=False)
        self.bytes_per_token = sum(len(t.encode()) for t in text) / self.windows.numel()
        self.loads: torch.Tensor | None = None
        self.results: dict[str, Any] = {"tokens": self.windows.numel(), "bytes_per_token": self.bytes_per_token}

    def network(self, weights: Weights, rounded: bool) -> Network:
        return Network(self.shape, self.classes, weights, torch.float32, rounded=rounded)

    def bits_per_byte(self, name: str, weights: Weights, rounded: bool) -> None:
        network, losses, loads = self.network(weights, rounded), [], []
        with torch.no_grad():
            for batch in tqdm(self.windows.split(BATCH), desc=name, unit=" batches"):
                out = network.forward(batch)
                losses.append(F.cross_entropy(out.logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()))
                loads.append(out.loads)
        if rounded:
            self.loads = torch.stack(loads).sum(0)
        self._report(name, float(torch.stack(losses).mean()))

    def five_gram(self) -> None:
        model = KneserNey(np.asarray(self.train), self.shape.vocab_size)
        logs = [model.log_probabilities(window.numpy()) for window in self.windows]
        self._report("5-gram", float(-np.concatenate(logs).mean()))

    def expert_load(self) -> None:
        """The share of the busiest and of the idlest expert, of an even share, over the layers."""
        assert self.loads is not None
        share = self.loads / self.loads.mean(1, keepdim=True)
        self.results["expert_load"] = {"largest": float(share.max()), "smallest": float(share.min())}
        print(f"expert load, 1 = even    largest {share.max():.2f}  smallest {share.min():.2f}")

    def drafts(self, num_prompts: int) -> None:
        """Two halves of the prompts: corrections are fitted on one, the errors are those of the other."""
        k, prompts = self.shape.dspark_block_size, self.windows[:num_prompts, :PROMPT]
        curves = {}
        for temperature in (0.0, 1.0):
            network = self.network(self.weights, rounded=True)
            fit, test = (speculate(network, part, GENERATED, temperature, n) for n, part in enumerate(prompts.chunk(2)))
            fitted = fitted_temperatures(fit, k)
            before = torch.sigmoid(test.logits)
            after = torch.sigmoid(test.logits / fitted[test.places])
            slope, offset = fitted_lines(fit, k)[test.places].unbind(1)
            served = torch.sigmoid(slope * test.logits + offset)
            places, accepted = torch.cat([fit.places, test.places]), torch.cat([fit.accepted, test.accepted])
            length = 1 + float(accepted.sum()) / (fit.num_rounds + test.num_rounds)
            rates = [float(accepted[places == place].float().mean()) for place in range(k)]
            errors = [calibration_error(probability, test.accepted) for probability in (before, after, served)]
            name = f"drafts at temperature {temperature:g}"
            self.results[name] = {
                "accepted_length": length,
                "acceptance_by_place": rates,
                "calibration_error": errors[0],
                "calibration_error_fitted_temperature": errors[1],
                "calibration_error_fitted_line": errors[2],
                "fitted_temperatures": fitted.tolist(),
            }
            curves[name] = (before, served, test.accepted)
            print(f"{name}    accepted length {length:.2f}, by place {' '.join(f'{rate:.3f}' for rate in rates)}")
            print(
                f"    calibration error {errors[0]:.3f}, with fitted temperatures {errors[1]:.3f}, "
                f"with fitted slopes and offsets {errors[2]:.3f}"
            )
        _plot_calibration(curves)

    def _report(self, name: str, nats: float) -> None:
        bits = nats / math.log(2) / self.bytes_per_token
        self.results.setdefault("bits_per_byte", {})[name] = bits
        print(f"{name:40} {nats:.4f} nats a token  {bits:.4f} bits per byte")


def _plot_calibration(curves: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(curves), figsize=(9, 4.2), sharey=True)
    for axis, (name, (before, after, accepted)) in zip(axes, curves.items(), strict=True):
        axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        for label, probability in (("as trained", before), ("slope and offset fitted", after)):
            bins = (probability * 10).long().clamp(max=9)
            used = [b for b in range(10) if (bins == b).sum() >= 10]
            points = [(probability[bins == b].mean(), accepted[bins == b].float().mean()) for b in used]
            axis.plot(*zip(*points, strict=True), marker="o", label=label)
        axis.set(title=name, xlabel="confidence")
    axes[0].set(ylabel="accepted")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "calibration.png", dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TRAINED, help="folder of the checkpoint")
    parser.add_argument("--master", type=Path, help="master.pt of export.py: also measure the weights before rounding")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of train.npy and heldout.npy")
    parser.add_argument("--windows", type=int, default=128, help=f"held-out windows of {WINDOW} tokens")
    parser.add_argument("--prompts", type=int, default=128, help="held-out prompts to draft for")
    args = parser.parse_args()
    if not (args.folder / "heldout.npy").exists():
        subprocess.run([sys.executable, Path(__file__).with_name("prepare.py"), "--folder", args.folder], check=True)
    evaluation = Evaluation(args.model, args.folder, args.windows)
    if args.master:
        master = {name: weight.float() for name, weight in torch.load(args.master).items()}
        evaluation.bits_per_byte("bf16 master weights, nothing rounded", master, rounded=False)
    evaluation.bits_per_byte("shipped weights, nothing else rounded", evaluation.weights, rounded=False)
    evaluation.bits_per_byte("shipped weights, as served", evaluation.weights, rounded=True)
    evaluation.expert_load()
    evaluation.five_gram()
    evaluation.drafts(args.prompts)
    (RESULTS / "evaluation.json").write_text(json.dumps(evaluation.results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
