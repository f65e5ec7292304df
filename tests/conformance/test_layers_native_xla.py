"""A decoder layer and the head as one native call each, against numpy in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pddkernels.kv_pages.portable_xla import decode, encode
from pddkernels.native_xla import calls, layers
from pddkernels.native_xla.layers import LayerRows, LayerWeights
from pddkernels.ragged_paged_attention.reference import ragged_paged_attention
from tests.support.ragged_batches import BatchSpec, RaggedBatch, RowSpec, make_batch

EPS = 1e-5
PADDING = 3


@dataclass(frozen=True)
class Case:
    """``post``, ``qk_norm``, ``bias``: whether the family has them; 3 and 1 of ``inner`` and ``hidden`` are past whole vectors, 2 and 1 of
    other ``hidden`` past threes.
    """

    batch: BatchSpec
    hidden: int = 65
    inner: int = 83
    post: bool = False
    qk_norm: bool = False
    bias: bool = False
    gelu: bool = False
    crossed: bool = False


# A chunk over a block of keys, extends, decode rows, a row without a token, one that begins; page size = KV heads in "few".
MIXED = (RowSpec(20, 37), RowSpec(0, 5), RowSpec(31, 1), RowSpec(9, 0), RowSpec(0, 1), RowSpec(15, 13), RowSpec(260, 1))
CASES = {
    "plain": Case(BatchSpec(MIXED, num_kv_heads=3, group=3, dim=64, page_size=12)),
    "everything": Case(
        BatchSpec(MIXED, num_kv_heads=2, group=2, dim=10, page_size=16, window=7, soft_cap=2.0),
        post=True,
        qk_norm=True,
        bias=True,
        gelu=True,
    ),
    "qk norm": Case(BatchSpec((RowSpec(3, 12),), num_kv_heads=1, group=5, dim=16, page_size=3), hidden=576, inner=64, qk_norm=True),
    "one token": Case(BatchSpec((RowSpec(0, 1),), num_kv_heads=3, group=1, dim=80, page_size=3), hidden=1, inner=1, bias=True),
    # So many that each thread takes all weights for its own tokens.
    "long": Case(BatchSpec((RowSpec(70, 290), RowSpec(3, 77)), num_kv_heads=1, group=3, dim=32, page_size=16), hidden=96, inner=48),
    # Turned as they leave the product, past one pair of halves, with a bias and without.
    "paired": Case(BatchSpec((RowSpec(3, 29), RowSpec(5, 1)), 2, 2, dim=96, page_size=5, window=9), hidden=31, inner=16, bias=True),
    "few": Case(BatchSpec(tuple(RowSpec(7, 1) for _ in range(8)), num_kv_heads=4, group=1, dim=8, page_size=4), hidden=32, inner=16),
}
CASES |= {f"{name}, crossed": replace(case, crossed=True) for name, case in CASES.items()}


@dataclass(frozen=True)
class Given:
    """A layer's dense weights by name, and the step: ``x`` [T, hidden], ``turns`` cos and sin [T, dim / 2], ``slots`` [T]."""

    dense: dict[str, np.ndarray]
    batch: RaggedBatch
    x: np.ndarray
    turns: tuple[np.ndarray, np.ndarray]
    slots: np.ndarray


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    calls.load(None)


def given(case: Case) -> Given:
    """New tokens' slots hold NaN until the layer stores there; so do all that no row may read."""
    rng = np.random.default_rng(7)
    batch, spec = make_batch(case.batch), case.batch
    slots = np.concatenate(
        [
            batch.page_tables[row, at // spec.page_size] * spec.page_size + at % spec.page_size
            for row, rows in enumerate(spec.rows)
            for at in [np.arange(rows.context_len, rows.context_len + rows.num_new)]
        ]
    ).astype(np.int32)
    for pages in (batch.k_pages, batch.v_pages):
        pages[slots // spec.page_size, :, slots % spec.page_size] = np.nan
    heads, dim = spec.num_kv_heads * spec.group, spec.dim
    sizes = {
        "qkv": ((heads + 2 * spec.num_kv_heads) * dim, case.hidden),
        "out": (case.hidden, heads * dim),
        "gate_up": (2 * case.inner, case.hidden),
        "down": (case.hidden, case.inner),
    }
    dense = {name: (rng.standard_normal(size) * size[1] ** -0.5).astype(np.float32) for name, size in sizes.items()}
    dense |= {f"{name}_bias": rng.standard_normal(size[0] if case.bias else 0, np.float32) for name, size in sizes.items()}
    norms = {"attention_norm": case.hidden, "mlp_norm": case.hidden}
    norms |= dict.fromkeys(("attention_post_norm", "mlp_post_norm"), case.hidden * case.post)
    norms |= dict.fromkeys(("q_norm", "k_norm"), dim * case.qk_norm)
    dense |= {name: 1 + 0.3 * rng.standard_normal(size, np.float32) for name, size in norms.items()}
    angles = rng.uniform(-3, 3, (len(slots), dim // 2))
    x = rng.standard_normal((len(slots), case.hidden), np.float32)
    return Given(dense, batch, x, (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)), slots)


def packed(dense: dict[str, np.ndarray], batch: BatchSpec, crossed: bool) -> LayerWeights:
    how = {"qkv": layers.pack, "out": layers.pack, "gate_up": layers.pack_gate_up, "down": layers.pack}
    weights = {name: layers.pad_down(dense[name]) if name == "down" else dense[name] for name in how}
    dense = dense | {name: layers.cross(weight) if crossed else weight for name, weight in weights.items()}
    how |= {f"{name}_bias": layers.pack_gate_up_bias if name == "gate_up" else layers.pack_bias for name in how}
    turned, normed = batch.num_kv_heads * (batch.group + 1), bool(dense["q_norm"].size)
    halves = {name: layers.pair_halves(dense[name], turned, batch.dim, normed=normed) for name in ("qkv", "qkv_bias")}
    dense = dense | halves
    return LayerWeights(**{name: how.get(name, lambda norm: norm)(values) for name, values in dense.items()})  # type: ignore[arg-type]


def run(case: Case, step: Given, kv_dtype: str = "float32", wanted: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """[T, hidden] or [W, hidden], and the pages [pages, page_size, 2 * kv_heads, dim] as float32."""
    batch, dtype = step.batch, jnp.dtype(kv_dtype)
    pages = encode(jnp.asarray(batch.interleaved_pages), dtype)
    past = np.prod(pages.shape[:2]) + np.arange(PADDING)
    num_rows = len(batch.context_lens)
    rows = LayerRows(
        np.concatenate((step.slots, past)).astype(np.int32),
        np.pad(batch.page_tables, ((0, 1), (0, 0))),
        np.pad(batch.row_starts, (0, 1), constant_values=2**20),
        np.pad(batch.context_lens, (0, 1), constant_values=2**20),
        np.array([num_rows], np.int32),
    )
    x, cos, sin = (np.pad(values, ((0, PADDING), (0, 0)), constant_values=np.nan) for values in (step.x, *step.turns))
    heads = case.batch.num_kv_heads * case.batch.group

    def call(weights: LayerWeights, x: jax.Array, rows: LayerRows, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        options = {"num_heads": heads, "eps": EPS, "gelu": case.gelu, "crossed": case.crossed, "wanted": wanted}
        return layers.layer(weights, x, cos, sin, rows, pages, batch.options, **options)

    found, written = jax.jit(call, donate_argnums=3)(packed(step.dense, case.batch, case.crossed), x, rows, pages)
    return np.asarray(found), np.asarray(decode(written, dtype), np.float32)


def normed(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return x if len(weights) == 0 else weights * x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)


def expected(case: Case, step: Given) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The layer in float64: [T, hidden], and the new tokens' keys and values [T, kv_heads, dim]."""
    w = {name: values.astype(np.float64) for name, values in step.dense.items()}
    batch, spec, x = step.batch, case.batch, step.x.astype(np.float64)
    heads = spec.num_kv_heads * spec.group

    def project(name: str, x: np.ndarray) -> np.ndarray:
        return x @ w[name].T + (w[f"{name}_bias"] if case.bias else 0)

    def turned(x: np.ndarray) -> np.ndarray:
        first, second = np.split(x, 2, -1)
        cos, sin = (values.astype(np.float64)[:, None] for values in step.turns)
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)

    q, k, v = np.split(project("qkv", normed(x, w["attention_norm"])).reshape(len(x), -1, spec.dim), (heads, heads + spec.num_kv_heads), 1)
    q, k = turned(normed(q, w["q_norm"])), turned(normed(k, w["k_norm"]))
    pages = [batch.k_pages.astype(np.float64), batch.v_pages.astype(np.float64)]
    for plane, new in zip(pages, (k, v), strict=True):
        plane[step.slots // spec.page_size, :, step.slots % spec.page_size] = new
    mixed = ragged_paged_attention(q, *pages, batch.row_starts, batch.context_lens, batch.page_tables, batch.options)
    x = x + normed(project("out", mixed.reshape(len(x), -1)), w["attention_post_norm"])
    gate, up = np.split(project("gate_up", normed(x, w["mlp_norm"])), 2, -1)
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    active = gate * (1 + np.tanh(inner)) / 2 if case.gelu else gate / (1 + np.exp(-gate))
    return x + normed(project("down", active * up), w["mlp_post_norm"]), k, v


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_what_its_definition_says(name: str) -> None:
    case = CASES[name]
    step = given(case)
    found, pages = run(case, step)
    want, keys, values = expected(case, step)
    assert np.abs(found[: len(want)] - want).max() < 3e-5
    assert not found[len(want) :].any()
    page, slot = step.slots // case.batch.page_size, step.slots % case.batch.page_size
    assert np.abs(pages[page, slot, 0::2] - keys).max() < 1e-5
    assert np.abs(pages[page, slot, 1::2] - values).max() < 1e-5
    untouched = step.batch.interleaved_pages.copy()
    untouched[page, slot] = pages[page, slot]
    assert np.array_equal(pages, untouched, equal_nan=True)


def test_kv_in_bfloat16_is_rounded_to_nearest_even_and_attended_to_as_stored() -> None:
    case = CASES["plain"]
    step = given(case)
    exact, rounded = run(case, step)[1], run(case, step, "bfloat16")
    page, slot = step.slots // case.batch.page_size, step.slots % case.batch.page_size
    assert np.array_equal(rounded[1][page, slot], np.asarray(jnp.asarray(exact[page, slot]).astype(jnp.bfloat16), np.float32))
    want = expected(case, step)[0]
    assert 1e-5 < np.abs(rounded[0][: len(want)] - want).max() < 5e-2


@pytest.mark.parametrize("times", [1, 9])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_tokens_that_are_wanted_are_those_of_the_whole_layer(name: str, times: int) -> None:
    """In any order, often, few or more than there are, last of a row or not; columns of nobody are zeros, and KV is stored for all."""
    case = CASES[name]
    step = given(case)
    columns = np.array([36, 2**31 - 1, 0, 42, 42, len(step.slots) - 1, len(step.slots)] * times, np.int32)
    valid = columns < len(step.slots)
    whole, all_pages = run(case, step)
    some, pages = run(case, step, wanted=columns)
    assert np.abs(some[valid] - whole[columns[valid]]).max() < 3e-5
    assert not some[~valid].any()
    assert np.array_equal(pages, all_pages, equal_nan=True)
    nothing, pages = run(case, step, wanted=np.full(2, len(step.slots), np.int32))
    assert not nothing.any()
    assert np.array_equal(pages, all_pages, equal_nan=True)


def beside(others: int, dim: int, crossed: bool) -> tuple[np.ndarray, np.ndarray]:
    """The result and the KV of a decode row, behind so many others."""
    case = replace(CASES["few"], batch=replace(CASES["few"].batch, dim=dim), crossed=crossed)
    rows = tuple(RowSpec(5 + index, 1) for index in range(others))
    with_others = replace(case, batch=replace(case.batch, rows=(RowSpec(300, 1), *rows)))
    step, alone = given(with_others), given(replace(case, batch=replace(case.batch, rows=(RowSpec(300, 1),))))
    step.x[0] = alone.x[0]
    for mine, its in zip(step.turns, alone.turns, strict=True):
        mine[0] = its[0]
    for pages, its in ((step.batch.k_pages, alone.batch.k_pages), (step.batch.v_pages, alone.batch.v_pages)):
        used = -(-301 // case.batch.page_size)
        pages[step.batch.page_tables[0, :used]] = its[alone.batch.page_tables[0, :used]]
    found, pages = run(with_others, replace(step, dense=alone.dense))
    return found[0], pages[step.slots[0] // case.batch.page_size, step.slots[0] % case.batch.page_size]


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("dim", [8, 32])
@pytest.mark.parametrize("others", [1, 7, 11, 12, 24, 40])
def test_a_row_is_the_same_to_the_bit_beside_any_others(others: int, dim: int, crossed: bool) -> None:
    """Around the twelve tokens of a tile, with heads that are turned in registers and heads that are not."""
    for alone, found in zip(beside(0, dim, crossed), beside(others, dim, crossed), strict=True):
        assert np.array_equal(found, alone)


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("size", [2.0**-9, 1.0, 2.0**12])
def test_crossing_inputs_round_little_more_whatever_their_size_and_sign(size: float, positive: bool) -> None:
    """Inputs of three products are as large as given, their weights the smaller: results stay, and unbalanced errors grow by thousands."""
    case = Case(BatchSpec((RowSpec(0, 40),), num_kv_heads=1, group=2, dim=64, page_size=16), hidden=576, inner=96)
    step, factor = given(case), np.float32(size)
    for norm, name in (("attention_norm", "qkv"), ("mlp_norm", "gate_up")):
        step.dense[norm] *= factor
        step.dense[name] /= factor
    step.dense["gate_up"][case.inner :] *= factor
    step.dense["down"] /= factor
    step = replace(step, x=np.abs(step.x) if positive else step.x)
    want = expected(case, step)[0]
    plain, crossed = (np.sqrt(np.mean((run(replace(case, crossed=form), step)[0][: len(want)] - want) ** 2)) for form in (False, True))
    assert plain < crossed * 2  # they are rounded apart, and neither is exact
    assert crossed < plain * 2


@pytest.mark.parametrize(("outs", "ins"), [(1, 1), (31, 4), (32, 5), (33, 7), (100, 3)])
def test_packed_weights_are_all_there(outs: int, ins: int) -> None:
    weight = np.random.default_rng(0).standard_normal((outs, ins), np.float32)
    panels = layers.pack(weight)
    assert panels.shape == (-(-outs // 32), ins, 32)
    assert not panels.transpose(0, 2, 1).reshape(-1, ins)[outs:].any()
    ids = np.arange(outs)[::-1]
    assert np.array_equal(np.asarray(layers.look_up(jnp.asarray(panels), jnp.asarray(ids))), weight[ids])


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize(("tokens", "vocab", "hidden"), [(1, 1, 1), (4, 31, 8), (13, 300, 65), (16, 33, 72), (80, 64, 20)])
def test_logits_and_the_best_of_them(tokens: int, vocab: int, hidden: int, soft_cap: float | None) -> None:
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((tokens, hidden), np.float32), rng.standard_normal((vocab, hidden), np.float32)
    norm = 1 + 0.3 * rng.standard_normal(hidden, np.float32)
    if vocab > 2:
        weight[vocab - 1] = weight[vocab // 2]  # ties, wherever they are the highest
        x[0] = weight[vocab - 1] / norm * 9
    call = jax.jit(lambda *given: layers.head(*given, vocab_size=vocab, eps=EPS, soft_cap=soft_cap))
    logits, highest, ids = (np.asarray(found) for found in call(x, norm, layers.pack(weight)))
    want = weight.astype(np.float64) @ normed(x.astype(np.float64), norm.astype(np.float64)).T
    want = want if soft_cap is None else soft_cap * np.tanh(want / soft_cap)
    assert np.abs(logits - want).max() < 3e-5
    assert np.array_equal(highest, logits.max(0))
    assert np.array_equal(ids, logits.argmax(0))


def test_a_logit_that_is_no_number_shows() -> None:
    weight = np.ones((40, 8), np.float32)
    weight[35, 2] = np.nan
    x = np.ones((2, 8), np.float32)
    _, highest, _ = layers.head(x, np.ones(8, np.float32), layers.pack(weight), vocab_size=40, eps=EPS, soft_cap=None)
    assert np.isnan(np.asarray(highest)).all()


def results() -> list[np.ndarray]:
    return [values for case in CASES.values() for values in run(case, given(case))]


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_no_bit(threads: int, tmp_path: Path) -> None:
    kept = tmp_path / "results.npz"
    module = "tests.conformance.test_layers_native_xla"
    code = f"import numpy; from {module} import calls, results; calls.load(None); numpy.savez({str(kept)!r}, *results())"
    environment = {**os.environ, "PJRT_NPROC": str(threads), "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)
    with np.load(kept) as found:
        for theirs, mine in zip(found.values(), results(), strict=True):
            assert np.array_equal(theirs, mine, equal_nan=True)
