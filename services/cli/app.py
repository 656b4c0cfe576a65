"""The `rookery` command: its grammar, and the commands for keys, settings and presets; others have a `command.py` each."""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import importlib.util
import json
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from common import extensions
from common.errors import ResourceError
from common.runtime.lifecycle import block_signals
from common.runtime.process import run
from services.cli.compare import command as compare
from services.cli.inspect import command as inspect
from services.cli.parser import CommandParser, add_allow_code, add_command, completion_script
from services.cli.policy import command as policy
from services.cli.series import command as series
from services.cli.train import command as train

if TYPE_CHECKING:
    from common.config.load import LoadedSettings

UNREAD = 128 + signal.SIGPIPE  # what a shell reports of a command whose reader ended first
SHELLS = ("bash", "zsh", "tcsh")
SERVICES = {
    "learner": "train and serve",
    "actor": "step environments",
    "evaluator": "play the newest policy",
    "policy-server": "act for the environments of env workers",
    "env-worker": "step environments for a policy server, without torch",
}
COMMANDS = (
    *("train", "sweep", "compare", "report", "evaluate", "play", "export", *SERVICES),
    *("top", "doctor", "health", "keys", "config", "presets", "completion"),
)

TOP_EXAMPLES = """\
examples:
  rookery train cartpole                         learn CartPole in about a minute
  rookery train pong --actors 2 --seed 3         learn Pong; settings from presets/pong.yaml
  rookery presets                                the presets that come with rookery
  rookery config show pong                       every setting, and where its value comes from
  rookery actor --learner tcp://10.0.0.7:5700 --keys keys/worker    join a learner on another machine
  rookery evaluate runs/mine                     the mean return of a trained policy
  rookery play runs/mine --video game.mp4        watch it
  rookery export runs/mine policy.onnx           an ONNX file of it
  rookery top                                    a live table of the run on this machine
  rookery doctor 10.0.0.7:9100 10.0.0.8:9100     the bottleneck of a run, and its faults
  rookery keys keys                              keys for a learner and its workers on other machines

Every command has its own --help.
"""
KEYS_EXAMPLES = """\
DIRECTORY/learner is for the learner: its secret key, and the public keys of all workers that may connect. DIRECTORY/NAME is
for workers: their secret key, and the learner's public one. Without a NAME it is `worker`, one key for all actors and evaluators.
Where DIRECTORY has keys already, more workers are added. Nothing is overwritten, and no secret is printed.

examples:
  rookery keys keys                              a learner's key, and one for all its workers
  rookery keys keys lab cluster                  a key each for the actors of two places

exit code: 0 made; 2 bad input, or the keys exist already.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`; returns the exit code: 0 success, 1 failure, 2 bad input, 130 interrupted, 141 not read."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in SERVICES:  # a service is its own program with its own --help
        block_signals()  # until the service handles them
        module = f"services.{argv[0].replace('-', '_')}"
        os.execv(sys.executable, [sys.executable, "-P", "-m", module, *argv[1:]])  # noqa: S606
    with _while_read():
        try:
            options = parse_arguments(argv)
            return run(lambda: _run(options), program=options.parser.prog, debug=options.debug)
        finally:
            _flush()


def _run(options: argparse.Namespace) -> int:
    if options.overrides and not getattr(options, "member", False):  # a resumed series gives its member newer values too
        from common.config.load import require_once  # noqa: PLC0415

        require_once(options.overrides)
    with _while_read(), _refused_files_in_one_line():
        code: int = options.run(options)
    return code


@contextmanager
def _while_read() -> Iterator[None]:
    """Exit with `UNREAD`, and no message, where the reader of standard output ends while inside, as in `| head -3`."""
    try:
        yield
    except BrokenPipeError:
        watch = select.poll()
        # Errors are reported without being asked for.
        watch.register(sys.stdout, 0)
        if not watch.poll(0):  # another pipe broke, such as that of an environment
            raise
        from services.cli.train.view import discard  # noqa: PLC0415

        discard(sys.stdout)
        sys.exit(UNREAD)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # of rich, which has redirected standard output
            sys.exit(UNREAD)
        raise


@contextmanager
def _refused_files_in_one_line() -> Iterator[None]:
    """Raise `ResourceError` where the system refuses a file or folder by its name, or has no space for output: that is no bug."""
    try:
        yield
        print(end="", flush=True)
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        if error.filename is None and not full:
            raise
        found = str(error.strerror) if error.filename is None else f"{error.strerror} at {error.filename}"
        if full:
            _discard_unwritable()
            fact, wanted, fix = "output cannot be written", "free space", "free some, or write elsewhere"
        else:
            fact, wanted, fix = "a file or folder cannot be used", "a path that can be used", "correct the cause, or name another"
        raise ResourceError(fact, found=found, wanted=wanted, fix=fix) from error


def _discard_unwritable() -> None:
    """Let standard output write nowhere where it cannot be written: the error was shown, and would be reported again at exit."""
    try:
        print(end="", flush=True)
    except OSError:
        from services.cli.train.view import discard  # noqa: PLC0415

        discard(sys.stdout)


def _flush() -> None:
    """Write what standard output holds. Raises `BrokenPipeError`; other errors, as of a full disk, the interpreter reports."""
    try:
        print(end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError:
        return


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    The result has `run`, the function of the command; `names`, its positional arguments; `overrides`, those that are
    `section.key=value` where the command takes settings; and the command's own options. Exits with code 2 and one line for
    invalid arguments, and with 0 after --help.
    """
    parser = _parser()
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        close = get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"wanted {', '.join(COMMANDS)}"
        parser.error(f"unknown command: found {argv[0]!r}, {hint}")
    # argparse takes only the first group of positional arguments; those after an option are in `rest`.
    options, rest = parser.parse_known_args(argv)
    for word in rest:
        if word.startswith("-"):
            options.parser.error(f"unknown option {word}")
    positional = [*options.positional, *rest]
    options.argv = tuple(argv)
    if getattr(options, "member", False):  # as `train_arguments` orders them
        begins = not options.resume
        options.names, options.overrides = positional[:begins], positional[begins:]
    else:
        options.overrides = [word for word in positional if options.takes_settings and _is_setting(word)]
        options.names = [word for word in positional if word not in options.overrides]
    if len(options.names) > options.max_names:
        wanted = "section.key=value, such as env.num_envs=16" if options.takes_settings else "no more arguments"
        options.parser.error(f"found {options.names[-1]!r}, wanted {wanted}")
    return options


def _is_setting(word: str) -> bool:
    key, given, _ = word.partition("=")
    return bool(given) and "/" not in key  # a run of a series has a path such as runs/valve/learning_rate=1e-3-s1


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="rookery", description="Distributed reinforcement learning.", epilog=TOP_EXAMPLES)
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.set_defaults(run=_version_or_help, positional=(), takes_settings=False, max_names=0, parser=parser, debug=False)
    commands = parser.add_subparsers(metavar="COMMAND")
    train.add(commands)
    series.add(commands)
    compare.add(commands)
    for role, task in SERVICES.items():
        commands.add_parser(role, help=f"run one {role} alone: {task}", add_help=False)
    policy.add(commands)
    inspect.add(commands)
    add_command(
        commands,
        "keys",
        _keys,
        "make keys, with which the wire is encrypted and only known workers may connect",
        usage="rookery keys DIRECTORY [NAME ...]",
        epilog=KEYS_EXAMPLES,
        max_names=sys.maxsize,
    )
    config = commands.add_parser("config", help="show, check or describe settings")
    verbs = config.add_subparsers(metavar="show|schema|validate", required=True)
    for verb, function, help_verb in (
        ("show", _config_show, "every setting as YAML, and where its value comes from"),
        ("validate", _config_validate, "check settings and start two environments; not keys, ports and GPUs, which a run checks"),
    ):
        usage = f"rookery config {verb} [PRESET] [section.key=value ...]" + (" [--describe]" if verb == "show" else "")
        command = add_command(verbs, verb, function, help_verb, usage=usage, takes_settings=True, max_names=1)
        add_allow_code(command)
        if verb == "show":
            command.add_argument("--describe", action="store_true", help="with a description of each setting")
    add_command(verbs, "schema", _config_schema, "JSON schema of a configuration file")
    add_command(commands, "presets", _presets, "the presets that come with rookery")
    shell = "a script with which a shell completes commands, options, presets and settings"
    add_command(
        commands,
        "completion",
        _completion,
        shell,
        usage="rookery completion bash|zsh|tcsh",
        epilog='example: eval "$(rookery completion bash)"      in ~/.bashrc; needs rookery[completion]',
        max_names=1,
    )
    return parser


def _version_or_help(options: argparse.Namespace) -> int:
    if options.version:
        print(f"rookery {importlib.metadata.version('rookery')}")
        return 0
    options.parser.print_help()
    return 2


def _keys(options: argparse.Namespace) -> int:
    from common.transport.curve import LEARNER, WORKER, make  # noqa: PLC0415

    if not options.names:
        options.parser.error("the following arguments are required: DIRECTORY")
    directory, workers = Path(options.names[0]), list(dict.fromkeys(options.names[1:])) or [WORKER]
    for path in make(directory, workers):
        print(f"made  {path}")
    print(f"\nlearner:            rookery learner --keys {directory / LEARNER} learner.bind=tcp://0.0.0.0:5700")
    for worker in workers:
        print(f"actors, evaluators: rookery actor --keys {directory / worker} --learner tcp://HOST:5700")
    print("\nGive each machine its own folder and no other. A learner accepts new workers after its next start.")
    return 0


def _loaded(options: argparse.Namespace) -> LoadedSettings:
    from common.config.code_references import named_modules  # noqa: PLC0415
    from common.config.load import load_settings  # noqa: PLC0415
    from common.runtime.run_directory import RunDirectory  # noqa: PLC0415

    preset = options.names[0] if options.names else None
    run, allowed = Path(preset or "").parent, (*options.allow_code, *named_modules(options.overrides))
    of_run = preset is not None and Path(preset) == RunDirectory(run).config
    with extensions.restricted(allowed, run=run) if of_run else nullcontext():
        return load_settings(preset=preset, overrides=options.overrides, environ=os.environ, strict=True)


def _config_show(options: argparse.Namespace) -> int:
    from common.config.load import as_yaml  # noqa: PLC0415

    loaded = _loaded(options)
    print(as_yaml(loaded.settings, loaded.provenance, describe=options.describe), end="")
    for note in loaded.notes:
        print(note, file=sys.stderr)
    return 0


def _config_validate(options: argparse.Namespace) -> int:
    from common.runtime.store import RunStore  # noqa: PLC0415
    from common.tracking.remote import check_tracking  # noqa: PLC0415
    from services.cli.env_trial import check_environment  # noqa: PLC0415

    loaded = _loaded(options)
    settings = loaded.settings
    check_tracking(settings.run.tracking, os.environ)
    if settings.run.store:
        RunStore(settings.run.store)
    check_environment(settings)
    masked = ", and masks its actions" if settings.env.action_mask else ""
    print(f"{settings.run.preset or 'defaults'}: all settings are valid, and the environment starts{masked}")
    for note in loaded.notes:
        print(note)
    return 0


def _config_schema(_: argparse.Namespace) -> int:
    from common.config.schema import file_schema  # noqa: PLC0415

    print(json.dumps(file_schema(), indent=2))
    return 0


def _completion(options: argparse.Namespace) -> int:
    if not options.names or options.names[0] not in SHELLS:
        options.parser.error(f"found {' '.join(options.names) or 'no shell'}, wanted one of {', '.join(SHELLS)}")
    if importlib.util.find_spec("shtab") is None:
        raise ResourceError("rookery completion needs a package", found="no shtab", fix="pip install 'rookery[completion]'")
    print(completion_script(_parser(), options.names[0]))
    return 0


def _presets(_: argparse.Namespace) -> int:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from common.config.load import find_preset, load_settings, preset_header, preset_names  # noqa: PLC0415

    caption = (
        "spaces: an observation -> an action; env steps: the budget; measured: seeds that reached the score in docs/results.md, "
        "and the median time of all of them on 2 cores without GPU"
    )
    console = Console()
    width = console.width if console.is_terminal else 240
    table = Table(box=None, pad_edge=False, header_style="bold", caption=caption, caption_justify="left")
    columns = {"preset": 0, "algorithm": 33, "spaces": 44, "env steps": 92, "measured": 78, "content": 120}  # from this width on
    for column in (name for name, least in columns.items() if width >= least):
        table.add_column(column, no_wrap=column not in {"spaces", "content"})
    for name in preset_names():
        settings, header = load_settings(preset=name, environ={}).settings, preset_header(find_preset(name))
        env_steps = f"{settings.target.env_steps:,}"
        cells = (name, settings.algorithm.name, header.spaces, env_steps, header.measured, header.content)
        table.add_row(*(cell for cell, least in zip(cells, columns.values(), strict=True) if width >= least))
    Console(width=width).print(table)
    return 0
