"""The parser of the `rookery` command line, and the form in which a group of commands is added to it.

Each group has a module `command.py` with `add(commands)`. It imports slow modules only inside the functions of its
commands, so that `--help` and errors come at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from common.config.arguments import OneLineParser


class CommandParser(OneLineParser):
    """Shows options in a column that is wide enough for their names."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, formatter_class=_formatter)


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=26, width=100)


def add_command(
    commands: Any,
    name: str,
    function: Callable[[argparse.Namespace], int],
    summary: str,
    *,
    takes_settings: bool = False,
    max_names: int = 0,
    **texts: str,
) -> argparse.ArgumentParser:
    """Add a command to a group of commands and return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, **texts)
    parser.add_argument("positional", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(run=function, parser=parser, takes_settings=takes_settings, max_names=max_names)
    return parser


def count(text: str, *, least: int = 1) -> int:
    """Return a number from `least` on that is the value of an option."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"found {text!r}, wanted a number from {least}")
    return int(text)
