"""Which codec a worker's pushes take, receiver by receiver: the config's rule for the link, what was measured, and the policy.

Pushes that cross no declared link stay raw: inside a site the link is faster than any codec.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from pdd.config import LaunchConfig
from pdd.policy.codec import choose_codec, link_bytes_s
from pdd.topology import Topology
from pddbridge.codecs import CODEC_NAMES, CODECS, CodecId
from pddbridge.codecs_base import CodecSpeed
from pddbridge.codecs_speed import measure_speed
from pddbridge.kv_spec import KVSpec
from pddbridge.links.stats import LinkStats

logger = logging.getLogger(__name__)

Address = tuple[str, int]  # a receiver's host and port as the sender sees them

LOSSLESS: Final = frozenset(codec_id for codec_id, codec in CODECS.items() if codec.lossless)

# The threads that code share the processor with the step thread and the engine's own.
_BUSY_SHARE: Final = 0.5
# Less KV than this says nothing of a codec's ratio: what was under way when the codec began may be as much.
_ENOUGH_BYTES: Final = 1 << 20
# A codec that did nothing for what was sent is tried again after so many pushes: other KV may be sent by then.
_TRIED_AGAIN_AFTER: Final = 64
_SAMPLE_TOKENS: Final = 64
_SAMPLE_LAYERS: Final = 8


@dataclass(frozen=True)
class CodecRule:
    """``fixed``: the config names it, None for the policy's choice. ``declared_bytes_s``: the link's rate as the config states it, believed
    until transfers say otherwise.
    """

    fixed: CodecId | None
    allow_lossy: bool
    declared_bytes_s: float | None


def codec_rules(config: LaunchConfig, topology: Topology, site: str) -> dict[Address, CodecRule]:
    """Rules for every receiver that workers at ``site`` reach over a declared link."""
    rules = {}
    for place in topology.workers:
        link = config.link(site, place.site)
        if link is not None:
            address = place.route(site).kv
            declared = link.emulate.rate_mbit_s * 1e6 / 8 if link.emulate else None
            rules[address.host, address.port] = CodecRule(CODEC_NAMES.get(link.codec), link.allow_lossy, declared)
    return rules


def codecs_taken(config: LaunchConfig, site: str) -> frozenset[CodecId]:
    """What workers at ``site`` take from others: lossy payloads only if some link to the site allows them."""
    lossy = any(link.allow_lossy for link in config.links if site in link.between)
    return frozenset(codec_id for codec_id, codec in CODECS.items() if codec.lossless or lossy)


def measure_codecs(spec: KVSpec) -> tuple[CodecSpeed, ...]:
    """Every codec on normals in the shape of ``spec``'s first plane: some tens of milliseconds, so call it in a thread. In time of that
    thread's on a processor: others start just then, too, and how busy it will be is not for this to say.
    """
    plane = spec.groups[0].planes[0]
    shape = (min(spec.groups[0].num_layers, _SAMPLE_LAYERS), _SAMPLE_TOKENS, plane.num_heads, plane.head_dim)
    values = np.random.default_rng(0).standard_normal(shape).astype(spec.np_dtype_of(plane))
    return tuple(measure_speed(codec, values, clock=time.thread_time) for codec_id, codec in CODECS.items() if codec_id is not CodecId.RAW)


@dataclass(frozen=True)
class _InUse:
    """``kv_bytes``, ``wire_bytes``: delivered when its use began."""

    codec_id: CodecId = CodecId.RAW
    kv_bytes: int = 0
    wire_bytes: int = 0

    def ratio(self, stats: LinkStats) -> float | None:
        """Of what was delivered since; None while that is too little."""
        kv_bytes, wire_bytes = stats.delivered_bytes - self.kv_bytes, stats.delivered_wire_bytes - self.wire_bytes
        return kv_bytes / wire_bytes if kv_bytes >= _ENOUGH_BYTES and wire_bytes > 0 else None


@dataclass(frozen=True)
class _Ratio:
    """``num_pushes``: of the receiver's, when it was last measured."""

    ratio: float
    num_pushes: int


class CodecChoice:
    """Remembers which codec each receiver's goodput was measured with, and for a while what the codecs made of its KV. ``taken``: of
    payloads that come in.
    """

    def __init__(self, rules: Mapping[Address, CodecRule], speeds: Sequence[CodecSpeed], taken: Collection[CodecId] = LOSSLESS) -> None:
        self.taken = frozenset(taken)
        self._rules = rules
        self._speeds = {speed.codec_id: speed for speed in speeds}
        self._in_use: dict[Address, _InUse] = {}
        self._num_pushes: Counter[Address] = Counter()
        self._ratios: dict[tuple[Address, CodecId], _Ratio] = {}
        self._num_chosen: Counter[str] = Counter()

    @property
    def num_chosen(self) -> dict[str, int]:
        """Pushes by codec name, ever."""
        return dict(self._num_chosen)

    def choose(self, receiver: Address, stats: LinkStats | None) -> CodecId:
        """For the next push. ``stats``: of the link to ``receiver``, with the codecs chosen so far; None before any push."""
        rule, before = self._rules.get(receiver), self.in_use(receiver)
        self._num_pushes[receiver] += 1
        if rule is None:
            codec_id = CodecId.RAW
        elif rule.fixed is not None:
            codec_id = rule.fixed
        else:
            speeds = self._as_measured(receiver, stats)
            wire = rule.declared_bytes_s
            if stats is not None and stats.goodput_bytes_per_s is not None:
                wire = link_bytes_s(stats.goodput_bytes_per_s, stats.wire_bytes_per_s, speeds.get(before), _BUSY_SHARE)
            codec_id = choose_codec(wire, tuple(speeds.values()), allow_lossy=rule.allow_lossy, busy_share=_BUSY_SHARE)
        if codec_id is not before:
            logger.info("pushes to %s:%d are %s from now on", *receiver, codec_id.name)
            delivered = (0, 0) if stats is None else (stats.delivered_bytes, stats.delivered_wire_bytes)
            self._in_use[receiver] = _InUse(codec_id, *delivered)
        self._num_chosen[codec_id.name] += 1
        return codec_id

    def in_use(self, receiver: Address) -> CodecId:
        """Of the latest push."""
        return self._in_use.get(receiver, _InUse()).codec_id

    def _as_measured(self, receiver: Address, stats: LinkStats | None) -> dict[CodecId, CodecSpeed]:
        """The speeds, with the ratio that the codec in use achieves on what is really sent to ``receiver``."""
        in_use, num_pushes = self._in_use.get(receiver, _InUse()), self._num_pushes[receiver]
        if stats is not None and in_use.codec_id in self._speeds and (ratio := in_use.ratio(stats)) is not None:
            self._ratios[receiver, in_use.codec_id] = _Ratio(ratio, num_pushes)
        speeds = dict(self._speeds)
        for codec_id, speed in self._speeds.items():
            known = self._ratios.get((receiver, codec_id))
            if known is not None and num_pushes - known.num_pushes < _TRIED_AGAIN_AFTER:
                speeds[codec_id] = replace(speed, ratio=known.ratio)
        return speeds
