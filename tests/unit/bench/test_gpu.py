"""`make gpu` where there is no GPU: it says what it skips; its checks, tried on the CPU, pass on what is right and fail on what is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import crc32c
import numpy as np
import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import (
    check_attention,
    check_latent,
    check_pages,
    engine_speed,
    exact,
    handoff,
    limits,
    speed,
    stand_ins,
)
from benchmarks.gpu.batches import Heads, draw, poisoned_memory
from benchmarks.gpu.children import Child
from benchmarks.gpu.findings import Finding, PartResult, lines, save_report
from benchmarks.gpu.models import HANDED_OVER, config_of, make_engine, spec_of, unexpected_fallbacks
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.sizes import SMALL
from pdd.conform.steps import GREEDY, decode, prefill
from pddbridge.engine import Engine, Step
from pddkernels.ragged_paged_attention import reference
from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.shapes import MODEL_SHAPES
from pddkernels.torch_ops import Problem, StepKernels, TorchOps, choose
from tests.support import gpu_child
from tests.support.triton_child import interpreting_process

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
ROWS = ((5, 9), (0, 0), (40, 1), (16, 3))


def problems(findings: Sequence[Finding]) -> list[str]:
    return [f"{finding.what}: {finding.note}" for finding in findings if finding.status == "failed"]


def test_without_a_gpu_every_part_is_skipped_by_name(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        ["make", "-s", "gpu", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        env=environment | {"OUT": str(tmp_path / "out"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out/gpu.json").read_text())
    assert [part["part"] for part in report["parts"]] == list(PARTS)
    assert report["counts"] == {"skipped": len(PARTS)}
    for name in PARTS:
        assert f"{name} (0 s)\n  skipped whole part" in done.stdout
    assert done.stdout.count("sees no CUDA device") == len(PARTS) + 1


def test_a_failed_check_is_exit_status_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    statuses = {}
    for status in ("passed", "failed", "skipped"):
        result = PartResult("limits", 0.0, (Finding("x", status),))
        monkeypatch.setattr(Child, "ask_machine", lambda self: {"gpu": "some"})
        monkeypatch.setattr(Child, "run_all", lambda self, parts, at_once, done, result=result: done(result))
        statuses[status] = command.main(["--json", str(tmp_path / "gpu.json")])
    assert statuses == {"passed": 0, "failed": 1, "skipped": 0}


def test_mistakes_are_one_line_and_exit_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--parts", "limits,nonsense"]) == 2
    monkeypatch.setattr(Child, "ask_machine", lambda self: {})
    monkeypatch.setenv("OUT", str(tmp_path / "file" / "folder"))
    (tmp_path / "file").write_text("in the way")
    assert command.main([]) == 2
    unknown, unwritable = capsys.readouterr().err.splitlines()
    assert "given ['nonsense'], allowed" in unknown
    assert "cannot write" in unwritable
    assert "file/folder/gpu.json" in unwritable


def test_only_what_was_measured_on_a_gpu_replaces_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    assert command._default_path(on_gpu=True) == Path("docs/measurements/gpu.json")
    assert command._default_path(on_gpu=False) != Path("docs/measurements/gpu.json")
    monkeypatch.setenv("OUT", "/somewhere")
    assert command._default_path(on_gpu=False) == Path("/somewhere/gpu.json")


def test_a_part_that_dies_hangs_or_comes_too_late_is_a_finding(tmp_path: Path) -> None:
    part, forever = PARTS["limits"], time.monotonic() + 600
    (died,) = Child(("--sizes", "no such"), tmp_path, forever).run(part).findings
    assert died.status == "failed"
    assert "ended with 2" in died.note
    assert "no such" in died.note
    (hung,) = Child((), tmp_path, forever).run(replace(part, timeout_s=0.01)).findings
    assert (hung.status, hung.note[:8]) == ("failed", "not done")
    (late,) = Child((), tmp_path, time.monotonic()).run(part).findings
    assert late.status == "skipped"


def test_what_is_not_installed_skips_the_parts_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins, "missing", lambda names: sorted({"jax", "crc32c"} & set(names)))
    skipped, runnable = command._divide(list(PARTS.values()), None)
    assert "jax engine" in {result.part for result in skipped}
    assert all("jax" in result.findings[0].note for result in skipped if result.part == "jax engine")
    assert "limits" in {part.name for part in runnable}


def test_the_table_is_short_and_names_what_failed() -> None:
    fine = (
        Finding("a", "passed", numbers={"error": 1.0, "allowed": 4.0}),
        Finding("b", "passed"),
        Finding("speed", "measured", numbers={"ms": 2.0}),
    )
    shown = lines(PartResult("part", 3.2, (*fine, Finding("c", "failed", "because"))))
    assert [" ".join(line.split()) for line in shown] == [
        "part (3 s)",
        "ok 2 checks, the largest error 25% of what is allowed",
        "speed ms 2",
        "FAILED c because",
    ]


def test_numbers_that_json_has_no_word_for(tmp_path: Path) -> None:
    result = PartResult("x", 0.0, (Finding("y", "failed", numbers={"error": float("nan"), "ms": 1.5}),))
    save_report({}, {}, [result], tmp_path / "deep/gpu.json")
    (part,) = json.loads((tmp_path / "deep/gpu.json").read_text())["parts"]
    assert part["findings"][0]["numbers"] == {"error": None, "ms": 1.5}


def test_the_stand_in_computes_what_the_package_does() -> None:
    data = np.random.default_rng(0).bytes(1000)
    for part in (b"", b"123456789", data):
        assert stand_ins.crc32c(part) == crc32c.crc32c(part)
    assert stand_ins.crc32c(memoryview(data)[300:], stand_ins.crc32c(data[:300])) == crc32c.crc32c(data)


def test_memory_is_poisoned_inside_and_only_there() -> None:
    with poisoned_memory():
        assert torch.empty(1000).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("window", "soft_cap", "with_sinks"), [(None, None, False), (7, 2.0, True)])
def test_attention_in_float64_is_the_references(
    window: int | None, soft_cap: float | None, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "_SCORE_VALUES", 6 * 50)  # blocks of a few queries
    batch = draw(ROWS, Heads(6, 3, 16), torch.float32, window, CPU, seed=0)
    pages, options = batch.stored(), AttentionOptions(0.3, window, soft_cap)
    sinks = torch.randn(6) if with_sinks else None
    got = exact.attention(batch.queries, *pages, batch.row_starts, batch.context_lens, batch.page_tables, options, sinks)
    wanted = reference.ragged_paged_attention(
        batch.queries.numpy(),
        *(pool.numpy() for pool in pages),
        batch.row_starts,
        batch.context_lens,
        batch.page_tables,
        options,
        None if sinks is None else sinks.numpy(),
    )
    np.testing.assert_allclose(got.numpy(), wanted, rtol=0, atol=1e-12)


def test_kernel_checks_pass_on_the_portable_path() -> None:
    for model in ("smollm2-135m", "gemma-2-9b", "gpt-oss-20b"):
        assert not problems(check_attention.run(model, CPU, SMALL, seed=2))
    assert not problems(check_latent.run(CPU, SMALL, seed=2))
    findings = check_pages.run(CPU, SMALL, seed=2)
    assert not problems(findings)
    assert [finding.what for finding in findings if finding.status == "skipped"] == ["attention over a pool of more than 2**31 values"]


@pytest.mark.slow
def test_kernel_checks_pass_on_interpreted_triton() -> None:
    with interpreting_process() as child:
        for findings in (
            child.submit(gpu_child.attention, "smollm2-135m").result(),
            child.submit(gpu_child.pages, "smollm2-135m").result(),
            child.submit(gpu_child.latents).result(),
        ):
            assert not problems(findings)
            assert any(finding.status == "passed" for finding in findings)


@dataclass(frozen=True)
class Faulty:
    """The ops of a problem, one of which goes wrong; also a step of them."""

    ops: TorchOps
    fault: str
    step: StepKernels | None = None
    fallbacks: tuple[str, ...] = ()
    path: str = "portable"

    def plan(self, row_starts: np.ndarray, context_lens: np.ndarray, page_tables: np.ndarray) -> Faulty:
        if self.fault == "context":
            context_lens = np.maximum(context_lens - 1, 0)
        return replace(self, step=self.ops.plan(row_starts, context_lens, page_tables))

    def append(self, k_pages: torch.Tensor, v_pages: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert self.step is not None
        if self.fault == "truncated":
            keys = (keys.view(torch.int32) & ~0xFFFF).view(torch.float32)
        self.step.append(k_pages, v_pages, keys, values)
        if self.fault == "neighbour":
            v_pages[0, 0, 0, 0] = 1.0

    def attend(self, queries: torch.Tensor, *rest: object) -> torch.Tensor:
        assert self.step is not None
        got = self.step.attend(queries, *rest)  # type: ignore[arg-type]
        if self.fault == "unwritten":
            got[-1] = torch.empty_like(got[-1])
        elif self.fault == "heads":
            got = got.flip(1)
        elif self.fault == "imprecise":
            got *= 1.03
        return got

    def pack(self, *arguments: object) -> torch.Tensor:
        packed = self.ops.pack(*arguments)  # type: ignore[arg-type]
        return packed.roll(1, 1) if self.fault == "token order" else packed

    def unpack(self, layers: torch.Tensor, *rest: object) -> None:
        self.ops.unpack(layers, *rest)  # type: ignore[arg-type]
        if self.fault == "beside":
            layers.view(torch.int16 if layers.itemsize == 2 else torch.int32)[0, 0, 0, 0, 0] ^= 1


def faulty(fault: str) -> Callable[[Problem, torch.device], Faulty]:
    return lambda problem, device: Faulty(choose(problem, device), fault)


@pytest.mark.parametrize("fault", ["context", "truncated", "neighbour", "unwritten", "heads", "imprecise"])
def test_attention_checks_fail_on_what_is_wrong(fault: str) -> None:
    shape = MODEL_SHAPES["smollm2-135m"]
    ops = faulty(fault)(check_attention.problem_of(shape, torch.bfloat16), CPU)
    finding = check_attention.check_batch("x", ops, shape, ROWS, torch.bfloat16, None, CPU, seed=4)
    assert finding.status == "failed", fault


@pytest.mark.parametrize("fault", ["token order", "beside"])
def test_page_checks_fail_on_what_is_wrong(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_pages, "choose", faulty(fault))
    monkeypatch.setattr(check_pages, "MODEL_SHAPES", {"smollm2-135m": MODEL_SHAPES["smollm2-135m"]})
    findings = [finding for finding in check_pages.run(CPU, SMALL, seed=0) if finding.status != "skipped"]
    assert {finding.status for finding in findings} == {"failed"}


def test_a_path_that_is_not_the_gpus_best_fails_unless_there_is_no_triton() -> None:
    gpu = torch.device("cuda")
    ops = choose(check_attention.problem_of(MODEL_SHAPES["smollm2-135m"], torch.float32), CPU)
    assert check_attention.check_path("x", ops, gpu).status == "failed"
    without = replace(ops, fallbacks={"portable_kernels_no_triton": 1})  # type: ignore[type-var]
    assert check_attention.check_path("x", without, gpu).status == "skipped"


def test_a_fallback_is_unexpected_only_where_the_gpu_has_kernels() -> None:
    counted = {"portable_kernels_shape": 1, "unpacked_linear": 0}
    assert unexpected_fallbacks("torch", "cuda:0", counted) == ["portable_kernels_shape"]
    assert not unexpected_fallbacks("torch", "cpu", counted)
    assert not unexpected_fallbacks("jax", "cuda", {"portable_attention_no_kernel_for_device": 1})


def test_speeds_are_measured_against_limits() -> None:
    found = limits.run(CPU, SMALL)
    assert all(next(iter(finding.numbers.values())) > 0 for finding in found)
    findings = speed.run(("smollm2-135m",), CPU, SMALL, seed=0)
    assert {finding.status for finding in findings} == {"measured"}
    named = {finding.what: finding for finding in findings}
    assert named["smollm2-135m: chunk after context"].numbers["torch_ms"] > 0
    assert "unequal" in named["smollm2-135m: decode"].note
    assert len(findings) == len(SMALL.timed) + 3 + 1


def test_torchs_attention_does_the_same_work() -> None:
    """Of rows that differ from ours in their values alone; that it is the same attention is seen on ours."""
    for rows, shape in ((((31, 1),) * 2, (2, 6, 1, 16)), (((0, 8),), (1, 6, 8, 16)), (((24, 8),), (1, 6, 8, 16))):
        assert speed.torch_attention(rows, Heads(6, 3, 16), CPU)().shape == shape
    with pytest.raises(ValueError, match="unequal"):
        speed.torch_attention(ROWS, Heads(6, 3, 16), CPU)


def test_an_engine_is_measured_and_its_logits_are_looked_at() -> None:
    findings = engine_speed.run("torch", "cpu", CPU, SMALL, threads=1, seed=0)
    assert not problems(findings)
    named = {finding.what: finding for finding in findings}
    assert named["decode, 2 streams at 29"].numbers["tokens_s"] > 0
    assert named["prefill of 32 after 32"].numbers["share"] > 0
    assert named["logits"].status == "passed"


def test_an_engine_whose_decode_rows_see_other_kv_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    make = engine_speed.make_engine

    def make_forgetful(*arguments: object) -> Engine:
        engine = make(*arguments)  # type: ignore[arg-type]
        logits = engine.logits

        def of_rolled_pages(step: Step) -> np.ndarray:
            is_decode = len(step.token_ids) == 1
            return logits(replace(step, page_tables=np.roll(step.page_tables, 1, axis=1)) if is_decode else step)

        engine.logits = of_rolled_pages  # type: ignore[method-assign]
        return engine

    monkeypatch.setattr(engine_speed, "make_engine", make_forgetful)
    (problem,) = problems(engine_speed.run("torch", "cpu", CPU, SMALL, threads=1, seed=0))
    assert problem.startswith("logits of a chunk and of a decode row")


def test_a_gap_is_measured_between_logits() -> None:
    """The sender's own first token is its largest logit, so no other is above it, and the gap to itself is none."""
    spec = spec_of(HANDED_OVER, 60)
    engine = make_engine("torch", spec, config_of(spec, "cpu", "float32", 8, 64, 2, 1), 0)
    prompt, pages = np.arange(20, dtype=np.int32), np.arange(4, dtype=np.int32)
    prefill(engine, prompt[:-1], pages)
    stream = decode(engine, prompt, pages, 3, GREEDY)
    assert handoff._gap(engine, prompt, pages, stream, stream[-1]) == 0
    assert all(handoff._gap(engine, prompt, pages, stream[:count], other) > 0 for count in (1, 3) for other in (0, 7))


def test_tokens_are_those_of_one_engine_on_both_sides_of_a_handoff() -> None:
    places = handoff.Place("jax", "cpu", 12), handoff.Place("torch", "cpu", 16)
    assert not problems(handoff.run(*places, SMALL, threads=1, seed=0))


def test_kv_that_is_not_what_was_sent_fails_the_handoff(monkeypatch: pytest.MonkeyPatch) -> None:
    real, torch_place = handoff.move_kv, handoff.Place("torch", "cpu", 16)

    def move_all_but_one(source: object, pages: object, target: object, other: object, tokens: object, seed: int) -> int:
        return real(source, pages, target, other, replace(tokens, stop=tokens.stop - 1), seed)  # type: ignore[arg-type,attr-defined,type-var]

    monkeypatch.setattr(handoff, "move_kv", move_all_but_one)
    with pytest.raises(ValueError, match="largest of row 0 is nan"):
        handoff.run(torch_place, torch_place, SMALL, threads=1, seed=0)
