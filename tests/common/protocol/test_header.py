"""Frame 0 from bytes nobody vouches for: what is taken, what is refused, and what either may cost."""

from __future__ import annotations

import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DecodeError, InternalError
from common.protocol import limits
from common.protocol.header import check_structure, pack, unpack

pytestmark = pytest.mark.wire

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=40), inner, max_size=5),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=40), values, max_size=5))
def test_what_msgpack_writes_is_read_back(fields: dict[str, object]) -> None:
    """Every kind and size of value that another msgpack library may send."""
    assert unpack(pack(fields)) == fields


@given(st.lists(st.integers(0, 9), min_size=16, max_size=300), st.text(min_size=32, max_size=75), st.integers(16, 300))
def test_long_forms_are_measured_right(numbers: list[int], text: str, count: int) -> None:
    """The forms with a length field of one, two and four bytes."""
    fields = {text: [numbers, {str(i): i for i in range(count)}, text.encode() * 100]}
    assert unpack(msgpack.packb(fields)) == fields


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_a_truncated_header_is_refused(cut: int) -> None:
    """A connection that broke inside a frame would be ZeroMQ's to notice; this is for senders that lie about lengths."""
    data = pack({"run": "r", "numbers": [1.5, 70_000], "text": "t" * 400})
    with pytest.raises(DecodeError, match=r"too early|bytes of the header"):
        unpack(data[:-cut])


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "ends too early"),
        (b"\x80\x00", "bytes of the header: found 2, wanted 1"),
        (b"\x93", "ends too early"),
        (b"\xda\x00", "ends too early"),
        (b"\x93\x01\x02\x03", "header: found list, wanted a map"),
        (b"\x07", "header: found int, wanted a map"),
        (b"\xc1", "header: found type byte 0xc1, wanted maps, lists"),
        (b"\x81\xa1t\xd6\xff\x00\x00\x00\x00", "found type byte 0xd6"),
        (b"\x81\xa1t\xc7\x00\x01", "found type byte 0xc7"),
        (b"\x81\x01\x02", "not msgpack: ValueError"),
        (b"\x81\x90\x02", "not msgpack"),
        (b"\x81\xa1t\xa1\xff", "not msgpack: UnicodeDecodeError"),
        (b"\x00" * (limits.HEADER_BYTES + 1), "bytes of the header: found 65537, wanted at most 65536"),
        (b"\x91" * 300, "found 257 values in 256 maps and lists|found 258 values in 257 maps"),
        (b"\xdc\x04\x00" + b"\x01" * 1024, "found 1025 values in 1 maps and lists"),
        (b"\xdb\x00\x00\x80\x01" + b"x" * 32769, "length in the header: found 32769, wanted at most 32768"),
    ],
)
def test_what_is_no_header_is_refused_with_a_sentence(data: bytes, sentence: str) -> None:
    """Each way to be wrong has its own words in the learner's log."""
    with pytest.raises(DecodeError, match=sentence):
        unpack(data)


def test_a_header_at_the_limits_is_taken() -> None:
    """The limits are the last that works, not the first that does not."""
    flat = {"x": [1] * (limits.HEADER_VALUES - 3)}
    deep: object = []
    for _ in range(limits.HEADER_CONTAINERS - 2):
        deep = [deep]
    for fields in (flat, {"x": deep}, {"x": "x" * limits.STRING_BYTES}):
        assert unpack(pack(fields)) == fields


@pytest.mark.parametrize("value", ["x" * (limits.STRING_BYTES + 1), 2**64, object(), "\ud800", [[]] * limits.HEADER_CONTAINERS])
def test_a_header_that_nobody_would_take_is_not_packed(value: object) -> None:
    """Our own bug, found where it is made."""
    with pytest.raises(InternalError, match="header cannot be sent"):
        pack({"x": value})


def test_a_header_too_long_in_sum_is_not_packed() -> None:
    """Every string within its limit, all together over the header's."""
    with pytest.raises(InternalError, match=f"at most {limits.HEADER_BYTES}"):
        pack({str(i): "x" * 30_000 for i in range(3)})


def fill(count: int, unit: bytes) -> bytes:
    """A map with one list of `count` times `unit`."""
    return b"\x81\xa1x\xdd" + count.to_bytes(4, "big") + unit * count


def peak_bytes(data: bytes) -> int:
    """The most that is held at once while `data` is unpacked, successfully or not."""
    tracemalloc.start()
    try:
        unpack(data)
    except DecodeError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize(
    "bomb",
    [
        pytest.param(fill(60_000, b"\x80"), id="60,000 empty maps"),
        pytest.param(fill(60_000, b"\x90"), id="60,000 empty lists"),
        pytest.param(fill(60_000, b"\xa0"), id="60,000 empty strings"),
        pytest.param(fill(7_000, b"\xcb" + b"\x11" * 8), id="7,000 floats"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="a list that says it has 4 G entries"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="a map that says it has 4 G entries"),
        pytest.param(b"\xdb\xff\xff\xff\xff", id="a string that says it has 4 GB"),
        pytest.param(b"\x91" * 65_000, id="65,000 lists inside one another"),
        pytest.param(b"\x81\xa0" * 32_000, id="32,000 maps inside one another"),
        pytest.param(b"\xa1" * 100_000_000, id="a header of 100 MB"),
    ],
)
def test_a_bomb_is_refused_before_it_is_unpacked(bomb: bytes) -> None:
    """One byte of msgpack can become 73 of Python, or announce 4 GB: none of it is ever built."""
    with pytest.raises(DecodeError):
        unpack(bomb)
    assert peak_bytes(bomb) < 4096 + min(len(bomb), limits.HEADER_BYTES)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(fill(254, b"\x80"), id="empty maps"),
        pytest.param(fill(254, b"\x81\xa1k\xa2xy"), id="maps with an entry"),
        pytest.param(fill(254, b"\x91\xa2xy"), id="lists with an entry"),
        pytest.param(fill(1_000, b"\xa2xy"), id="short strings"),
        pytest.param(fill(1_000, b"\xc4\x02xy"), id="short bytes"),
        pytest.param(fill(1_000, b"\xcf" + b"\x11" * 8), id="long integers"),
        pytest.param(fill(1, b"\xda\x7f\xf0" + b"a" * 0x7FEC + "\U0001f426".encode()), id="a string, its last letter wide"),
        pytest.param(fill(2, b"\xda\x7f\xe0" + b"\x01" * 0x7FDC + "\U0001f426".encode()), id="two of them"),
    ],
)
def test_the_worst_that_the_limits_let_through_stays_within_the_law(data: bytes) -> None:
    """Four times the input plus the fixed floor, for the densest headers there are."""
    check_structure(data)
    assert peak_bytes(data) <= 4 * len(data) + limits.DECODE_FLOOR_BYTES
