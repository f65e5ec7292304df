"""``pdd compile``: what it runs, what it tells of a compiler that refuses or dies, and real compilers for a few chips that are not here."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pdd.cli import app
from pdd.compile import children as module
from pdd.compile.children import Child, Runner, children
from pdd.compile.table import show
from pddkernels.shapes import MODEL_SHAPES
from pddkernels.targets.hardware import target
from pddkernels.targets.report import Case, Compiled, Memory, compile_all
from pddkernels.targets.work import Work

ROOT = Path(__file__).parents[3]


class Done(NamedTuple):
    status: int
    rows: list[dict[str, dict[str, int] | str | bool]]
    shown: str


def run_command(tmp_path: Path, *options: str) -> Done:
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "pdd.cli", "compile", *options, "--json", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False, cwd=ROOT)
    assert file.exists(), ended.stderr[-2000:]
    return Done(ended.returncode, json.loads(file.read_text()), ended.stdout)


def test_kernels_for_every_target_and_steps_for_tpus() -> None:
    assert children(["tpu-v6e", "cuda-sm80"], small=False) == [
        Child("tpu-v6e", "pddkernels.targets"),
        Child("tpu-v6e", "pddjax.aot"),
        Child("cuda-sm80", "pddkernels.targets"),
    ]
    assert children(["tpu-v6e"], small=True) == [Child("tpu-v6e", "pddkernels.targets", ("--small",))]
    assert children(["tpu-v5e"], small=False, steps="int8") == [Child("tpu-v5e", "pddjax.aot", ("--compute-dtype", "int8"))]
    with pytest.raises(ValueError, match="target: given 'cuda-sm70', allowed"):
        children(["cuda-sm70"], small=True)
    for name, small, steps in (("tpu-v5e", False, "int4"), ("tpu-v5e", True, "int8"), ("cuda-sm90", False, "int8")):
        with pytest.raises(ValueError, match=f"steps: given '{steps}'"):
            children([name], small, steps)


def test_mistakes_are_one_line_before_anything_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd.launch.serve.end_on_signal", lambda: None)  # what is for a process of its own
    (tmp_path / "file").write_text("in the way")
    for options, told in (
        (["--target", "h100"], "target: given 'h100', allowed"),
        (["--target", "cuda-sm90", "--json", str(tmp_path)], "--json: given"),
        (["--target", "cuda-sm90", "--json", str(tmp_path / "file" / "rows.json")], "which cannot be written"),
    ):
        done = CliRunner().invoke(app, ["compile", *options])
        assert done.exit_code == 2
        assert told in done.stderr
        assert done.stderr.count("\n") == 1
        assert done.stdout == ""


def test_what_a_compiler_refuses_and_what_does_not_fit_are_failures_with_their_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> Compiled:
        raise RuntimeError("Mosaic failed to compile TPU kernel: unsupported shape cast")

    def too_large() -> Compiled:
        return Compiled(Work(1.0, 1.0), Memory(15 * 10**9, 2 * 10**9, 1 * 10**9, 10**9))

    cases = [Case("kernel", "refused", refuse), Case("step", "large", too_large, 8), Case("kernel", "left out", refuse)]
    compile_all(target("tpu-v5e"), cases[:2], 0)
    compile_all(target("tpu-v5e"), cases, 3)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [message["what"] for message in told] == ["refused", "refused", "large", "large"]
    assert (told[1]["ok"], told[1]["error"]) == (False, "RuntimeError: Mosaic failed to compile TPU kernel: unsupported shape cast")
    assert (told[3]["ok"], told[3]["error"]) == (False, "needs 17.0 GB per device, TPU v5e has 16 GB")
    assert told[3]["memory"]["peak_bytes"] == 17 * 10**9

    console = Console(file=io.StringIO(), width=200)
    show([told[1], told[3]], console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "unsupported shape cast" in shown
    assert "0 of 2 compiled and fit" in shown


def test_a_compiler_that_dies_fails_what_it_was_at_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._ENVIRONMENT, "PYTHONPATH", str(ROOT))
    told: list[object] = []
    rows = Runner(lambda row: told.append(row["what"])).run_all([Child("tpu-v5e", "tests.support.dying_compiler")], jobs=2)
    assert [(row["what"], row["ok"], row["num_devices"]) for row in rows] == [("a", True, 1), ("b", False, 8), ("c", True, 1)]
    assert "Check failed: registers.size() > 0" in str(rows[1]["error"])
    assert told == ["a", "b", "c"]


def test_a_compiler_that_does_not_start_is_a_failure() -> None:
    (row,) = Runner(lambda row: None).run_all([Child("tpu-v5e", "pddkernels.no_such_module")], jobs=1)
    assert not row["ok"]
    assert "No module named" in str(row["error"])


def test_triton_kernels_compile_for_sm_90_without_spills_and_with_tensor_cores(tmp_path: Path) -> None:
    done = run_command(tmp_path, "--target", "cuda-sm90", "--small")
    assert done.status == 0, done.shown
    assert f"{len(done.rows)} of {len(done.rows)} compiled and fit" in done.shown
    kernels = {str(row["what"]).split(":")[0].split("/")[1].split()[0] for row in done.rows}
    assert kernels >= {"attend_tiles", "merge_partials", "append_tokens", "move_tokens"}
    for row in done.rows:
        registers, instructions = row["registers"], row["instructions"]
        assert isinstance(registers, dict)
        assert isinstance(instructions, dict)
        assert registers["spill_bytes"] == 0, row["what"]
        assert registers["registers"] > 0
        if "attend_tiles" in str(row["what"]):
            assert instructions["tensor_core"] > 0
            assert instructions["loads_16_bytes"] > 0


def test_pallas_kernels_compile_for_v5e(tmp_path: Path) -> None:
    done = run_command(tmp_path, "--target", "tpu-v5e", "--small")
    assert done.status == 0, done.shown
    for row in done.rows:
        memory = row["memory"]
        assert isinstance(memory, dict)
        assert 0 < memory["arguments_bytes"] <= memory["peak_bytes"] < 16e9
        instructions = row["instructions"]
        assert isinstance(instructions, dict)
        if "ragged_paged_attention" in str(row["what"]):
            assert instructions["kernel_calls"] == 1
        if "append" in str(row["what"]) or "write" in str(row["what"]):  # pages are updated in place: nothing of their size is made
            assert memory["alias_bytes"] >= 2**28
            assert memory["temporaries_bytes"] < 2**24


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_everything_compiles_for_every_target_and_whole_steps_fit(tmp_path: Path) -> None:
    done = run_command(tmp_path, "--target", "all", "--jobs", str(min(2, os.cpu_count() or 1)))
    assert done.status == 0, done.shown
    steps = {(row["target"], str(row["what"]).split(":")[1].split(",")[0].strip()) for row in done.rows if row["kind"] == "step"}
    assert steps >= {("tpu-v5e", "llama-3.1-8b"), ("tpu-v5e", "llama-3.1-70b"), ("tpu-v6e", "qwen3-32b")}
    for row in done.rows:
        if row["kind"] == "step":
            memory = row["memory"]
            assert isinstance(memory, dict)
            assert memory["fits"] is True
            if str(row["what"]).startswith("step"):  # the engine's kernels run in every layer, and nothing of the pool's size is made
                layers = MODEL_SHAPES[str(row["what"]).split(":")[1].split(",")[0].strip()].num_layers
                if (instructions := row["instructions"]) is not None:
                    assert isinstance(instructions, dict)
                    assert instructions["kernel_calls"] >= layers
                assert memory["temporaries_bytes"] < memory["alias_bytes"] / 20
