"""The float32 oracle: Hugging Face transformers in one process. What every engine and every handoff is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


@lru_cache(maxsize=4)
def model(model_dir: Path) -> LlamaForCausalLM:
    """The model in float32, read by transformers alone: safetensors, or one ``.gguf`` file.

    ``model_dir`` must not change between calls. GGUF goes past ``from_pretrained``, which wants the accelerate package for it.
    """
    ggufs = list(model_dir.glob("*.gguf"))
    if not ggufs:
        return LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    config = LlamaConfig.from_pretrained(model_dir, gguf_file=ggufs[0].name, attn_implementation="eager")
    loaded = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(ggufs[0]), return_tensors=True, model_to_load=loaded, torch_dtype=torch.float32)["tensors"]
    missing, unknown = loaded.load_state_dict(tensors, strict=False)
    if unknown or set(missing) - ({"lm_head.weight"} if config.tie_word_embeddings else set()):
        raise ValueError(f"{ggufs[0]}: transformers misses {missing} and has no place for {unknown}")
    loaded.tie_weights()
    return loaded.eval()


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
