"""A coordinator whose answers are the real sampler's and the real text side's, over logits that depend on prompt and log alone."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import numpy as np

from pdd.serving.acceptor import Acceptor
from pdd.serving.request import Delta, GenerationRequest
from pdd.serving.text.model import TextModel
from pddbridge.sampling import sample, token_record
from pddbridge.sampling_params import TokenRecord
from tests.support.scripted_coordinator import TIMELINE, Limits, ScriptedCoordinator


def logits_after(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """[V] float32: peaked enough that top-k, top-p and min-p leave several tokens; letters and the end of text are likely."""
    rng = np.random.default_rng(zlib.crc32(np.asarray(ids, np.int64).tobytes()))
    logits = rng.normal(0.0, 2.0, vocab_size).astype(np.float32)
    return logits


class SamplingCoordinator(ScriptedCoordinator):
    def __init__(self, text: TextModel) -> None:
        super().__init__(text, limits=Limits())

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        self.running.add(request.request_id)
        try:
            prompt = self._prompt_records(request)
            if request.prompt_only:
                yield Delta((), "", 0, "main", "length", TIMELINE, prompt)
                return
            acceptor = Acceptor(request, self.text)
            while acceptor.finish_reason is None:
                position, log = len(acceptor.log), list(acceptor.log.ids)
                logits = logits_after([*request.prompt_ids, *log], self.limits.vocab_size)
                chosen = sample(logits, request.sampling, request.prompt_ids, log, position)
                delta = acceptor.accept(position, chosen, "main")
                assert delta is not None
                yield replace(delta, prompt_records=prompt, timeline=TIMELINE if delta.finish_reason else None)
                prompt = None
        finally:
            self.running.discard(request.request_id)

    def _prompt_records(self, request: GenerationRequest) -> tuple[TokenRecord, ...] | None:
        if request.prompt_logprobs is None:
            return None
        ids = request.prompt_ids
        logits = [logits_after(ids[:at], self.limits.vocab_size) for at in range(1, len(ids))]
        scored = [token_record(row, token, request.prompt_logprobs) for row, token in zip(logits, ids[1:], strict=True)]
        return (TokenRecord(ids[0]), *scored)
