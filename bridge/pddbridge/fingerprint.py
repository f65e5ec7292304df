"""The semantic fingerprint: two workers whose fingerprints are equal may exchange KV.

It covers what decides the meaning of a KV byte: architecture numbers, RoPE, norms, weight values, KV dtype and planes. No engine,
library or file format, and nothing that only limits a request (context length) or ends it (stop tokens).
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

from pddbridge.kv_spec import KVSpec
from pddbridge.model_spec import ModelSpec

_VERSION = "pdd-fingerprint-1"


def fingerprint(spec: ModelSpec, weights_digest: str, kv_spec: KVSpec) -> str:
    """SHA-256 (hex) of a canonical JSON. ``weights_digest`` is :meth:`pddbridge.checkpoint.Checkpoint.weights_digest`.

    Floats count as float32, the precision that every file format keeps of them.
    """
    facts = {
        "version": _VERSION,
        "architecture": spec.architecture,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": _float32_hex(spec.rms_norm_eps),
        "rope_theta": _float32_hex(spec.rope_theta),
        "tie_embeddings": spec.tie_embeddings,
        "attention_bias": spec.attention_bias,
        "mlp_bias": spec.mlp_bias,
        "weights": weights_digest,
        "kv": kv_spec.facts(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _float32_hex(value: float) -> str:
    return np.array(value, ">f4").tobytes().hex()
