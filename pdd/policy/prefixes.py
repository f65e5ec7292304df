"""Which workers were sent which beginnings of prompts: a bounded memory of fingerprints. No clock: what was not asked for longest goes."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

_DIGEST_BYTES = 8
# Of a prompt, chunks that are looked at: what lies behind 2,048 equal chunks changes no choice.
MAX_CHUNKS = 2048


def fingerprints(tenant: str, prompt_ids: Sequence[int], chunk_tokens: int) -> tuple[bytes, ...]:
    """One per whole chunk of the prompt: of the tenant and all tokens up to that chunk's end. Workers keep caches per tenant."""
    state = hashlib.blake2b(tenant.encode(), digest_size=_DIGEST_BYTES)
    state.update(b"\0")
    num_chunks = min(len(prompt_ids) // chunk_tokens, MAX_CHUNKS)
    tokens = np.asarray(prompt_ids[: num_chunks * chunk_tokens], dtype="<i8").reshape(num_chunks, chunk_tokens)
    found = []
    for chunk in tokens:
        state.update(chunk.tobytes())
        found.append(state.digest())
    return tuple(found)


class PrefixMemory:
    """``max_prefixes``: fingerprints remembered, whoever they were sent to."""

    def __init__(self, chunk_tokens: int, max_prefixes: int) -> None:
        self.chunk_tokens = chunk_tokens
        self._max = max_prefixes
        self._workers: OrderedDict[bytes, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def known(self, prints: Sequence[bytes]) -> dict[str, int]:
        """Tokens of a prompt with these fingerprints that each worker was sent before; workers that were not are absent."""
        found: dict[str, int] = {}
        alive: set[str] | None = None
        for index, fingerprint in enumerate(prints):
            workers = self._workers.get(fingerprint, set())
            alive = set(workers) if alive is None else alive & workers
            if not alive:
                break
            for worker in alive:
                found[worker] = (index + 1) * self.chunk_tokens
        return found

    def sent(self, prints: Sequence[bytes], worker: str) -> None:
        """A prompt with these fingerprints goes to ``worker``."""
        # From the end: of one prompt, the beginning is forgotten last, as it is what other prompts share.
        for fingerprint in reversed(prints):
            self._workers.setdefault(fingerprint, set()).add(worker)
            self._workers.move_to_end(fingerprint)
        while len(self._workers) > self._max:
            self._workers.popitem(last=False)

    def forget(self, worker: str) -> None:
        """Its cache is gone, or it is."""
        for fingerprint in [f for f, workers in self._workers.items() if worker in workers]:
            workers = self._workers[fingerprint]
            workers.discard(worker)
            if not workers:
                del self._workers[fingerprint]
