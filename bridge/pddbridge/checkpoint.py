"""A model directory opened for reading: its spec, and its tensors by canonical (Hugging Face) name, one at a time.

Owns the checks that run before anything is served: every expected tensor is there with its shape, nothing unknown is dropped in silence,
and whether the output head is tied is decided by what the file holds, not by what the config says.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import crc32c
import numpy as np

from pddbridge.checkpoint_safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsSource, TextPart
from pddbridge.checkpoint_source import CheckpointError, TensorInfo, TensorSource, some
from pddbridge.eos_files import eos_ids_beside_weights, read_json_object
from pddbridge.model_spec import GEMMA3, ModelSpec
from pddbridge.model_spec_hf import from_hf_config

__all__ = ["Checkpoint", "CheckpointError", "expected_shapes", "open_checkpoint", "read_hf_spec"]

_log = logging.getLogger(__name__)

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
# Buffers that old exports stored beside the weights; they follow from the config.
_IGNORED_SUFFIX: Final = ".rotary_emb.inv_freq"
_ROWS_PER_PIECE: Final = 4096


class Checkpoint:
    """``spec.tie_embeddings`` is what the checkpoint holds; ``names`` has ``lm_head.weight`` only if it differs from the embedding.

    ``warnings``: where config and file disagreed and how that was settled, and what was left out; one line each (also logged).
    """

    def __init__(self, spec: ModelSpec, source: TensorSource, warnings: tuple[str, ...]) -> None:
        self.spec = spec
        self.warnings = warnings
        self.names = tuple(sorted(expected_shapes(spec)))
        self._source = source
        self._crcs: dict[str, int] = {}

    def load(self, name: str) -> np.ndarray:
        """The tensor, C-contiguous, linear weights [out, in]: float32, float16 or bfloat16 as stored, quantised GGUF as float32.

        Raises KeyError for a name that is not in ``names``. Nothing is kept but a checksum.
        """
        if name not in self.names:
            raise KeyError(f"{name} is not one of this checkpoint's {len(self.names)} tensors")
        values = self._source.load(name)
        self._crcs[name] = crc32c.crc32c(np.ascontiguousarray(values, np.float32))
        return values

    def weights_digest(self) -> str:
        """SHA-256 (hex) over name, shape and CRC-32C of the float32 values of every tensor, in name order.

        The same for every file form that holds the same values. Tensors that were loaded before are not read again.
        """
        digest = hashlib.sha256()
        for name in self.names:
            if name not in self._crcs:
                self.load(name)
            digest.update(f"{name} {self._source.infos[name].shape} {self._crcs[name]:08x}\n".encode())
        return digest.hexdigest()


def open_checkpoint(model_dir: str | Path) -> Checkpoint:
    """Open a directory with ``config.json`` and safetensors, or with one ``.gguf`` file, and check it without reading the weights.

    Raises CheckpointError (one line: missing tensors, missing shards, truncated files, wrong shapes, tensors that the architecture has no
    place for) and ValueError for an architecture, activation, RoPE scaling or quantisation that is not supported, named.
    """
    path = Path(model_dir)
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path}: not a directory")
    if (path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file():
        spec, source = read_hf_spec(path), SafetensorsSource(path)
        if spec.architecture != GEMMA3:
            return _checked(path, spec, source)
        text = TextPart(source)
        left_out = (
            [f"checkpoint {path}: {text.num_left_out} tensors of the vision tower are not loaded: text only"] if text.num_left_out else []
        )
        return _checked(path, spec, text, left_out)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) != 1:
        found = f"found {some(file.name for file in ggufs)}" if ggufs else "found none of them"
        raise CheckpointError(f"checkpoint {path}: need {SINGLE_FILE}, {INDEX_FILE} or exactly one .gguf file, {found}")
    # Only here: what reads GGUF is not needed where models are safetensors, or in no file at all.
    from pddbridge.checkpoint_gguf import GgufSource

    gguf_source = GgufSource(ggufs[0], eos_ids_beside_weights(path))
    return _checked(path, gguf_source.spec, gguf_source)


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a model by Hugging Face name, linear weights [out, in]; the head only if not tied."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linears = {
        "self_attn.q_proj": (q_size, hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, spec.attention_out_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if spec.post_norms:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if spec.qk_norm:
        norms |= {"self_attn.q_norm": spec.head_dim, "self_attn.k_norm": spec.head_dim}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        for name, size in norms.items():
            shapes[f"{prefix}.{name}.weight"] = (size,)
        for name, (out_size, in_size, bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (out_size, in_size)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (out_size,)
    if not spec.tie_embeddings:
        shapes[HEAD] = (spec.vocab_size, hidden)
    return shapes


def read_hf_spec(model_dir: Path) -> ModelSpec:
    """Spec from ``config.json`` and the files beside it, as they declare it; ``tie_embeddings`` is still the config's word.

    Raises CheckpointError for a missing or malformed file, ValueError for what is not supported.
    """
    config_file = model_dir / "config.json"
    config = read_json_object(config_file)
    eos_ids = eos_ids_beside_weights(model_dir)
    try:
        return from_hf_config(config, eos_ids)
    except ValueError as error:
        raise ValueError(f"{config_file}: {error}") from error


def _checked(path: Path, declared: ModelSpec, source: TensorSource, noticed: Sequence[str] = ()) -> Checkpoint:
    infos = source.infos
    has_head = HEAD in infos
    # Shapes first, and those of the head whenever there is one: the tie decision below compares values.
    _check_tensors(path, expected_shapes(replace(declared, tie_embeddings=not has_head)), infos)
    tied = not has_head or _same_values(source, EMBEDDING, HEAD)
    warnings = [*noticed]
    if tied and not has_head and not declared.tie_embeddings:
        warnings.append(f"checkpoint {path}: config says untied embeddings but there is no {HEAD}: the embedding is used as the head")
    if not tied and declared.tie_embeddings:
        warnings.append(f"checkpoint {path}: config says tied embeddings but {HEAD} differs from the embedding: {HEAD} is used")
    for warning in warnings:
        _log.warning(warning)
    return Checkpoint(replace(declared, tie_embeddings=tied), source, tuple(warnings))


def _check_tensors(path: Path, expected: dict[str, tuple[int, ...]], infos: dict[str, TensorInfo]) -> None:
    missing = [name for name in expected if name not in infos]
    if missing:
        raise CheckpointError(f"checkpoint {path}: {len(missing)} of {len(expected)} tensors are missing: {some(missing, len(missing))}")
    unknown = [name for name in infos if name not in expected and not name.endswith(_IGNORED_SUFFIX)]
    if unknown:
        raise CheckpointError(f"checkpoint {path}: tensors that the config gives no place: {some(unknown)}")
    wrong = [f"{name} {infos[name].shape}, expected {shape}" for name, shape in expected.items() if infos[name].shape != shape]
    if wrong:
        raise CheckpointError(f"checkpoint {path}: wrong shapes: {some(wrong)}")


def _same_values(source: TensorSource, name: str, other: str) -> bool:
    pieces = zip(source.rows(name, _ROWS_PER_PIECE), source.rows(other, _ROWS_PER_PIECE), strict=True)
    return all(np.array_equal(piece.astype(np.float32), twin.astype(np.float32)) for piece, twin in pieces)
