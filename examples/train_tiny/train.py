"""Train the tiny V4.1: first the text network, then DSpark's draft blocks on the frozen network.

python examples/train_tiny/train.py [--folder DIR] [--minutes N]

Reads DIR/train.npy (see prepare.py). Writes DIR/state.pt every few minutes and when the time is up; the same command
goes on from there. At the end: DIR/weights.pt (what export.py reads) and DIR/log.csv (what plots.py draws).
"""

import argparse
import csv
import json
import math
import time
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import network as network_module
import numpy as np
import torch
import torch.nn.functional as F
from draft import draft, draft_weights, markov
from network import Network, Weights
from prepare import FOLDER, TRAINED
from rounding import ACTIVATION, WEIGHT
from torch import Tensor
from tqdm import tqdm
from weights import NOT_TRAINED, initial_weights

from deepinfer_plugin.model_executor.models.checkpoint import Format
from deepinfer_plugin.model_executor.models.engram_vocabulary import class_table
from deepinfer_plugin.model_executor.models.shape import ModelShape

SAVE_EVERY = 120.0  # seconds
HELDOUT_EVERY = 500  # steps
NO_DECAY = ("*embed*", "*_scale", "*_base", "*norm*", "*.attn_sink", "*.q_weight", "*.k_weight", "*.gate.weight")


@dataclass(frozen=True)
class Stage:
    """One of the two trainings. batch: sequences a step; length: their tokens; warm_up and cool_down: in steps."""

    name: str
    steps: int
    batch: int
    length: int
    learning_rate: float
    warm_up: int
    cool_down: int
    weight_decay: float = 0.05
    balance_step: float = 1e-3  # how far a selection bias moves a step
    anchors: int = 0  # draft stage: blocks drafted a sequence
    index_rows: int = 32  # queries a sequence on which the indexers learn

    def rate(self, step: int) -> float:
        """Linear up, constant, linear down to nothing."""
        return self.learning_rate * min(1.0, (step + 1) / self.warm_up, (self.steps - step) / self.cool_down)


STAGES = {
    "network": Stage("network", 7000, 32, 1024, 2e-3, 300, 3500),
    "draft": Stage("draft", 3300, 16, 1024, 2e-3, 200, 1650, anchors=96, index_rows=0),
}
COMPILED = ("gather", "spread", "remember", "norm", "rotate", "swiglu", "largest", "index_scores", "candidate_entries")


class Trainer:
    """One stage: its weights, its optimiser, its place in the data. `step` does one update."""

    def __init__(self, stage: Stage, folder: Path, weights: Weights, device: torch.device) -> None:
        self.stage, self.device = stage, device
        self.shape = ModelShape.from_json(json.loads((TRAINED / "config.json").read_text(encoding="utf-8")))
        self.weights = {name: weight.to(device) for name, weight in weights.items()}
        self.trained = self._trained()
        for name, weight in self.weights.items():
            weight.requires_grad_(name in self.trained and not fnmatchcase(name, "*.gate.bias*"))
        classes = class_table(TRAINED / "tokenizer.json", self.shape).to(device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.network = Network(self.shape, classes, self.weights, dtype, index_rows=stage.index_rows)
        self.tokens, self.heldout = (
            torch.from_numpy(np.load(folder / f"{part}.npy").astype(np.int32)).to(device)
            for part in ("train", "heldout")
        )
        on_gpu = device.type == "cuda"
        self.rate = torch.zeros((), device=device)  # a tensor, because a recorded step reads it anew each time
        self.optimizer = torch.optim.AdamW(
            self._groups(), lr=self.rate, betas=(0.9, 0.95), eps=1e-10, fused=on_gpu, capturable=on_gpu
        )
        self.batch = torch.zeros(stage.batch, stage.length + 1, dtype=torch.int64, device=device)
        self.done, self.steps_here = 0, 0
        self.recorded: torch.cuda.CUDAGraph | None = None
        self.logged: dict[str, Tensor] = {}

    def _trained(self) -> list[str]:
        names = (
            draft_weights(self.weights)
            if self.stage.name == "draft"
            else self.weights.keys() - draft_weights(self.weights).keys()
        )
        return sorted(n for n in names if not any(fnmatchcase(n, pattern) for pattern in NOT_TRAINED))

    def _groups(self) -> list[dict[str, Any]]:
        plain = [n for n in self.trained if any(fnmatchcase(n, pattern) for pattern in NO_DECAY)]
        decayed = [n for n in self.trained if n not in plain]
        return [
            {"params": [self.weights[n] for n in names if self.weights[n].requires_grad], "weight_decay": decay}
            for names, decay in ((decayed, self.stage.weight_decay), (plain, 0.0))
        ]

    def step(self) -> dict[str, Tensor]:
        """One update; returns what to log, still on the device. On a GPU the fourth step is recorded, then replayed."""
        self.rate.fill_(self.stage.rate(self.done))
        self.batch.copy_(self._batch())
        if self.recorded is not None:
            self.recorded.replay()
        elif self.device.type == "cuda" and self.steps_here >= 3:
            self.optimizer.zero_grad(set_to_none=True)
            self.recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.recorded):
                self.logged = self._update()
            self.recorded.replay()
        else:
            self.optimizer.zero_grad(set_to_none=True)
            self.logged = self._update()
        self.done, self.steps_here = self.done + 1, self.steps_here + 1
        return self.logged

    def _update(self) -> dict[str, Tensor]:
        loss, logged = self._draft_loss(self.batch) if self.stage.name == "draft" else self._network_loss(self.batch)
        loss.backward()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        logged["grad_norm"] = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizer.step()
        return logged

    def heldout_loss(self) -> float:
        """Nats a token over the first held-out windows."""
        stage, losses = self.stage, []
        index_rows, self.network.index_rows = self.network.index_rows, 0
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for windows in self.heldout[: 64 * stage.length].view(-1, stage.batch, stage.length):
                logits = self.network.forward(windows.long()).logits
                losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].long().flatten()))
        self.network.index_rows = index_rows
        return float(torch.stack(losses).mean())

    def _batch(self) -> Tensor:
        """[batch, length + 1]; step n reads the same places in every run."""
        generator = np.random.default_rng([ord(self.stage.name[0]), self.done])
        starts = generator.integers(0, len(self.tokens) - self.stage.length - 1, self.stage.batch)
        places = torch.from_numpy(starts).to(self.device)[:, None] + torch.arange(
            self.stage.length + 1, device=self.device
        )
        return self.tokens[places].long()

    def _network_loss(self, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out = self.network.forward(batch[:, :-1])
        ce = F.cross_entropy(out.logits.flatten(0, 1), batch[:, 1:].flatten())
        self._balance("layers", out.loads)
        return ce + out.index_loss + 0.01 * out.balance_loss, {
            "loss": ce.detach(),
            "index_loss": out.index_loss.detach(),
            "largest_load": (out.loads / out.loads.mean(1, keepdim=True)).max(),
        }

    def _balance(self, block: str, loads: Tensor) -> None:
        """Overloaded experts become less likely to be chosen; nothing else of the output depends on this bias."""
        with torch.no_grad():
            for layer, load in enumerate(loads):
                step = self.stage.balance_step * self.rate / self.stage.learning_rate
                bias = self.weights[f"{block}.{layer}.ffn.gate.bias"]
                bias += step * torch.sign(load.mean() - load).to(bias.dtype)
                self.weights[f"{block}.{layer}.ffn.gate.bias_vl"].copy_(bias)

    def _draft_loss(self, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy and distance to the target's distribution, and whether coupled sampling would accept."""
        stage, k = self.stage, self.shape.dspark_block_size
        with torch.no_grad():
            target = self.network.forward(batch[:, :-1])
        last = stage.length - k - 1
        anchors = torch.rand(len(batch), last, device=self.device).topk(stage.anchors, 1).indices
        places = anchors[..., None] + 1 + torch.arange(k, device=self.device)  # rows whose logits judge the drafts
        drafts = draft(self.network, target.features, anchors, batch.gather(1, anchors + 1))
        previous = batch.gather(1, places.flatten(1)).view(places.shape)
        logits, confidence = markov(self.network, drafts, previous, slice(None))
        rows = torch.arange(len(batch), device=self.device)[:, None, None]
        wanted = torch.log_softmax(target.logits[rows, places], -1)
        q = torch.log_softmax(logits, -1)
        p = wanted.exp()
        ce = -(p * q).sum(-1)
        distance = 0.5 * (p - q.exp()).abs().sum(-1)
        with torch.no_grad():  # one noise for both, as coupled verification has it
            noise = -torch.empty_like(p).exponential_().log()
            accepted = ((wanted + noise).argmax(-1) == (q + noise).argmax(-1)).to(p.dtype)
        judged = F.binary_cross_entropy_with_logits(confidence, accepted)
        self._balance("mtp", drafts.loads)
        return ce.mean() + distance.mean() + judged + 0.01 * drafts.balance_loss, {
            "loss": ce.mean().detach(),
            "distance": distance.mean().detach(),
            "accepted": accepted.mean(),
            "accepted_length": 1 + accepted.cumprod(-1).sum(-1).mean(),
        }

    def load(self, optimizer: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate

    def state(self) -> dict[str, Any]:
        return {
            "stage": self.stage.name,
            "done": self.done,
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
            "optimizer": self.optimizer.state_dict(),
        }


def compile_pieces() -> None:
    """Fuse what is not a matrix product: most of a step is memory traffic between small steps.

    For training steps of the first stage only: without gradients, the compiled pieces gave NaN in a resumed run (torch
    2.11 on an H200) where the plain ones, on the same weights, do not. The cause was not found.
    """
    torch._dynamo.config.recompile_limit = 64
    for name in COMPILED:
        setattr(network_module, name, torch.compile(getattr(network_module, name), dynamic=False))
    for key in ("activation", "local_kv"):
        ACTIVATION[key] = torch.compile(ACTIVATION[key], dynamic=False)
    for format in (Format.FP8_BLOCKS, Format.FP8_ROWS):
        WEIGHT[format] = torch.compile(WEIGHT[format], dynamic=False)


def run_stage(trainer: Trainer, folder: Path, deadline: float, log: Any) -> bool:
    """Train until the stage or the time ends; True if the stage is done."""
    stage = trainer.stage
    progress = tqdm(
        range(trainer.done, stage.steps), desc=stage.name, initial=trainer.done, total=stage.steps, mininterval=5
    )
    saved = time.monotonic()
    for _ in progress:
        logged = trainer.step()
        if trainer.done % 20 == 0 or trainer.done == stage.steps:
            values = {name: float(value) for name, value in logged.items()}
            progress.set_postfix({name: f"{value:.3f}" for name, value in values.items()}, refresh=False)
            log.writerow([stage.name, trainer.done, *(f"{name}={value:.5f}" for name, value in values.items())])
            if not math.isfinite(values["loss"]):
                raise FloatingPointError(f"{stage.name}: the loss is {values['loss']} at step {trainer.done}")
            if stage.name == "network" and (trainer.done % HELDOUT_EVERY == 0 or trainer.done == stage.steps):
                log.writerow([stage.name, trainer.done, f"heldout={trainer.heldout_loss():.5f}"])
            if time.monotonic() > deadline:
                break
            if time.monotonic() > saved + SAVE_EVERY:
                torch.save(trainer.state(), folder / "state.pt")
                saved = time.monotonic()
    torch.save(trainer.state(), folder / "state.pt")
    return trainer.done == stage.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of train.npy, the state and the results")
    parser.add_argument("--minutes", type=float, default=25.0, help="stop after this time; the same command goes on")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the draft's anchors")
    parser.add_argument("--no-compile", action="store_true", help="plain torch operations, slower")
    parser.add_argument("--steps", type=int, help="of each stage; default: as published")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    if not args.no_compile:
        compile_pieces()
    file = args.folder / "state.pt"
    saved = torch.load(file, map_location="cpu") if file.exists() else {"stage": "network", "done": 0}
    stages = list(STAGES)
    shape = ModelShape.from_json(json.loads((TRAINED / "config.json").read_text(encoding="utf-8")))
    weights = saved.get("weights") or initial_weights(shape, args.seed)
    with (args.folder / "log.csv").open("a", newline="") as log:
        for name in stages[stages.index(saved["stage"]) :]:
            stage = STAGES[name]
            if args.steps:
                stage = Stage(**{**asdict(stage), "steps": args.steps, "warm_up": 10, "cool_down": args.steps // 2})
            torch.compiler.set_stance("default" if name == "network" else "force_eager")
            trainer = Trainer(stage, args.folder, weights, device)
            if saved["stage"] == name and saved["done"]:
                trainer.done = saved["done"]
                trainer.load(saved["optimizer"])
            if not run_stage(trainer, args.folder, deadline, csv.writer(log)):
                print(f"time is up at step {trainer.done} of stage {name}: run the same command to go on")
                return
            weights = {n: w.detach().cpu() for n, w in trainer.weights.items()}
            saved = {"stage": "", "done": 0}
    torch.save(weights, args.folder / "weights.pt")
    print(f"done: {args.folder / 'weights.pt'}")


if __name__ == "__main__":
    main()
