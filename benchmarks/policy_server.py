"""Acting at a policy server against acting on the actors, with the ResNet of IMPALA: env steps trained per second, in turns.

    python -m benchmarks.policy_server --repeats 3 --out benchmarks/results

All runs have one learner and the same environments on the same cores; the processes that step and act differ. Forward passes of
this network take longer than steps of the emulator, which is what policy servers are for.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.learning import machine
from benchmarks.pipeline import running
from benchmarks.throughput import NO_EVALUATOR
from common.units import Seconds

PRESET = "pong-impala"
WARM_UP = 1_024  # env steps before a run is watched
OVERRIDES = (
    *("env.height=84", "env.width=84", "env.crop=[0,0]", "env.num_envs=16", "rollout.length=16", "learner.batch=1"),
    *("model.conv=impala", NO_EVALUATOR),
)
WAYS = {
    "two actors": ("actor.count=2", "env.num_envs=8"),
    "one policy server, two env workers": ("actor.count=1", "policy_server.workers=2"),
    "two policy servers, an env worker each": ("actor.count=2", "env.num_envs=8", "policy_server.workers=1"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all ways in turns, print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run, after its first updates")
    parser.add_argument("--out", type=Path, help="folder for policy_server.md, such as benchmarks/results")
    options = parser.parse_args(argv)
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.repeats):
        for way in WAYS:
            rates[way].append(measured(way, seconds=options.seconds))
            print(f"  {way}: {rates[way][-1]:,.0f} env steps/s", flush=True)
    print(text := report(rates))
    if options.out:
        (options.out / "policy_server.md").write_text(text)


def measured(way: str, *, seconds: Seconds) -> float:
    """Return the env steps per second trained by a run of this way."""
    with running(PRESET, (*OVERRIDES, *WAYS[way])) as run:
        run.wait_until_trained(WARM_UP)
        return run.watch(seconds).trained_per_second


def report(rates: Mapping[str, Sequence[float]]) -> str:
    """Return the page: medians, and each as a multiple of the first way's."""
    base = median(next(iter(rates.values())))
    lines = [
        "# Acting at a policy server and on the actors",
        "",
        "    python -m benchmarks.policy_server",
        "",
        f"`{PRESET}` with the ResNet of IMPALA on 84x84 images, 16 environments in all, in turns. {machine()}.",
        "",
        "| acting | env steps/s trained, each run | median | of two actors |",
        "|---|---|---|---|",
    ]
    for way, each in rates.items():
        lines.append(
            f"| {way} | {', '.join(f'{rate:,.0f}' for rate in each)} | {median(each):,.0f} | {median(each) / base:.2f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
