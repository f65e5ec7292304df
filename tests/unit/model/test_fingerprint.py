"""Equal fingerprints mean exchangeable KV: everything that changes a KV byte's meaning changes it, nothing else does."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from pddbridge.checkpoint import open_checkpoint
from pddbridge.fingerprint import fingerprint
from pddbridge.kv_spec import KVSpec
from pddbridge.model_spec import ModelSpec
from tests.support.tiny_models import Form, make_tiny_llama

SPEC = ModelSpec("LlamaForCausalLM", 3, 48, 80, 6, 3, 8, 300, 512, 1e-5, 1e4, False, False, False, 1, (2,))
KV = KVSpec.gqa(3, 3, 8, "bfloat16")
# What limits or ends a request, and nothing else, may differ between two sides.
FREE = {"max_context_tokens": 1024, "bos_token_id": None, "eos_token_ids": (2, 5)}
DECISIVE: dict[str, object] = {
    "architecture": "Other",
    "num_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 12,
    "num_kv_heads": 6,
    "head_dim": 16,
    "vocab_size": 301,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_001.0,
    "tie_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
}


def test_every_field_is_decided_on() -> None:
    """A new field of ModelSpec must be put on one of the two lists."""
    assert {field.name for field in fields(ModelSpec)} == set(FREE) | set(DECISIVE)


def test_what_changes_it() -> None:
    base = fingerprint(SPEC, "ab", KV)
    others = [fingerprint(replace(SPEC, **{name: value}), "ab", KV) for name, value in DECISIVE.items()]  # type: ignore[arg-type]
    others += [fingerprint(SPEC, "ac", KV)]
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
    assert fingerprint(SPEC, "ab", KV) == "e6cc2c97c35a96e35a6fe10604afd7e75745b90aa7bef08d04ebbfec5a61a07c"


def test_one_model_in_all_forms(tmp_path: Path) -> None:
    forms: tuple[Form, ...] = ("safetensors", "sharded", "gguf")
    prints = set()
    for form in forms:
        checkpoint = open_checkpoint(make_tiny_llama(tmp_path / form, form=form, num_heads=6, num_kv_heads=3, head_dim=8))
        prints.add(fingerprint(checkpoint.spec, checkpoint.weights_digest(), KV))
    other = open_checkpoint(make_tiny_llama(tmp_path / "other", seed=1, num_heads=6, num_kv_heads=3, head_dim=8))
    assert len(prints) == 1
    assert fingerprint(other.spec, other.weights_digest(), KV) not in prints
