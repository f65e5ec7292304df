"""`pdd conform`'s ladder on tiny models: engines that agree pass every level, and each fault fails the level that it belongs to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pdd.conform.ladder import run
from pdd.conform.plan import Plan
from pdd.conform.report import Report, save
from pdd.conform.side import Dtype, Side, open_engine, parse_side
from pddbridge.engine import Engine
from tests.support.faulty_engines import (
    ForgetsAPage,
    LosesAPage,
    MixesUpRows,
    OtherRandomNumbers,
    ReplaysBadly,
    ReversedOnArrival,
    ReversedOnTheWire,
)
from tests.support.tiny_families import FAMILIES, make_tiny_family
from tests.support.tiny_models import make_tiny_llama

Wrap = Callable[[Engine], Engine]
Change = Callable[[dict[str, np.ndarray], dict[str, object]], None]

LEVELS = ("L0", "L1", "L2", "L3")


def plan(levels: tuple[str, ...] = LEVELS, dtypes: tuple[Dtype, ...] = ("float32",)) -> Plan:
    """70 prompt tokens: the last page is not full on either side, and they take two chunks."""
    return Plan(levels, dtypes, seed=3, prompt_tokens=70, handoffs=(0, 1, 6), new_tokens=7, step_tokens=64)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 KV heads against pages of 16 and 12: no two sizes alike."""
    return make_tiny_llama(tmp_path_factory.mktemp("ladder") / "m", num_heads=6, num_kv_heads=3, hidden=48, head_dim=16, max_context=256)


def sides(a: str, b: str, model_dir: Path, model_b: Path | None = None) -> tuple[Side, Side]:
    return parse_side("a", a, model_dir, 16), parse_side("b", b, model_b or model_dir, 12)


def climb(pair: tuple[Side, Side], what: Plan, tmp_path: Path, wrap_b: Wrap | None = None) -> Report:
    def open_side(side: Side, dtype: Dtype) -> Engine:
        engine = open_engine(side, dtype, what.sizes, 1, None)
        return wrap_b(engine) if wrap_b is not None and side.name == "b" else engine

    return run(pair, what, tmp_path, lambda line: None, open_side)


def failed(report: Report, level: str) -> list[str]:
    """Ways of the checks of ``level`` that failed."""
    return [check.way for check in report.checks if check.level == level and not check.passed]


@pytest.mark.parametrize(
    ("a", "b", "dtypes"),
    [
        ("jax:cpu", "torch:cpu", ("float32",)),
        ("torch:cpu", "torch:cpu", ("float32", "bfloat16")),
        pytest.param("jax:cpu", "torch:cpu", ("bfloat16",), marks=pytest.mark.slow),
        pytest.param("torch:cpu", "jax:cpu", ("float32", "bfloat16"), marks=pytest.mark.slow),
        pytest.param("jax:cpu", "jax:cpu", ("float32",), marks=pytest.mark.slow),
    ],
)
def test_engines_that_agree_pass(a: str, b: str, dtypes: tuple[Dtype, ...], model_dir: Path, tmp_path: Path) -> None:
    report = climb(sides(a, b, model_dir), plan(dtypes=dtypes), tmp_path)
    assert report.failed_levels == ()
    for dtype in dtypes:
        seen = {(check.level, check.way) for check in report.checks if check.dtype == dtype}
        both = {(level, way) for level in ("L0", "L3") for way in ("a->b", "b->a")}
        assert seen == both | {(level, way) for level in ("L1", "L2", "L3") for way in ("a", "b")} | {("handshake", "a<->b")}
    exact = [check for check in report.checks if check.dtype == "float32" and check.what.endswith("handoffs")]
    assert len(exact) == (4 if "float32" in dtypes else 0)
    assert all(check.note.startswith("3 of 3") for check in exact), "float32 has no ties here"
    audits = [check.audit for check in report.checks if check.audit is not None]
    assert len(audits) == 4 * len(dtypes)
    assert all(audit.tokens == 7 for audit in audits)


def test_a_family_with_windows_and_caps(tmp_path: Path) -> None:
    model_dir = make_tiny_family(tmp_path / "gemma2", "gemma2")
    report = climb(sides("torch:cpu", "torch:cpu", model_dir), plan(), tmp_path)
    assert [check for check in report.checks if not check.passed] == []
    assert [check.what for check in report.checks if check.level == "L1" and check.way == "a"] == [
        "attention, window 16, mixed rows",
        "attention, window 16, decode rows",
        "attention, mixed rows",
        "attention, decode rows",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("a", ["torch:cpu", "jax:cpu"])
def test_every_family(a: str, family: str, tmp_path: Path) -> None:
    """Biases, norms and rotations of each, too."""
    model_dir = make_tiny_family(tmp_path / family, family)
    report = climb(sides(a, "torch:cpu", model_dir), plan(), tmp_path)
    assert [check for check in report.checks if not check.passed] == []


def test_the_report_as_json(model_dir: Path, tmp_path: Path) -> None:
    report = climb(sides("torch:cpu", "torch:cpu", model_dir), plan(("L0", "L3")), tmp_path)
    save(report, tmp_path / "out" / "report.json")
    fields = json.loads((tmp_path / "out" / "report.json").read_text())
    assert fields["passed"] is True
    assert fields["failed_levels"] == []
    assert {check["level"] for check in fields["checks"]} == {"handshake", "L0", "L3"}
    assert [check["audit"] for check in fields["checks"] if check["audit"]] == [{"tokens": 7, "disagreements": 0}] * 4
    assert fields["audit_rates"] == {"float32": 0.0}


# --- another model on side b


def change(model_dir: Path, target: Path, edit: Change) -> Path:
    """A copy of a model directory, its tensors and config after ``edit``."""
    target.mkdir()
    for file in model_dir.iterdir():
        if file.name not in ("model.safetensors", "config.json"):
            (target / file.name).write_bytes(file.read_bytes())
    tensors, config = load_file(model_dir / "model.safetensors"), json.loads((model_dir / "config.json").read_text())
    edit(tensors, config)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    return target


def one_weight(tensors: dict[str, np.ndarray], config: dict[str, object]) -> None:
    tensors["model.layers.1.self_attn.k_proj.weight"][5, 7] += 0.1


def rope_constant(tensors: dict[str, np.ndarray], config: dict[str, object]) -> None:
    config["rope_theta"] = 10_100.0


def head_order(tensors: dict[str, np.ndarray], config: dict[str, object]) -> None:
    """KV heads of layer 2 in another order, their query heads with them: the same function, other KV."""

    def reordered(values: np.ndarray, groups: int, axis: int) -> np.ndarray:
        return np.ascontiguousarray(np.concatenate(np.split(values, groups, axis)[::-1], axis))

    for name, axis in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
        key = f"model.layers.2.self_attn.{name}.weight"
        tensors[key] = reordered(tensors[key], 3, axis)


@pytest.mark.parametrize("edit", [one_weight, rope_constant, head_order])
def test_another_model_on_one_side_is_named_by_l2(edit: Change, model_dir: Path, tmp_path: Path) -> None:
    other = change(model_dir, tmp_path / "other", edit)
    report = climb(sides("torch:cpu", "torch:cpu", model_dir, other), plan(), tmp_path)
    assert report.failed_levels[:2] == ("handshake", "L2"), "bytes and operations are right"
    assert set(failed(report, "L2")) == {"b"}
    where = {check.what: check.where for check in report.checks if check.level == "L2" and check.way == "b" and not check.passed}
    if edit is head_order:
        assert list(where) == ["KV"], "the same function"
        assert "layer 2" in where["KV"]
        assert failed(report, "L3").count("a->b") >= 2, "and another's KV is no use to it"
    else:
        assert len(where) == 3


@pytest.mark.slow
@pytest.mark.parametrize("edit", [one_weight, rope_constant, head_order])
def test_a_changed_side_a_is_named_too(edit: Change, model_dir: Path, tmp_path: Path) -> None:
    """The oracle is a's model: then it is b, the unchanged one, that differs."""
    other = change(model_dir, tmp_path / "other", edit)
    report = climb(sides("torch:cpu", "jax:cpu", other, model_dir), plan(), tmp_path)
    assert report.failed_levels[:2] == ("handshake", "L2")
    assert set(failed(report, "L2")) == {"b"}


# --- another engine on side b


@pytest.mark.parametrize("wrap", [ReversedOnArrival, LosesAPage])
def test_kv_that_arrives_wrong_is_named_by_l0(wrap: Wrap, model_dir: Path, tmp_path: Path) -> None:
    report = climb(sides("torch:cpu", "torch:cpu", model_dir), plan(("L0",)), tmp_path, wrap)
    assert report.failed_levels == ("L0",)
    bad = next(check for check in report.checks if check.level == "L0" and check.way == "a->b")
    assert not bad.passed
    if wrap is LosesAPage:
        assert "page 1 of the row" in bad.where
        assert bad.where.startswith("k layer 0 head 0 token 12 ")


def test_an_engine_whose_heads_are_in_another_order(model_dir: Path, tmp_path: Path) -> None:
    """It reads back what it wrote, and its tokens are right: only its KV, seen by others, is not."""
    report = climb(sides("torch:cpu", "torch:cpu", model_dir), plan(), tmp_path, ReversedOnTheWire)
    assert report.failed_levels == ("L2", "L3")
    assert [(c.way, c.what) for c in report.checks if c.level == "L2" and not c.passed] == [("b", "KV")]
    assert set(failed(report, "L3")) == {"a->b", "b->a"}


def test_a_page_of_kv_that_is_lost_after_it_arrived_is_named_by_l3(model_dir: Path, tmp_path: Path) -> None:
    report = climb(sides("torch:cpu", "torch:cpu", model_dir), plan(), tmp_path, ForgetsAPage)
    assert report.failed_levels == ("L3",)
    assert set(failed(report, "L3")) == {"a->b"}
    parted = next(check.parting for check in report.checks if check.level == "L3" and not check.passed)
    assert parted is not None
    assert parted.margin > 1e-3


def test_other_random_numbers_are_named_by_the_sampled_streams_of_l3(model_dir: Path, tmp_path: Path) -> None:
    report = climb(sides("torch:cpu", "torch:cpu", model_dir), plan(("L2", "L3")), tmp_path, OtherRandomNumbers)
    assert report.failed_levels == ("L3",)
    assert all("sampled" in check.what for check in report.checks if not check.passed)


def test_a_replay_that_is_not_decode_is_named_by_l3_with_its_place(model_dir: Path, tmp_path: Path) -> None:
    report = climb(sides("torch:cpu", "torch:cpu", model_dir), plan(("L2", "L3")), tmp_path, ReplaysBadly)
    assert report.failed_levels == ("L3",)
    bad = [check for check in report.checks if not check.passed and check.what.startswith("KV")]
    assert [check.way for check in bad] == ["a->b"]
    assert bad[0].where.endswith(" token 69"), "the last prompt token: the first that the row took in"


def test_rows_that_are_mixed_up_are_named_by_l2(model_dir: Path, tmp_path: Path) -> None:
    report = climb(sides("torch:cpu", "torch:cpu", model_dir), plan(("L2",)), tmp_path, MixesUpRows)
    assert [(check.way, check.what) for check in report.checks if not check.passed] == [("b", "logits, rows of a batch")]


def test_a_level_that_raises_has_failed_and_the_others_go_on(model_dir: Path, tmp_path: Path) -> None:
    class Refuses(ReversedOnArrival):
        def write_kv(self, page_table: np.ndarray, block: object) -> None:
            raise RuntimeError("out of memory")

    report = climb(sides("torch:cpu", "torch:cpu", model_dir), plan(("L0", "L1")), tmp_path, Refuses)
    assert report.failed_levels == ("L0",)
    assert all("RuntimeError: out of memory" in check.note for check in report.checks if not check.passed)
    assert [check.passed for check in report.checks if check.level == "L1"] == [True] * 4
