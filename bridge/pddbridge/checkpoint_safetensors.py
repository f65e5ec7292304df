"""Safetensors checkpoints: one ``model.safetensors``, or shards named by ``model.safetensors.index.json``.

With both present the single file is used, as transformers does. Files that the index does not name are never opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from safetensors import SafetensorError, safe_open

from pddbridge.checkpoint_source import CheckpointError, TensorInfo, TensorSource, some

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_DTYPES: Final = frozenset({"F32", "F16", "BF16"})


class SafetensorsSource:
    """Opens every file at once (headers only, memory-mapped). Raises CheckpointError for missing, truncated or inconsistent files."""

    def __init__(self, model_dir: Path) -> None:
        single = model_dir / SINGLE_FILE
        weight_map = None if single.is_file() else _read_index(model_dir / INDEX_FILE)
        files = [SINGLE_FILE] if weight_map is None else sorted(set(weight_map.values()))
        absent = [file for file in files if not (model_dir / file).is_file()]
        if absent:
            raise CheckpointError(f"checkpoint {model_dir}: files named by {INDEX_FILE} are missing: {some(absent)}")
        handles = {file: _open(model_dir / file) for file in files}
        held = {file: frozenset(handle.keys()) for file, handle in handles.items()}
        if weight_map is None:
            weight_map = dict.fromkeys(held[SINGLE_FILE], SINGLE_FILE)
        lost = [f"{name} ({file})" for name, file in weight_map.items() if name not in held[file]]
        if lost:
            raise CheckpointError(f"checkpoint {model_dir}: tensors are missing from the files that {INDEX_FILE} names: {some(lost)}")
        self._slices = {name: handles[file].get_slice(name) for name, file in weight_map.items()}
        self._infos = {name: TensorInfo(tuple(s.get_shape()), s.get_dtype()) for name, s in self._slices.items()}
        foreign = [f"{name} ({info.dtype})" for name, info in self._infos.items() if info.dtype not in _DTYPES]
        if foreign:
            raise CheckpointError(f"checkpoint {model_dir}: dtypes allowed are {sorted(_DTYPES)}, given {some(foreign)}")

    @property
    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def load(self, name: str) -> np.ndarray:
        values: np.ndarray = self._slices[name][:]
        return values

    def rows(self, name: str, num_rows: int) -> Iterator[np.ndarray]:
        total = self._infos[name].shape[0]
        for start in range(0, total, num_rows):
            yield self._slices[name][start : min(start + num_rows, total)]


class TextPart:
    """The text model inside a multimodal checkpoint, under the names it would have by itself. ``num_left_out``: tensors of the rest."""

    def __init__(self, whole: TensorSource) -> None:
        self._whole = whole
        self._names = {name: stored for stored in whole.infos if (name := _text_name(stored)) is not None}
        self._infos = {name: whole.infos[stored] for name, stored in self._names.items()}
        self.num_left_out = len(whole.infos) - len(self._names)

    @property
    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def load(self, name: str) -> np.ndarray:
        return self._whole.load(self._names[name])

    def rows(self, name: str, num_rows: int) -> Iterator[np.ndarray]:
        return self._whole.rows(self._names[name], num_rows)


def _text_name(stored: str) -> str | None:
    """As published, "language_model.model.layers..."; as transformers names its modules, "model.language_model.layers..."."""
    if stored.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector.")):
        return None
    return stored.replace("model.language_model.", "model.", 1) if stored.startswith("model.") else stored.removeprefix("language_model.")


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"checkpoint {file}: truncated or not safetensors: {' '.join(str(error).split())}") from error


def _read_index(file: Path) -> dict[str, str]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"checkpoint {file}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"checkpoint {file}: not JSON: {error}") from error
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"checkpoint {file}: weight_map must map tensor names to file names")
    outside = [shard for shard in weight_map.values() if shard != Path(shard).name]
    if outside:
        raise CheckpointError(f"checkpoint {file}: weight_map must name files of the same folder, given {some(set(outside))}")
    return weight_map
