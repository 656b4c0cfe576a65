"""What the command lines of all services have in common: `--config FILE`, `section.key=value`, logs, `--debug`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from common.runtime import config
from common.runtime.config import Loaded
from common.runtime.tree import Settings

LINGER = "for whom an orchestrator restarts: stay when the run has ended, until SIGTERM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """How a service was asked to run."""

    loaded: Loaded
    linger: bool = False
    debug: bool

    @property
    def settings(self) -> Settings:
        """What it was told, without where that came from."""
        return self.loaded.settings


class _Parser(argparse.ArgumentParser):
    """argparse with errors of one line, and no guessed abbreviations."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and no usage text: the line says where to find it."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def parser(service: str, what: str, example: str) -> argparse.ArgumentParser:
    """The arguments every service takes; the caller adds its own."""
    built = _Parser(
        allow_abbrev=False,
        prog=f"rookery {service}",
        description=what,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    built.add_argument("overrides", nargs="*", metavar="section.key=value", help="change a setting; see `rookery config show`")
    built.add_argument("--config", metavar="FILE", help="YAML file of settings, such as a run's config.yaml, or a preset's name")
    built.add_argument("--linger", action="store_true", help=LINGER)
    built.add_argument("--log-format", choices=("auto", "plain", "json"), help="of the lines on standard error")
    built.add_argument("--debug", action="store_true", help="show tracebacks")
    return built


def load(parsed: argparse.Namespace, named: Mapping[str, str | None], environ: Mapping[str, str]) -> Loaded:
    """Settings from the file, the environment and the command line; `named` maps keys to what options say of them."""
    options = {"log.format": parsed.log_format, **named}
    overrides: Sequence[str] = [f"{key}={value}" for key, value in options.items() if value is not None]
    return config.load(preset=parsed.config, overrides=[*overrides, *parsed.overrides], environ=environ)
