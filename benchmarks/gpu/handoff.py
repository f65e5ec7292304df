"""KV from one engine's pages on its device into another's on its own, by the bridge's frames; and then tokens: those of one engine alone.

The sender prefills and decodes; the receiver's pages are full of NaN, get the prompt's KV by the wire and the sender's first k tokens as
ids, ingest these in one extend and go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.gpu.findings import Finding, checked
from benchmarks.gpu.models import HANDED_OVER, EngineName, config_of, make_engine, spec_of, unexpected_fallbacks
from benchmarks.gpu.sizes import Sizes
from pdd.conform.compare import bits
from pdd.conform.steps import Row, ScatteredPages, poison, prefill, step_of
from pdd.conform.wire import move_kv
from pddbridge.engine import Engine
from pddbridge.fingerprint import fingerprint
from pddbridge.kv_spec import TokenRange
from pddbridge.sampling_params import SamplingParams

_TOKENS: Final = 24
_HANDOFFS: Final = (0, 1, 5, 16)
# Of one plane's largest magnitude: what float32 leaves of either engine's own KV.
_KV_ERROR: Final = 2e-5
# Two candidates within this are either's right to choose: logits of the two engines differ by about 1e-5.
_TIE: Final = 1e-4


@dataclass(frozen=True)
class Place:
    """``device``: in the engine's own words. Pages of the two places differ in size."""

    engine: EngineName
    device: str
    page_size: int

    @property
    def label(self) -> str:
        return f"{self.engine}:{self.device}"


def run(sender: Place, receiver: Place, sizes: Sizes, threads: int, seed: int) -> list[Finding]:
    """Both directions, float32, greedy and sampled."""
    spec = spec_of(HANDED_OVER, sizes.handed_tokens + _TOKENS)
    num_rows = 2 * (len(_HANDOFFS) + 2) + 1  # per sampler: one alone, and a row per handoff; the prompt's own KV
    engines = []
    for place in (sender, receiver):
        num_pages = num_rows * -(-spec.max_context_tokens // place.page_size)
        config = config_of(spec, place.device, "float32", num_pages, 128, 4, threads, place.page_size)
        engines.append(make_engine(place.engine, spec, config, seed))
    prints = [fingerprint(engine.spec, engine.weights_digest, engine.kv_spec) for engine in engines]
    findings = [checked("fingerprints", None if prints[0] == prints[1] else f"{prints[0][:12]} and {prints[1][:12]}")]
    prompt = np.random.default_rng(seed).integers(spec.vocab_size, size=sizes.handed_tokens).astype(np.int32)
    for source, target, way in (
        (engines[0], engines[1], f"{sender.label} to {receiver.label}"),
        (engines[1], engines[0], f"{receiver.label} to {sender.label}"),
    ):
        findings += _direction(source, target, way, prompt, seed)
    for place, engine in zip((sender, receiver), engines, strict=True):
        counted = {reason: times for reason, times in engine.stats().fallbacks.items() if times}
        unexpected = unexpected_fallbacks(place.engine, place.device, counted)
        problem = f"counted {unexpected}" if unexpected else None
        findings.append(checked(f"fallbacks of {place.label}", problem, note=str(counted or "none")))
    return findings


def _direction(source: Engine, target: Engine, way: str, prompt: np.ndarray, seed: int) -> list[Finding]:
    """``source`` prefills; both engines' pools are used anew."""
    tokens = TokenRange(0, len(prompt) - 1)
    here, there = ScatteredPages(source, seed), ScatteredPages(target, seed + 1)
    kept = here.take(len(prompt))
    prefill(source, prompt[:-1], kept)
    moved = _pages(target, there, len(prompt))
    num_bytes = move_kv(source, kept, target, moved, tokens, seed)
    findings = [_same_kv(f"{way}: KV bits", source, kept, target, moved, tokens, num_bytes)]
    own = _pages(target, there, len(prompt))
    prefill(target, prompt[:-1], own)
    findings.append(_close_kv(f"{way}: KV of either's own prefill", source, kept, target, own, tokens))
    for name, params in _samplers(seed).items():
        sender_pages = _pages(source, here, len(prompt) + _TOKENS)
        prefill(source, prompt[:-1], sender_pages)
        alone = _continue(source, prompt, sender_pages, [], params)
        wrong: list[str] = []
        ties: list[str] = []
        for handoff in _HANDOFFS:
            pages = _pages(target, there, len(prompt) + _TOKENS)
            move_kv(source, kept, target, pages, tokens, seed + handoff)
            stream = _continue(target, prompt, pages, alone[:handoff], params)
            if stream != alone:
                first = next(i for i, (a, b) in enumerate(zip(stream, alone, strict=True)) if a != b)
                gap = _gap(source, prompt, sender_pages, alone[: first + 1], stream[first])
                line = f"handed over after {handoff}, token {first} is {stream[first]}, alone {alone[first]}, logits {gap:.2g} apart"
                (ties if name == "greedy" and gap <= _TIE else wrong).append(line)
        # A model that repeats itself would hide what is lost.
        problem = "; ".join(wrong) if wrong else "the stream has fewer than 4 different tokens" if len(set(alone)) < 4 else None
        note = f"a tie: {'; '.join(ties)}" if ties else ""
        findings.append(checked(f"{way}: {name} tokens, {len(_HANDOFFS)} handoffs", problem, note=note))
    return findings


def _samplers(seed: int) -> dict[str, SamplingParams]:
    greedy = SamplingParams(seed=seed, max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
    return {
        "greedy": greedy,
        "sampled": SamplingParams(seed=seed, max_tokens=_TOKENS, temperature=0.8, repetition_penalty=1.1, ignore_eos=True),
    }


def _continue(engine: Engine, prompt: np.ndarray, pages: np.ndarray, log: list[int], params: SamplingParams) -> list[int]:
    """``log`` up to ``_TOKENS`` tokens; it and the prompt's last token are ingested in one step."""
    tokens, pending, in_kv = list(log), [int(prompt[-1]), *log], len(prompt) - 1
    while len(tokens) < _TOKENS:
        row = Row(np.array(pending), in_kv, pages, params=params, prompt_ids=prompt, log_ids=np.array(tokens, np.int32))
        in_kv += len(pending)
        pending = [engine.step(step_of(row)).records[0].token_id]
        tokens += pending
    return tokens


def _gap(engine: Engine, prompt: np.ndarray, pages: np.ndarray, stream: list[int], other: int) -> float:
    """By how much the logit of the stream's last token is above the ``other``'s, on the engine that made the stream in ``pages``."""
    *before, chosen = stream
    pending = np.array([before[-1] if before else prompt[-1]])
    logits = engine.logits(step_of(Row(pending, len(prompt) - 1 + len(before), pages, log_ids=np.array(before, np.int32))))[0]
    return float(logits[chosen] - logits[other])


def _pages(engine: Engine, pages: ScatteredPages, num_tokens: int) -> np.ndarray:
    taken = pages.take(num_tokens)
    poison(engine, taken)
    return taken


def _same_kv(what: str, source: Engine, here: np.ndarray, target: Engine, there: np.ndarray, tokens: TokenRange, num_bytes: int) -> Finding:
    pairs = zip(source.read_kv(here, tokens), target.read_kv(there, tokens), strict=True)
    wrong = [a.plane for a, b in pairs if not np.array_equal(bits(a.values), bits(b.values))]
    return checked(what, f"planes {wrong} differ" if wrong else None, {"mb_of_frames": num_bytes / 1e6})


def _close_kv(what: str, source: Engine, here: np.ndarray, target: Engine, there: np.ndarray, tokens: TokenRange) -> Finding:
    errors = [
        float(np.abs(a.values - b.values).max() / np.abs(a.values).max())
        for a, b in zip(source.read_kv(here, tokens), target.read_kv(there, tokens), strict=True)
    ]
    worst = float(np.max(errors))  # NaN if one is
    return checked(what, None if worst <= _KV_ERROR else "too far apart", {"error": worst, "allowed": _KV_ERROR})
