"""Storms against a real run, and a table of what held.

    python -m benchmarks.chaos                      all storms, about 50 minutes
    python -m benchmarks.chaos --short              a small part of each kind, a few minutes
    python -m benchmarks.chaos --only pause-learner-35 --seed 3

Each row ends with the command that repeats it; the same seed gives the same sequence of disturbances. Exit code 1 where a
goal was missed. `--write` keeps the table in benchmarks/results/chaos.md, with the rows there of other storms.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields

from benchmarks.chaos import floods, host, kills, network
from benchmarks.chaos.deployment import Setup
from benchmarks.chaos.storm import Row, Storm, perform
from benchmarks.chaos.table import RESULTS, faults, line, page, slow

STORMS: list[Storm] = [*kills.STORMS, *network.STORMS, *floods.STORMS, *host.STORMS]


def run(storms: Sequence[Storm], *, seed: int, short: bool) -> Iterator[Row]:
    """Yield a row for each storm; in the short form those that may share a deployment do."""
    for group in _groups(storms, short=short):
        if reason := next((reason for storm in group if (reason := storm.needs())), ""):
            yield from (Row(storm=storm, seed=seed, skipped=reason) for storm in group)
            continue
        yield from perform(group, _union(group), seed=seed, short=short)


def _groups(storms: Sequence[Storm], *, short: bool) -> list[list[Storm]]:
    if not short:
        return [[storm] for storm in storms]
    skipped = [[storm] for storm in storms if storm.needs()]
    shared = [storm for storm in storms if not storm.needs()]
    groups = [[storm for storm in shared if storm.setup.keys == keys] for keys in (False, True)]
    return skipped + [group for group in groups if group]


def _union(storms: Sequence[Storm]) -> Setup:
    """Return the setup that has what each of the storms needs; actors and ranks of a shared one are the fewest."""
    if len(storms) == 1:
        return storms[0].setup
    switches = [field.name for field in fields(Setup) if field.name not in ("actors", "ranks")]
    return Setup(**{name: any(getattr(storm.setup, name) for storm in storms) for name in switches})


def main(argv: Sequence[str] | None = None) -> int:
    """Perform the storms asked for and print the table."""
    names = [storm.name for storm in STORMS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--short", action="store_true", help="a small part of each storm, in shared deployments")
    parser.add_argument("--write", action="store_true", help=f"keep the table in {RESULTS.name}")
    options = parser.parse_args(argv)
    if options.write and options.short:
        parser.error("--write keeps whole storms, and --short performs a part of each")
    chosen = [storm for storm in STORMS if (storm.name in options.only if options.only else storm.short or not options.short)]
    rows: list[Row] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave no process and no mount behind
    for row in run(chosen, seed=options.seed, short=options.short):
        rows.append(row)
        print(line(row), flush=True)
    words = sys.argv[1:] if argv is None else argv
    if options.write:
        command = shlex.join(["python", "-m", "benchmarks.chaos", *words])
        RESULTS.write_text(page(rows, command=command, names=names, before=RESULTS.read_text()))
    return 1 if any(faults(row) or slow(row) for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
