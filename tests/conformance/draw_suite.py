"""What a device's drawing owes: the host sampler's token wherever it is sure, and doubt wherever rounding might decide. One suite, run on
each engine's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from pddbridge.draw_plan import HOST_EXP_ERROR, ONE, DrawArrays, draw_plan, moved_share
from pddbridge.engine import SampleRow
from pddbridge.sampling import sample
from pddbridge.sampling_params import SamplingParams

NUM_ROWS = 4
REAL_VOCAB = 49152
NO_IDS = np.zeros(0, np.int32)
PLAIN = SamplingParams(seed=1, max_tokens=9)

Rows = list[tuple[np.ndarray, SamplingParams]]


@dataclass(frozen=True)
class Drawer:
    """``draw``: [S, vocab] f32 logits and what a plan says -> ids, margins [S] · ``error``: of the device's weights."""

    draw: Callable[[np.ndarray, DrawArrays], tuple[np.ndarray, np.ndarray]]
    error: float


@st.composite
def row_sets(draw: st.DrawFn) -> Rows:
    """``NUM_ROWS`` rows over one vocabulary: peaked, flat, tied, masked, in bfloat16's steps."""
    vocab = draw(st.sampled_from([1, 2, 3, 300]))
    return [(_logits(draw, vocab), draw(params(vocab))) for _ in range(NUM_ROWS)]


@st.composite
def params(draw: st.DrawFn, vocab: int) -> SamplingParams:
    return SamplingParams(
        seed=draw(st.integers(0, 2**64 - 1)),
        max_tokens=9,
        temperature=draw(st.sampled_from([0.01, 0.3, 0.7, 1.0, 1.7, 5.0])),
        top_k=draw(st.sampled_from([None, 1, 2, 50, max(1, vocab - 1), vocab, vocab + 7])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9999999, 0.95, 0.5, 0.25, 0.01, 1e-7])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-4, 0.05, 0.5, 1.0])),
    )


def _logits(draw: st.DrawFn, vocab: int) -> np.ndarray:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["normal", "flat", "peaked", "tied", "bfloat16", "equal", "signed zeros"]))
    logits = random.normal(0, {"flat": 1e-3, "peaked": 12.0}.get(kind, 3.0), vocab).astype(np.float32)
    if kind == "tied":
        logits = np.round(logits)
    elif kind == "bfloat16":
        logits = (logits.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    elif kind == "equal":
        logits[:] = -7.25
    elif kind == "signed zeros":
        logits = np.where(random.random(vocab) < 0.5, np.float32(-0.0), np.float32(0.0))
    if draw(st.booleans()):
        logits[random.random(vocab) < 0.4] = -np.inf
        logits[random.integers(vocab)] = 1.0
    return logits


def check_rows(drawer: Drawer, rows: Rows, positions: Sequence[int] = (0, 1, 2, 3)) -> int:
    """Draws all ``rows`` at once; the number that were in doubt. The others must be the host's."""
    plan = draw_plan(_sampling(rows, positions), [True] * len(rows), len(rows[0][0]), drawer.error, len(rows))
    ids, margins = drawer.draw(np.stack([logits for logits, _ in rows]), plan.arrays)
    sure = margins > plan.tolerances
    wanted = [_host(logits, params, position) for (logits, params), position in zip(rows, positions, strict=True)]
    assert [int(i) for i in ids[sure]] == [token_id for token_id, is_sure in zip(wanted, sure, strict=True) if is_sure]
    return int((~sure).sum())


def is_sure(drawer: Drawer, logits: Sequence[float], params: SamplingParams, u: float) -> tuple[int, bool]:
    """The token that is drawn for the number ``u``, and whether it stands."""
    row = np.array(logits, np.float32)
    plan = draw_plan(_sampling([(row, params)] * NUM_ROWS, range(NUM_ROWS)), [True] * NUM_ROWS, len(row), drawer.error, NUM_ROWS)
    plan.arrays.u[:] = int(u * ONE)
    ids, margins = drawer.draw(np.stack([row] * NUM_ROWS), plan.arrays)
    return int(ids[0]), bool(margins[0] > moved_share(u, HOST_EXP_ERROR + drawer.error, len(row)))


def check_borders(drawer: Drawer) -> None:
    """Whatever is decided exactly at a border is in doubt, where the token hangs on it; a hair further it is not."""
    even, half = [0.5, 0.5], float(np.log(0.5))
    assert is_sure(drawer, even, PLAIN, 0.5)[1] is False
    assert is_sure(drawer, even, PLAIN, 0.5 - 1e-6) == (0, True)
    assert is_sure(drawer, even, PLAIN, 0.5 + 1e-6) == (1, True)
    # top-p: exactly half of the sum is the first token's; past half of what is kept then, the second may be meant.
    nucleus = replace(PLAIN, top_p=0.5)
    assert is_sure(drawer, even, nucleus, 0.75)[1] is False
    assert is_sure(drawer, even, nucleus, 0.25) == (0, True), "the first token with the second and without"
    assert is_sure(drawer, even, replace(PLAIN, top_p=0.499), 0.75) == (0, True)
    assert is_sure(drawer, even, replace(PLAIN, top_p=0.501), 0.75) == (1, True)
    # min-p: the second weighs what is asked, as near as float32 can say.
    assert is_sure(drawer, [0.0, half], replace(PLAIN, min_p=0.5), 0.9)[1] is False
    assert is_sure(drawer, [0.0, half], replace(PLAIN, min_p=0.5), 0.3) == (0, True)
    assert is_sure(drawer, [0.0, half], replace(PLAIN, min_p=0.4999), 0.9) == (1, True)
    assert is_sure(drawer, [0.0, half], replace(PLAIN, min_p=0.5001), 0.9) == (0, True)
    # Two different logits that the host's float32 weights may order either way.
    near = [1.0, float(np.nextafter(np.float32(1), np.float32(2)))]
    assert is_sure(drawer, near, replace(PLAIN, top_p=0.3, temperature=5.0), 0.4)[1] is False
    assert is_sure(drawer, [1.0, 1.001], replace(PLAIN, top_p=0.3, temperature=5.0), 0.4) == (1, True)
    # top-k among equals is by id, and no matter of rounding.
    assert is_sure(drawer, [1.0, 2.0, 2.0, 2.0], replace(PLAIN, top_k=2), 0.999) == (2, True)


def check_real_vocabulary(drawer: Drawer, num_batches: int) -> None:
    """Rows as a model makes them and flat ones; the doubt among them is what the bounds say at most."""
    random = np.random.default_rng(5)
    settings = (PLAIN, replace(PLAIN, temperature=0.7, top_p=0.95), replace(PLAIN, top_k=50, min_p=0.02), replace(PLAIN, temperature=2.0))
    doubts = 0
    for batch in range(num_batches):
        spread = (3.0, 6.0, 1.0)[batch % 3]
        rows = [(random.normal(0, spread, REAL_VOCAB).astype(np.float32), replace(p, seed=batch)) for p in settings]
        doubts += check_rows(drawer, rows)
    assert doubts <= 0.05 * num_batches * NUM_ROWS


def check_bounds_hold_for_a_worse_host(drawer: Drawer, exp_is_wrong: Callable[[float], None], num_batches: int) -> None:
    """Flat rows, whose borders lie close, with a host whose exp is wrong by all that is allowed, up on one half of the ids, down on the
    other: what is sure is still its token."""
    random = np.random.default_rng(6)
    exp_is_wrong(HOST_EXP_ERROR * 0.9)
    doubts = 0
    for batch in range(num_batches):
        chosen = replace(PLAIN, temperature=5.0, seed=batch, top_p=(1.0, 0.9)[batch % 2])
        doubts += check_rows(drawer, [(random.normal(0, 1, REAL_VOCAB).astype(np.float32), chosen) for _ in range(NUM_ROWS)])
    assert doubts < num_batches * NUM_ROWS / 4


def _sampling(rows: Rows, positions: Sequence[int]) -> list[SampleRow]:
    return [SampleRow(i, position, params, NO_IDS, NO_IDS) for i, ((_, params), position) in enumerate(zip(rows, positions, strict=True))]


def _host(logits: np.ndarray, params: SamplingParams, position: int) -> int:
    return sample(logits, params, NO_IDS, np.zeros(position, np.int32), position).token_id
