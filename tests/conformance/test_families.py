"""Every family on both engines: logits against transformers (L2), and token streams with a handoff in the middle (L3).

Windows are 12 to 24 tokens and prompts a hundred, so every windowed layer drops keys in chunks, in decode steps and in what is ingested.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from pddbridge.checkpoint import open_checkpoint
from pddbridge.engine import Engine
from pddbridge.kv_spec import TokenRange
from pddbridge.rope import RopeSpec, inverse_frequencies
from tests.support import oracle
from tests.support.engines import MODULES, Row, decode_greedy, make_engine, prefill, random_ids, step_of
from tests.support.tiny_families import FAMILIES, make_tiny_family

EXACT = 1e-4  # absolute, on logits of up to 2 to 14; float32 compute and KV
OTHER = {"jax": "torch", "torch": "jax"}
PAGE_SIZES = {"jax": 8, "torch": 12}
# A JAX engine compiles for seconds: what differs from another of these by a table of frequencies alone runs on PyTorch here, where the
# table comes from the same function, and on both with the slow tests.
COMPILED = ("llama3", "llama yarn mscale", "mistral", "qwen2 window", "qwen3", "gemma2", "gemma3")
PAIRS = [
    pytest.param(name, family, marks=() if name == "torch" or family in COMPILED else pytest.mark.slow, id=f"{family}-{name}")
    for family in FAMILIES
    for name in ("torch", "jax")
]

STREAMS = [
    pytest.param(name, family, marks=() if family in COMPILED else pytest.mark.slow, id=f"{family}-{name}-first")
    for family in FAMILIES
    for name in ("torch", "jax")
]

Engines = Callable[[str, str], Engine]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("families")
    return cache(lambda family: make_tiny_family(root / family.replace(" ", "-"), family))


@pytest.fixture(scope="module")
def engines(models: Callable[[str], Path]) -> Engines:
    @cache
    def get(name: str, family: str) -> Engine:
        return make_engine(name, models(family), page_size=PAGE_SIZES[name], max_rows=1, max_step_tokens=16, max_context_tokens=160)

    return get


def pages_of(engine: Engine, turn: int = 0) -> list[int]:
    """Pages for 160 tokens, out of order; those of turn 0 and 1 differ."""
    scattered = np.random.default_rng(5).permutation(engine.config.num_pages)
    count = -(-160 // engine.config.page_size)
    return [int(page) for page in scattered[turn * count : (turn + 1) * count]]


@pytest.mark.parametrize(("name", "family"), PAIRS)
def test_logits_equal_transformers(engines: Engines, models: Callable[[str], Path], name: str, family: str) -> None:
    """Chunks and single tokens, from the first position to past six windows."""
    ids = random_ids(1, 150)
    want = oracle.logits(models(family), ids.tolist())
    engine = engines(name, family)
    pages, start = pages_of(engine), 0
    for count in (1, 7, 16, 1, 1, 1, 15, *([16] * 4), 1, 1, 2, 16, 16, 8):
        got = engine.logits(step_of(Row(ids[start : start + count], start, pages)))
        start += count
        np.testing.assert_allclose(got[0], want[start - 1], rtol=0, atol=EXACT)
    assert start == len(ids)


@pytest.mark.parametrize(("name", "family"), STREAMS)
def test_a_stream_goes_on_after_its_handoff(engines: Engines, models: Callable[[str], Path], name: str, family: str) -> None:
    """``name`` prefills and relays 6 tokens, the other engine gets the prompt's KV and those ids and decodes on: the oracle's tokens."""
    prompt, relayed, wanted = random_ids(4, 75), 6, 14
    want, gaps = oracle.greedy(models(family), prompt.tolist(), wanted)
    assert min(gaps) > 10 * EXACT, "a near-tie shows nothing"
    assert len(set(want)) > 4
    here, there = engines(name, family), engines(OTHER[name], family)
    pages, remote = pages_of(here), pages_of(there, 1)
    prefill(here, prompt[:-1], pages, chunks=(16, 11))
    log = decode_greedy(here, prompt, pages, relayed)
    for block in here.read_kv(np.array(pages, np.int32), TokenRange(0, len(prompt) - 1)):
        there.write_kv(np.array(remote, np.int32), block)
    known = np.concatenate([prompt, np.array(log, np.int32)])
    there.step(step_of(Row(known[len(prompt) - 1 : -1], len(prompt) - 1, remote, samples=False)))
    assert [*log, *decode_greedy(there, known, remote, wanted - relayed)] == want


# One layer that turns by the scaled table.
FAR = {
    "llama3": {"num_hidden_layers": 1},
    "llama linear": {"num_hidden_layers": 1},
    "llama yarn mscale": {"num_hidden_layers": 1},
    "gemma3": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
}


@pytest.mark.parametrize("family", FAR)
def test_k_of_a_far_position_is_the_same_everywhere(family: str, tmp_path: Path) -> None:
    """Short prompts hide a scaling that was read and not used. K of the first layer depends on its token and position alone."""
    position, token = 9000, 57
    model_dir = make_tiny_family(tmp_path / "m", family, **FAR[family])
    with torch.inference_mode():
        out = oracle.model(model_dir)(torch.tensor([[token]]), position_ids=torch.tensor([[position]]), use_cache=True)
    want = out.past_key_values.layers[0].keys[0, :, 0].numpy()
    found = {}
    for name in MODULES:
        engine = make_engine(name, model_dir, page_size=16, num_pages=563, max_context_tokens=position + 1, max_step_tokens=1, max_rows=1)
        pages = np.arange(563, dtype=np.int32)
        engine.step(step_of(Row(np.array([token]), position, pages.tolist(), samples=False)))
        found[name] = engine.read_kv(pages, TokenRange(position, position + 1))[0].values[0, 0]
        # At 9,000 radians half a unit in the last place of the angle turns by 0.0005.
        np.testing.assert_allclose(found[name], want, rtol=0, atol=2e-3 * np.abs(want).max())
    np.testing.assert_allclose(found["jax"], found["torch"], rtol=0, atol=1e-5 * np.abs(want).max())
    unscaled = inverse_frequencies(RopeSpec(open_checkpoint(model_dir).spec.ropes[0].theta), want.shape[1])
    scaled = inverse_frequencies(open_checkpoint(model_dir).spec.ropes[0], want.shape[1])
    assert np.abs(np.cos(unscaled * position) - np.cos(scaled * position)).max() > 0.1, "the scaling would not be missed here"
