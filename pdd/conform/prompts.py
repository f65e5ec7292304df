"""Token ids that look like what a model is asked: a shipped text, tokenized, from a place that the seed decides."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np

from pdd.serving.text.model import TextModel


def prompt_ids(model_dir: Path, count: int, seed: int) -> np.ndarray:
    """``count`` ids [count] i32. Raises ValueError as :meth:`TextModel.load` does."""
    text = resources.files("pdd.launch").joinpath("demo_prompt.txt").read_text(encoding="utf-8")
    ids = np.array(TextModel.load(model_dir).encode(text, add_special=False), np.int32)
    start = int(np.random.default_rng(seed).integers(len(ids)))
    return np.resize(np.roll(ids, -start), count)
