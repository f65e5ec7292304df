"""How much is checked and timed: all of it on a GPU, or little enough for a CPU, where the same code is tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

Rows = tuple[tuple[int, int], ...]  # (tokens in KV, new tokens) of each row


@dataclass(frozen=True)
class Sizes:
    """``batches``: of attention, by name · ``latent_batches``: of multi-head latent attention · ``moved_tokens``: of page moves ·
    ``copy_bytes``, ``matmul_side``, ``rounds``: of measurements · ``timed``: attention steps that are timed · ``timed_tokens``: of timed
    page moves · ``streams``: decode rows of an engine · ``prompt_tokens``: in KV before they decode · ``decode_steps`` · ``chunks``:
    (tokens in KV, new) of prefill steps · ``model``: of :data:`pddkernels.shapes.MODEL_SHAPES`, or "tiny" · ``handed_tokens``: of the
    prompt that is handed over · ``graphed``: models whose decode steps are timed with graphs and without, with how many of their layers
    (None: all) · ``graphed_streams``: of them.
    """

    batches: dict[str, Rows]
    latent_batches: dict[str, Rows]
    moved_tokens: int
    copy_bytes: int
    matmul_side: int
    rounds: int
    timed: dict[str, Rows]
    timed_tokens: int
    streams: tuple[int, ...]
    prompt_tokens: int
    decode_steps: int
    chunks: Rows
    model: str
    handed_tokens: int
    graphed: tuple[tuple[str, int | None], ...]
    graphed_streams: tuple[int, ...]


# Around page boundaries (16), tiles (64, 128), windows (128, 1,024, 4,096), and far enough for key ranges to be split over the device.
_DECODE: Final = tuple((context, 1) for context in (0, 1, 14, 15, 16, 63, 64, 126, 127, 128, 1022, 1023, 1024, 4094, 4095, 4096, 8000))
_EXTENDS: Final = ((5, 9), (15, 17), (0, 0), (4000, 33), (0, 2), (127, 4), (1023, 3), (4095, 16))

FULL: Final = Sizes(
    batches={
        "decode": _DECODE,
        "long decode": ((70_001, 1), (32_767, 1), (3, 1)),
        "extends": _EXTENDS,
        "chunk": ((0, 2048),),
        "chunk after context": ((8191, 513),),
        "mixed": ((100, 700), *_EXTENDS, *_DECODE, (5000, 130)),
    },
    latent_batches={"decode": _DECODE, "extends": _EXTENDS, "chunk": ((0, 300),), "long decode": ((70_001, 1), (3, 1))},
    moved_tokens=5000,
    copy_bytes=4 << 30,
    matmul_side=8192,
    rounds=10,
    timed={
        "decode 64 rows at 4,096": ((4095, 1),) * 64,
        "decode 64 rows at 32,768": ((32_767, 1),) * 64,
        "decode 1 row at 32,768": ((32_767, 1),),
        "chunk of 2,048": ((0, 2048),),
        "chunk of 2,048 after 8,192": ((8192, 2048),),
        "chunk of 512 beside 32 decode rows at 4,096": ((0, 512), *((4095, 1),) * 32),
    },
    timed_tokens=4096,
    streams=(1, 8, 64),
    prompt_tokens=1000,
    decode_steps=32,
    chunks=((0, 2048), (8192, 2048)),
    model="llama-3.1-8b",
    handed_tokens=300,
    graphed=(("smollm2-135m", None), ("llama-3.1-8b", 8)),
    graphed_streams=(1, 8, 16, 64),
)

SMALL: Final = Sizes(
    batches={"decode": ((0, 1), (16, 1), (140, 1)), "mixed": ((5, 40), (0, 0), (17, 1), (3, 4))},
    latent_batches={"mixed": ((16, 1), (3, 4), (0, 0))},
    moved_tokens=50,
    copy_bytes=1 << 20,
    matmul_side=64,
    rounds=2,
    timed={"decode": ((63, 1), (40, 1)), "chunk": ((0, 48),), "chunk after context": ((32, 32),)},
    timed_tokens=40,
    streams=(1, 2),
    prompt_tokens=20,
    decode_steps=3,
    chunks=((0, 32), (32, 32)),
    model="tiny",
    handed_tokens=37,
    graphed=(("tiny", 2),),
    graphed_streams=(1, 3),
)

SIZES: Final[dict[str, Sizes]] = {"full": FULL, "small": SMALL}
