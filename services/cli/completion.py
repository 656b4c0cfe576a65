"""`rookery completion`: a shell script that completes commands, options, presets and settings."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import shtab

from common.config.errors import schema_at
from common.config.load import preset_names
from common.config.schema import Settings


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script of `parser` for `shell`; the parser is changed and parses nothing afterwards."""
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
    algorithms = (schema_at(("algorithm", "name"), {}) or {}).get("enum", [])
    names = [
        f"{section}.{key}"
        for section in Settings.model_fields
        for algorithm in algorithms
        for key in (schema_at((section,), {"algorithm": {"name": algorithm}}) or {}).get("properties", {})
    ]
    return list(dict.fromkeys(names))
