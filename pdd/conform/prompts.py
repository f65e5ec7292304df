"""Token ids for the levels to work on: a shipped text, tokenized, as a model is asked; or random ids, for a model without a tokenizer."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np

from pdd.serving.text.model import TextModel
from pddbridge.checkpoint import open_checkpoint

PromptKind = Literal["text", "random"]


def prompt_ids(model_dir: Path, kind: PromptKind, count: int, seed: int) -> np.ndarray:
    """``count`` ids [count] i32; of the text, from a place that ``seed`` decides. Raises ValueError as :meth:`TextModel.load` and
    :func:`pddbridge.checkpoint.open_checkpoint` do.
    """
    rng = np.random.default_rng(seed)
    if kind == "random":
        return rng.integers(open_checkpoint(model_dir).spec.vocab_size, size=count).astype(np.int32)
    text = resources.files("pdd.launch").joinpath("demo_prompt.txt").read_text(encoding="utf-8")
    ids = np.array(TextModel.load(model_dir).encode(text, add_special=False), np.int32)
    return np.resize(np.roll(ids, -int(rng.integers(len(ids)))), count)
