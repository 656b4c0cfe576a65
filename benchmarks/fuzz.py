"""Coverage-guided fuzzing of the decoder: each of one million inputs must decode to a message or raise a `ProtocolError`.

    python -m benchmarks.fuzz --inputs 1000000

An input is a message of several parts in one string of bytes: each part is its length (2 bytes, little-endian) and its
bytes. The corpus in tests/common/protocol/corpus is where fuzzing starts; `--keep` adds what covered more code, minimised.
Without atheris an ordinary test decodes every file of the corpus.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

CORPUS = Path(__file__).parents[1] / "tests" / "common" / "protocol" / "corpus"
LENGTH = 2  # bytes of the length before each part
LARGEST = 4096  # bytes of an input: more would slow the search without new branches
MEASURED = 64  # of so many inputs the memory of one is measured


def parts(data: bytes) -> list[bytes]:
    """Return the parts of a fuzzed message; the last part may be shorter than its length field."""
    found = []
    while len(data) >= LENGTH:
        size = int.from_bytes(data[:LENGTH], "little")
        found.append(data[LENGTH : LENGTH + size])
        data = data[LENGTH + size :]
    return found


def joined(frames: Sequence[bytes | memoryview]) -> bytes:
    """Return the bytes that `parts` splits into these parts."""
    return b"".join(len(frame := bytes(part)).to_bytes(LENGTH, "little") + frame for part in frames)


def allowed(frames: Sequence[bytes]) -> int:
    """Return the most bytes that decoding these parts may allocate."""
    from common.protocol.limits import DECODE_FLOOR_BYTES  # noqa: PLC0415

    return 4 * sum(map(len, frames)) + DECODE_FLOOR_BYTES


def _child(arguments: Sequence[str]) -> None:
    """Fuzz until libFuzzer has used all its inputs; libFuzzer then ends the process."""
    import atheris  # noqa: PLC0415

    with atheris.instrument_imports(include=["common.protocol"]):
        from common.errors import ProtocolError  # noqa: PLC0415
        from common.protocol.codec import decode  # noqa: PLC0415
    seen = 0

    def one_input(data: bytes) -> None:
        nonlocal seen
        seen += 1
        frames = parts(data)
        measured = seen % MEASURED == 0
        if measured:
            tracemalloc.start()
        try:
            decode(frames)
        except ProtocolError:
            pass
        finally:
            if measured:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
        if measured and peak > allowed(frames):
            raise MemoryError(f"{peak} bytes for {len(data)} of input, wanted at most {allowed(frames)}")

    atheris.Setup([sys.argv[0], *arguments], one_input)
    atheris.Fuzz()


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz in a process of its own, print how many inputs passed, and save the corpus if `--keep` is given."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["--child"]:
        _child(words[1:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="add to the corpus in the tree, and minimise it")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        fresh, crashes = Path(folder, "corpus"), Path(folder, "crashes")
        fresh.mkdir()
        crashes.mkdir()
        limits = [f"-runs={options.inputs}", f"-seed={options.seed}", f"-max_len={LARGEST}", "-rss_limit_mb=1024", "-timeout=10"]
        code, said = _fuzz([*limits, f"-artifact_prefix={crashes}/", str(fresh), str(CORPUS)])
        done = re.findall(r"Done (\d+) runs in (\d+) second", said)
        if code or not done:
            print(said[-4000:])
            for crash in crashes.iterdir():
                kept = Path(crash.name)
                shutil.copy(crash, kept)
                print(f"crash: {kept} (parts: {parts(crash.read_bytes())!r:.500})")
            return 1
        coverage = re.findall(r"cov: (\d+)", said)[-1]
        runs, seconds = map(int, done[0])
        print(f"{runs:,} inputs in {seconds} s: 0 crashes; {coverage} branches covered, {len(list(fresh.iterdir()))} new inputs")
        if options.keep:
            _keep(fresh)
    return 0


def minimal(inputs: Iterable[bytes]) -> list[bytes]:
    """Return inputs, the small ones first, that together take every branch of the decoder that all of them take."""
    taken: set[tuple[str, int, int]] = set()
    kept = []
    for data in sorted(set(inputs), key=lambda data: (len(data), data)):
        branches = _branches(data)
        if branches - taken:
            taken |= branches
            kept.append(data)
    return kept


def _branches(data: bytes) -> set[tuple[str, int, int]]:
    """Return the pairs of lines of the wire that decoding `data` runs one after the other."""
    from common.errors import ProtocolError  # noqa: PLC0415
    from common.protocol.codec import decode  # noqa: PLC0415

    found: set[tuple[str, int, int]] = set()
    last: dict[int, int] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        name = frame.f_code.co_filename
        if "common/protocol" not in name:
            return None
        if event == "line":
            found.add((name, last.get(id(frame), 0), frame.f_lineno))
            last[id(frame)] = frame.f_lineno
        return trace

    sys.settrace(trace)
    try:
        with contextlib.suppress(ProtocolError):
            decode(parts(data))
    finally:
        sys.settrace(None)
    return found


def _keep(fresh: Path) -> None:
    """Save the inputs that cover everything that the old and the new corpus cover."""
    inputs = {path: path.read_bytes() for folder in (CORPUS, fresh) for path in folder.iterdir()}
    kept = minimal(inputs.values())
    for path in CORPUS.iterdir():
        path.unlink()
    for data in kept:
        (CORPUS / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    print(f"corpus: {len(kept)} of {len(inputs)} inputs, {sum(map(len, kept)):,} bytes in {CORPUS}")


def _fuzz(arguments: Sequence[str]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fuzz", "--child", *arguments], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    raise SystemExit(main())
