"""The options that all services share: `--config FILE`, `section.key=value`, the log format, `--linger`, `--debug`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from common.config.load import LoadedSettings
    from common.config.schema import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """The parsed command line of a service."""

    loaded: LoadedSettings
    linger: bool = False
    debug: bool

    @property
    def settings(self) -> Settings:
        """The settings without their sources."""
        return self.loaded.settings


class OneLineParser(argparse.ArgumentParser):
    """`ArgumentParser` with errors of one line and without abbreviated options."""

    def __init__(self, **settings: Any) -> None:
        """As `ArgumentParser`; descriptions keep their line breaks unless `formatter_class` says otherwise."""
        super().__init__(**{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **settings})

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line that names `--help`, without the usage text."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def service_parser(service: str, description: str, example: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every service, to which the caller adds those of `service`."""
    parser = OneLineParser(prog=f"rookery {service}", description=description, epilog=f"example: {example}")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change a setting; see `rookery config show`")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, such as a run's config.yaml, or a preset's name")
    parser.add_argument(
        "--linger",
        action="store_true",
        help="for orchestrators that restart every process that exits: keep running after the end of the run, until SIGTERM; a "
        "worker until it finds another run, too",
    )
    parser.add_argument("--log-format", choices=("auto", "plain", "json"), help="of the lines on standard error")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def settings_from_arguments(
    parsed: argparse.Namespace, options: Mapping[str, str | None], environ: Mapping[str, str]
) -> LoadedSettings:
    """Load settings from the file, the environment and the command line.

    `options` maps dotted keys to the values of the service's own options; None where the option was not given.
    """
    from common.config.load import load_settings  # noqa: PLC0415  slow to import, and not needed for --help

    given = {"log.format": parsed.log_format, **options}
    overrides: Sequence[str] = [f"{key}={value}" for key, value in given.items() if value is not None]
    return load_settings(preset=parsed.config, overrides=[*overrides, *parsed.overrides], environ=environ)
