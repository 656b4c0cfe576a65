"""Where a run's YAML comes from: a preset that ships with the package, or a file of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path

from common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """YAML text, the name a run of it goes by, and its source in words."""

    name: str
    source: str
    text: str


def preset_names() -> tuple[str, ...]:
    """The presets that ship, sorted."""
    return tuple(
        sorted(entry.name.removesuffix(".yaml") for entry in resources.files("presets").iterdir() if entry.name.endswith(".yaml"))
    )


def find_preset(name: str) -> Preset:
    """The preset called `name`, or the file where `name` ends in .yaml or .yml. Raises `ConfigError` with close matches."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        try:
            return Preset(name=path.stem, source=f"file {name}", text=path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
            raise ConfigError(
                f"configuration file cannot be read: {reason}", found=name, wanted="a readable YAML file"
            ) from error
    names = preset_names()
    if name not in names:
        close = get_close_matches(name, names, n=2)
        fix = f"did you mean {' or '.join(close)}?" if close else "or the path of your own .yaml file"
        raise ConfigError("unknown preset", found=repr(name), wanted=f"one of {', '.join(names)}", fix=fix)
    return Preset(
        name=name, source=f"preset {name}", text=(resources.files("presets") / f"{name}.yaml").read_text(encoding="utf-8")
    )
