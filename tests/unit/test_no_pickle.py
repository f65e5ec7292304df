"""Static check: no code of ours makes objects or code out of data. Over the syntax tree, so that no spelling of an import hides it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("pdd", "pddjax", "pddtorch", "bridge/pddbridge", "kernels/pddkernels", "benchmarks", "tools")
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
# Their safe forms have other names.
UNSAFE_YAML = {"load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all"}
EVALUATING = {"eval", "exec"}


def faults(source: str) -> Iterator[str]:
    """What ``source`` may not do, with its line."""
    tree = ast.parse(source)
    torch_eval = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            yield from (f"{line}: import {a.name}" for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield f"{line}: from {node.module}"
        elif isinstance(node, ast.ImportFrom) and node.module == "yaml":
            yield from (f"{line}: from yaml import {a.name}" for a in node.names if a.name in UNSAFE_YAML)
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from (f"{line}: from torch import {a.name}" for a in node.names if a.name == "load")
        elif isinstance(node, ast.Name) and node.id in EVALUATING:
            yield f"{line}: {node.id}"
        elif isinstance(node, ast.Call):
            yield from (f"{line}: {what}" for what in _calls(node))
        elif isinstance(node, ast.Attribute) and id(node) not in torch_eval and node.attr in UNSAFE_YAML and _name(node.value) == "yaml":
            yield f"{line}: yaml.{node.attr} passed on"


def _calls(node: ast.Call) -> Iterator[str]:
    name = _name(node.func)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    first, _, last = name.rpartition(".")
    if first == "yaml" and last in UNSAFE_YAML:
        yield name
    if name == "torch.load" and not _is(keywords.get("weights_only"), True):
        yield "torch.load without weights_only=True"
    if last in {"load", "save"} and first in {"np", "numpy"} and _is(keywords.get("allow_pickle"), True):
        yield f"{name} with allow_pickle"
    if (
        last in {"import_module", "__import__"}
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and str(node.args[0].value) in MODULES
    ):
        yield f"{name}({node.args[0].value!r})"


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_no_shipped_file_does() -> None:
    files = [file for folder in SHIPPED for file in (ROOT / folder).rglob("*.py") if "__pycache__" not in file.parts]
    assert len(files) > 200
    found = {str(file.relative_to(ROOT)): list(faults(file.read_text(encoding="utf-8"))) for file in files}
    assert {name: said for name, said in found.items() if said} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import a, marshal as m",
        "from pickle import loads",
        "from cloudpickle.cloudpickle import dumps",
        "import importlib; importlib.import_module('pickle')",
        "__import__('marshal')",
        "import torch; torch.load(f)",
        "torch.load(f, weights_only=False)",
        "from torch import load",
        "yaml.load(f)",
        "yaml.load(f, Loader=yaml.SafeLoader)",
        "yaml.unsafe_load(f)",
        "read = yaml.load",
        "from yaml import load",
        "eval(text)",
        "run = exec",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_it_sees(source: str) -> None:
    assert list(faults(source))


@pytest.mark.parametrize("source", ["yaml.safe_load(f)", "model.eval()", "torch.load(f, weights_only=True)", "np.load(f)", "json.loads(x)"])
def test_it_leaves_alone(source: str) -> None:
    assert not list(faults(source))
