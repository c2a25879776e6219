"""The trainer's files import each other as a script's neighbours do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "train_tiny"))
