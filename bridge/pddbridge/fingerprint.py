"""The semantic fingerprint: two workers whose fingerprints are equal may exchange KV.

It covers what decides the meaning of a KV byte: architecture numbers, RoPE, windows, norms, weight values, KV dtype and planes. No engine,
library or file format, no name of a family (a Mistral is a Llama in GGUF; what they compute is spelled out), and nothing that only limits a
request (context length) or ends it (stop tokens).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

import numpy as np

from pddbridge.kv_spec import KVSpec
from pddbridge.model_spec import ModelSpec
from pddbridge.rope import RopeSpec

_VERSION = "pdd-fingerprint-2"


def fingerprint(spec: ModelSpec, weights_digest: str, kv_spec: KVSpec) -> str:
    """SHA-256 (hex) of a canonical JSON. ``weights_digest`` is :meth:`pddbridge.checkpoint.Checkpoint.weights_digest`.

    Floats count as float32, the precision that every file format keeps of them.
    """
    facts = {
        "version": _VERSION,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": _canonical(spec.rms_norm_eps),
        "ropes": [_rope(rope) for rope in spec.ropes],
        "layer_ropes": spec.layer_ropes,
        "layer_windows": spec.layer_windows,
        "attention_scale": _canonical(spec.attention_scale),
        "attention_soft_cap": _canonical(spec.attention_soft_cap),
        "qk_norm": spec.qk_norm,
        "qkv_bias": spec.qkv_bias,
        "attention_out_bias": spec.attention_out_bias,
        "mlp_bias": spec.mlp_bias,
        "activation": spec.activation,
        "norm_offset": _canonical(spec.norm_offset),
        "post_norms": spec.post_norms,
        "embedding_scale": _canonical(spec.embedding_scale),
        "logit_soft_cap": _canonical(spec.logit_soft_cap),
        "tie_embeddings": spec.tie_embeddings,
        "weights": weights_digest,
        "kv": kv_spec.facts(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _rope(rope: RopeSpec) -> dict[str, object]:
    scaling = None if rope.scaling is None else {name: _canonical(value) for name, value in asdict(rope.scaling).items()}
    return {"theta": _canonical(rope.theta), "scaling": type(rope.scaling).__name__, "numbers": scaling}


def _canonical(value: object) -> object:
    """Numbers as float32 in hex, tuples as lists of them; None and flags as they are."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, tuple):
        return [_canonical(item) for item in value]
    return np.array(value, ">f4").tobytes().hex()
