"""Load that a learner's I/O threads carry: bytes, messages and workers.

Examples, all of `python -m benchmarks.transport`, with env steps/s of large messages from two actors where none is named:

    --keys                       the same without and with encryption, in pairs
    --actors 1 16 64 256 1000    CPU time of one small message, by the number of workers
    --actors 1000 --restart      seconds until all workers are welcomed by a restarted learner

Each measurement is repeated `--repeats` times; those that are compared take turns.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from benchmarks.transport import bandwidth, messages, restart


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport", description=__doc__, formatter_class=raw)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--actors", type=int, nargs="+", default=[2], help="several numbers: small messages at a fixed rate")
    parser.add_argument("--rate", type=float, default=300.0, help="small messages/s of all actors together")
    parser.add_argument("--length", type=int, default=128, help="T of large messages")
    parser.add_argument("--num-envs", type=int, default=16, help="B of large messages")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keys", action="store_true", help="pairs of runs with large messages, plain and with keys")
    parser.add_argument("--restart", action="store_true", help="kill the learner, start it again, and wait for all actors")
    asked = parser.parse_args(argv)
    print(f"load before: {os.getloadavg()[0]:.1f}", flush=True)
    if asked.restart:
        for workers in asked.actors * asked.repeats:
            print(restart.report(restart.measure(workers, rate=asked.rate)), flush=True)
    elif len(asked.actors) > 1:
        turns = asked.actors * asked.repeats
        costs = [messages.measure(workers, rate=asked.rate, seconds=asked.seconds) for workers in turns]
        print(messages.table(costs, messages.crowd_of(1, asked.rate)), flush=True)
    else:
        _bandwidth(asked)
    return 0


def _bandwidth(asked: argparse.Namespace) -> None:
    load = bandwidth.Load(actors=asked.actors[0], length=asked.length, num_envs=asked.num_envs)
    if asked.keys:
        compared = bandwidth.compare(load, seconds=asked.seconds, pairs=asked.repeats)
        print(bandwidth.report_pairs(load, compared), flush=True)
        return
    for _ in range(asked.repeats):
        print(bandwidth.report(load, bandwidth.benchmark(load, seconds=asked.seconds)), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
