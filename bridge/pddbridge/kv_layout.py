"""How an engine stores KV in pages: named axes, page size, dtype, version. Declared by the engine, never guessed from a shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Axis names of one layer's storage. "page": which page; "slot": token within a page; "head"; "plane": k or v; "dim".
# "plane_head": heads of the planes interleaved (k0 v0 k1 v1 ...), as TPU ragged paged attention has it.
Axis = Literal["page", "slot", "head", "plane", "plane_head", "dim"]


@dataclass(frozen=True)
class KVLayout:
    """``axes`` of the array that holds one layer. With neither ``plane`` nor ``plane_head`` among them, each plane has an array of its own."""

    name: str
    version: int
    axes: tuple[Axis, ...]
    page_size: int
    dtype: str


def interleaved_heads(page_size: int, dtype: str) -> KVLayout:
    """One array per layer: [pages, page_size, heads * 2, dim], K and V of a head side by side."""
    return KVLayout("interleaved_heads", 1, ("page", "slot", "plane_head", "dim"), page_size, dtype)


def head_major(page_size: int, dtype: str) -> KVLayout:
    """One array per layer and plane: [pages, heads, page_size, dim]."""
    return KVLayout("head_major", 1, ("page", "head", "slot", "dim"), page_size, dtype)


def token_major(page_size: int, dtype: str) -> KVLayout:
    """One array per layer and plane: [pages, page_size, heads, dim]."""
    return KVLayout("token_major", 1, ("page", "slot", "head", "dim"), page_size, dtype)
