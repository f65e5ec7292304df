"""What the ladder measures with: the op's batch, the oracle's margin, comparisons that NaN cannot slip through, options."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pdd.cli import app
from pdd.conform.compare import first_unequal, largest, worst_absolute, worst_per_vector, worst_relative
from pdd.conform.l1_op import MIXED_ROWS, check_attention, make_batch
from pdd.conform.oracle import verdict
from pdd.conform.plan import Plan
from pdd.conform.prompts import prompt_ids
from pdd.conform.report import within
from pdd.conform.side import Dtype, Sizes, open_engine, parse_side
from pddbridge.engine import EngineConfig
from pddbridge.sampling import sample
from pddbridge.sampling_params import SamplingParams
from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.ragged_paged_attention.reference import ragged_paged_attention
from tests.support.tiny_models import make_tiny_llama


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["none", "window", "scale", "heads", "page", "nan"])
def test_l1_finds_what_is_wrong_with_an_op(dtype: Dtype, fault: str) -> None:
    batch = make_batch(MIXED_ROWS, 6, 3, 16, 16, dtype, seed=1)

    def attend(*arguments: object) -> tuple[np.ndarray, str]:
        queries, k, v, starts, lens, tables, options = arguments
        assert isinstance(options, AttentionOptions)
        assert isinstance(queries, np.ndarray)
        assert isinstance(tables, np.ndarray)
        if fault == "window":
            options = replace(options, window=300)  # the one row of 301 tokens misses its first
        if fault == "scale":
            options = replace(options, scale=options.scale * 1.05)
        if fault == "page":
            tables = tables.copy()
            tables[6, [0, 1]] = tables[6, [1, 0]]
            tables[4, 0] = tables[6, 0]
        out = ragged_paged_attention(queries, k, v, starts, lens, tables, options)
        if fault == "heads":
            out = out[:, [1, 0, 2, 3, 4, 5]]
        if fault == "nan":
            out[3, 2, 1] = np.nan
        return out.astype(np.float32), "altered"

    check = check_attention(attend, batch, AttentionOptions(0.25), "a", dtype, "attention")
    assert check.passed is (fault == "none")
    if fault in ("window", "page"):
        assert "row 4 (300 + 1 tokens) position 300" in check.where
    if fault == "nan":
        assert check.where == "head 2, row 3 (32 + 1 tokens) position 32"


def test_nan_is_the_largest_error_and_never_within() -> None:
    want = np.ones((2, 3, 4))
    got = want.astype(np.float32)
    got[1, 2, 3] = np.nan
    got[0, 0, 0] = 5
    for worst in (worst_relative(got, want), worst_absolute(got, want)):
        assert math.isnan(worst.error)
        assert worst.place == (1, 2, 3)
        assert not within(worst.error, math.inf)
    assert worst_per_vector(got, want).place == (1, 2)
    bad, good = worst_absolute(got, want), worst_absolute(want, want)
    for order in ([(bad, "bad"), (good, "good")], [(good, "good"), (bad, "bad")]):
        assert largest(order) == (bad, "bad")
    bits = np.zeros((2, 2), np.float32)
    assert first_unequal(bits, -bits) == (4, (0, 0)), "minus zero has other bits"
    assert first_unequal(np.full(2, np.nan, np.float32), np.full(2, np.nan, np.float32)) is None


@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from((0.0, 0.5, 1.3)),
    penalty=st.sampled_from((1.0, 1.2)),
    token=st.integers(0, 11),
)
def test_the_margin_is_how_far_logits_must_move(seed: int, temperature: float, penalty: float, token: int) -> None:
    """Moved by half the margin, the token's way, they choose it; by a little less, they do not."""
    logits = (2 * np.random.default_rng(seed).standard_normal(12)).astype(np.float32)
    params = SamplingParams(seed=seed, max_tokens=9, temperature=temperature, repetition_penalty=penalty, ignore_eos=True)
    log_ids = [3, 4]
    seen = verdict(logits, params, [1], log_ids, token)
    assert seen.choice == sample(logits, params, [1], log_ids, 2).token_id
    assert (seen.margin == 0) == (seen.choice == token)
    assume(seen.margin > 0 and penalty == 1.0)
    if temperature > 0:
        weights = np.exp(logits / temperature)
        assume(weights[token] / weights.sum() > 1e-3)  # a narrower interval is stepped over below

    def moved(by: float) -> int:
        """Greedy: the token up, all others down. Sampled: everything up to the token's end (or from its start) against the rest."""
        best = np.full(12, -by, np.float32)
        if temperature == 0:
            best[token] = by
        elif seen.choice > token:
            best[: token + 1] = by
        else:
            best[token:] = by
        return sample(logits + best, params, [1], log_ids, 2).token_id

    assert moved(seen.margin / 2 + 1e-4) == token
    assert moved(seen.margin / 2 - 1e-3) != token or seen.margin < 4e-3


def test_prompts_depend_on_the_seed_alone(tmp_path: Path) -> None:
    model_dir = make_tiny_llama(tmp_path / "m")
    for kind in ("text", "random"):
        ids = prompt_ids(model_dir, kind, 2000, seed=1)
        assert ids.dtype == np.int32
        assert ids.shape == (2000,)
        assert 0 <= ids.min() <= ids.max() < 300
        assert np.array_equal(ids, prompt_ids(model_dir, kind, 2000, seed=1))
        assert not np.array_equal(ids, prompt_ids(model_dir, kind, 2000, seed=2))
    for file in model_dir.glob("tokenizer*"):
        file.unlink()
    assert len(prompt_ids(model_dir, "random", 5, seed=1)) == 5
    with pytest.raises(ValueError, match="tokenizer"):
        prompt_ids(model_dir, "text", 5, seed=1)


@pytest.mark.parametrize("text", ["jax", "cuda:0", "jax:", ":cpu", "numpy:cpu"])
def test_a_side_is_engine_and_device(text: str) -> None:
    with pytest.raises(ValueError, match=r"--a: given .* allowed ENGINE:DEVICE"):
        parse_side("a", text, Path(), 16)
    assert parse_side("b", "torch:cuda:1", Path(), 16).device == "cuda:1"


@pytest.mark.parametrize(
    ("field", "value"), [("prompt_tokens", 1), ("new_tokens", 0), ("handoffs", ()), ("handoffs", (3, 3)), ("step_tokens", 30)]
)
def test_a_plan_that_cannot_be_carried_out_names_its_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        replace(Plan(("L3",), ("float32",)), **{field: value})


@pytest.mark.parametrize(
    "options",
    [
        ["--a", "jax", "--b", "torch:cpu"],
        ["--a", "jax:cpu", "--b", "torch:cpu", "--levels", "L0,L7"],
        ["--a", "jax:cpu", "--b", "torch:cpu", "--dtype", "float64"],
        ["--a", "jax:cpu", "--b", "torch:cpu", "--prompt-tokens", "1"],
        ["--a", "jax:cpu", "--b", "torch:cpu", "--prompt", "prose"],
        ["--a", "jax:cpu"],
    ],
)
def test_wrong_options_end_with_status_2(options: list[str], tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["conform", "--model", str(tmp_path), *options]).exit_code == 2


def test_the_command_says_which_level_failed_by_text_json_and_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prepare_environment", "end_on_signal"):  # what is for a process of its own
        monkeypatch.setattr(f"pdd.conform.command.{name}", lambda *_: None)
    model = make_tiny_llama(tmp_path / "m", num_layers=1)
    other = make_tiny_llama(tmp_path / "other", num_layers=1, seed=1)
    options = ["--a", "torch:cpu", "--b", "torch:cpu", "--model", str(model), "--model-b", str(other), "--dtype", "float32"]
    options += ["--levels", "L0,L2", "--prompt-tokens", "40", "--json", str(tmp_path / "report.json")]
    done = CliRunner().invoke(app, ["conform", *options])
    assert done.exit_code == 1, done.output
    assert "FAIL: handshake, L2" in done.output
    assert json.loads((tmp_path / "report.json").read_text())["failed_levels"] == ["handshake", "L2"]


@pytest.mark.parametrize(("text", "replays"), [("torch:cuda:1", True), ("torch:cpu", False), ("jax:cuda", False)])
def test_decode_steps_are_recorded_where_workers_record_them(text: str, replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bool] = []

    class Opened:
        def __init__(self, model_dir: str, config: EngineConfig) -> None:
            opened.append(config.decode_graphs)

        def warm_up(self, progress: object) -> None:
            opened.append(True)

    side = parse_side("a", text, Path("model"), 16)
    monkeypatch.setattr(f"pdd{side.engine}.engine.create", Opened)
    open_engine(side, "float32", Sizes(64, 2, 32), 1, None)
    assert opened == ([True, True] if replays else [False])
