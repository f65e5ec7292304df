"""A worker loads one framework: importing a kernel module loads JAX or PyTorch, never both. Read from the source, nothing is imported."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import pddkernels

ROOT = Path(pddkernels.__file__).parent
FAMILIES = {"jax": "jax", "jaxlib": "jax", "flax": "jax", "torch": "torch", "triton": "torch"}
MODULES = {
    ".".join(("pddkernels", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path for path in ROOT.rglob("*.py")
}


@cache
def imported(module: str) -> frozenset[str]:
    """What the module imports when it is loaded: names of modules, absolute."""
    names: set[str] = set()
    for node in ast.parse(MODULES[module].read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{module}: a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def families(module: str) -> set[str]:
    """Frameworks loaded by the module and by all kernel modules it loads."""
    reached, pending = set[str](), [module]
    while pending:
        current = pending.pop()
        if current not in reached:
            reached.add(current)
            pending += [name for name in imported(current) if name in MODULES]
    tops = {name.split(".")[0] for name in set().union(*(imported(name) for name in reached))}
    return {FAMILIES[top] for top in tops & FAMILIES.keys()}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_loads_one_framework_at_most(module: str) -> None:
    assert len(families(module)) <= 1


@pytest.mark.parametrize(
    ("ending", "family"), [("reference", set()), ("options", set()), ("portable_torch", {"torch"}), ("portable_xla", {"jax"})]
)
def test_modules_load_the_framework_they_are_named_for(ending: str, family: set[str]) -> None:
    modules = [module for module in MODULES if module.endswith(f".{ending}")]
    assert modules
    assert all(families(module) == family for module in modules)
