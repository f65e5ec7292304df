"""numpy <-> torch for the dtypes of checkpoints and KV, bit by bit: bfloat16 goes through int16 views, as numpy has no name for it."""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np
import torch

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A CPU tensor that shares the array's memory; of a read-only array a copy, since torch knows no read-only tensors."""
    array = np.require(array, requirements=["C", "W"])
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.dtype == _BFLOAT16 else torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor on the host, its memory shared if it is there already."""
    tensor = tensor.cpu()
    return tensor.view(torch.int16).numpy().view(_BFLOAT16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
