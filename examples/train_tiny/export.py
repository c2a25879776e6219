"""Write the trained weights as a V4.1 checkpoint into the package, and beside the training data in bf16.

python examples/train_tiny/export.py [--folder DIR] [--to DIR]

Reads DIR/weights.pt. The checkpoint holds exactly the low-precision weights that were trained with. DIR/master.pt
holds the same weights before that rounding, for evaluate.py --master.
"""

import argparse
import json
from pathlib import Path

import torch
from prepare import FOLDER, TRAINED
from tokenizers import Tokenizer
from weights import unstacked

from deepinfer_plugin.model_executor.models.tiny import write_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of weights.pt")
    parser.add_argument("--to", type=Path, default=TRAINED, help="folder of the checkpoint")
    args = parser.parse_args()
    weights = torch.load(args.folder / "weights.pt")
    config = json.loads((TRAINED / "config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(TRAINED / "tokenizer.json"))
    write_checkpoint(args.to, config, tokenizer, lambda entry: unstacked(weights, entry))
    torch.save({name: weight.bfloat16() for name, weight in weights.items()}, args.folder / "master.pt")
    size = sum(file.stat().st_size for file in args.to.glob("*.safetensors"))
    print(f"{args.to}: {size / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    main()
