"""How an engine stores KV in pages: named axes, page size, dtype, head shard, version. Declared by the engine, never guessed from a shape.

With two KV heads, or a page as long as there are heads, shapes cannot tell one layout from another: only the names here can.
:mod:`pddbridge.kv_layout_catalogue` has the layouts of known engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pddbridge.kv_spec import KV_DTYPES, HeadRange, KVGroup, KVPlane, KVSpec

# Axis names of one layer's storage. "page": which page; "slot": token within a page; "head"; "plane": k or v; "dim".
# "plane_head": heads of the planes interleaved (k0 v0 k1 v1 ...). "plane_dim": dims of the planes one after the other (latent, then rope).
# "pack": the fast part of the axis named before it, which is then the slow part: index = slow * pack + fast.
Axis = Literal["page", "slot", "head", "plane", "plane_head", "plane_dim", "dim", "pack"]

_ALWAYS: Final = {"page", "slot"}
_HEADS_PLANES_DIMS: Final = (
    {"head", "dim"},
    {"head", "plane", "dim"},
    {"plane_head", "dim"},
    {"head", "plane_dim"},
    {"dim"},
    {"plane_dim"},
)
_FUSED: Final = {"plane", "plane_head", "plane_dim"}
_PACKABLE: Final = ("slot", "head", "plane_head")


@dataclass(frozen=True)
class StoredArray:
    """One array of a layer: which planes of the group it holds (indices), its shape, dtype, and each plane's first dim in it."""

    planes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    first_dims: tuple[int, ...]


@dataclass(frozen=True)
class KVLayout:
    """``axes`` of an array of one layer. With none of ``plane``, ``plane_head``, ``plane_dim`` among them, each plane has its own array;
    without ``head``, planes have one head.

    ``heads``: the KV heads stored here, counted in the model's total; None for all of them (no head sharding) ·
    ``dim_multiple``: each plane's dim is padded up to a multiple of it; padding is never read or written ·
    ``pack``: size of axis ``pack``; the axis before it is padded to a multiple ·
    ``plane_sets``: which planes share an array, in their order in it; None for all planes of a group in one array if they are fused.
    """

    name: str
    version: int
    axes: tuple[Axis, ...]
    page_size: int
    dtype: str
    heads: HeadRange | None = None
    dim_multiple: int = 1
    pack: int = 1
    plane_sets: tuple[tuple[str, ...], ...] | None = None

    def __post_init__(self) -> None:
        names = set(self.axes)
        if len(names) != len(self.axes) or not names >= _ALWAYS or names - _ALWAYS - {"pack"} not in _HEADS_PLANES_DIMS:
            allowed = "; ".join(" and ".join(sorted(choice)) for choice in _HEADS_PLANES_DIMS)
            raise ValueError(f"KVLayout.axes: given {self.axes}, allowed page and slot once each, and one of: {allowed}")
        if "pack" in names and (self.axes[0] == "pack" or self.axes[self.axes.index("pack") - 1] not in _PACKABLE):
            raise ValueError(f"KVLayout.axes: given {self.axes}, pack must come right after one of {list(_PACKABLE)}")
        for field in ("page_size", "dim_multiple", "pack"):
            if getattr(self, field) < 1:
                raise ValueError(f"KVLayout.{field}: given {getattr(self, field)}, must be at least 1")
        if self.pack > 1 and "pack" not in names:
            raise ValueError(f"KVLayout.pack: given {self.pack}, but axes has no pack: {self.axes}")
        if self.packed == "slot" and self.page_size % self.pack:
            raise ValueError(f"KVLayout.page_size: given {self.page_size}, must be a multiple of pack={self.pack}")
        if self.dtype not in KV_DTYPES:
            raise ValueError(f"KVLayout.dtype: given {self.dtype!r}, allowed {sorted(KV_DTYPES)}")
        if self.plane_sets is not None and not self.fused:
            raise ValueError(f"KVLayout.plane_sets: given {self.plane_sets}, but axes {self.axes} fuse no planes")

    @property
    def fused(self) -> bool:
        """Whether one array holds several planes."""
        return bool(_FUSED & set(self.axes))

    @property
    def packed(self) -> Axis | None:
        """The axis that ``pack`` is the fast part of."""
        return self.axes[self.axes.index("pack") - 1] if "pack" in self.axes else None

    def heads_of(self, plane: KVPlane) -> HeadRange:
        """The heads of ``plane`` that are stored here. Raises ValueError if the plane does not have them."""
        heads = self.heads or HeadRange(0, plane.num_heads)
        if heads.stop > plane.num_heads:
            raise ValueError(f"KVLayout.heads: given {heads}, but plane {plane.name!r} has {plane.num_heads} heads")
        return heads

    def arrays(self, spec: KVSpec, group: KVGroup, num_pages: int) -> tuple[StoredArray, ...]:
        """The arrays that hold one layer of ``group``, in the order of ``plane_sets`` or of the group's planes.

        Raises ValueError if ``plane_sets`` are not the group's planes, or planes are to share an array that cannot.
        """
        return tuple(self._array(spec, group, planes, num_pages) for planes in self._sets(group))

    def _sets(self, group: KVGroup) -> tuple[tuple[int, ...], ...]:
        every = tuple(range(len(group.planes)))
        if not self.fused:
            return tuple((plane,) for plane in every)
        if self.plane_sets is None:
            return (every,)
        names = [plane.name for plane in group.planes]
        if sorted(name for names in self.plane_sets for name in names) != sorted(names):
            raise ValueError(f"KVLayout.plane_sets: given {self.plane_sets}, must name each plane of {names} once")
        return tuple(tuple(names.index(name) for name in names_of_set) for names_of_set in self.plane_sets)

    def _array(self, spec: KVSpec, group: KVGroup, indices: tuple[int, ...], num_pages: int) -> StoredArray:
        planes = [group.planes[i] for i in indices]
        side_by_side = "plane_dim" in self.axes
        if len({(p.num_heads, spec.dtype_of(p), 0 if side_by_side else p.head_dim) for p in planes}) != 1:
            raise ValueError(f"KVLayout {self.name!r} fuses planes that differ in heads, dim or dtype: {planes}")
        num_heads = len(self.heads_of(planes[0]))
        if num_heads > 1 and not {"head", "plane_head"} & set(self.axes):
            raise ValueError(f"KVLayout {self.name!r} has no axis for the {num_heads} heads of {planes}")
        dims = [_ceil(plane.head_dim, self.dim_multiple) for plane in planes]
        sizes: dict[Axis, int] = {
            "page": num_pages,
            "slot": self.page_size,
            "head": num_heads,
            "plane": len(planes),
            "plane_head": num_heads * len(planes),
            "plane_dim": sum(dims),
            "dim": dims[0],
        }
        if self.packed is not None:
            sizes[self.packed] = _ceil(sizes[self.packed], self.pack) // self.pack
            sizes["pack"] = self.pack
        first_dims = tuple(sum(dims[:i]) if side_by_side else 0 for i in range(len(planes)))
        return StoredArray(indices, tuple(sizes[axis] for axis in self.axes), spec.dtype_of(planes[0]), first_dims)


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


def _ceil(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
