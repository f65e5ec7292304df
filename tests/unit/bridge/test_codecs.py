"""Codecs: bit-exact or within the stated error, of the stated sizes, and every wrong payload refused before it allocates."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pddbridge.codecs import CODEC_NAMES, CODECS, CodecError, CodecId, encode_frame
from pddbridge.codecs_planes import ZSTD_PLANES
from pddbridge.codecs_scaled import BLOCK_DIMS, FP8, INT8, ScaledCodec
from pddbridge.codecs_speed import measure_speed
from pddbridge.kv_spec import KV_DTYPES

FLOATS = {name: KV_DTYPES[name] for name in ("float32", "bfloat16", "float16")}
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 3), st.sampled_from([1, 2, 31, 32, 33, 64, 80]))


def kv_like(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Normals whose size differs by channel, as real K has it."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[-1]))).astype(KV_DTYPES[dtype])


def random_bits(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Any bit pattern: NaNs with payloads, infinities, subnormals, both zeros."""
    size = int(np.prod(shape)) * KV_DTYPES[dtype].itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8).view(KV_DTYPES[dtype]).reshape(shape)


def decoded(codec_id: CodecId, payload: bytes | memoryview, like: np.ndarray) -> np.ndarray:
    values = np.empty_like(like)
    CODECS[codec_id].decode_into(payload, values)
    return values


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_ids_are_the_wire_s_and_every_codec_has_a_name() -> None:
    assert {codec_id.name: int(codec_id) for codec_id in CodecId} == {"RAW": 0, "ZSTD_PLANES": 1, "INT8_BLOCKS": 2, "FP8_BLOCKS": 3}
    assert set(CODECS) == set(CodecId) == set(CODEC_NAMES.values())
    assert [codec.lossless for codec in CODECS.values()] == [True, True, False, False]


@given(SHAPES, st.sampled_from(sorted(KV_DTYPES)), st.integers(0, 1 << 32), st.sampled_from(["bits", "kv", "zeros", "run"]))
@settings(max_examples=150, deadline=None)
def test_lossless_codecs_return_every_bit(shape: tuple[int, ...], dtype: str, seed: int, kind: str) -> None:
    values = random_bits(shape, dtype, seed)
    if kind == "kv":
        values = kv_like(shape, dtype, seed)
    elif kind == "zeros":
        values = np.zeros(shape, KV_DTYPES[dtype])
    elif kind == "run":
        values = np.full(shape, values.reshape(-1)[0])
    for wanted in (CodecId.RAW, CodecId.ZSTD_PLANES):
        codec_id, payload = encode_frame(CODECS[wanted], values)
        assert codec_id in (wanted, CodecId.RAW)
        assert len(payload) in CODECS[codec_id].size_bounds(values.shape, values.dtype)
        assert len(payload) < values.nbytes or codec_id is CodecId.RAW
        assert same_bits(decoded(codec_id, payload, values), values)


def test_every_bfloat16_returns() -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(4, 64, 4, 64)
    codec_id, payload = encode_frame(ZSTD_PLANES, values)
    assert codec_id is CodecId.ZSTD_PLANES
    assert same_bits(decoded(codec_id, payload, values), values)


def test_planes_save_what_they_are_for_and_noise_goes_raw() -> None:
    values = kv_like((4, 200, 3, 64), "bfloat16")
    payload = ZSTD_PLANES.encode(values)
    assert payload is not None
    assert values.nbytes / len(payload) > 1.35
    assert values.nbytes / len(payload) > 1.1 * (values.nbytes / len(zstandard.compress(values.tobytes(), 1))), "better than unsplit"
    noise = random_bits((4, 200, 3, 64), "bfloat16", 1)
    assert encode_frame(ZSTD_PLANES, noise)[0] is CodecId.RAW


@pytest.mark.parametrize("codec", [INT8, FP8], ids=["int8", "fp8"])
@given(shape=SHAPES, dtype=st.sampled_from(sorted(FLOATS)), seed=st.integers(0, 1 << 32), magnitude=st.integers(-150, 130))
@settings(max_examples=120, deadline=None)
def test_lossy_codecs_keep_their_error_bound(codec: ScaledCodec, shape: tuple[int, ...], dtype: str, seed: int, magnitude: int) -> None:
    wide = np.random.default_rng(seed).standard_normal(shape) * 2.0**magnitude
    limit = float(ml_dtypes.finfo(FLOATS[dtype]).max)
    values = np.clip(wide, -limit, limit).astype(FLOATS[dtype])
    values[..., 0] = 0
    codec_id, payload = encode_frame(codec, values)
    if codec_id is CodecId.RAW:
        assert codec.size_bounds(values.shape, values.dtype).smallest >= values.nbytes
        return
    assert len(payload) == codec.size_bounds(values.shape, values.dtype).smallest < values.nbytes
    got = decoded(codec_id, payload, values).astype(np.float64)
    exact = values.astype(np.float64)
    for start in range(0, shape[-1], BLOCK_DIMS):
        x, y = exact[..., start : start + BLOCK_DIMS], got[..., start : start + BLOCK_DIMS]
        largest = np.abs(x).max(axis=-1, keepdims=True)
        # The scale, rounded up to bfloat16 (8 significant bits; 2^-133 is its smallest step).
        scale = largest / codec.largest_code * (1 + 2.0**-7) + 2.0**-133
        bound = scale / 2 if codec is INT8 else np.maximum(np.abs(x) / 16, scale / 1024)
        rounding = np.abs(y) * float(ml_dtypes.finfo(FLOATS[dtype]).eps) / 2 + float(ml_dtypes.finfo(FLOATS[dtype]).smallest_subnormal)
        assert (np.abs(x - y) <= bound * (1 + 1e-6) + rounding).all()
    assert (got[..., 0] == 0).all()


@pytest.mark.parametrize("codec", [INT8, FP8], ids=["int8", "fp8"])
def test_lossy_codecs_have_a_scale_per_head_and_block(codec: ScaledCodec) -> None:
    """A huge head, token or block leaves its neighbours' precision alone."""
    values = kv_like((2, 5, 3, 64), "bfloat16")
    plain = decoded(codec.codec_id, codec.encode(values) or b"", values)
    loud = values.copy()
    loud[1, 2, 1, :BLOCK_DIMS] *= 1000
    got = decoded(codec.codec_id, codec.encode(loud) or b"", values)
    got[1, 2, 1, :BLOCK_DIMS] = plain[1, 2, 1, :BLOCK_DIMS]
    assert same_bits(got, plain)


@pytest.mark.parametrize("codec", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_has_no_scale_goes_raw(codec: ScaledCodec, odd: float) -> None:
    values = kv_like((2, 5, 3, 64), "float32")
    values[1, 4, 2, 63] = odd
    codec_id, payload = encode_frame(codec, values)
    assert codec_id is CodecId.RAW
    assert bytes(payload) == values.tobytes()
    assert encode_frame(codec, np.zeros((1, 4, 2, 8), np.int8))[0] is CodecId.RAW
    with pytest.raises(ValueError, match="allowed"):
        codec.encode(np.zeros((1, 4, 2, 8), np.int8))


def test_the_format_is_what_the_documentation_says() -> None:
    """Built by hand, decoded by us: nothing here calls an encoder."""
    values = np.empty((1, 1, 2, 3), np.float32)
    scales = np.array([0.5, 2.0], ml_dtypes.bfloat16).tobytes()
    INT8.decode_into(scales + np.array([1, -127, 0, 3, 4, 5], np.int8).tobytes(), values)
    assert values.tolist() == [[[[0.5, -63.5, 0.0], [6.0, 8.0, 10.0]]]]
    # e4m3: 0x38 is 1, 0x7e is 448, 0xb8 is -1, 0x01 is 2^-9.
    FP8.decode_into(scales + bytes([0x38, 0x7E, 0xB8, 0x01, 0, 0x38]), values)
    assert values.tolist() == [[[[0.5, 224.0, -0.5], [2**-8, 0.0, 2.0]]]]
    # bfloat16 1.0 is 3f80 and -2.0 is c000: exponents 7f and 80; mantissa and sign 00 and 01.
    halves = np.empty((1, 100, 2, 12), ml_dtypes.bfloat16)
    high, low = zstandard.compress(bytes([0x7F, 0x80] * 1200), 1), bytes([0x00, 0x01] * 1200)
    ZSTD_PLANES.decode_into(b"\0" + (2400).to_bytes(4, "little") + low + b"\1" + len(high).to_bytes(4, "little") + high, halves)
    assert (halves.reshape(-1)[::2] == 1.0).all()
    assert (halves.reshape(-1)[1::2] == -2.0).all()


def plane(mode: int, data: bytes) -> bytes:
    return bytes([mode]) + len(data).to_bytes(4, "little") + data


CLAIMS_A_TERABYTE = bytes.fromhex("28b52ffd e0") + (1 << 40).to_bytes(8, "little") + bytes.fromhex("01 00 00")
VALUES = np.zeros((1, 20, 2, 32), ml_dtypes.bfloat16)  # planes of 1,280 bytes
GOOD = zstandard.compress(bytes(1280), 1)
STORED = plane(0, bytes(1280))
BAD_PLANES = {
    "empty": b"",
    "ends in a header": STORED + b"\1\0",
    "claims more than there is": STORED + b"\1" + (500).to_bytes(4, "little") + bytes(20),
    "claims 4 GiB": STORED + b"\1" + b"\xff\xff\xff\xff" + bytes(20),
    "unknown mode": STORED + plane(2, GOOD),
    "not zstd": STORED + plane(1, b"hello, world"),
    "a plane too short": STORED + plane(1, zstandard.compress(bytes(1279), 1)),
    "a plane too long": STORED + plane(1, zstandard.compress(bytes(1281), 1)),
    "a stored plane too short": plane(0, bytes(1279)) + plane(1, GOOD),
    "no size stated": STORED + plane(1, zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(1280))),
    "a terabyte stated": STORED + plane(1, CLAIMS_A_TERABYTE),
    "bytes after the frame": STORED + plane(1, GOOD + b"more"),
    "a frame cut short": STORED + plane(1, GOOD[:-1]),
    "bytes after the planes": STORED + plane(1, GOOD) + b"x",
    "one plane": STORED,
    "as long as raw": bytes(2560),
}


@pytest.mark.parametrize("name", BAD_PLANES)
def test_wrong_planes_are_refused(name: str) -> None:
    ZSTD_PLANES.decode_into(STORED + plane(1, GOOD), np.empty_like(VALUES))
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            ZSTD_PLANES.decode_into(BAD_PLANES[name], np.empty_like(VALUES))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", [INT8, FP8], ids=["int8", "fp8"])
def test_wrong_codes_and_scales_are_refused(codec: ScaledCodec) -> None:
    values = kv_like((1, 4, 2, 64), "bfloat16")
    good = bytearray(codec.encode(values) or b"")
    never = 0x80 if codec is INT8 else 0x7F
    for at, bad in ((1, b"\x7f\xc0"), (0, b"\x80\x7f"), (0, b"\x80\xbf"), (len(good) - 1, bytes([never]))):
        wrong = bytes(good[:at]) + bad + bytes(good[at + len(bad) :])
        if at == 1:
            wrong = b"\xc0\x7f" + bytes(good[2:])  # NaN, little endian
        with pytest.raises(CodecError):
            codec.decode_into(wrong, np.empty_like(values))
    for size in (0, 1, len(good) - 1, len(good) + 1):
        with pytest.raises(CodecError):
            codec.decode_into(bytes(size), np.empty_like(values))
    with pytest.raises(CodecError):
        codec.decode_into(bytes(len(good)), np.empty(values.shape, np.int8))


@given(st.sampled_from(sorted(CodecId)), st.data())
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_decoded_or_refused(codec_id: CodecId, data: st.DataObject) -> None:
    """Whole rubbish, and good payloads with a few bytes changed, cut or added."""
    values = kv_like((1, 20, 2, 32), "bfloat16", 3)
    payload = bytearray(CODECS[codec_id].encode(values) or b"")
    for _ in range(data.draw(st.integers(1, 4))):
        match data.draw(st.sampled_from(["change", "cut", "add", "rubbish"])):
            case "change" if payload:
                payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
            case "cut":
                del payload[data.draw(st.integers(0, len(payload))) :]
            case "add":
                payload += data.draw(st.binary(max_size=20))
            case "rubbish":
                payload[:40] = data.draw(st.binary(min_size=40, max_size=40))
    try:
        CODECS[codec_id].decode_into(payload, np.empty_like(values))
    except CodecError:
        return
    assert len(payload) in CODECS[codec_id].size_bounds(values.shape, values.dtype)


def test_speed_is_measured_on_the_given_values() -> None:
    ticks = iter(range(1000))
    values = kv_like((2, 50, 3, 64), "bfloat16")
    speed = measure_speed(INT8, values, clock=lambda: float(next(ticks)))
    assert speed.codec_id is CodecId.INT8_BLOCKS
    assert not speed.lossless
    assert speed.ratio == pytest.approx(2 * 64 / (64 + 4))
    assert speed.encode_bytes_s == speed.decode_bytes_s == values.nbytes
    declined = measure_speed(ZSTD_PLANES, random_bits((2, 50, 3, 64), "bfloat16", 3))
    assert declined.ratio == 1.0
