"""Which workers were sent which beginnings of prompts: a bounded memory of fingerprints. No clock: what was not asked for longest goes."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

_DIGEST_BYTES = 8
# Of a prompt, chunks that are looked at: what lies behind 2,048 equal chunks changes no choice.
MAX_CHUNKS = 2048
_NOBODY: frozenset[str] = frozenset()


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
        # Fingerprints sent to the same workers share one set: a set of its own for each is more than all the rest of it.
        self._workers: OrderedDict[bytes, frozenset[str]] = OrderedDict()
        self._groups: dict[frozenset[str], frozenset[str]] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def known(self, prints: Sequence[bytes]) -> dict[str, int]:
        """Tokens of a prompt with these fingerprints that each worker was sent before; workers that were not are absent."""
        found: dict[str, int] = {}
        alive: frozenset[str] | None = None
        for index, fingerprint in enumerate(prints):
            workers = self._workers.get(fingerprint, _NOBODY)
            alive = workers if alive is None else alive & workers
            if not alive:
                break
            for worker in alive:
                found[worker] = (index + 1) * self.chunk_tokens
        return found

    def sent(self, prints: Sequence[bytes], worker: str) -> None:
        """A prompt with these fingerprints goes to ``worker``."""
        # From the end: of one prompt, the beginning is forgotten last, as it is what other prompts share.
        for fingerprint in reversed(prints):
            workers = self._workers.get(fingerprint, _NOBODY)
            if worker not in workers:
                self._workers[fingerprint] = self._shared(workers | {worker})
            self._workers.move_to_end(fingerprint)
        while len(self._workers) > self._max:
            self._workers.popitem(last=False)

    def forget(self, worker: str) -> None:
        """Its cache is gone, or it is."""
        for fingerprint in [f for f, workers in self._workers.items() if worker in workers]:
            if left := self._shared(self._workers[fingerprint] - {worker}):
                self._workers[fingerprint] = left
            else:
                del self._workers[fingerprint]
        self._groups = {group: group for group in self._groups if worker not in group}

    def _shared(self, group: frozenset[str]) -> frozenset[str]:
        """The one that is equal to ``group``."""
        return self._groups.setdefault(group, group)
