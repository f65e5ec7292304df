"""Reading a TPU compiler's final schedule: bundles (one is issued per cycle, unless the core waits), by loop. Imports no framework.

libtpu writes it with ``--xla_jf_dump_to=DIR --xla_jf_dump_llo_text=true`` (in LIBTPU_INIT_ARGS) as ``*-final_bundles.txt``, a line a
bundle: address, a label where control arrives (LB: a loop's body), a ``>`` for every loop around it, the instructions. Beside it,
``*-final_hlo-static-per-bundle-utilization.txt`` counts the functional units that each bundle uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

_BUNDLE: Final = re.compile(r"^ *(?:0x)?[0-9a-f]+ +([A-Z]{2})?:((?: *>)*) *\{(.*)")


@dataclass
class Loop:
    """``bundles``: of its body without loops inside · ``matmuls``: matrix-unit instructions among them · ``spills``: vector registers
    stored and loaded for want of room.
    """

    depth: int
    bundles: int = 0
    matmuls: int = 0
    spills: int = 0
    inner: list[Loop] = field(default_factory=list)

    def walk(self) -> Iterator[Loop]:
        """Itself and all loops inside, outermost first, in the order of the program."""
        yield self
        for loop in self.inner:
            yield from loop.walk()


def read_loops(bundles: str, utilization: str) -> Loop:
    """The program as a loop of depth 0. Raises ValueError if the two texts do not belong together or are of an unknown form."""
    spills = _spills(utilization)
    root = Loop(0)
    stack = [root]
    count = 0
    for line in bundles.splitlines():
        match = _BUNDLE.match(line)
        if match is None:
            continue
        label, marks, instructions = match.groups()
        depth = marks.count(">")
        if label == "LB":
            del stack[depth:]
            loop = Loop(depth)
            stack[-1].inner.append(loop)
            stack.append(loop)
        elif depth:  # none: the slots behind a branch, which belong to what branched
            del stack[depth + 1 :]
        if count >= len(spills):
            raise ValueError(f"bundles: more than the {len(spills)} of the utilization")
        here = stack[-1]
        here.bundles += 1
        here.matmuls += instructions.count("vmatmul")
        here.spills += spills[count]
        count += 1
    if count == 0 or count != len(spills):
        raise ValueError(f"bundles: {count}, utilization of {len(spills)}")
    return root


def _spills(utilization: str) -> list[int]:
    lines = utilization.splitlines()
    names = [name.strip() for name in lines[1].split(",")]
    columns = [names.index("VLOAD:FILL"), names.index("VSTORE:SPILL")]
    return [sum(int(line.split()[column]) for column in columns) for line in lines[4:] if line.strip()]
