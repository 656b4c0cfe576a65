"""The parser of the `rookery` command line, the form in which a group of commands is added to it, and its completion in shells.

Each group has a module `command.py` with `add(commands)`. It imports slow modules only inside the functions of its
commands, so that `--help` and errors come at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from common.config.arguments import OneLineParser


class _StoreOnce(argparse.Action):
    """Stores the value of an option, and refuses a second one, as of a setting that is given twice."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """As the base."""
        given: set[str] = vars(namespace).setdefault("given", set())
        if option_string in given:
            parser.error(f"{option_string} is given twice; name it once")
        if option_string is not None:
            given.add(option_string)
        setattr(namespace, self.dest, values)


class CommandParser(OneLineParser):
    """Shows options in a column that is wide enough for their names; takes one value for each."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            **settings, formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=26, width=100)
        )
        self.register("action", None, _StoreOnce)


def add_allow_code(parser: argparse.ArgumentParser) -> None:
    """Add the option `--allow-code`."""
    text = "let the settings of a run name code of this package; may be repeated. Your own in the current directory may"
    parser.add_argument("--allow-code", metavar="PACKAGE", action="append", default=[], help=text)


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
    """Return a number from `least` to 2**31 - 1 that is the value of an option."""
    if not text.isdecimal() or not least <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"found {text!r}, wanted a number from {least} to {2**31 - 1}")
    return int(text)


# --- completion ---


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script of `parser` for `shell`; the parser is changed and parses nothing afterwards."""
    import shtab  # noqa: PLC0415  of the extra rookery[completion]

    from common.config.load import preset_names  # noqa: PLC0415

    words = [*preset_names(), *(f"{key}=" for key in _setting_names())]
    for command in _commands(parser):
        positional = next((action for action in command._actions if action.dest == "positional"), None)  # noqa: SLF001
        if positional is not None and command.get_default("takes_settings"):
            positional.choices, positional.help = words, "preset or section.key=value"
    return str(shtab.complete(parser, shell=shell))


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield `parser` and the parsers of all commands in it."""
    yield parser
    for action in parser._actions:  # noqa: SLF001  argparse has no public way to list commands
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for command in action.choices.values():
                yield from _commands(command)


def _setting_names() -> list[str]:
    """Return the dotted keys of all settings, those of every algorithm included."""
    from common.config.errors import schema_at  # noqa: PLC0415
    from common.config.schema import Settings  # noqa: PLC0415

    algorithms = (schema_at(("algorithm", "name"), {}) or {}).get("enum", [])
    names = [
        f"{section}.{key}"
        for section in Settings.model_fields
        for algorithm in algorithms
        for key in (schema_at((section,), {"algorithm": {"name": algorithm}}) or {}).get("properties", {})
    ]
    return list(dict.fromkeys(names))
