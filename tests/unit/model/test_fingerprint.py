"""Equal fingerprints mean exchangeable KV: everything that changes a KV byte's meaning changes it, nothing else does."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from pddbridge.checkpoint import open_checkpoint
from pddbridge.fingerprint import fingerprint
from pddbridge.kv_spec import KVSpec
from pddbridge.model_spec import ModelSpec
from pddbridge.rope import FrequencyFactors, LinearScaling, Llama3Scaling, RopeSpec, YarnScaling
from tests.support.specs import llama_spec
from tests.support.tiny_models import Form, make_tiny_llama

SPEC = llama_spec(ropes=(RopeSpec(1e4), RopeSpec(1e6)))
KV = KVSpec.gqa(3, 3, 8, "bfloat16")
# What limits or ends a request, and nothing else, may differ between two sides.
FREE = {"architecture": "Other", "max_context_tokens": 1024, "bos_token_id": None, "eos_token_ids": (2, 5)}
DECISIVE: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 12,
    "num_kv_heads": 6,
    "head_dim": 16,
    "vocab_size": 301,
    "rms_norm_eps": 1e-6,
    "ropes": (RopeSpec(10_001.0), RopeSpec(1e6)),
    "layer_ropes": (0, 1, 0),
    "layer_windows": (None, 16, None),
    "attention_scale": 0.25,
    "attention_soft_cap": 50.0,
    "qk_norm": True,
    "activation": "gelu_tanh",
    "norm_offset": 1.0,
    "post_norms": True,
    "embedding_scale": 2.0,
    "logit_soft_cap": 30.0,
    "tie_embeddings": True,
    "qkv_bias": True,
    "attention_out_bias": True,
    "mlp_bias": True,
}


def test_every_field_is_decided_on() -> None:
    """A new field of ModelSpec must be put on one of the two lists."""
    assert {field.name for field in fields(ModelSpec)} == set(FREE) | set(DECISIVE) | {"num_layers"}


def test_what_changes_it() -> None:
    base = fingerprint(SPEC, "ab", KV)
    others = [fingerprint(replace(SPEC, **{name: value}), "ab", KV) for name, value in DECISIVE.items()]  # type: ignore[arg-type]
    others += [fingerprint(llama_spec(num_layers=4, ropes=SPEC.ropes), "ab", KV), fingerprint(SPEC, "ac", KV)]
    scalings = [
        *(LinearScaling(factor) for factor in (2.0, 4.0)),
        *(Llama3Scaling(*numbers, 8192) for numbers in ((8.0, 1.0, 4.0), (32.0, 1.0, 4.0), (8.0, 2.0, 4.0))),
        *(YarnScaling(4.0, 8192, factor) for factor in (1.0, 1.1)),
        YarnScaling(4.0, 8192, 1.0, truncate=False),
        *(FrequencyFactors((1.0, 1.0, 2.0, last)) for last in (2.0, 4.0)),
    ]
    others += [fingerprint(replace(SPEC, ropes=(RopeSpec(1e4, scaling), RopeSpec(1e6))), "ab", KV) for scaling in scalings]
    others += [
        fingerprint(SPEC, "ab", kv)
        for kv in (KVSpec.gqa(3, 3, 8, "float32"), KVSpec.gqa(3, 6, 4, "bfloat16"), KVSpec.gqa(2, 3, 8, "bfloat16"))
    ]
    assert len({base, *others}) == 1 + len(others)


def test_what_does_not() -> None:
    base = fingerprint(SPEC, "ab", KV)
    for name, value in FREE.items():
        assert fingerprint(replace(SPEC, **{name: value}), "ab", KV) == base, name  # type: ignore[arg-type]
    assert fingerprint(replace(SPEC, rms_norm_eps=9.999999747378752e-06), "ab", KV) == base, "the float32 of 1e-5, as GGUF keeps it"


def test_stays_what_it_is() -> None:
    """Two installations compare this value: a change of it must be deliberate, with a new version tag."""
    assert fingerprint(SPEC, "ab", KV) == "fa9ee6797e8777b85d26226fa501215106bdd7ea563151514e938f5d17c84323"


def test_one_model_in_all_forms(tmp_path: Path) -> None:
    forms: tuple[Form, ...] = ("safetensors", "sharded", "gguf")
    prints = set()
    for form in forms:
        checkpoint = open_checkpoint(make_tiny_llama(tmp_path / form, form=form, num_heads=6, num_kv_heads=3, head_dim=8))
        prints.add(fingerprint(checkpoint.spec, checkpoint.weights_digest(), KV))
    other = open_checkpoint(make_tiny_llama(tmp_path / "other", seed=1, num_heads=6, num_kv_heads=3, head_dim=8))
    assert len(prints) == 1
    assert fingerprint(other.spec, other.weights_digest(), KV) not in prints
