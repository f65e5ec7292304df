"""One set of weights in every file form: the same spec, tensors, digest, and the same logits as transformers (case 105)."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from pddbridge.checkpoint import Checkpoint, open_checkpoint
from pddbridge.checkpoint_gguf import unpermute
from tests.support import numpy_llama, oracle
from tests.support.tiny_families import make_tiny_family
from tests.support.tiny_models import Form, make_tiny_llama, permute

IDS = [1, 57, 260, 3, 99, 250, 17, 2, 140, 88, 41]
# heads, KV heads, head_dim, hidden: grouped; three KV heads; explicit head_dim unlike hidden / heads; every head its own KV head
SHAPES = [(4, 2, None, 64), (6, 3, 12, 48), (4, 2, 24, 64), (4, 4, None, 32)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["safetensors", "sharded", "gguf"])
def test_logits_equal_transformers(tmp_path: Path, form: Form, shape: tuple[int, int, int | None, int]) -> None:
    num_heads, num_kv_heads, head_dim, hidden = shape
    make = partial(
        make_tiny_llama, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, hidden=hidden, rope_theta=777.0, vocab=300
    )
    reference = make(tmp_path / "reference")
    checkpoint = open_checkpoint(make(tmp_path / form, form=form))
    np.testing.assert_allclose(numpy_llama.logits(checkpoint, IDS), oracle.logits(reference, IDS), atol=2e-4)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_all_forms_are_one_model(tmp_path: Path, tie: bool, bias: bool) -> None:
    forms: tuple[Form, ...] = ("safetensors", "sharded", "gguf")
    opened = [
        open_checkpoint(make_tiny_llama(tmp_path / form, form=form, tie=tie, attention_bias=bias, mlp_bias=bias, head_dim=24, vocab=307))
        for form in forms
    ]
    first = opened[0]
    assert first.spec.tie_embeddings == tie
    assert ("lm_head.weight" in first.names) == (not tie)
    assert ("model.layers.2.mlp.down_proj.bias" in first.names) == bias
    assert ("model.layers.0.self_attn.k_proj.bias" in first.names) == bias
    for other in opened[1:]:
        assert other.spec == first.spec
        assert other.names == first.names
        assert other.weights_digest() == first.weights_digest()
        for name in first.names:
            np.testing.assert_array_equal(other.load(name), first.load(name), err_msg=name)


def test_spec_of_a_config(tmp_path: Path) -> None:
    spec = open_checkpoint(
        make_tiny_llama(tmp_path, num_heads=6, num_kv_heads=3, head_dim=10, num_layers=2, hidden=48, rope_theta=5e5)
    ).spec
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.num_layers, spec.hidden_size) == (6, 3, 10, 2, 48)
    assert (spec.intermediate_size, spec.vocab_size, spec.max_context_tokens) == (96, 300, 512)
    assert (spec.ropes[0].theta, spec.rms_norm_eps, spec.bos_token_id, spec.eos_token_ids) == (5e5, 1e-5, 1, (0, 2))


@pytest.mark.parametrize("tie", [False, True])
def test_gguf_equals_transformers_reading_of_it(tmp_path: Path, tie: bool) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path, form="gguf", num_heads=6, num_kv_heads=3, head_dim=12, hidden=48, tie=tie))
    expected = oracle.model(tmp_path).state_dict()
    assert set(expected) - ({"lm_head.weight"} if tie else set()) == set(checkpoint.names)
    for name in checkpoint.names:
        np.testing.assert_array_equal(checkpoint.load(name), expected[name].numpy(), err_msg=name)
    np.testing.assert_allclose(numpy_llama.logits(checkpoint, IDS), oracle.logits(tmp_path, IDS), atol=2e-4)


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16), ("float32", np.float32)])
def test_safetensors_come_as_stored(tmp_path: Path, dtype: str, stored: type) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path, dtype=dtype))  # type: ignore[arg-type]
    values = checkpoint.load("model.layers.1.self_attn.k_proj.weight")
    assert values.dtype == stored
    assert values.shape == (32, 64)
    assert values.flags.c_contiguous


def test_digest_sees_values_not_storage(tmp_path: Path) -> None:
    """bfloat16 and its exact float32 copy agree; a flipped value, swapped tensors and a read beforehand do what they should."""
    half = open_checkpoint(make_tiny_llama(tmp_path / "half", dtype="bfloat16"))
    tensors = {name: half.load(name).astype(np.float32) for name in half.names}
    rewritten = make_tiny_llama(tmp_path / "full")
    assert _digest(rewritten, tensors) == half.weights_digest()
    one_value = {
        **tensors,
        "model.norm.weight": tensors["model.norm.weight"] * np.where(np.arange(64) == 5, 1 + 2**-20, 1).astype(np.float32),
    }
    assert _digest(rewritten, one_value) != half.weights_digest()
    up, gate = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    assert _digest(rewritten, {**tensors, up: tensors[gate], gate: tensors[up]}) != half.weights_digest()
    unread = open_checkpoint(tmp_path / "half")
    assert unread.weights_digest() == half.weights_digest()


def test_quantised_gguf_is_dequantised_before_rows_move(tmp_path: Path) -> None:
    """Q8_0 rows of q and k: the same rows that the library gives, put in half-split order."""
    directory = make_tiny_llama(tmp_path, form="gguf", num_kv_heads=2)
    exact = open_checkpoint(directory)
    name = "model.layers.0.self_attn.k_proj.weight"
    rewritten = _requantised(directory)
    np.testing.assert_allclose(rewritten.load(name), exact.load(name), atol=0.01)
    assert rewritten.load(name).dtype == np.float32
    assert rewritten.weights_digest() != exact.weights_digest()


def test_load_gives_own_memory(tmp_path: Path) -> None:
    """A caller may write into what it got; the next reader sees the file."""
    for form in ("safetensors", "gguf"):
        checkpoint = open_checkpoint(make_tiny_llama(tmp_path / form, form=form))
        for name in ("model.norm.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
            before = checkpoint.load(name).copy()
            checkpoint.load(name)[...] = 0
            np.testing.assert_array_equal(checkpoint.load(name), before)


@given(num_heads=st.integers(1, 5), half=st.integers(1, 6), columns=st.integers(0, 3))
def test_unpermute_undoes_the_converter(num_heads: int, half: int, columns: int) -> None:
    rows = num_heads * half * 2
    shape = (rows, columns) if columns else (rows,)
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    np.testing.assert_array_equal(unpermute(permute(values, num_heads), num_heads), values)
    if num_heads > 1 and half > 1:
        assert not np.array_equal(unpermute(permute(values, num_heads), 1), values)


def test_unknown_name_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path, tie=True))
    with pytest.raises(KeyError, match=r"lm_head\.weight"):
        checkpoint.load("lm_head.weight")


def _digest(directory: Path, tensors: dict[str, np.ndarray]) -> str:
    save_file(tensors, directory / "model.safetensors")
    return open_checkpoint(directory).weights_digest()


def _requantised(directory: Path) -> Checkpoint:
    """The same GGUF with its matrices in Q8_0."""
    source = gguf.GGUFReader(directory / "tiny.gguf")
    target = directory / "quantised"
    target.mkdir()
    writer = gguf.GGUFWriter(target / "q8.gguf", "llama")
    for key, field in source.fields.items():
        if not key.startswith(("GGUF.", "general.architecture", "tokenizer.")):
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in source.tensors:
        if tensor.data.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(tensor.name, gguf.quants.quantize(np.array(tensor.data), kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(target)


@pytest.mark.parametrize("naming", ["language_model.{}", "model.language_model.{}"])
def test_the_text_model_inside_a_multimodal_gemma(tmp_path: Path, naming: str) -> None:
    """As published, and as transformers names its modules: the model of the text alone, with a word about what is left out."""
    alone = open_checkpoint(make_tiny_family(tmp_path / "text", "gemma3"))
    dropped = "model." if naming.startswith("model.") else ""
    tensors = {naming.format(n.removeprefix(dropped)): alone.load(n) for n in alone.names}
    tensors |= dict.fromkeys(
        ("vision_tower.vision_model.head.bias", "multi_modal_projector.mm_input_projection_weight"), np.ones(3, np.float32)
    )
    whole = make_tiny_family(tmp_path / "whole", "gemma3")
    save_file(tensors, whole / "model.safetensors")
    text = json.loads((whole / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text, "vision_config": {"a": 1}}
    (whole / "config.json").write_text(json.dumps(config))
    found = open_checkpoint(whole)
    assert found.spec == alone.spec
    assert found.weights_digest() == alone.weights_digest()
    assert ["2 tensors of the vision tower" in warning for warning in found.warnings] == [True]
