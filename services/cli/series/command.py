"""`rookery sweep`: its options and its help."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

from common import extensions
from common.errors import ConfigError, ResourceError
from services.cli.parser import add_allow_code, add_command

SWEEP_TEXT = """\
SWEEP.yaml names a preset, settings of all trials, and ranges or choices of those that are searched:

  preset: cartpole
  settings: {target.env_steps: 30_000}
  search:
    algorithm.learning_rate: {low: 1e-4, high: 1e-2, log: true}
    model.hidden: {choices: [[64, 64], [128, 128]]}
  trials: 20
  goal: curve    # mean of the learning curve over the whole budget; or mean100, or evaluation, with both targets null
  prune: true    # stop a trial that is below the median of the earlier ones

examples:
  rookery sweep sweep.yaml
  rookery sweep --resume --run-dir runs/sweep-20260102-120000

Ctrl-C saves the trial that runs, and stops. Trials that fail do not count; two in a row end the sweep, which --resume continues.
exit code: 0 all trials ended, or stopped; 1 a trial failed; 2 bad input; 130 stopped at once.
"""


def add(commands: Any) -> None:
    """Add `sweep`."""
    sweep = add_command(
        commands,
        "sweep",
        _sweep,
        "search settings with Optuna: one run for each trial",
        usage="rookery sweep SWEEP.yaml [options]",
        epilog=SWEEP_TEXT,
        max_names=1,
    )
    sweep.add_argument("--run-dir", metavar="DIR", type=Path, help="folder of the trials; default: runs/...")
    sweep.add_argument("--resume", action="store_true", help="continue the sweep in --run-dir, its interrupted trial first")
    add_allow_code(sweep)
    sweep.add_argument("--log-format", choices=("auto", "plain", "json"), help="as of `rookery train`")


def _sweep(options: argparse.Namespace) -> int:
    file = Path(options.names[0]) if options.names else None
    if file is None and not options.resume:
        options.parser.error("the following arguments are required: SWEEP.yaml")
    if options.resume and options.run_dir is None:
        raise ConfigError("no sweep to resume", found="--resume alone", wanted="its folder", fix="set --run-dir to it")
    if importlib.util.find_spec("optuna") is None:
        raise ResourceError("rookery sweep needs a package", found="no optuna", fix="pip install 'rookery[sweep]'")

    from services.cli.series.run import train_processes  # noqa: PLC0415
    from services.cli.series.sweep import open_sweep, run_sweep  # noqa: PLC0415
    from services.cli.train.view import make_view  # noqa: PLC0415

    folder = options.run_dir or Path("runs") / f"{file.stem if file else 'sweep'}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    passed = ("--log-format", options.log_format) if options.log_format else ()
    passed = (*passed, *(word for package in options.allow_code for word in ("--allow-code", package)))
    show = make_view(sys.stdout, options.log_format or "auto").print_message
    with (
        extensions.restricted(options.allow_code, run=folder) if options.resume else nullcontext(),
        open_sweep(file, folder, resume=options.resume, environ=os.environ) as sweep,
        train_processes() as trainer,  # last: a stop signal ends the checks at once
    ):
        return run_sweep(sweep, folder, trainer=trainer, show=show, stdout=sys.stdout, environ=os.environ, options=passed)
