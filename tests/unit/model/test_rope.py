"""The table of frequencies is transformers', for every kind of scaling, wherever its parameters come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from pddbridge.checkpoint import open_checkpoint
from pddbridge.model_spec_hf import from_hf_config
from pddbridge.rope import FrequencyFactors, Llama3Scaling, RopeSpec, inverse_frequencies, rotation_table
from tests.support.tiny_families import FAMILIES, make_tiny_family, tiny_family_tensors, write_family_gguf
from tests.support.tiny_models import write_tokenizer

SIZES: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 300,
    "max_position_embeddings": 131_072,
}


def llama3(factor: float, key: str = "rope_type") -> dict[str, object]:
    """Of Llama 3.1 (factor 8) and 3.2 (factor 32)."""
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_theta": 500_000.0, "rope_scaling": scaling | {key: "llama3"}}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize("head_dim", [64, 128, 80])
@pytest.mark.parametrize(
    "fields",
    [
        llama3(8.0),
        llama3(32.0, "type"),
        {"rope_theta": 10_000.0, "rope_scaling": {"type": "linear", "factor": 8.0}},
        {"rope_theta": 10_000.0, "rope_scaling": {"type": "dynamic", "factor": 8.0}},
        {"rope_theta": 1_000_000.0, "rope_scaling": YARN},
        {"rope_theta": 1_000_000.0, "rope_scaling": YARN | {"attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2}},
        {"rope_theta": 10_000.0, "rope_scaling": YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707, "truncate": False}},
        {"rope_theta": 10_000.0, "rope_scaling": YARN | {"mscale": 0.5}},
        {"rope_theta": 100.0, "rope_scaling": YARN | {"original_max_position_embeddings": 16, "beta_fast": 1.0}},
    ],
)
def test_table_and_factor_are_those_of_transformers(fields: dict[str, object], head_dim: int) -> None:
    reference = LlamaConfig(**{**SIZES, **fields, "head_dim": head_dim})
    want, factor = ROPE_INIT_FUNCTIONS[reference.rope_parameters["rope_type"]](reference, torch.device("cpu"))
    (rope,) = from_hf_config(SIZES | fields | {"head_dim": head_dim}).ropes
    table = inverse_frequencies(rope, head_dim)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table, want.numpy(), rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)
    cos, sin = rotation_table(rope, head_dim, 3)
    np.testing.assert_allclose(cos[2], np.cos(2 * table) * factor, rtol=1e-6)
    np.testing.assert_allclose(sin[1], np.sin(table) * factor, rtol=1e-6)


def test_dynamic_scaling_is_none_up_to_the_context_that_is_served() -> None:
    """transformers' own table for a sequence of that length."""
    fields = {"rope_theta": 10_000.0, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    spec = from_hf_config(SIZES | fields)
    reference = LlamaConfig(**(SIZES | fields))
    want, _ = ROPE_INIT_FUNCTIONS["dynamic"](reference, torch.device("cpu"), seq_len=spec.max_context_tokens)
    np.testing.assert_allclose(inverse_frequencies(spec.ropes[0], 128), want.numpy(), rtol=1e-6)
    beyond, _ = ROPE_INIT_FUNCTIONS["dynamic"](reference, torch.device("cpu"), seq_len=spec.max_context_tokens + 1000)
    assert not np.allclose(beyond.numpy(), want.numpy(), rtol=1e-6)


@pytest.mark.parametrize("written", ["old", "nested"])
def test_gemma3_has_a_table_for_each_kind_of_layer(written: str) -> None:
    fields = dict(FAMILIES["gemma3"])
    if written == "nested":
        full = {"rope_type": "linear", "factor": 8.0, "rope_theta": fields.pop("rope_theta")}
        fields.pop("rope_scaling")
        sliding = {"rope_type": "default", "rope_theta": fields.pop("rope_local_base_freq")}
        fields["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
    spec = from_hf_config(fields)
    assert spec.layer_windows == (12, None)
    assert spec.layer_ropes == (1, 0)
    given = {name: value for name, value in fields.items() if name != "model_type"}
    reference = Gemma3RotaryEmbedding(AutoConfig.for_model("gemma3_text", **given))
    for rope, kind in zip(spec.ropes, ("full_attention", "sliding_attention"), strict=True):
        want = getattr(reference, f"{kind}_inv_freq").numpy()
        np.testing.assert_allclose(inverse_frequencies(rope, spec.head_dim), want, rtol=1e-6)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequency_factors_of_gguf_are_llama_3s_scaling(tmp_path: Path, factor: float) -> None:
    """The tensor as llama.cpp's converter computes it gives the spec, and so the fingerprint, of the config."""
    changes = {"head_dim": 64, **llama3(factor)}
    directory = make_tiny_family(tmp_path / "hf", "llama", **changes)
    config = FAMILIES["llama"] | changes
    write_gguf(tmp_path / "gguf", config, llama_cpp_factors(64, 500_000.0, factor))
    wanted, found = open_checkpoint(directory), open_checkpoint(tmp_path / "gguf")
    assert replace(found.spec, eos_token_ids=wanted.spec.eos_token_ids) == wanted.spec
    assert found.spec.ropes == (RopeSpec(500_000.0, Llama3Scaling(factor, 1.0, 4.0, 8192)),)
    assert found.weights_digest() == wanted.weights_digest()


def test_other_frequency_factors_are_used_as_they_are(tmp_path: Path) -> None:
    factors = np.linspace(1, 3.5, 5, dtype=np.float32)
    write_gguf(tmp_path / "m", dict(FAMILIES["llama"]), factors)
    (rope,) = open_checkpoint(tmp_path / "m").spec.ropes
    assert rope.scaling == FrequencyFactors((1.0, 1.625, 2.25, 2.875, 3.5))
    np.testing.assert_allclose(inverse_frequencies(rope, 10), inverse_frequencies(RopeSpec(10_000.0), 10) / factors, rtol=1e-6)


def test_factors_that_do_not_fit_the_heads_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m", dict(FAMILIES["llama"]), np.ones(4, np.float32))
    with pytest.raises(ValueError, match=r"key_length: given 10 with 4 values"):
        open_checkpoint(tmp_path / "m")


def write_gguf(path: Path, config: dict[str, object], factors: np.ndarray) -> None:
    path.mkdir()
    write_tokenizer(path, 300)
    write_family_gguf(path / "m.gguf", config, tiny_family_tensors(config, 0), rope_factors=factors)


def llama_cpp_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """One number for each wave, from its length: 1 for short ones, ``factor`` for long ones (in Python's floats, one by one)."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)
