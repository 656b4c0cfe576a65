"""`rookery compare` and `rookery report`: their options and their help."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.cli.parser import add_command

if TYPE_CHECKING:
    from services.cli.compare.runs import RunData

RUNS = """\
RUN is a run directory, or a folder of such, as `rookery train PRESET --seeds 1-5` leaves, or the address of a run's copy, such as
s3://BUCKET/runs/NAME. Runs with equal settings
but for the seed are one configuration, shown by its interquartile mean with a 95 % bootstrap interval.

examples:
  rookery {} runs/cartpole-a runs/cartpole-b
"""


def add(commands: Any) -> None:
    """Add `compare` and `report`."""
    add_command(
        commands,
        "compare",
        _compare,
        "a table of runs: returns with intervals, and the settings that differ",
        usage="rookery compare RUN [RUN ...]",
        epilog=RUNS.format("compare") + "\nexit code: 0 shown; 2 bad input.\n",
        max_names=sys.maxsize,
    )
    report = add_command(
        commands,
        "report",
        _report,
        "the same with learning curves, as one HTML file",
        usage="rookery report RUN [RUN ...] [--out report.html]",
        epilog=RUNS.format("report") + "\nexit code: 0 written; 2 bad input.\n",
        max_names=sys.maxsize,
    )
    report.add_argument("--out", metavar="FILE", type=Path, default=Path("report.html"), help="default: report.html")


def _compare(options: argparse.Namespace) -> int:
    from services.cli.compare.tables import print_runs  # noqa: PLC0415

    print_runs(_runs(options), stdout=sys.stdout, each=False)
    return 0


def _report(options: argparse.Namespace) -> int:
    runs = _runs(options)
    from services.cli.compare.report import report  # noqa: PLC0415

    return report(runs, out=options.out, now=datetime.now().astimezone(), stdout=sys.stdout)


def _runs(options: argparse.Namespace) -> list[RunData]:
    from common.runtime.copies import fetch_results, is_address  # noqa: PLC0415
    from services.cli.compare.runs import read_runs  # noqa: PLC0415

    if not options.names:
        options.parser.error("the following arguments are required: RUN")
    local, addresses = ([name for name in options.names if is_address(name) == far] for far in (False, True))

    def warn(folder: Path) -> None:
        print(f"{options.parser.prog}: warning: {folder} may not be entered: runs in it are left out", file=sys.stderr)

    return read_runs(map(Path, local), copies=map(fetch_results, addresses), warn=warn)
