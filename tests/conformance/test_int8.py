"""compute_dtype: int8 on both engines: the same whole numbers, the same model, and tokens that pass from one to the other.

What int8 engines are compared with is the model that they compute: a float32 engine on weights that are rounded and then multiplied out.
They differ from it by bfloat16 activations alone, so by no more than bfloat16 engines may from theirs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from pddbridge.checkpoint import open_checkpoint
from pddbridge.checkpoint_source import ModelTensors
from pddbridge.engine import Engine
from pddbridge.kv_spec import TokenRange
from pddbridge.model_spec import ModelSpec
from pddbridge.weight_rounding import round_per_output
from pddjax.engine import create_from as create_jax
from pddjax.model import Projection
from pddjax.weights import load_model
from pddkernels.native.torch_native import Native
from pddtorch.engine import TorchEngine
from pddtorch.linear import Linear
from pddtorch.weights import load_weights
from tests.support.engines import CONFIG, Row, decode_greedy, make_engine, prefill, random_ids, relative_error, step_of
from tests.support.tiny_models import make_tiny_llama

PAGES = [7, 2, 9, 4, 11, 0, 3, 8]
INT8 = dataclasses.replace(CONFIG, compute_dtype="int8")
# Of the logits' spread: what bfloat16 arithmetic moves a logit of such models by, at most (tests/conformance/test_row_independence.py).
BFLOAT16_TIE = 0.05

# PyTorch's products with int8 weights need AVX-512 BF16 and VBMI; without, what is promised of JAX is still checked.
ENGINES = ("jax", "torch") if Native(None).has_int8 else ("jax",)


class MultipliedOut:
    """A checkpoint whose linear maps are rounded to int8 and multiplied out in float32; the head of a tied model is one of them."""

    def __init__(self, checkpoint: ModelTensors) -> None:
        self._checkpoint = checkpoint
        self.spec: ModelSpec = dataclasses.replace(checkpoint.spec, tie_embeddings=False)
        self.names = tuple(sorted({*checkpoint.names, "lm_head.weight"}))

    def load(self, name: str) -> np.ndarray:
        stored = "model.embed_tokens.weight" if name == "lm_head.weight" and name not in self._checkpoint.names else name
        values = self._checkpoint.load(stored)
        if not name.endswith(("_proj.weight", "lm_head.weight")):
            return values
        steps, scales = round_per_output(values)
        return steps * scales[:, None]

    def weights_digest(self) -> str:
        return f"{self._checkpoint.weights_digest()} in int8"


@pytest.fixture(scope="module", params=["untied", "tied"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three KV heads for nine, sizes that are no multiple of a vector."""
    root = tmp_path_factory.mktemp("model")
    biased = request.param == "untied"
    return make_tiny_llama(
        root / "m",
        num_heads=9,
        num_kv_heads=3,
        head_dim=16,
        hidden=72,
        num_layers=2,
        vocab=301,
        seed=3,
        tie=not biased,
        attention_bias=biased,
        mlp_bias=biased,
    )


def engine_of(name: str, checkpoint: ModelTensors, compute_dtype: str) -> Engine:
    config = dataclasses.replace(CONFIG, compute_dtype=compute_dtype)
    return create_jax(checkpoint, config) if name == "jax" else TorchEngine(checkpoint, config)


def test_both_engines_hold_the_same_whole_numbers_and_scales(model_dir: Path) -> None:
    """Read out with unit vectors: every product is then a step, exactly, times its scale."""
    checkpoint, native = open_checkpoint(model_dir), Native(None)
    if not native.has_int8:
        return
    mine = load_model(checkpoint, jnp.dtype("bfloat16"), 8, jax.devices("cpu")[0], int8=True)
    with torch.inference_mode():
        theirs = load_weights(checkpoint, torch.bfloat16, torch.device("cpu"), native, int8=True)

    def unit_products(linear: Linear, num_inputs: int) -> np.ndarray:
        with torch.inference_mode():
            return linear(torch.eye(num_inputs, dtype=torch.bfloat16)).float().numpy().T

    def held(projection: Projection) -> np.ndarray:
        """As a bfloat16 output has it, the bias added."""
        return np.asarray(projection(jnp.eye(projection.weight.shape[1], dtype=jnp.bfloat16)).astype(jnp.float32))

    for layer, other in zip(mine.layers, theirs.layers, strict=True):
        for projection, linear in (
            (layer.attention.qkv, other.qkv),
            (layer.attention.out, other.output),
            (layer.mlp.gate_up, other.gate_up),
            (layer.mlp.down, other.down),
        ):
            assert projection.weight.dtype == jnp.int8
            assert np.abs(np.asarray(projection.weight[...])).max() == 127
            assert np.array_equal(held(projection), unit_products(linear, projection.weight.shape[1]))
    assert mine.lm_head is not None
    assert mine.lm_head_scale is not None
    assert mine.embedding.dtype == jnp.bfloat16
    wanted = np.asarray(mine.lm_head[...]).astype(np.float32) * np.asarray(mine.lm_head_scale[...])[:, None]
    assert np.array_equal(wanted, unit_products(theirs.head, mine.lm_head.shape[1]))
    stored = checkpoint.load("model.embed_tokens.weight" if checkpoint.spec.tie_embeddings else "lm_head.weight")
    assert 0 < np.abs(wanted - stored).max() <= np.abs(stored).max() / 254 * 1.001


@pytest.mark.parametrize("name", ENGINES)
def test_int8_engines_compute_the_rounded_model_as_bfloat16_ones_compute_theirs(
    name: str, model_dir: Path, record_property: pytest.RecordProperty
) -> None:
    """In chunks and by single tokens, and at once."""
    checkpoint = open_checkpoint(model_dir)
    rounded, bfloat16 = (engine_of("torch", MultipliedOut(checkpoint), dtype) for dtype in ("float32", "bfloat16"))
    int8 = engine_of(name, checkpoint, "int8")
    ids = random_ids(33, 60)
    at_once = step_of(Row(ids, 0, [20, 21, 22, 23, 24, 25, 26, 27]))
    wanted, allowed = rounded.logits(at_once), 0.0
    for engine in (bfloat16, int8):
        prefill(engine, ids[:-2], PAGES, chunks=(20,))
        engine.step(step_of(Row(ids[-2:-1], 58, PAGES, samples=False)))
        error = max(relative_error(engine.logits(step), wanted) for step in (step_of(Row(ids[-1:], 59, PAGES)), at_once))
        record_property(engine.config.compute_dtype, error)
        if engine is bfloat16:
            allowed = 2 * error
    assert error < allowed < BFLOAT16_TIE


@pytest.mark.parametrize("model_dir", ["untied"], indirect=True)
@pytest.mark.parametrize(("first", "then"), list(zip(ENGINES, ENGINES[::-1], strict=True)))
def test_tokens_go_on_where_the_other_engine_left_them(first: str, then: str, model_dir: Path) -> None:
    """Prefilled and twelve tokens decoded on one, ingested and finished on the other: as the rounded model chooses, but for near ties."""
    checkpoint = open_checkpoint(model_dir)
    relay, main = engine_of(first, checkpoint, "int8"), engine_of(then, checkpoint, "int8")
    assert relay.weights_digest == main.weights_digest == checkpoint.weights_digest()
    oracle = engine_of("torch", MultipliedOut(checkpoint), "float32")
    ids = random_ids(41, 21)
    prefill(relay, ids[:-1], PAGES)
    log = decode_greedy(relay, ids, PAGES, 12)
    for block in relay.read_kv(np.array(PAGES, np.int32), TokenRange(0, 20)):
        main.write_kv(np.array(PAGES, np.int32), block)
    ingest = step_of(Row(np.array([ids[-1], *log], np.int32), 20, PAGES, prompt_ids=ids, log_ids=np.array(log, np.int32)))
    log.append(main.step(ingest).records[0].token_id)
    log += decode_greedy(main, np.array([*ids, *log], np.int32), PAGES, 11)
    assert len(set(log)) > 3
    tokens = np.array([*ids, *log], np.int32)
    for position, token in enumerate(log):
        (logits,) = oracle.logits(step_of(Row(tokens[: len(ids) + position], 0, PAGES)))
        assert logits.max() - logits[token] < BFLOAT16_TIE * np.ptp(logits), position


@pytest.mark.parametrize("model_dir", ["tied"], indirect=True)
@pytest.mark.parametrize("name", ENGINES)
def test_neighbours_change_nothing_but_near_ties(name: str, model_dir: Path) -> None:
    """Of seven decode rows the same logits as of one, as near as bfloat16 engines promise it."""
    engine = make_engine(name, model_dir, compute_dtype="int8", max_rows=7, num_pages=80)
    prompts = [random_ids(50 + row, 9 + row) for row in range(7)]
    tables = [[row * 3, row * 3 + 1, row * 3 + 2] for row in range(7)]
    for prompt, table in zip(prompts, tables, strict=True):
        prefill(engine, prompt[:-1], table)
    rows = [Row(prompt[-1:], len(prompt) - 1, table) for prompt, table in zip(prompts, tables, strict=True)]
    together = engine.logits(step_of(*rows))
    for row, beside in zip(rows, together, strict=True):
        (alone,) = engine.logits(step_of(row))
        assert np.abs(beside - alone).max() < BFLOAT16_TIE * np.ptp(alone)


@pytest.mark.parametrize("model_dir", ["untied"], indirect=True)
@pytest.mark.parametrize("name", ENGINES)
def test_weights_that_are_not_finite_are_refused(name: str, model_dir: Path) -> None:
    class Broken(MultipliedOut):
        def load(self, name: str) -> np.ndarray:
            values = super().load(name)
            return np.full_like(values, np.inf) if name.endswith("layers.1.mlp.down_proj.weight") else values

    with pytest.raises(ValueError, match="compute_dtype: int8: weights of output 0 are not finite"):
        engine_of(name, Broken(open_checkpoint(model_dir)), "int8")
