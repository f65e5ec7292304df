"""GGUF checkpoints, read through the ``gguf`` library: names, dequantisation, and what llama.cpp's converter changed, undone.

It permutes the rows of q and k of ``llama`` models (of no other) from half-split to interleaved RoPE order; undone with the number of query
heads for q, of KV heads for k. It adds 1 to the norm weights of Gemma, whose own files hold w of 1 + w.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import gguf
import numpy as np

from pddbridge.checkpoint_source import CheckpointError, TensorInfo
from pddbridge.model_spec import LLAMA
from pddbridge.model_spec_gguf import TensorFacts, from_gguf

# Arrays longer than this are vocabularies, scores and merges: a checkpoint reader skips them. The library builds Python objects per
# element, seconds for 49,152 tokens, where skipping takes milliseconds.
_LONGEST_ARRAY_READ: Final = 1024
_EMBEDDING: Final = "token_embd.weight"
_ROPE_FACTORS: Final = "rope_freqs.weight"
# Q5_0 and Q5_1 stand in K-quantised files for rows that are no multiple of 256.
_STORAGE_TYPES: Final = frozenset({"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"})


class GgufSource:
    """One memory-mapped file. ``spec`` comes from its metadata, tensors and ``eos_token_ids`` of the files beside it.

    Raises CheckpointError for a truncated or foreign file, ValueError for what :func:`pddbridge.model_spec_gguf.from_gguf` refuses.
    """

    def __init__(self, file: Path, eos_token_ids: Iterable[int] = ()) -> None:
        reader, metadata = _open(file)
        self._tensors: dict[str, gguf.ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        if _EMBEDDING not in self._tensors:
            raise CheckpointError(f"checkpoint {file}: tensors are missing: {_EMBEDDING}")
        try:
            self.spec = from_gguf(metadata, self._facts(), eos_token_ids)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        self._architecture = str(metadata["general.architecture"])
        self._stored_names = self._canonical_names()
        self._check_types(file)
        self._infos = {
            name: TensorInfo(tuple(int(n) for n in reversed(self._tensors[stored].shape)), self._tensors[stored].tensor_type.name)
            for name, stored in self._stored_names.items()
        }

    @property
    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def load(self, name: str) -> np.ndarray:
        tensor = self._tensors[self._stored_names[name]]
        values: np.ndarray = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if self.spec.architecture == LLAMA and ".self_attn.q_proj." in name:
            return unpermute(values, self.spec.num_heads)
        if self.spec.architecture == LLAMA and ".self_attn.k_proj." in name:
            return unpermute(values, self.spec.num_kv_heads)
        if self.spec.norm_offset and "norm" in name:
            return values - np.float32(self.spec.norm_offset)
        return np.array(values) if np.shares_memory(values, tensor.data) else values

    def rows(self, name: str, num_rows: int) -> Iterator[np.ndarray]:
        tensor = self._tensors[self._stored_names[name]]
        assert ".self_attn." not in name, "rows of q and k are permuted across pieces"
        for start in range(0, len(tensor.data), num_rows):
            yield gguf.quants.dequantize(tensor.data[start : start + num_rows], tensor.tensor_type)

    def _facts(self) -> TensorFacts:
        factors = self._tensors.get(_ROPE_FACTORS)
        return TensorFacts(
            vocab_size=int(self._tensors[_EMBEDDING].shape[-1]),
            tie_embeddings="output.weight" not in self._tensors,
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            attention_out_bias="blk.0.attn_output.bias" in self._tensors,
            mlp_bias="blk.0.ffn_up.bias" in self._tensors,
            rope_factors=None if factors is None else tuple(float(str(f)) for f in np.array(factors.data, np.float32).ravel()),
        )

    def _canonical_names(self) -> dict[str, str]:
        """Hugging Face name -> stored name, for every tensor of the file; one without a place keeps its own, to be refused by it."""
        arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self._architecture)
        name_map = gguf.get_tensor_name_map(arch, self.spec.num_layers)
        canonical = [f"model.layers.{layer}.{part}" for layer in range(self.spec.num_layers) for part in _LAYER_PARTS]
        canonical += ["model.embed_tokens", "model.norm", "lm_head"]
        by_stored = {stored: name for name in canonical if (stored := name_map.get_name(name)) is not None}
        names: dict[str, str] = {}
        for stored in self._tensors.keys() - {_ROPE_FACTORS}:
            stem, _, suffix = stored.rpartition(".")
            names[f"{by_stored[stem]}.{suffix}" if stem in by_stored else stored] = stored
        return names

    def _check_types(self, file: Path) -> None:
        """Refused here, not in the middle of loading: storage types whose reading is not tested, which the library may know or not."""
        for tensor in self._tensors.values():
            if (kind := tensor.tensor_type.name) not in _STORAGE_TYPES:
                raise CheckpointError(f"checkpoint {file}: {tensor.name} is stored as {kind}, allowed {sorted(_STORAGE_TYPES)}")


_LAYER_PARTS: Final = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "self_attn.q_norm",
    "self_attn.k_norm",
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)


def unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k (weight [heads * dim, in] or bias [heads * dim]) from GGUF's interleaved RoPE order to half-split; a copy.

    Inverse of ``LlamaModel.permute`` in llama.cpp's convert_hf_to_gguf.py: a head's rows [dim/2, 2] -> [2, dim/2].
    """
    pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


class _MetadataReader(gguf.GGUFReader):
    """The library's reader, but long arrays are stepped over: their fields have no contents."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[np.ndarray], list[int], list[gguf.GGUFValueType]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item_type = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        length = int(self._get(orig_offs + 4, np.uint64)[0])
        if length <= _LONGEST_ARRAY_READ or item_type == gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        end = orig_offs + 12
        if item_type == gguf.GGUFValueType.STRING:
            read_length = struct.Struct("<Q" if self.byte_order == "I" else ">Q").unpack_from
            buffer = memoryview(self.data)
            for _ in range(length):
                end += 8 + read_length(buffer, end)[0]
        else:
            end += length * np.dtype(self.gguf_scalar_to_np[item_type]).itemsize
        return end - orig_offs, [], [], [gguf.GGUFValueType.ARRAY, item_type]


def _open(file: Path) -> tuple[gguf.GGUFReader, Mapping[str, object]]:
    try:
        reader = _MetadataReader(file)
        return reader, {key: field.contents() for key, field in reader.fields.items() if field.data}
    except OSError as error:
        raise CheckpointError(f"checkpoint {file}: {error.strerror or error}") from error
    except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
        # what slicing past the end of the memory map, or reading lengths and types out of garbage, ends in
        raise CheckpointError(f"checkpoint {file}: truncated or not GGUF: {' '.join(str(error).split())}") from error
