"""What a config may say, what follows when it says nothing, and what is refused by name."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from pddbridge.model_spec import from_gguf, from_hf_config

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
    return from_gguf(GGUF | given, vocab_size=301, tie_embeddings=True, attention_bias=False, mlp_bias=False)


def test_defaults_are_those_of_transformers() -> None:
    spec = from_hf_config(CONFIG)
    reference = LlamaConfig(**{key: value for key, value in CONFIG.items() if key != "architectures"})
    assert (spec.head_dim, spec.num_kv_heads) == (reference.head_dim, reference.num_key_value_heads) == (16, 3)
    assert spec.rms_norm_eps == reference.rms_norm_eps
    assert spec.rope_theta == reference.rope_parameters["rope_theta"]
    assert spec.tie_embeddings == reference.tie_word_embeddings
    assert (spec.attention_bias, spec.mlp_bias) == (reference.attention_bias, reference.mlp_bias)
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
    assert from_hf_config(CONFIG | fields).rope_theta == 5e5


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "architectures.*Qwen2ForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "architectures"),
        ({"model_type": "mistral"}, "model_type.*mistral"),
        ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.rope_type.*llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type.*linear"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters.rope_type.*yarn"),
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


def test_gguf_and_config_of_one_model_are_equal() -> None:
    """Float32 metadata must not make two specs of one model differ."""
    assert gguf_spec(llama__rope__freq_base=float("1e4")) == from_hf_config(CONFIG | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "qwen2"),
        ("llama.rope.scaling.type", "linear"),
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
