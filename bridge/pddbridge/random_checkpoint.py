"""Weights that are in no file: random, of any shape of model, the same for every engine. For benchmarks and for devices without a model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Final

import numpy as np

from pddbridge.checkpoint import EMBEDDING, expected_shapes
from pddbridge.kv_spec import KV_DTYPES
from pddbridge.model_spec import ModelSpec

# So many values of a tensor are drawn, then repeated: models of billions of weights are there in seconds. A prime, so that rows of a matrix
# are not one another.
_DRAWN: Final = 1_048_573
_SCHEME: Final = "random weights 1"


class RandomCheckpoint:
    """Tensors of ``spec``, drawn from ``seed`` and their names, in ``dtype`` ("float32", "bfloat16", "float16"). Implements
    :class:`pddbridge.checkpoint_source.ModelTensors`.

    Scales are such that activations neither vanish nor grow with depth: linear weights have a variance of 1 / in, norms are near one.
    """

    def __init__(self, spec: ModelSpec, seed: int, dtype: str = "float32") -> None:
        self.spec = spec
        self._seed, self._dtype = seed, dtype
        self._shapes = expected_shapes(spec)
        self.names = tuple(sorted(self._shapes))

    def load(self, name: str) -> np.ndarray:
        """See :meth:`pddbridge.checkpoint_source.ModelTensors.load`. Raises KeyError for a name that is not in ``names``."""
        shape = self._shapes[name]
        size = int(np.prod(shape))
        key = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        drawn = np.random.default_rng(np.frombuffer(key, np.uint32)).standard_normal(min(size, _DRAWN), np.float32)
        if len(shape) == 2:
            drawn *= 1.0 if name == EMBEDDING else shape[1] ** -0.5
        elif name.endswith(".bias"):
            drawn *= 0.1
        else:
            drawn = 1 - self.spec.norm_offset + 0.1 * drawn
        return np.resize(drawn.astype(KV_DTYPES[self._dtype]), shape)

    def weights_digest(self) -> str:
        """SHA-256 (hex) of what the weights follow from, which is less work than the weights."""
        facts = [_SCHEME, asdict(self.spec), self._seed, self._dtype]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
