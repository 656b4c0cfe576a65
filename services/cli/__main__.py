"""The `rookery` command: reads the command line and hands over. Heavy modules are imported by the commands that need them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.runtime.shutdown import block_signals
from services.cli.arguments import SERVICES, Arguments, parse

if TYPE_CHECKING:
    from services.cli.sources import Source


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 well, 1 failed, 2 bad input, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in SERVICES:  # a service is its own program with its own --help
        block_signals()  # until the service handles them
        os.execv(sys.executable, [sys.executable, "-m", f"services.{words[0]}", *words[1:]])  # noqa: S606
    from common.runtime.root import run  # noqa: PLC0415

    _import_from_here()
    arguments = parse(words)
    commands: Mapping[str, Callable[[Arguments], int]] = {
        "train": _train,
        "top": _top,
        "doctor": _doctor,
        "config show": _config_show,
        "config schema": _config_schema,
        "config validate": _config_validate,
        "presets": _presets,
        "health": _health,
        "keys": _keys,
        "version": _version,
    }
    return run(lambda: commands[arguments.command](arguments), program=f"rookery {arguments.command}", debug=arguments.debug)


def _import_from_here() -> None:
    """Find a user's own modules where the command is given, as the services do, which Python runs by `-m`."""
    if not sys.flags.safe_path and not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append("")


def _train(arguments: Arguments) -> int:
    from services.cli.plan import Request  # noqa: PLC0415
    from services.cli.train import train  # noqa: PLC0415

    if arguments.preset is None and not arguments.resume:
        from common.runtime.presets import preset_names  # noqa: PLC0415

        raise ConfigError("no preset named", wanted=f"one of {', '.join(preset_names())}", fix="try `rookery train cartpole`")
    request = Request(
        preset=arguments.preset,
        overrides=arguments.overrides,
        run_dir=arguments.run_dir,
        resume=arguments.resume,
        auto_actors=arguments.auto_actors,
    )
    line = ["rookery", *arguments.words]
    return train(request, environ=os.environ, command_line=line, stdout=sys.stdout, stderr=sys.stderr, debug=arguments.debug)


def _top(arguments: Arguments) -> int:
    from services.cli.top import top  # noqa: PLC0415

    return top(_source(arguments), once=arguments.once, stdout=sys.stdout)


def _doctor(arguments: Arguments) -> int:
    from services.cli.doctor import doctor  # noqa: PLC0415

    return doctor(_source(arguments), seconds=arguments.seconds, stdout=sys.stdout)


def _source(arguments: Arguments) -> Source:
    from services.cli.sources import open_source  # noqa: PLC0415

    return open_source(arguments.targets, prometheus=arguments.prometheus, namespace=arguments.namespace, folder=Path("runs"))


def _config_show(arguments: Arguments) -> int:
    from common.runtime.config import as_yaml, load  # noqa: PLC0415

    loaded = load(preset=arguments.preset, overrides=arguments.overrides, environ=os.environ)
    print(as_yaml(loaded.settings, loaded.provenance), end="")
    return 0


def _config_validate(arguments: Arguments) -> int:
    from common.runtime.config import load  # noqa: PLC0415

    loaded = load(preset=arguments.preset, overrides=arguments.overrides, environ=os.environ)
    print(f"{loaded.settings.run.preset or 'defaults'}: all settings are valid")
    return 0


def _config_schema(_: Arguments) -> int:
    import json  # noqa: PLC0415

    from common.runtime.tree import Settings  # noqa: PLC0415

    print(json.dumps(Settings.model_json_schema(), indent=2))
    return 0


def _presets(_: Arguments) -> int:
    from common.runtime.presets import find_preset, preset_names  # noqa: PLC0415

    names = preset_names()
    width = max(map(len, names))
    for name in names:
        first_line = find_preset(name).text.partition("\n")[0]
        print(f"{name:{width}}  {first_line.removeprefix('#').strip()}")
    return 0


def _health(arguments: Arguments) -> int:
    from services.cli.health import health  # noqa: PLC0415

    well, sentence = health(ready=arguments.ready, overrides=arguments.overrides, environ=os.environ)
    print(sentence)
    return 0 if well else 1


def _keys(arguments: Arguments) -> int:
    from services.cli.keys import keys  # noqa: PLC0415

    assert arguments.directory is not None
    print(keys(arguments.directory, arguments.peers))
    return 0


def _version(_: Arguments) -> int:
    from importlib.metadata import version  # noqa: PLC0415

    print(f"rookery {version('rookery')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
