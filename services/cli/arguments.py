"""The grammar of the `rookery` command, and what `--help` says. Words in, a value out; knows no settings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

SERVICES = ("learner", "actor", "evaluator")
AUTO = "auto"
COMMANDS = ("train", *SERVICES, "top", "doctor", "health", "keys", "config", "presets")
LONGEST = 86_400.0  # seconds that one may measure

TOP_EXAMPLES = """\
examples:
  rookery train cartpole                         learn CartPole in about a minute
  rookery train pong --actors 2 --seed 3         learn Pong; settings from presets/pong.yaml
  rookery presets                                what can be trained
  rookery config show pong                       every setting, and where its value comes from
  rookery actor --learner tcp://10.0.0.7:5700    join a learner on another machine
  rookery top                                    a live table of the run on this machine
  rookery doctor 10.0.0.7:9100 10.0.0.8:9100     what holds a run up, and what is broken
  rookery keys keys                              keys for a learner and its peers on other machines

Every command has its own --help.
"""
TRAIN_EXAMPLES = """\
PRESET is a name that `rookery presets` lists, or a YAML file of your own. Settings come from
key=value > environment ROOKERY_SECTION__KEY > PRESET > defaults; `rookery config show` lists them all.

examples:
  rookery train cartpole
  rookery train pong --actors 2 algorithm.learning_rate=1e-3
  rookery train my.yaml --run-dir runs/mine --log-format json
  rookery train --resume --run-dir runs/mine     go on where it stopped

Ctrl-C saves and stops; a second Ctrl-C stops at once.
exit code: 0 target reached, budget spent, or stopped; 1 failed; 2 bad input; 130 stopped at once.
"""
TARGETS = """\
TARGET is the directory of a run of `rookery train`, or the address of a service's metrics, host:port; give as many as there
are. Without any it is the newest run under runs/ that is under way. With --prometheus all that it scrapes is shown.

examples:
  rookery {0}
  rookery {0} runs/mine
  rookery {0} 10.0.0.7:9100 10.0.0.8:9100 10.0.0.9:9100
  rookery {0} --prometheus http://127.0.0.1:9090

"""
TOP_CODES = "exit code: 0 shown; 2 bad input, or nobody answers.\n"
DOCTOR_CODES = "exit code: 0 healthy (a bottleneck is no fault); 1 something is broken; 2 bad input, or nobody answers.\n"


KEYS_EXAMPLES = """\
DIRECTORY/learner is for the learner: its secret key, and the public keys of all who may connect. DIRECTORY/NAME is for
peers: their secret key, and the learner's public one. Without a NAME it is `peer`, one key for all actors and evaluators.
Where there are keys already, more peers are added. Nothing is overwritten, and no secret is printed.

examples:
  rookery keys keys                              a learner's key, and one for all its peers
  rookery keys keys lab cluster                  a key each for the actors of two places

exit code: 0 made; 2 bad input, or they are there already.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What was asked for. `overrides` are `section.key=value` in the order in which they win, the named options last."""

    command: str
    words: tuple[str, ...]
    preset: str | None = None
    overrides: tuple[str, ...] = ()
    run_dir: Path | None = None
    resume: bool = False
    auto_actors: bool = False
    ready: bool = False
    debug: bool = False
    targets: tuple[str, ...] = ()
    directory: Path | None = None
    peers: tuple[str, ...] = ()
    prometheus: str | None = None
    namespace: str | None = None
    once: bool = False
    seconds: float | None = None


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=26, width=100)


class _Parser(argparse.ArgumentParser):
    """argparse with errors of one line, no guessed abbreviations, and room for the names."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_formatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and no usage text: the line says where to find it."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def parse(words: Sequence[str]) -> Arguments:
    """Read the command line. Exits with code 2 and one line where it makes no sense, with 0 after --help."""
    parser = _grammar()
    if words and not words[0].startswith("-"):
        _check_command(parser, words[0])
    # Settings may stand before and after options; argparse takes only the first run of them, the rest is left over.
    found, rest = parser.parse_known_args(words)
    if found.version:
        return Arguments(command="version", words=tuple(words))
    if found.command is None:
        parser.print_help()
        parser.exit(2)
    free = [*getattr(found, "free", ()), *rest]
    for word in free:
        if word.startswith("-"):
            found.parser.error(f"unknown option {word}")
    if (actors := getattr(found, "actors", None)) is not None and actors != AUTO and not actors.isdecimal():
        found.parser.error(f"--actors: found {actors!r}, wanted a number, or {AUTO}")
    if hasattr(found, "targets"):
        found.targets, free = [*found.targets, *free], []
    named = [word for word in free if "=" not in word]
    if len(named) > getattr(found, "most_names", 0):
        found.parser.error(f"found {named[-1]!r}, wanted section.key=value, such as env.num_envs=16")
    return Arguments(
        command=" ".join(filter(None, (found.command, getattr(found, "verb", None)))),
        words=tuple(words),
        preset=named[0] if named else None,
        overrides=(*(word for word in free if "=" in word), *_named_options(found)),
        run_dir=getattr(found, "run_dir", None),
        resume=getattr(found, "resume", False),
        auto_actors=getattr(found, "actors", None) == AUTO,
        ready=getattr(found, "ready", False),
        debug=getattr(found, "debug", False),
        targets=tuple(getattr(found, "targets", ())),
        directory=getattr(found, "directory", None),
        peers=tuple(getattr(found, "peers", ())),
        prometheus=getattr(found, "prometheus", None),
        namespace=getattr(found, "namespace", None),
        once=getattr(found, "once", False),
        seconds=getattr(found, "seconds", None),
    )


def _check_command(parser: argparse.ArgumentParser, word: str) -> None:
    if word not in COMMANDS:
        close = get_close_matches(word, COMMANDS, n=1)
        parser.error(
            f"unknown command: found {word!r}, " + (f"did you mean {close[0]}?" if close else f"wanted {', '.join(COMMANDS)}")
        )


def _named_options(found: argparse.Namespace) -> list[str]:
    options = {"actor.count": "actors", "run.seed": "seed", "log.format": "log_format"}
    given = {key: value for key, name in options.items() if (value := getattr(found, name, None)) is not None}
    return [f"{key}={0 if value == AUTO else value}" for key, value in given.items()]  # 0 actors: nobody knows how many yet


def _grammar() -> argparse.ArgumentParser:
    parser = _Parser(prog="rookery", description="Distributed reinforcement learning.", epilog=TOP_EXAMPLES)
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="learner, actors and evaluator on this machine, until the target",
        usage="rookery train PRESET [section.key=value ...] [options]",
        epilog=TRAIN_EXAMPLES,
    )
    train.add_argument(
        "--actors", metavar="N", help=f"actor processes (actor.count); {AUTO}: as many as make training fastest, found by trying"
    )
    train.add_argument("--seed", metavar="S", help="seed of every random stream (run.seed)")
    train.add_argument("--run-dir", metavar="DIR", type=Path, help="where the run keeps its files; default: runs/...")
    train.add_argument("--resume", action="store_true", help="continue the run in --run-dir from its newest checkpoint")
    train.add_argument("--log-format", choices=("auto", "plain", "json"), help="auto: live view on a terminal, else plain lines")
    _takes_settings(train)
    for role, what in zip(SERVICES, ("train and serve", "step environments", "play the newest policy"), strict=True):
        commands.add_parser(role, help=f"run one {role} alone: {what}", add_help=False)
    top = _takes_targets(commands, "top", "a live table of a running deployment", TOP_CODES)
    top.add_argument("--once", action="store_true", help="one table, measured over two seconds, and an end")
    doctor = _takes_targets(commands, "doctor", "what holds a running deployment up, and what is broken", DOCTOR_CODES)
    doctor.add_argument(
        "--seconds", metavar="N", type=_seconds, help="how long to measure; default: 10, and 60 of a Prometheus' past"
    )
    config = commands.add_parser("config", help="show, check or describe settings")
    verbs = config.add_subparsers(dest="verb", metavar="show|schema|validate", required=True)
    for verb, what in (("show", "every setting as YAML, and where its value comes from"), ("validate", "check and say so")):
        _takes_settings(verbs.add_parser(verb, help=what, usage=f"rookery config {verb} [PRESET] [section.key=value ...]"))
    _no_settings(verbs.add_parser("schema", help="JSON schema of a configuration file"))
    _no_settings(commands.add_parser("presets", help="what can be trained"))
    health = commands.add_parser(
        "health",
        help="ask the service of this host how it is: exit code 0 alive, 1 not",
        usage="rookery health [--ready] [metrics.host=HOST] [metrics.port=PORT]",
    )
    health.add_argument("--ready", action="store_true", help="ask whether it can do its work, not whether it is alive")
    _takes_settings(health, most_names=0)
    keys = commands.add_parser(
        "keys",
        help="make keys, with which the wire is encrypted and only known peers may connect",
        usage="rookery keys DIRECTORY [NAME ...]",
        epilog=KEYS_EXAMPLES,
    )
    keys.add_argument("directory", metavar="DIRECTORY", type=Path, help=argparse.SUPPRESS)
    keys.add_argument("peers", metavar="NAME", nargs="*", default=(), help=argparse.SUPPRESS)
    _no_settings(keys)
    return parser


def _takes_targets(commands: Any, command: str, what: str, codes: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        command, help=what, usage=f"rookery {command} [TARGET ...] [options]", epilog=TARGETS.format(command) + codes
    )
    parser.add_argument("targets", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--prometheus", metavar="URL", help="read from a Prometheus that scrapes the services")
    parser.add_argument("--namespace", metavar="NAME", help="of the runs that it scrapes in a cluster, this one")
    _no_settings(parser)
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.0 < seconds <= LONGEST:  # NaN is neither
        raise ValueError
    return seconds


def _takes_settings(parser: argparse.ArgumentParser, *, most_names: int = 1) -> None:
    parser.add_argument("free", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(parser=parser, most_names=most_names)


def _no_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(parser=parser)
