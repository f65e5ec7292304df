"""`pdd bench engine`: what a step costs at least, the pairing of figures, and a real run on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from pdd.bench.engine import Plan, baseline_dtype, run
from pdd.bench.engine_costs import decode_bytes, head_weights, layer_weights, prefill_flops
from pddbridge.checkpoint import open_checkpoint
from tests.support.tiny_models import make_tiny_llama


def test_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Every matrix but the embedding, which a step looks up and does not read; here the head is a matrix of its own."""
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path / "m", num_heads=6, num_kv_heads=3, tie=False))
    sizes = {name: checkpoint.load(name).size for name in checkpoint.names if checkpoint.load(name).ndim == 2}
    assert head_weights(checkpoint.spec) == sizes.pop("lm_head.weight")
    sizes.pop("model.embed_tokens.weight")
    assert layer_weights(checkpoint.spec) == sum(sizes.values())


def test_costs_grow_with_what_is_read_and_computed(tmp_path: Path) -> None:
    spec = open_checkpoint(make_tiny_llama(tmp_path / "m")).spec
    weights = layer_weights(spec) + head_weights(spec)
    assert decode_bytes(spec, "bfloat16", 100, 4, 10) == 2 * weights + 4000
    assert decode_bytes(spec, "float32", 100, 4, 10) - decode_bytes(spec, "bfloat16", 100, 4, 10) == 2 * weights
    # One query against n keys on average n / 2: twice the prompt is four times the attention, twice the rest.
    attention = prefill_flops(spec, 20) - 2 * prefill_flops(spec, 10) + 2 * head_weights(spec)
    assert attention == 2 * spec.num_layers * spec.num_heads * spec.head_dim * (20 * 20 - 2 * 10 * 10)


@pytest.mark.parametrize("subjects", [(("numpy", "float32"),), (("jax", "float8"),), ()])
def test_plan_refuses(subjects: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(ValueError, match=r"subjects|at least one engine"):
        Plan(subjects)


def test_integer_weights_are_compared_with_bfloat16() -> None:
    assert baseline_dtype("int8") == "bfloat16"
    assert Plan((("torch", "int8"), ("jax", "float32"), ("torch", "bfloat16"))).baselines == ("bfloat16", "float32")


@pytest.mark.system
def test_a_real_run(tmp_path: Path) -> None:
    model_dir = make_tiny_llama(tmp_path / "m", max_context=64)
    plan = Plan(
        (("torch", "float32"),),
        streams=(1, 2),
        context=7,
        long_context=None,
        prompts=(9,),
        decode_steps=3,
        rounds=2,
        threads=1,
        step_tokens=4,
    )
    rows = run(model_dir, tmp_path / "cache", plan, Console(quiet=True), tmp_path / "rows.json")
    assert [(r.engine, r.phase, r.streams, r.context) for r in rows] == [
        (engine, *case) for case in (("prefill", 1, 9), ("decode", 1, 7), ("decode", 2, 7)) for engine in ("hf", "torch")
    ]
    for row in rows:
        assert row.tokens_per_s > 0
        assert row.share_of_limit is not None
        assert (row.ratio_to_hf is None) == (row.engine == "hf")
    assert [list(row) for row in json.loads((tmp_path / "rows.json").read_text())] == [
        ["engine", "dtype", "phase", "streams", "context", "tokens_per_s", "ratio_to_hf", "share_of_limit"]
    ] * len(rows)


@pytest.mark.system
def test_a_subject_that_cannot_start_says_why(tmp_path: Path) -> None:
    model_dir = make_tiny_llama(tmp_path / "m", max_context=64)
    with pytest.raises(ValueError, match="1034 tokens, allowed up to the model's 64"):
        run(
            model_dir,
            tmp_path / "cache",
            Plan((("torch", "float32"),), streams=(1,), long_context=None, prompts=(1034,)),
            Console(quiet=True),
            None,
        )
