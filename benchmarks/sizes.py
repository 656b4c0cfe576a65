"""Disk and memory of the services: the packages of each image, and the processes of a run of Pong with a policy server.

    python -m benchmarks.sizes

The packages are those that the Dockerfile installs, with all that they need, by the files in this environment; an image has its
base besides. A CPU build of torch is needed for the figures of `actor` and `learner`. Memory is resident memory, libraries
included, after `--seconds` of training, first with an actor and then with a policy server and its env workers.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.pipeline import running
from benchmarks.throughput import NO_EVALUATOR
from common.units import MIB

ROOT = Path(__file__).parents[1]
RUNS = (("actor.count=1",), ("actor.count=1", "policy_server.workers=2"))
STAGE = re.compile(r"^FROM \S+ AS (\S+)-packages\n(?:ARG .*\n)*RUN python requirements.py (.*) > ", re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="of training, for each of two runs; 0: packages alone")
    seconds = parser.parse_args(argv).seconds
    print(report_packages({image: packages(requirements(left_out)) for image, left_out in images().items()}), flush=True)
    for words in RUNS if seconds else ():
        with running("pong", (*words, NO_EVALUATOR)) as run:
            run.watch(seconds)
            print(report_memory(run.resident_bytes()), flush=True)
    return 0


def images() -> dict[str, list[str]]:
    """Return the dependencies that the Dockerfile leaves out of each image for CPUs; a GPU's has another torch."""
    found = STAGE.findall((ROOT / "docker/Dockerfile").read_text())
    return {image: left_out.split() for image, left_out in found if not image.endswith("-gpu")}


def requirements(left_out: Sequence[str]) -> list[str]:
    """Return the requirements of an image, by the script that its build runs."""
    words = [sys.executable, "docker/requirements.py", *left_out]
    return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def packages(wanted: Iterable[str]) -> dict[str, int]:
    """Return the bytes of each installed package among `wanted`, or that one of them needs, by name."""
    sizes: dict[str, int] = {}
    seen: set[str] = set()
    waiting = [Requirement(text) for text in wanted]
    while waiting:
        requirement = waiting.pop()
        for extra in (*requirement.extras, ""):
            name = canonicalize_name(requirement.name)
            if f"{name}[{extra}]" in seen:
                continue
            seen.add(f"{name}[{extra}]")
            try:
                found = distribution(name)
            except PackageNotFoundError as error:
                raise SystemExit(
                    f"{name} is not installed here: found none, wanted all packages of the images; make setup"
                ) from error
            sizes[name] = sum(path.stat().st_size for file in found.files or () if (path := Path(file.locate())).is_file())
            needs = (Requirement(text) for text in found.requires or ())
            waiting += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    return sizes


def report_packages(sizes: Mapping[str, Mapping[str, int]]) -> str:
    """Return the table of the images."""
    whole = sum(sizes["actor"].values())
    lines = ["", "| image | packages | MiB of packages | of those of `actor` | largest |", "|---|---|---|---|---|"]
    for image, each in sizes.items():
        total, largest = sum(each.values()), sorted(each, key=lambda name: -each[name])[:3]
        named = ", ".join(f"{name} {each[name] / MIB:.0f}" for name in largest)
        lines.append(f"| `{image}` | {len(each)} | {total / MIB:.0f} | {total / whole:.0%} | {named} |")
    return "\n".join(lines)


def report_memory(resident: Mapping[str, float]) -> str:
    """Return the table of the processes of one run."""
    rows = [f"| {name} | {size / MIB:.0f} |" for name, size in resident.items()]
    return "\n".join(["", "| process | MiB resident |", "|---|---|", *rows])


if __name__ == "__main__":
    raise SystemExit(main())
