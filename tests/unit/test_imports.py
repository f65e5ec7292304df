"""Data flows one way: no module imports another that imports it back, however many are between, not for annotations either."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp

PACKAGES = ("pdd", "pddjax", "pddtorch", "pddbridge", "pddkernels")


def test_no_modules_import_in_a_circle() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None, exclude_type_checking_imports=False)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert "pdd.serving.prefill_run" in imports["pdd.serving.background"], "the graph is not of what is there"
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle
