"""What the payload codecs do to real KV: size, speed, error, and for the lossy ones the effect on logits and tokens.

    python benchmarks/kv_codecs.py [--model NAME] [--cache DIR] [--json FILE]

A prompt's KV is computed once, coded and decoded as if it had crossed a link, and put into other pages. From there the model reads a text
(teacher forcing: every position's logits are compared with those over the original KV) and continues greedily.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path

import numpy as np

from pdd.models import resolve
from pdd.serving.text.model import TextModel
from pddbridge.codecs import CODEC_NAMES, CODECS, CodecId
from pddbridge.codecs_speed import measure_speed
from pddbridge.engine import Engine, EngineConfig, KVBlock, SampleRow, Step
from pddbridge.kv_block import split_block
from pddbridge.kv_spec import TokenRange
from pddbridge.kv_wire import MAX_PAYLOAD_BYTES
from pddbridge.sampling_params import SamplingParams

_PAGE = 16
_PROMPT_TOKENS = 512
_FORCED_TOKENS = 96
_GREEDY_TOKENS = 96
_GREEDY = SamplingParams(seed=0, max_tokens=4096, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Effect:
    """``relative_rmse``: of the KV values, per plane. The rest compares logits after the prompt with those over uncoded KV: largest, mean
    absolute difference, mean Kullback-Leibler divergence in nats, how often the most likely token is the same, and how many greedy tokens
    are the same before the first that is not (of ``num_greedy``).
    """

    codec: str
    ratio: float
    encode_gb_s: float
    decode_gb_s: float
    relative_rmse: dict[str, float]
    logit_max_difference: float
    logit_mean_difference: float
    mean_kl_nats: float
    same_top_token: float
    greedy_tokens_equal: int
    num_greedy: int


class Reader:
    """One engine, two page tables: the original KV and the coded one."""

    def __init__(self, engine: Engine, num_tokens: int) -> None:
        self.engine = engine
        pages = -(-num_tokens // _PAGE)
        self.original = np.arange(1, 1 + pages, dtype=np.int32)
        self.coded = np.arange(1 + pages, 1 + 2 * pages, dtype=np.int32)

    def prefill(self, ids: list[int]) -> None:
        for start in range(0, len(ids), 256):
            self._step(self.original, ids[start : start + 256], start, None)

    def move(self, codec_id: CodecId, num_tokens: int) -> tuple[tuple[KVBlock, ...], tuple[KVBlock, ...]]:
        """The prompt's KV from the original pages through ``codec_id`` into the coded ones; both sides of it."""
        before = self.engine.read_kv(self.original, TokenRange(0, num_tokens))
        after: list[KVBlock] = []
        for block in before:
            for part in split_block(block, MAX_PAYLOAD_BYTES):
                payload = CODECS[codec_id].encode(part.values)
                values = part.values.copy()
                if payload is not None:
                    CODECS[codec_id].decode_into(payload, values)
                moved = replace(part, values=values)
                self.engine.write_kv(self.coded, moved)
            after.append(self.engine.read_kv(self.coded, TokenRange(0, num_tokens))[len(after)])
        return before, tuple(after)

    def forced(self, table: np.ndarray, context: int, ids: list[int]) -> np.ndarray:
        """Logits [len(ids), vocab] after each of ``ids``, read one by one."""
        rows = [self.engine.logits(self._make(table, [token], context + i, i)) for i, token in enumerate(ids)]
        return np.concatenate(rows)

    def greedy(self, table: np.ndarray, context: int, first: int, count: int) -> list[int]:
        tokens = [first]
        for i in range(count):
            tokens.append(int(self.forced(table, context + i, tokens[-1:])[0].argmax()))
        return tokens[1:]

    def _step(self, table: np.ndarray, ids: list[int], context: int, position: int | None) -> None:
        self.engine.step(self._make(table, ids, context, position))

    @staticmethod
    def _make(table: np.ndarray, ids: list[int], context: int, position: int | None) -> Step:
        none = np.empty(0, np.int32)
        samples = () if position is None else (SampleRow(0, position, _GREEDY, none, np.zeros(position, np.int32)),)
        return Step(np.array(ids, np.int32), np.array([0, len(ids)], np.int32), np.array([context], np.int32), table[None], samples)


def measure(model: str, cache_dir: Path, name: str, threads: int) -> tuple[Reader, list[int]]:
    directory = resolve(model, cache_dir)
    text = (resources.files("pdd.launch") / "demo_prompt.txt").read_text(encoding="utf-8")
    ids = TextModel.load(directory).encode(text, add_special=True)[: _PROMPT_TOKENS + _FORCED_TOKENS]
    total = len(ids) + _GREEDY_TOKENS + _PAGE
    config = EngineConfig("cpu", "float32", "bfloat16", _PAGE, 2 * (total // _PAGE + 1) + 2, total, 256, 1, threads, None)
    os.environ.update(importlib.import_module(f"pdd{name}.threads").environment(config.num_threads))
    engine: Engine = importlib.import_module(f"pdd{name}.engine").create(str(directory), config)
    return Reader(engine, total), ids


def effects(reader: Reader, ids: list[int]) -> list[Effect]:
    context, forced = _PROMPT_TOKENS, ids[_PROMPT_TOKENS:]
    reader.prefill(ids[:context])
    want = reader.forced(reader.original, context, forced)
    greedy = reader.greedy(reader.original, context, forced[0], _GREEDY_TOKENS)
    found = []
    for label, codec_id in CODEC_NAMES.items():
        before, after = reader.move(codec_id, context)
        got = reader.forced(reader.coded, context, forced)
        mine = reader.greedy(reader.coded, context, forced[0], _GREEDY_TOKENS)
        speed = measure_speed(CODECS[codec_id], next(iter(split_block(before[0], MAX_PAYLOAD_BYTES))).values)
        sizes = [CODECS[codec_id].encode(part.values) for block in before for part in split_block(block, MAX_PAYLOAD_BYTES)]
        raw = sum(block.values.nbytes for block in before)
        found.append(
            Effect(
                codec=label,
                ratio=round(raw / sum(len(payload) for payload in sizes if payload is not None), 3),
                encode_gb_s=round(speed.encode_bytes_s / 1e9, 2),
                decode_gb_s=round(speed.decode_bytes_s / 1e9, 2),
                relative_rmse={b.plane: round(_relative_rmse(b.values, a.values), 5) for b, a in zip(before, after, strict=True)},
                logit_max_difference=round(float(np.abs(got - want).max()), 4),
                logit_mean_difference=round(float(np.abs(got - want).mean()), 4),
                mean_kl_nats=round(_mean_kl(want, got), 6),
                same_top_token=round(float((got.argmax(1) == want.argmax(1)).mean()), 4),
                greedy_tokens_equal=next((i for i, (a, b) in enumerate(zip(greedy, mine, strict=True)) if a != b), len(greedy)),
                num_greedy=len(greedy),
            )
        )
    return found


def _relative_rmse(before: np.ndarray, after: np.ndarray) -> float:
    x, y = before.astype(np.float64), after.astype(np.float64)
    return float(np.sqrt(((x - y) ** 2).mean() / (x**2).mean()))


def _mean_kl(want: np.ndarray, got: np.ndarray) -> float:
    p, q = (x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64), axis=1, keepdims=True) for x in (want, got))
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--cache", type=Path, default=Path(os.environ.get("PDD_CACHE") or Path.home() / ".cache" / "pdd"))
    parser.add_argument("--engine", choices=["torch", "jax"], default="torch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = effects(*measure(arguments.model, arguments.cache, arguments.engine, arguments.threads))
    for effect in found:
        print(json.dumps(asdict(effect)))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(effect) for effect in found], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
