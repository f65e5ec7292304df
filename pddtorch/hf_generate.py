"""Hugging Face transformers' ``generate`` as a yardstick for ``pdd bench engine``: what people would use instead."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import LogitsProcessorList

from pddtorch.oracle import load

_FIRST_ID = 5  # below are special tokens in many vocabularies


class HfGenerate:
    """The model of ``model_dir`` (safetensors or one GGUF file), greedy, its own KV cache."""

    def __init__(self, model_dir: str, dtype: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._model = load(Path(model_dir), "sdpa").to(getattr(torch, dtype))
        self._generator = torch.Generator().manual_seed(0)

    def prefill(self, num_tokens: int) -> float:
        """Seconds until the logits after a prompt of ``num_tokens`` are there."""
        began, steps = self._generate(1, num_tokens, 1)
        return steps[0] - began

    def decode(self, streams: int, context: int, steps: int) -> float:
        """Seconds of ``steps`` decode steps of ``streams`` rows after prompts of ``context`` tokens, the prompts' own time left out."""
        _, times = self._generate(streams, context, steps + 1)
        return times[-1] - times[0]

    @torch.inference_mode()
    def _generate(self, streams: int, context: int, num_tokens: int) -> tuple[float, list[float]]:
        """(start, when each step's logits were there), in ``perf_counter`` seconds."""
        times: list[float] = []

        def clock(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            times.append(time.perf_counter())
            return scores

        ids = torch.randint(_FIRST_ID, self._model.config.vocab_size, (streams, context), generator=self._generator)
        began = time.perf_counter()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([clock]),
        )
        return began, times
