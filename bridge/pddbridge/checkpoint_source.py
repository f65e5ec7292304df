"""What a weight file offers before and after its bytes are read; the error that every checkpoint fault ends in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pddbridge.model_spec import ModelSpec


class CheckpointError(ValueError):
    """A model directory that cannot be served, in one line: what is missing, truncated, of wrong shape, or unsupported."""


@dataclass(frozen=True)
class TensorInfo:
    """Shape as numpy sees it (linear weights [out, in]) and the stored dtype's name in its file format."""

    shape: tuple[int, ...]
    dtype: str


class TensorSource(Protocol):
    """Tensors of one checkpoint by canonical (Hugging Face) name. Headers are checked on construction, values are read on demand."""

    @property
    def infos(self) -> dict[str, TensorInfo]: ...

    def load(self, name: str) -> np.ndarray:
        """The whole tensor, C-contiguous: float32, float16 or bfloat16 as stored; quantised formats as float32."""

    def rows(self, name: str, num_rows: int) -> Iterator[np.ndarray]:
        """The tensor in pieces of ``num_rows`` rows (the last may be shorter), as ``load`` would give them."""


class ModelTensors(Protocol):
    """What an engine makes a model of: :class:`pddbridge.checkpoint.Checkpoint`, or weights that are in no file."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def names(self) -> tuple[str, ...]: ...

    def load(self, name: str) -> np.ndarray:
        """The tensor of a canonical name, C-contiguous, linear weights [out, in]: float32, float16 or bfloat16."""

    def weights_digest(self) -> str:
        """Equal for equal tensors by name."""


def some(names: Iterable[str], limit: int = 8) -> str:
    """Names for an error line, all of them up to ``limit``, then a count."""
    listed: Sequence[str] = sorted(names)
    shown = ", ".join(listed[:limit])
    return shown if len(listed) <= limit else f"{shown} and {len(listed) - limit} more"
