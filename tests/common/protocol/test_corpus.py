"""Tests that replay the fuzzer's corpus without the fuzzer: every input is a message or a refusal, within its memory."""

import tracemalloc

import pytest

from benchmarks.fuzz import CORPUS, allowed, joined, parts
from common.errors import ProtocolError
from common.protocol.codec import decode

pytestmark = pytest.mark.wire

INPUTS = sorted(CORPUS.iterdir())


def decoded(frames):
    """Return whether the parts are a message; any exception but the protocol's own fails the test."""
    try:
        decode(frames)
    except ProtocolError:
        return False
    return True


def test_every_input_of_the_corpus_is_a_message_or_refused():
    """Among them are messages and refusals of many kinds: a corpus that never gets past the header would find nothing."""
    outcomes = [decoded(parts(path.read_bytes())) for path in INPUTS]
    assert {True, False} == set(outcomes)


def test_no_input_of_the_corpus_takes_more_memory_than_the_limit():
    """Four times the input and the fixed floor, as docs/protocol.md promises."""
    for path in INPUTS:
        frames = parts(path.read_bytes())
        decoded(frames)
        tracemalloc.start()
        try:
            decoded(frames)
            assert tracemalloc.get_traced_memory()[1] <= allowed(frames), path.name
        finally:
            tracemalloc.stop()


def test_nested_lists_that_claim_many_entries_take_no_more_memory_than_the_limit():
    """The unpacker allocates for the entries that a list claims before it reads them."""
    frames = [b"\xdc\x04\x00" * 256]
    tracemalloc.start()
    try:
        assert not decoded(frames)
        assert tracemalloc.get_traced_memory()[1] <= allowed(frames)
    finally:
        tracemalloc.stop()


def test_the_corpus_stays_small():
    """It is kept in the tree; `python -m benchmarks.fuzz --keep` minimises it."""
    assert sum(path.stat().st_size for path in INPUTS) < 300_000


@pytest.mark.parametrize("frames", [[], [b""], [b"a", b""], [b"abc", b"x" * 70, b"\0\0"]])
def test_parts_are_found_again(frames):
    """The fuzzer's form of a message holds any list of parts."""
    assert parts(joined(frames)) == frames
