"""`rookery train`: its options and its help."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

from common import extensions
from common.errors import ConfigError
from services.cli.parser import add_allow_code, add_command, count

AUTO = "auto"
TRAIN_EXAMPLES = """\
PRESET is a name that `rookery presets` lists, or a YAML file of your own. Settings come from
key=value > environment ROOKERY_SECTION__KEY > PRESET > defaults; `rookery config show` lists them all.

examples:
  rookery train cartpole
  rookery train pong --actors 2 algorithm.learning_rate=1e-3
  rookery train my.yaml --run-dir runs/mine --log-format json
  rookery train --resume --run-dir runs/mine     continue a run, or a series, that was stopped
  rookery train --resume --run-dir s3://bucket/runs/mine    the same from its copy, in runs/mine
  rookery train cartpole --seeds 1-5             one run for each seed, one after another
  rookery train cartpole --seeds 1-6 --parallel 3    three runs at a time, where there are cores for them
  rookery train cartpole --seeds 1-3 algorithm.learning_rate=1e-3,3e-4     for each value, each seed

Several values for a setting, separated by commas, make a series: one run for each combination, with each seed, in one
folder. A comma in brackets, braces or quotes belongs to the value: 'model.hidden=[64, 64],[128]' has two. With --resume
a series continues its unfinished runs and leaves the finished ones.

Ctrl-C saves and stops, a series too; a second Ctrl-C stops at once.
exit code: 0 target reached, budget spent, or stopped; 1 failed; 2 bad input; 130 stopped at once.
"""


def add(commands: Any) -> None:
    """Add `train`."""
    train = add_command(
        commands,
        "train",
        _train,
        "learner, actors and evaluator on this machine, until the target",
        usage="rookery train PRESET [section.key=value ...] [options]",
        epilog=TRAIN_EXAMPLES,
        takes_settings=True,
        max_names=1,
    )
    help_actors = f"actor processes (actor.count); {AUTO}: search for the number with which training is fastest"
    train.add_argument("--actors", metavar="N", type=_actor_count, help=help_actors)
    train.add_argument("--seed", metavar="S", help="seed of every random stream (run.seed)")
    train.add_argument("--seeds", metavar="LIST", help="a series: one run for each seed of 1-5 or 1,3,7")
    help_parallel = "runs of a series at a time, each with all its processes; default: 1"
    train.add_argument("--parallel", metavar="N", type=count, help=help_parallel)
    help_run_dir = "where the run keeps its files; default: runs/...; with --resume also s3://BUCKET/runs/NAME"
    train.add_argument("--run-dir", metavar="DIR", help=help_run_dir)
    train.add_argument("--resume", action="store_true", help="continue the run in --run-dir from its newest checkpoint")
    train.add_argument(
        "--init", metavar="RUN", help="start with the weights of another run, or of a checkpoint; also an address (run.init)"
    )
    train.add_argument("--member", action="store_true", help=argparse.SUPPRESS)  # a series or sweep combined the settings
    add_allow_code(train)
    train.add_argument("--log-format", choices=("auto", "plain", "json"), help="auto: live view on a terminal, else plain lines")


def _actor_count(text: str) -> str:
    if text != AUTO and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}, wanted a number, or {AUTO}")
    return text


def _train(options: argparse.Namespace) -> int:
    """Begin what the command line names; continue a run that it names with code of the current directory, or that is allowed."""
    from common.config.code_references import named_modules  # noqa: PLC0415
    from common.config.load import preset_names  # noqa: PLC0415
    from common.runtime.copies import local_path  # noqa: PLC0415
    from services.cli.series.grid import has_grid  # noqa: PLC0415
    from services.cli.series.plan import is_series  # noqa: PLC0415

    _require_text(options.argv)
    folder = None if options.run_dir is None else local_path(options.run_dir)
    # Settings of a member were read from the file of its series, which allows nothing; a user types those of other runs.
    allowed = (*options.allow_code, *(() if options.member else named_modules(options.overrides)))
    run = (folder or Path()).parent if options.member else folder or Path()  # of a member its series
    with extensions.restricted(allowed, run=run) if options.resume else nullcontext():
        if not options.names and not options.resume:
            fix = "try `rookery train cartpole`"
            raise ConfigError("no preset named", wanted=f"one of {', '.join(preset_names())}", fix=fix)
        if not options.member:  # the options of a series may be newer than its settings
            _require_once(options)
        several = not options.member and has_grid(options.overrides)  # a member has one value of each, which was checked
        if options.seeds is not None or several or (options.resume and is_series(folder)):
            return _train_series(options, folder)
        if options.parallel is not None:
            raise ConfigError("--parallel is for a series", found="one run", wanted="--seeds 1-5, or several values of a setting")
        return _train_one(options, folder)


def _require_text(argv: Sequence[str]) -> None:
    """Refuse (ConfigError) bytes that config.yaml and command.txt cannot hold, as in the name of a folder."""
    for word in argv:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise ConfigError("argument is no UTF-8 text", found=repr(word), wanted="UTF-8", fix="rename it") from error


def _by_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return what options of their own set, by setting; None where one is not given."""
    return {"actor.count": options.actors, "run.seed": options.seed, "run.init": options.init, "log.format": options.log_format}


def _require_once(options: argparse.Namespace) -> None:
    """Refuse (ConfigError) a setting that an option sets too: one of both would win without a word."""
    by_options = {key for key, value in (_by_options(options) | {"run.dir": options.run_dir}).items() if value is not None}
    if twice := by_options & {text.partition("=")[0] for text in options.overrides}:
        raise ConfigError("by an option and by its name", found=", ".join(sorted(twice)), wanted="each setting once")


def _initial(options: argparse.Namespace) -> str | None:
    """Return the checkpoint that `--init` names; None without the option. Raises `ConfigError`."""
    from common.runtime.copies import fetch  # noqa: PLC0415
    from services.cli.train.warm_start import find_checkpoint  # noqa: PLC0415

    if options.init is None:
        return None
    if options.resume:
        raise ConfigError("--init and --resume", found="both", wanted="one: a run goes on with its own weights")
    return str(find_checkpoint(fetch(options.init)))


def _train_one(options: argparse.Namespace, folder: Path | None) -> int:
    from common.runtime.copies import is_address  # noqa: PLC0415
    from services.cli.train.plan import Request  # noqa: PLC0415
    from services.cli.train.run import train  # noqa: PLC0415

    auto = options.actors == AUTO
    settings = _by_options(options) | {"actor.count": None if auto else options.actors, "run.init": _initial(options)}
    named = [f"{key}={value}" for key, value in settings.items() if value is not None]
    request = Request(
        preset=options.names[0] if options.names else None,
        overrides=(*options.overrides, *named),
        run_dir=folder,
        store_copy=options.run_dir if options.run_dir and is_address(options.run_dir) else None,
        resume=options.resume,
        auto_actors=auto,
        member=options.member,
    )
    line = ["rookery", *options.argv]
    return train(request, environ=os.environ, command_line=line, stdout=sys.stdout, stderr=sys.stderr, debug=options.debug)


def _train_series(options: argparse.Namespace, folder: Path | None) -> int:
    from common.config.code_references import named_modules  # noqa: PLC0415
    from common.runtime.copies import is_address  # noqa: PLC0415
    from services.cli.series.plan import SeriesRequest, open_series  # noqa: PLC0415
    from services.cli.series.run import run_series, train_processes  # noqa: PLC0415
    from services.cli.train.view import make_view  # noqa: PLC0415

    if options.run_dir is not None and is_address(options.run_dir):
        raise ConfigError("--run-dir of a series is a local directory", found=options.run_dir, wanted="--run-dir runs/NAME")
    if options.seeds is not None and options.seed is not None:
        raise ConfigError("--seed and --seeds", found="both", wanted="one of them")
    # A number of actors is a setting like others, so that a newer `actor.count` replaces it.
    counted = () if options.actors in {None, AUTO} else (f"actor.count={options.actors}",)
    passed = {"--actors": None if counted else options.actors, "--log-format": options.log_format}
    named = {"run.seed": options.seed, "run.init": _initial(options)}
    request = SeriesRequest(
        preset=options.names[0] if options.names else None,
        overrides=(*options.overrides, *counted),
        seeds=options.seeds,
        named=tuple(f"{key}={value}" for key, value in named.items() if value is not None),
        options=tuple(word for name, value in passed.items() if value is not None for word in (name, value)),
        folder=folder,
        resume=options.resume,
        parallel=options.parallel or 1,
    )
    packages = (*options.allow_code, *(named_modules(options.overrides) if options.resume else ()))
    allowed = tuple(word for package in packages for word in ("--allow-code", package))
    show, now = make_view(sys.stdout, options.log_format or "auto").print_message, datetime.now().astimezone()
    with open_series(request, environ=os.environ, now=now) as (series, opened), train_processes() as trainer:
        return run_series(
            series,
            opened,
            trainer=trainer,
            show=show,
            stdout=sys.stdout,
            environ=os.environ,
            parallel=request.parallel,
            options=allowed,
        )
