"""Planes of unlike dims and dtypes: fp8, int8 with its scales, latent and rope. From the spec over the frames to the other side's pages."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from pddbridge.fingerprint import fingerprint
from pddbridge.kv_block import split_block
from pddbridge.kv_convert import read_blocks, write_block
from pddbridge.kv_handshake import Handshake, HandshakeError, check_hello, decode_body, decode_message_header, hello
from pddbridge.kv_layout import KVLayout, head_major
from pddbridge.kv_layout_catalogue import tpu_mla, tpu_ragged_packed, vllm_mla, vllm_nhd, with_scales
from pddbridge.kv_spec import KV_DTYPES, HeadRange, KVGroup, KVPlane, KVSpec, LayerRange, TokenRange
from pddbridge.kv_transfer import Admission, Receiver, ReceiverState
from pddbridge.kv_wire import DTYPE_CODES, block_of, decode_frame_header, empty_values, encode_frame_header, frame_of, payload_view
from tests.support.kv import canary_pool, fill_slowly, random_planes, same_pools
from tests.support.movers import moved_by as moved_by
from tests.support.specs import llama_spec

INT8 = KVSpec.gqa_scaled(2, 3, 8, "int8", scales_per_head=2)
MLA = KVSpec.mla(3, 24, 8, "bfloat16")


@pytest.mark.parametrize(
    ("spec", "source", "target"),
    [
        (INT8, with_scales(vllm_nhd(8, "int8"), INT8), head_major(12, "int8")),
        (INT8, head_major(12, "int8"), with_scales(tpu_ragged_packed(16, "int8"), INT8)),
        (MLA, vllm_mla(8, "bfloat16"), tpu_mla(12, "bfloat16")),
        (MLA, tpu_mla(16, "bfloat16"), vllm_mla(1, "bfloat16")),
        (KVSpec.gqa(2, 3, 8, "float8_e4m3fn"), vllm_nhd(8, "float8_e4m3fn"), tpu_ragged_packed(12, "float8_e4m3fn")),
        (KVSpec.gqa(2, 3, 8, "float8_e5m2"), tpu_ragged_packed(8, "float8_e5m2"), head_major(1, "float8_e5m2")),
    ],
)
def test_a_whole_transfer_of_unlike_planes_is_bit_exact(spec: KVSpec, source: KVLayout, target: KVLayout) -> None:
    tokens, num_heads = TokenRange(5, 30), spec.groups[0].planes[0].num_heads
    planes = random_planes(spec, tokens.stop, 7)
    pages = np.random.default_rng(1).permutation(40).astype(np.int32)
    layers, heads = LayerRange(0, spec.num_layers), HeadRange(0, num_heads)
    a, b, expected = (canary_pool(layout, spec, 40) for layout in (source, target, target))
    fill_slowly(a, pages, planes, layers, TokenRange(0, tokens.stop), heads)
    fill_slowly(expected, pages[::-1], planes, layers, tokens, heads)

    receiver = Receiver(spec, 1, tokens)
    receiver.expect()
    payload = 0
    parts = [part for block in read_blocks(a, pages, tokens) for part in split_block(block, 500)]
    assert len(parts) > len(planes)
    for sequence, part in enumerate(parts):
        header = decode_frame_header(encode_frame_header(frame_of(spec, 1, 9, sequence, part)), spec)
        values = empty_values(header, spec)
        payload_view(values)[:] = payload_view(part.values)
        block = block_of(header, spec, values)
        assert receiver.begin(header) is Admission.PLACE
        write_block(b, pages[::-1], block)
        receiver.placed(header)
        payload += header.payload_bytes
    assert receiver.state is ReceiverState.COMPLETE
    assert payload == spec.bytes_per_token * len(tokens)
    assert same_pools(b, expected)


def test_bytes_per_token_counts_each_plane_in_its_dtype() -> None:
    assert INT8.bytes_per_token == 2 * 3 * 2 * (8 * 1 + 2 * 4)
    assert MLA.bytes_per_token == 3 * (24 + 8) * 2
    assert KVSpec.mla(61, 512, 64, "bfloat16").bytes_per_token == 70_272  # DeepSeek-V3


def test_every_dtype_has_a_code_and_no_two_share_one() -> None:
    assert set(DTYPE_CODES) == set(KV_DTYPES)
    assert len(set(DTYPE_CODES.values())) == len(DTYPE_CODES)
    assert {name: KV_DTYPES[name].itemsize for name in KV_DTYPES} == {
        "float32": 4,
        "bfloat16": 2,
        "float16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int8": 1,
    }


K = KVPlane("k", 3, 8)


@pytest.mark.parametrize(
    ("planes", "match"),
    [
        ((K,), "'k' is int8, so plane 'k_scale' must be there"),
        ((K, KVPlane("k_scale", 2, 1, "float32")), "must have the heads of 'k'"),
        ((K, KVPlane("k_scale", 3, 3, "float32")), "a dim that divides"),
        ((K, KVPlane("k_scale", 3, 1, "float8_e5m2")), "a dtype of"),
        ((K, KVPlane("k_scale", 3, 1)), "a dtype of"),
        ((K, K, KVPlane("k_scale", 3, 1, "float32")), "names must differ"),
    ],
)
def test_int8_without_fitting_scales_is_refused(planes: tuple[KVPlane, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        KVSpec((KVGroup(0, 1, planes),), "int8")


def test_what_is_no_plane_is_refused() -> None:
    for head_dim, num_heads in ((0, 1), (1, 0), (-2, 1)):
        with pytest.raises(ValueError, match="must be at least 1"):
            KVPlane("k", num_heads, head_dim)
    with pytest.raises(ValueError, match="'float64'"):
        KVPlane("k", 1, 1, "float64")
    with pytest.raises(ValueError, match="must be there"):
        KVSpec.gqa(1, 1, 8, "int8")


def test_a_plane_that_names_the_specs_own_dtype_changes_no_text() -> None:
    """Golden: what two installations compare. A plane's dtype appears only where it differs."""
    plain = KVSpec.gqa(1, 2, 4, "bfloat16")
    said = KVSpec((KVGroup(0, 1, tuple(replace(plane, dtype="bfloat16") for plane in plain.groups[0].planes)),), "bfloat16")
    text = (
        '{"dtype": "bfloat16", "groups": [{"first_layer": 0, "num_layers": 1, "planes": ['
        '{"head_dim": 4, "name": "k", "num_heads": 2}, {"head_dim": 4, "name": "v", "num_heads": 2}]}]}'
    )
    assert json.dumps(plain.facts(), sort_keys=True) == json.dumps(said.facts(), sort_keys=True) == text
    scaled = KVSpec.gqa_scaled(1, 2, 4, "int8").facts()
    assert json.loads(json.dumps(scaled))["groups"][0]["planes"][2:] == [
        {"name": "k_scale", "num_heads": 2, "head_dim": 1, "dtype": "float32"},
        {"name": "v_scale", "num_heads": 2, "head_dim": 1, "dtype": "float32"},
    ]


def test_scales_of_another_dtype_or_count_are_another_fingerprint_and_refused_at_the_handshake() -> None:
    model = llama_spec(num_layers=2)
    specs = [
        KVSpec.gqa_scaled(2, 3, 8, "int8"),
        KVSpec.gqa_scaled(2, 3, 8, "int8", "bfloat16"),
        KVSpec.gqa_scaled(2, 3, 8, "int8", scales_per_head=2),
        KVSpec.gqa_scaled(2, 3, 8, "float8_e4m3fn"),
        KVSpec.gqa(2, 3, 8, "float8_e4m3fn"),
        KVSpec.gqa(2, 3, 8, "float8_e5m2"),
        KVSpec.mla(2, 24, 8, "bfloat16"),
        KVSpec.mla(2, 8, 24, "bfloat16"),
    ]
    assert len({fingerprint(model, "ab", spec) for spec in specs}) == len(specs)
    mine = Handshake(1, "f", specs[0], 5, "receiver")
    for spec in specs[1:]:
        message = hello(Handshake(1, "f", spec, 6, "sender"), 5)
        _, size, crc = decode_message_header(message[:20], ("hello",))
        assert len(message) == 20 + size
        with pytest.raises(HandshakeError) as caught:
            check_hello(decode_body(message[20:], crc), mine)
        assert caught.value.field == "kv_spec"
