"""The float32 oracle: Hugging Face transformers in one process. What every engine and every handoff is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM


@lru_cache(maxsize=4)
def _model(model_dir: str) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()


def logits(model_dir: Path, ids: Sequence[int]) -> np.ndarray:
    """Float32 logits [len(ids), vocab] of one whole-sequence pass. ``model_dir`` holds safetensors and must not change between calls."""
    with torch.inference_mode():
        return np.asarray(_model(str(model_dir))(torch.tensor([list(ids)])).logits[0].numpy())


def greedy(model_dir: Path, prompt_ids: Sequence[int], n: int) -> tuple[list[int], list[float]]:
    """``n`` greedy tokens, lowest id on ties, no stop rule; and per token the gap between its logit and the second best."""
    ids: list[int] = []
    gaps: list[float] = []
    with torch.inference_mode():
        out = _model(str(model_dir))(torch.tensor([list(prompt_ids)]), use_cache=True)
        while True:
            last = out.logits[0, -1].numpy()
            token = int(np.argmax(last))
            ids.append(token)
            gaps.append(float(last[token] - np.partition(last, -2)[-2]))
            if len(ids) == n:
                return ids, gaps
            out = _model(str(model_dir))(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
