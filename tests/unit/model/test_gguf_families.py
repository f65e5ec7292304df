"""GGUF of every architecture and storage type: the same model as its safetensors, and values as the formats define them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from pddbridge.checkpoint import open_checkpoint
from pddbridge.fingerprint import fingerprint
from pddbridge.kv_spec import KVSpec
from tests.support import oracle
from tests.support.engines import random_ids
from tests.support.tiny_families import FAMILIES, make_tiny_family, tiny_family_tensors, write_family_gguf

Kind = gguf.GGMLQuantizationType
KV = KVSpec.gqa(2, 3, 10, "bfloat16")

# What llama.cpp keeps in its code and not in the file is given to both forms: every sixth layer of Gemma 3 without a window, Gemma's scale.
CHANGES: dict[str, dict[str, object]] = {
    "llama": {},
    "llama linear": {},
    "llama yarn": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 10, "num_hidden_layers": 3},
    "gemma3": {"query_pre_attn_scalar": 10, "num_hidden_layers": 7, "sliding_window_pattern": 6},
}


@pytest.mark.parametrize("family", CHANGES)
def test_gguf_is_the_model_of_the_safetensors(family: str, tmp_path: Path) -> None:
    """q and k are permuted in ``llama`` alone; Gemma's norms come with 1 added; everything else follows from keys or from llama.cpp."""
    wanted = open_checkpoint(make_tiny_family(tmp_path / "hf", family, **CHANGES[family]))
    found = open_checkpoint(make_tiny_family(tmp_path / "gguf", family, form="gguf", **CHANGES[family]))
    assert found.spec == wanted.spec
    assert found.names == wanted.names
    for name in wanted.names:
        np.testing.assert_array_equal(found.load(name), wanted.load(name), err_msg=name)
    assert fingerprint(found.spec, found.weights_digest(), KV) == fingerprint(wanted.spec, wanted.weights_digest(), KV)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_transformers_reads_our_gguf_alike(family: str, tmp_path: Path) -> None:
    """So the files of these tests are not only self-consistent. It ignores the key length of llama and qwen3."""
    head_dims = {"llama": {"head_dim": 8}, "qwen3": {"head_dim": 128}}
    model_dir = make_tiny_family(tmp_path / "gguf", family, form="gguf", **(CHANGES[family] | head_dims.get(family, {})))
    checkpoint = open_checkpoint(model_dir)
    state = oracle.model(model_dir).state_dict()
    for name in checkpoint.names:
        np.testing.assert_array_equal(checkpoint.load(name), state[name].numpy(), err_msg=name)


@pytest.mark.parametrize("num_layers", [46, 62])
def test_the_largest_gemma_has_a_query_scale_of_its_own(num_layers: int, tmp_path: Path) -> None:
    family = "gemma2" if num_layers == 46 else "gemma3"
    spec = open_checkpoint(make_tiny_family(tmp_path / "m", family, form="gguf", num_hidden_layers=num_layers)).spec
    assert spec.attention_scale == 8**-0.5 != spec.head_dim**-0.5  # hidden_size / num_heads


def test_a_mistral_in_gguf_is_the_mistral_of_its_safetensors(tmp_path: Path) -> None:
    """llama.cpp calls it llama; KV may pass between the two."""
    wanted = open_checkpoint(make_tiny_family(tmp_path / "hf", "mistral", sliding_window=None))
    (tmp_path / "gguf").mkdir()
    config = FAMILIES["mistral"] | {"model_type": "llama"}
    write_family_gguf(tmp_path / "gguf" / "m.gguf", config, tiny_family_tensors(FAMILIES["mistral"] | {"sliding_window": None}, 0))
    found = open_checkpoint(tmp_path / "gguf")
    assert fingerprint(found.spec, found.weights_digest(), KV) == fingerprint(wanted.spec, wanted.weights_digest(), KV)


# --- storage types: one block by hand, its values by the format's definition (ggml-quants.c's dequantize_row functions)


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def nibbles(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 16, count)


def q8_0(rng: np.random.Generator) -> tuple[bytes, list[float]]:
    numbers = rng.integers(-127, 128, 32)
    return half(0.125) + numbers.astype(np.int8).tobytes(), [0.125 * int(q) for q in numbers]


def q4_0(rng: np.random.Generator) -> tuple[bytes, list[float]]:
    """Low halves of 16 bytes, then high halves."""
    q = nibbles(rng, 32)
    packed = bytes(int(q[i]) | int(q[i + 16]) << 4 for i in range(16))
    return half(0.5) + packed, [0.5 * (int(v) - 8) for v in q]


def q4_1(rng: np.random.Generator) -> tuple[bytes, list[float]]:
    q = nibbles(rng, 32)
    packed = bytes(int(q[i]) | int(q[i + 16]) << 4 for i in range(16))
    return half(0.5) + half(-3.0) + packed, [0.5 * int(v) - 3.0 for v in q]


def q5_0(rng: np.random.Generator) -> tuple[bytes, list[float]]:
    """As Q4_0, with a fifth bit of every value in 32 bits of their own."""
    q = rng.integers(0, 32, 32)
    fifth = sum((int(v) >> 4) << i for i, v in enumerate(q))
    packed = bytes((int(q[i]) & 15) | (int(q[i + 16]) & 15) << 4 for i in range(16))
    return half(0.25) + struct.pack("<I", fifth) + packed, [0.25 * (int(v) - 16) for v in q]


def q5_1(rng: np.random.Generator) -> tuple[bytes, list[float]]:
    q = rng.integers(0, 32, 32)
    fifth = sum((int(v) >> 4) << i for i, v in enumerate(q))
    packed = bytes((int(q[i]) & 15) | (int(q[i + 16]) & 15) << 4 for i in range(16))
    return half(0.25) + half(1.5) + struct.pack("<I", fifth) + packed, [0.25 * int(v) + 1.5 for v in q]


def scales_and_mins(scales: np.ndarray, mins: np.ndarray) -> bytes:
    """Eight pairs of six bits in twelve bytes, as Q4_K and Q5_K keep them."""
    out = [0] * 12
    for j in range(4):
        out[j] = int(scales[j]) | (int(scales[j + 4]) >> 4) << 6
        out[j + 4] = int(mins[j]) | (int(mins[j + 4]) >> 4) << 6
        out[j + 8] = (int(scales[j + 4]) & 15) | (int(mins[j + 4]) & 15) << 4
    return bytes(out)


def q4_k(rng: np.random.Generator) -> tuple[bytes, list[float]]:
    """256 values in eight runs of 32, each with a scale and a minimum; two runs share 32 bytes, the first in their low halves."""
    q, scales, mins = nibbles(rng, 256), rng.integers(0, 64, 8), rng.integers(0, 64, 8)
    packed = bytes(int(q[64 * pair + i]) | int(q[64 * pair + 32 + i]) << 4 for pair in range(4) for i in range(32))
    values = [0.5 * int(scales[i // 32]) * int(v) - 0.25 * int(mins[i // 32]) for i, v in enumerate(q)]
    return half(0.5) + half(0.25) + scales_and_mins(scales, mins) + packed, values


def q5_k(rng: np.random.Generator) -> tuple[bytes, list[float]]:
    """As Q4_K, with the fifth bits of run r in bit r of 32 bytes."""
    q, scales, mins = rng.integers(0, 32, 256), rng.integers(0, 64, 8), rng.integers(0, 64, 8)
    fifth = bytes(sum((int(q[32 * run + i]) >> 4) << run for run in range(8)) for i in range(32))
    packed = bytes((int(q[64 * pair + i]) & 15) | (int(q[64 * pair + 32 + i]) & 15) << 4 for pair in range(4) for i in range(32))
    values = [0.5 * int(scales[i // 32]) * int(v) - 0.25 * int(mins[i // 32]) for i, v in enumerate(q)]
    return half(0.5) + half(0.25) + scales_and_mins(scales, mins) + fifth + packed, values


def q6_k(rng: np.random.Generator) -> tuple[bytes, list[float]]:
    """256 values in sixteen runs of 16 with an int8 scale each. Of each half of 128: low nibbles in 64 bytes, upper pairs of bits in 32."""
    q, scales = rng.integers(0, 64, 256), rng.integers(-128, 128, 16)
    low, high = bytearray(), bytearray()
    for part in (q[:128], q[128:]):
        low += bytes((int(part[i]) & 15) | (int(part[i + 64]) & 15) << 4 for i in range(64))
        high += bytes(sum((int(part[32 * quarter + i]) >> 4) << 2 * quarter for quarter in range(4)) for i in range(32))
    values = [0.125 * int(scales[i // 16]) * (int(v) - 32) for i, v in enumerate(q)]
    return bytes(low) + bytes(high) + scales.astype(np.int8).tobytes() + half(0.125), values


def f16(rng: np.random.Generator) -> tuple[bytes, list[float]]:
    numbers = rng.standard_normal(32).astype(np.float16)
    return numbers.tobytes(), [float(v) for v in numbers]


def bf16(rng: np.random.Generator) -> tuple[bytes, list[float]]:
    """The upper halves of float32."""
    upper = rng.standard_normal(32).astype("<f4").view("<u4") >> 16
    return upper.astype("<u2").tobytes(), [float(v) for v in (upper.astype("<u4") << 16).view("<f4")]


def f32(rng: np.random.Generator) -> tuple[bytes, list[float]]:
    numbers = rng.standard_normal(32).astype("<f4")
    return numbers.tobytes(), [float(v) for v in numbers]


Block = Callable[[np.random.Generator], tuple[bytes, list[float]]]
BLOCKS: dict[str, Block] = {
    "F32": f32,
    "F16": f16,
    "BF16": bf16,
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_by_hand_are_read_as_the_format_says(kind: str, tmp_path: Path) -> None:
    """Rows of several blocks, of a tensor that stays where it is (embedding) and of one whose rows are moved back (q of a Llama)."""
    config = FAMILIES["llama"] | {"hidden_size": 768, "intermediate_size": 8, "num_hidden_layers": 1, "tie_word_embeddings": True}
    tensors = tiny_family_tensors(config, 0)
    write_family_gguf(tmp_path / "m.gguf", config, tensors)
    rng = np.random.default_rng(7)
    blocks = {name: [[BLOCKS[kind](rng) for _ in range(768 // size_of(kind))] for _ in range(rows)] for name, rows in ROWS.items()}
    stored = {name: np.array([np.frombuffer(b"".join(raw for raw, _ in row), np.uint8) for row in rows]) for name, rows in blocks.items()}
    values = {name: np.array([[v for _, numbers in row for v in numbers] for row in rows], np.float32) for name, rows in blocks.items()}
    rewrite(tmp_path / "m.gguf", stored, Kind[kind])
    checkpoint = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.load("model.embed_tokens.weight").astype(np.float32), values["token_embd.weight"])
    heads = values["blk.0.attn_q.weight"].reshape(6, 5, 2, 768)  # of a head: pairs of rows that turn together
    halves = np.concatenate([heads[:, :, 0], heads[:, :, 1]], axis=1).reshape(60, 768)
    np.testing.assert_array_equal(checkpoint.load("model.layers.0.self_attn.q_proj.weight").astype(np.float32), halves)


def test_other_storage_types_are_refused_by_name(tmp_path: Path) -> None:
    config = FAMILIES["llama"] | {"hidden_size": 768, "intermediate_size": 8, "num_hidden_layers": 1}
    write_family_gguf(tmp_path / "m.gguf", config, tiny_family_tensors(config, 0))
    rewrite(tmp_path / "m.gguf", {"token_embd.weight": np.zeros((300, 3 * gguf.GGML_QUANT_SIZES[Kind.Q2_K][1]), np.uint8)}, Kind.Q2_K)
    with pytest.raises(ValueError, match=r"token_embd.weight is stored as Q2_K, allowed .*'Q4_K'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
def test_a_quantised_model_computes_as_its_dequantised_copy(kind: Kind, tmp_path: Path) -> None:
    """transformers, reading the quantised file by itself, has the weights that we serve."""
    sizes: dict[str, object] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = FAMILIES["qwen2"] | sizes
    model_dir = make_tiny_family(tmp_path / "m", "qwen2", form="gguf", **sizes)
    write_family_gguf(model_dir / "tiny.gguf", config, tiny_family_tensors(config, 0), kind=kind)
    checkpoint = open_checkpoint(model_dir)
    state = oracle.model(model_dir).state_dict()
    for name in checkpoint.names:
        np.testing.assert_array_equal(checkpoint.load(name), state[name].numpy(), err_msg=name)
    assert np.isfinite(oracle.logits(model_dir, random_ids(0, 9).tolist())).all()


ROWS = {"token_embd.weight": 300, "blk.0.attn_q.weight": 60}


def size_of(kind: str) -> int:
    """Values that a hand-made block of ``kind`` holds."""
    return 256 if kind.endswith("_K") else 32


def rewrite(file: Path, stored: dict[str, np.ndarray], kind: Kind) -> None:
    """The same file with the bytes of some tensors, [rows, bytes], in place of theirs."""
    source = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(file.with_suffix(".new"), "llama")
    for key, field in source.fields.items():
        if not key.startswith(("GGUF.", "general.architecture", "tokenizer.")):
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in source.tensors:
        if tensor.name in stored:
            writer.add_tensor(tensor.name, stored[tensor.name], raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.with_suffix(".new").replace(file)
