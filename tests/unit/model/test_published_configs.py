"""``config.json`` of published models, as their repositories have them, and what they say."""

from __future__ import annotations

import pytest

from pddbridge.model_spec_hf import from_hf_config
from pddbridge.rope import LinearScaling, Llama3Scaling, RopeSpec
from pddkernels.shapes import MODEL_SHAPES

LLAMA_31: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
CONFIGS: dict[str, dict[str, object]] = {
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
        "transformers_version": "4.42.3",
        "use_cache": True,
        "vocab_size": 49152,
    },
    "llama-3.1-8b": LLAMA_31,
    "llama-3.1-70b": LLAMA_31 | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "qwen3-32b": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 25600,
        "max_position_embeddings": 40960,
        "max_window_layers": 64,
        "model_type": "qwen3",
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    "gemma-2-9b": {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 16,
        "num_hidden_layers": 42,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
        "torch_dtype": "float32",
        "transformers_version": "4.42.0.dev0",
        "use_cache": True,
        "vocab_size": 256000,
    },
    # The text model is one part of this file; what it leaves out are defaults.
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
}
GEMMA_3_1B: dict[str, object] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}


@pytest.mark.parametrize("model", CONFIGS)
def test_sizes_windows_and_caps_are_those_that_kernels_are_tested_with(model: str) -> None:
    spec, shape = from_hf_config(CONFIGS[model]), MODEL_SHAPES[model]
    assert (spec.num_layers, spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (
        shape.num_layers,
        shape.hidden_size,
        shape.intermediate_size,
        shape.vocab_size,
    )
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    assert spec.layer_windows == tuple(shape.windows[layer % len(shape.windows)] for layer in range(spec.num_layers))
    assert spec.attention_soft_cap == shape.soft_cap


def test_what_else_the_families_differ_in() -> None:
    llama, qwen2, qwen3 = (from_hf_config(CONFIGS[model]) for model in ("llama-3.1-8b", "qwen2.5-7b", "qwen3-32b"))
    assert llama.ropes == (RopeSpec(500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192)),)
    assert (llama.qkv_bias, qwen2.qkv_bias, qwen3.qkv_bias) == (False, True, False)
    assert not any(spec.attention_out_bias or spec.mlp_bias for spec in (llama, qwen2, qwen3))
    assert (llama.qk_norm, qwen2.qk_norm, qwen3.qk_norm) == (False, False, True)
    assert {spec.norm_offset for spec in (llama, qwen2, qwen3)} == {0.0}
    assert (qwen3.attention_scale, qwen3.max_context_tokens) == (128**-0.5, 40960)


def test_gemma_2() -> None:
    spec = from_hf_config(CONFIGS["gemma-2-9b"])
    assert spec.layer_windows[:2] == (4096, None)
    assert (spec.attention_scale, spec.attention_soft_cap, spec.logit_soft_cap) == (1 / 16, 50.0, 30.0)
    assert (spec.embedding_scale, spec.norm_offset, spec.post_norms, spec.activation) == (3584**0.5, 1.0, True, "gelu_tanh")
    assert spec.ropes == (RopeSpec(10_000.0),)
    assert (spec.tie_embeddings, spec.qk_norm) == (True, False)
    assert from_hf_config(CONFIGS["gemma-2-9b"] | {"query_pre_attn_scalar": 144}).attention_scale == 1 / 12, "27B's"


@pytest.mark.parametrize(("config", "scaling"), [(CONFIGS["gemma-3-4b"], LinearScaling(8.0)), (GEMMA_3_1B, None)])
def test_gemma_3(config: dict[str, object], scaling: LinearScaling | None) -> None:
    spec = from_hf_config(config)
    assert spec.architecture == "Gemma3ForCausalLM"
    assert spec.ropes == (RopeSpec(1_000_000.0, scaling), RopeSpec(10_000.0))
    assert spec.layer_ropes[:7] == (1, 1, 1, 1, 1, 0, 1)
    assert [layer for layer, window in enumerate(spec.layer_windows) if window is None] == list(range(5, spec.num_layers, 6))
    assert (spec.attention_scale, spec.attention_soft_cap, spec.logit_soft_cap) == (1 / 16, None, None)
    assert (spec.qk_norm, spec.norm_offset, spec.post_norms, spec.tie_embeddings) == (True, 1.0, True, True)
    assert spec.eos_token_ids == (1, 106)


@pytest.mark.parametrize(
    ("model", "fields", "said"),
    [
        ("mistral-7b", {"sliding_window": 0}, "layer_windows: given 0"),
        ("mistral-7b", {"sliding_window": "4k"}, "sliding_window.*4k"),
        ("mistral-7b", {"attention_bias": True}, "attention_bias: given True"),
        ("qwen2.5-7b", {"mlp_bias": True}, "mlp_bias: given True"),
        ("qwen2.5-7b", {"layer_types": ["sliding_attention"] * 28}, "layer_types.*use_sliding_window"),
        ("qwen2.5-7b", {"use_sliding_window": True, "layer_types": ["full_attention"] * 27}, "layer_types.*28 of"),
        ("qwen3-32b", {"layer_types": ["chunked_attention"] * 64}, "layer_types.*chunked_attention"),
        ("qwen3-32b", {"use_sliding_window": True, "max_window_layers": 0}, "sliding_window: given None"),
        ("qwen3-32b", {"num_experts": 128}, "num_experts: given 128"),
        ("gemma-2-9b", {"hidden_activation": "gelu"}, "hidden_activation.*gelu.*gelu_pytorch_tanh"),
        ("gemma-2-9b", {"use_bidirectional_attention": True}, "use_bidirectional_attention: given True"),
        ("gemma-2-9b", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: given 0"),
        ("gemma-2-9b", {"attn_logit_softcapping": -1.0}, "attention_soft_cap: given -1"),
        ("gemma-2-9b", {"sliding_window_size": 2048}, "sliding_window_size: given 2048.*4096"),
        ("gemma-3-4b", {"text_config": None}, "text_config: given None"),
        ("gemma-3-4b", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_refused_by_name(model: str, fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        from_hf_config(CONFIGS[model] | fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: given 50.0, allowed null"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern: given 0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_parameters.rope_theta.*full_attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "short_factor": [1.0]}}, "rope_scaling.short_factor"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope_scaling.rope_type: given 'proportional'"),
    ],
)
def test_gemma_3_refused_by_name(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_hf_config(GEMMA_3_1B | fields)


def test_a_cap_that_is_null_is_none() -> None:
    spec = from_hf_config(CONFIGS["gemma-2-9b"] | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (spec.attention_soft_cap, spec.logit_soft_cap) == (None, None)


def test_layer_types_say_which_layers_have_a_window() -> None:
    kinds = ["full_attention", "sliding_attention"] * 32
    spec = from_hf_config(CONFIGS["qwen3-32b"] | {"use_sliding_window": True, "sliding_window": 8, "layer_types": kinds})
    assert spec.layer_windows == (None, 8) * 32
