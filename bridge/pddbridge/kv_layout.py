"""How an engine stores KV in pages: named axes, page size, dtype, head shard, version. Declared by the engine, never guessed from a shape.

With two KV heads, or a page as long as there are heads, shapes cannot tell one layout from another: only the names here can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pddbridge.kv_spec import KV_DTYPES, HeadRange, KVGroup, KVPlane

# Axis names of one layer's storage. "page": which page; "slot": token within a page; "head"; "plane": k or v; "dim".
# "plane_head": heads of the planes interleaved (k0 v0 k1 v1 ...), as TPU ragged paged attention has it.
Axis = Literal["page", "slot", "head", "plane", "plane_head", "dim"]

# Every layout has these, in some order, and then says where heads and planes are.
_ALWAYS: Final = {"page", "slot", "dim"}
_HEADS_AND_PLANES: Final = ({"head"}, {"head", "plane"}, {"plane_head"})


@dataclass(frozen=True)
class KVLayout:
    """``axes`` of the array that holds one layer. With neither ``plane`` nor ``plane_head`` among them, each plane has an array of its own.

    ``heads``: the KV heads stored here, counted in the model's total; None for all of them (no head sharding).
    """

    name: str
    version: int
    axes: tuple[Axis, ...]
    page_size: int
    dtype: str
    heads: HeadRange | None = None

    def __post_init__(self) -> None:
        names = set(self.axes)
        if len(names) != len(self.axes) or not names >= _ALWAYS or names - _ALWAYS not in _HEADS_AND_PLANES:
            allowed = "page, slot and dim once each, and one of: head; head and plane; plane_head"
            raise ValueError(f"KVLayout.axes: given {self.axes}, allowed {allowed}")
        if self.page_size < 1:
            raise ValueError(f"KVLayout.page_size: given {self.page_size}, must be at least 1")
        if self.dtype not in KV_DTYPES:
            raise ValueError(f"KVLayout.dtype: given {self.dtype!r}, allowed {sorted(KV_DTYPES)}")

    @property
    def fused(self) -> bool:
        """Whether one array per layer holds all planes."""
        return "plane" in self.axes or "plane_head" in self.axes

    def heads_of(self, plane: KVPlane) -> HeadRange:
        """The heads of ``plane`` that are stored here. Raises ValueError if the plane does not have them."""
        heads = self.heads or HeadRange(0, plane.num_heads)
        if heads.stop > plane.num_heads:
            raise ValueError(f"KVLayout.heads: given {heads}, but plane {plane.name!r} has {plane.num_heads} heads")
        return heads

    def array_shapes(self, group: KVGroup, num_pages: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays that hold one layer of ``group``: one if fused, else one per plane in the group's order.

        Raises ValueError if planes of different shape are to be fused.
        """
        if self.fused and len({(plane.num_heads, plane.head_dim) for plane in group.planes}) != 1:
            raise ValueError(f"KVLayout {self.name!r} fuses planes, so their shapes must be equal, given {group.planes}")
        shapes = []
        for plane in group.planes[:1] if self.fused else group.planes:
            num_heads = len(self.heads_of(plane))
            sizes: dict[Axis, int] = {
                "page": num_pages,
                "slot": self.page_size,
                "head": num_heads,
                "plane": len(group.planes),
                "plane_head": num_heads * len(group.planes),
                "dim": plane.head_dim,
            }
            shapes.append(tuple(sizes[axis] for axis in self.axes))
        return tuple(shapes)


def interleaved_heads(page_size: int, dtype: str) -> KVLayout:
    """One array per layer: [pages, page_size, heads * 2, dim], K and V of a head side by side."""
    return KVLayout("interleaved_heads", 1, ("page", "slot", "plane_head", "dim"), page_size, dtype)


def head_major(page_size: int, dtype: str) -> KVLayout:
    """One array per layer and plane: [pages, heads, page_size, dim]."""
    return KVLayout("head_major", 1, ("page", "head", "slot", "dim"), page_size, dtype)


def token_major(page_size: int, dtype: str) -> KVLayout:
    """One array per layer and plane: [pages, page_size, heads, dim]."""
    return KVLayout("token_major", 1, ("page", "slot", "head", "dim"), page_size, dtype)


def shard_heads(num_heads: int, shard: int, num_shards: int) -> HeadRange:
    """The KV heads of tensor-parallel shard ``shard`` of ``num_shards``, out of the model's total ``num_heads``.

    With more shards than heads, neighbouring shards hold the same head (grouped-query replication). Raises ValueError unless one
    number divides the other.
    """
    if num_shards < 1 or not 0 <= shard < num_shards:
        raise ValueError(f"shard_heads: need 0 <= shard < num_shards, given shard={shard} num_shards={num_shards}")
    if num_heads % num_shards and num_shards % num_heads:
        raise ValueError(f"shard_heads: num_shards={num_shards} and num_heads={num_heads}: one must divide the other")
    if num_shards > num_heads:
        head = shard * num_heads // num_shards
        return HeadRange(head, head + 1)
    per_shard = num_heads // num_shards
    return HeadRange(shard * per_shard, (shard + 1) * per_shard)
