"""The float32 oracle: Hugging Face transformers in one pass, on the CPU. What every engine and every handoff is compared with.

Shares nothing with the engines but the checkpoint's files: transformers reads them, names the tensors and computes by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


@dataclass(frozen=True)
class OraclePass:
    """``logits`` [T, vocab] float32 · ``keys``, ``values``: per layer [tokens, kv_heads, dim] float32, keys after rotary embedding. A layer
    with a sliding window may keep its last tokens only.
    """

    logits: np.ndarray
    keys: tuple[np.ndarray, ...]
    values: tuple[np.ndarray, ...]


@lru_cache(maxsize=4)
def model(model_dir: Path) -> PreTrainedModel:
    """The model in float32, kept: ``model_dir`` must not change between calls. Raises what :func:`load` does."""
    return load(model_dir, "eager")


def load(model_dir: Path, attention: str) -> PreTrainedModel:
    """The model in float32, read by transformers alone: safetensors, or one ``.gguf`` file. ``attention``: transformers' name for its path.

    GGUF goes past ``from_pretrained``, which wants the accelerate package for it.
    Raises ValueError when transformers does not find every tensor in the GGUF file.
    """
    ggufs = list(model_dir.glob("*.gguf"))
    if not ggufs:
        return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation=attention).eval()
    config = AutoConfig.from_pretrained(model_dir, gguf_file=ggufs[0].name)
    loaded = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    tensors = load_gguf_checkpoint(str(ggufs[0]), return_tensors=True, model_to_load=loaded, torch_dtype=torch.float32)["tensors"]
    missing, unknown = loaded.load_state_dict(tensors, strict=False)
    if unknown or set(missing) - ({"lm_head.weight"} if config.tie_word_embeddings else set()):
        raise ValueError(f"{ggufs[0]}: transformers misses {missing} and has no place for {unknown}")
    loaded.tie_weights()
    return loaded.eval()


def run(model_dir: Path, ids: Sequence[int]) -> OraclePass:
    """One whole-sequence pass over ``ids``: logits of every position and the KV it leaves behind."""
    with torch.inference_mode():
        out = model(model_dir)(torch.tensor([list(ids)]), use_cache=True)
    # Renamed within transformers 5.
    layers = (out.cache if hasattr(out, "cache") else out.past_key_values).layers
    planes = ([layer.keys for layer in layers], [layer.values for layer in layers])
    keys, values = (tuple(np.asarray(plane[0].transpose(0, 1).numpy()) for plane in by_layer) for by_layer in planes)
    return OraclePass(np.asarray(out.logits[0].numpy()), keys, values)


def logits(model_dir: Path, ids: Sequence[int]) -> np.ndarray:
    """Float32 logits [len(ids), vocab] of one whole-sequence pass."""
    with torch.inference_mode():
        return np.asarray(model(model_dir)(torch.tensor([list(ids)])).logits[0].numpy())


def greedy(model_dir: Path, prompt_ids: Sequence[int], n: int) -> tuple[list[int], list[float]]:
    """``n`` greedy tokens, lowest id on ties, no stop rule; and per token the gap between its logit and the second best."""
    ids: list[int] = []
    gaps: list[float] = []
    with torch.inference_mode():
        out = model(model_dir)(torch.tensor([list(prompt_ids)]), use_cache=True)
        while True:
            last = out.logits[0, -1].numpy()
            token = int(np.argmax(last))
            ids.append(token)
            gaps.append(float(last[token] - np.partition(last, -2)[-2]))
            if len(ids) == n:
                return ids, gaps
            out = model(model_dir)(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
