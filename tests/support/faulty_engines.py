"""Engines with one fault each, around a real one: what a ladder of checks must find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pddbridge.engine import Engine, EngineConfig, EngineStats, KVBlock, Step, StepResult
from pddbridge.kv_layout import KVLayout
from pddbridge.kv_spec import KVSpec, TokenRange
from pddbridge.model_spec import ModelSpec


class Around:
    """Hands every call on. Subclasses change one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def spec(self) -> ModelSpec:
        return self.engine.spec

    @property
    def kv_spec(self) -> KVSpec:
        return self.engine.kv_spec

    @property
    def layout(self) -> KVLayout:
        return self.engine.layout

    @property
    def config(self) -> EngineConfig:
        return self.engine.config

    @property
    def weights_digest(self) -> str:
        return self.engine.weights_digest

    def warm_up(self, progress: Callable[[int, int, str], None]) -> None:
        self.engine.warm_up(progress)

    def step(self, step: Step) -> StepResult:
        return self.engine.step(step)

    def logits(self, step: Step) -> np.ndarray:
        return self.engine.logits(step)

    def read_kv(self, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> tuple[KVBlock, ...]:
        return self.engine.read_kv(page_table, tokens, out)

    def write_kv(self, page_table: np.ndarray, block: KVBlock) -> None:
        self.engine.write_kv(page_table, block)

    def copy_page(self, source: int, destination: int) -> None:
        self.engine.copy_page(source, destination)

    def stats(self) -> EngineStats:
        return self.engine.stats()


def reverse_heads(block: KVBlock) -> KVBlock:
    """All heads of a block in the opposite order; a block of some heads becomes that of their mirror images."""
    return replace(block, values=np.ascontiguousarray(block.values[:, :, ::-1]))


class ReversedOnArrival(Around):
    """Places heads in the wrong order."""

    def write_kv(self, page_table: np.ndarray, block: KVBlock) -> None:
        super().write_kv(page_table, reverse_heads(block))


class ReversedOnTheWire(Around):
    """Its own order of heads is not the wire's, and it converts neither way: what it reads back is what it wrote."""

    def read_kv(self, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> tuple[KVBlock, ...]:
        return tuple(reverse_heads(block) for block in super().read_kv(page_table, tokens))

    def write_kv(self, page_table: np.ndarray, block: KVBlock) -> None:
        super().write_kv(page_table, reverse_heads(block))


class LosesAPage(Around):
    """Second page of a table: values that arrive in it are not placed."""

    def write_kv(self, page_table: np.ndarray, block: KVBlock) -> None:
        size = self.config.page_size
        for start, stop in ((0, size), (2 * size, block.tokens.stop)):
            kept = TokenRange(max(start, block.tokens.start), max(start, block.tokens.start, min(stop, block.tokens.stop)))
            if len(kept):
                values = block.values[:, kept.start - block.tokens.start : kept.stop - block.tokens.start]
                super().write_kv(page_table, replace(block, tokens=kept, values=np.ascontiguousarray(values)))


class ForgetsAPage(Around):
    """All is well until the first step after KV arrived: then the first page of its first row is full of zeros."""

    arrived = False

    def write_kv(self, page_table: np.ndarray, block: KVBlock) -> None:
        super().write_kv(page_table, block)
        self.arrived = True

    def step(self, step: Step) -> StepResult:
        if self.arrived and step.context_lens[0] >= self.config.page_size:
            self.arrived = False
            for block in self.read_kv(step.page_tables[0], TokenRange(0, self.config.page_size)):
                super().write_kv(step.page_tables[0], replace(block, values=np.zeros_like(block.values)))
        return super().step(step)


class OtherRandomNumbers(Around):
    """Samples every position with the uniform number of another."""

    def step(self, step: Step) -> StepResult:
        samples = tuple(replace(row, params=replace(row.params, seed=row.params.seed + 1)) for row in step.samples)
        return super().step(replace(step, samples=samples))


class MixesUpRows(Around):
    """Right for a row alone; in a batch every row but the first gets its neighbour's logits."""

    def logits(self, step: Step) -> np.ndarray:
        logits = super().logits(step)
        return np.concatenate((logits[:1], np.roll(logits[1:], 1, axis=0))) if len(logits) > 2 else logits


class ReplaysBadly(Around):
    """KV of tokens that a sampling row takes in at once is a little off; tokens one at a time are right."""

    def step(self, step: Step) -> StepResult:
        result = super().step(step)
        for row in (sample.row for sample in step.samples):
            start, new = int(step.context_lens[row]), int(step.row_starts[row + 1] - step.row_starts[row])
            if new > 1:
                for block in self.read_kv(step.page_tables[row], TokenRange(start, start + 1)):
                    self.write_kv(step.page_tables[row], replace(block, values=block.values * np.float32(1.001)))
        return result
