"""What a config may say, what follows when it says nothing, and what is refused by name."""

from __future__ import annotations

import math

import pytest
from transformers import LlamaConfig

from pddbridge.model_spec_gguf import TensorFacts, from_gguf
from pddbridge.model_spec_hf import from_hf_config
from pddbridge.rope import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling

CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 301,
    "max_position_embeddings": 777,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 200,
}
GGUF: dict[str, object] = {
    "general.architecture": "llama",
    "llama.embedding_length": 96,
    "llama.feed_forward_length": 160,
    "llama.block_count": 5,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 3,
    "llama.context_length": 777,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "general.quantization_version": 2,
}


def gguf_spec(**metadata: object) -> object:
    given = {key.replace("__", "."): value for key, value in metadata.items()}
    return from_gguf(GGUF | given, TensorFacts(vocab_size=301, tie_embeddings=True))


def test_defaults_are_those_of_transformers() -> None:
    spec = from_hf_config(CONFIG)
    reference = LlamaConfig(**{key: value for key, value in CONFIG.items() if key != "architectures"})
    assert (spec.head_dim, spec.num_kv_heads) == (reference.head_dim, reference.num_key_value_heads) == (16, 3)
    assert spec.rms_norm_eps == reference.rms_norm_eps
    assert spec.ropes == (RopeSpec(reference.rope_parameters["rope_theta"]),)
    assert spec.attention_scale == reference.head_dim**-0.5
    assert spec.tie_embeddings == reference.tie_word_embeddings
    assert (spec.qkv_bias, spec.mlp_bias) == (reference.attention_bias, reference.mlp_bias)
    assert (spec.eos_token_ids, spec.bos_token_id) == ((), None)


def test_kv_heads_default_to_all_heads() -> None:
    assert from_hf_config({key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}).num_kv_heads == 6


def test_explicit_head_dim_wins() -> None:
    assert from_hf_config(CONFIG | {"head_dim": 40}).head_dim == 40
    assert from_hf_config(CONFIG | {"head_dim": None}).head_dim == 16
    assert from_hf_config(CONFIG | {"hidden_size": 97, "head_dim": 40}).hidden_size == 97


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500000, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}},
    ],
)
def test_rope_theta_wherever_it_is_named(fields: dict[str, object]) -> None:
    assert from_hf_config(CONFIG | fields).ropes == (RopeSpec(5e5),)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architectures": ["Phi3ForCausalLM"]}, "architectures.*Phi3ForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "llama"}, "model_type.*llama.*qwen3"),
        ({"architectures": None}, "architectures"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "architectures"),
        ({"model_type": "mistral"}, "model_type.*mistral"),
        ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "rope_scaling.rope_type.*longrope.*linear"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor.*1.0.*low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"beta_fast": 32}}, "rope_scaling.beta_fast.*32"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "rope_scaling.factor.*0.0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "rope_scaling.factor.*0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": "1"}}, "rope_scaling.mscale.*1"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}}, "rope_scaling.*rope_parameters"),
        ({"logit_scale": 0.0625}, "logit_scale.*0.0625"),
        ({"attention_multiplier": 0.1}, "attention_multiplier.*0.1"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types"),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}}, "rope_parameters.factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4}}, "rope_theta.*twice"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps.*1e-5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*gptq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"hidden_size": 97}, "hidden_size.*97"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_layers.*0"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_key_value_heads": 4}, "num_kv_heads.*4"),
        ({"num_key_value_heads": 0}, "num_kv_heads.*0"),
        ({"head_dim": 15}, "head_dim.*15"),
        ({"head_dim": -2}, "head_dim.*-2"),
        ({"vocab_size": 1.5}, "vocab_size.*1.5"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings.*yes"),
        ({"attention_bias": 1}, "attention_bias.*1"),
        ({"bos_token_id": 301}, "bos_token_id.*301"),
    ],
)
def test_refused_by_name(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        from_hf_config(CONFIG | fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("scaling", "wanted", "context"),
    [
        (LLAMA3, Llama3Scaling(8.0, 1.0, 4.0, 200), 777),
        ({"rope_type": "linear", "factor": 2}, LinearScaling(2.0), 777),
        # up to max_position_embeddings, transformers' dynamic scaling is none; beyond, nothing is served
        ({"type": "dynamic", "factor": 4.0}, None, 777),
        ({"type": "yarn", "factor": 4.0}, YarnScaling(4.0, 777, 0.1 * math.log(4) + 1), 4 * 777),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 300}, YarnScaling(2.0, 300, 0.1 * math.log(2) + 1), 777),
        ({"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}, YarnScaling(4.0, 777, 1.0), 4 * 777),
        ({"type": "yarn", "factor": 4.0, "attention_factor": 1.5, "mscale": 0.7}, YarnScaling(4.0, 777, 1.5), 4 * 777),
        (
            {"type": "yarn", "factor": 4.0, "beta_fast": 16, "truncate": False},
            YarnScaling(4.0, 777, 0.1 * math.log(4) + 1, 16.0, 1.0, False),
            3108,
        ),
    ],
)
def test_rope_scaling(scaling: dict[str, object], wanted: object, context: int) -> None:
    for fields in ({"rope_scaling": scaling}, {"rope_parameters": scaling | {"rope_theta": 10_000.0}}):
        spec = from_hf_config(CONFIG | fields)
        assert spec.ropes == (RopeSpec(10_000.0, wanted),)  # type: ignore[arg-type]
        assert spec.max_context_tokens == context


def test_neutral_and_switched_off_fields_are_no_matter() -> None:
    off = {"rope_scaling": None, "sliding_window": None, "logit_scale": None, "some_flag": False, "auto_map": {}, "_name_or_path": "x"}
    assert from_hf_config(CONFIG | off | {"torch_dtype": "bfloat16", "initializer_range": 0.02}) == from_hf_config(CONFIG)


def test_gguf_and_config_of_one_model_are_equal() -> None:
    """Float32 metadata must not make two specs of one model differ."""
    assert gguf_spec(llama__rope__freq_base=float("1e4")) == from_hf_config(CONFIG | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "phi3"),
        ("llama.rope.scaling.type", "longrope"),
        ("llama.rope.scaling.factor", 2.0),
        ("llama.expert_count", 8),
        ("llama.rope.dimension_count", 8),
        ("llama.attention.value_length", 32),
        ("llama.attention.sliding_window", 4096),
        ("llama.attention.head_count", 7),
        ("llama.attention.head_count_kv", [3, 3, 3, 3, 3]),
        ("llama.vocab_size", 300),
        ("llama.block_count", None),
    ],
)
def test_gguf_refused_by_key(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        gguf_spec(**{key.replace(".", "__"): value})
