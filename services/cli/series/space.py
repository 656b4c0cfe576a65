"""The file of a sweep: which settings are searched, in which ranges, and what the search maximises."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from common.config.errors import schema_at
from common.config.layers import comparable, dotted, parse_yaml
from common.config.load import read_text
from common.config.sections import Section
from common.errors import ConfigError
from services.cli.series.grid import split_values

Goal: TypeAlias = Literal["mean100", "evaluation", "curve"]


class Range(Section):
    """All numbers from `low` to `high`, whole ones where both are whole; `log`: equal ratios are equally likely."""

    low: int | float
    high: int | float
    log: bool = False

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.low >= self.high or (self.log and self.low <= 0):
            raise ValueError("low < high, and 0 < low where log is true")
        return self

    @property
    def whole(self) -> bool:
        """True where only whole numbers are tried."""
        return isinstance(self.low, int) and isinstance(self.high, int)


class Choices(Section):
    """One of some values of any type."""

    choices: list[Any] = Field(min_length=2)


def _form(part: object) -> str:
    """Return which of the two forms a searched setting has, so that errors are of this one."""
    return "Choices" if isinstance(part, Choices) or (isinstance(part, dict) and "choices" in part) else "Range"


class Sweep(Section):
    """A search for the settings with which a preset learns best."""

    preset: str
    settings: dict[str, Any] = Field(default={})  # of all trials, by dotted key
    search: dict[str, Annotated[Annotated[Range, Tag("Range")] | Annotated[Choices, Tag("Choices")], Discriminator(_form)]] = (
        Field(min_length=1)  # by dotted key
    )
    trials: int = Field(default=20, ge=1)
    goal: Goal = "curve"  # mean of the learning curve over the whole budget, which counts early learning too
    prune: bool = True  # stop a trial that is below the median of the earlier ones

    def require_once(self) -> None:
        """Raise `ConfigError` for a setting both of all trials and searched, and for equal choices."""
        if twice := dotted(self.settings).keys() & self.search.keys():
            found = ", ".join(sorted(twice))
            raise ConfigError("the sweep sets what it searches", found=found, wanted="`settings` or `search`, not both")
        for key, part in self.search.items():
            if isinstance(part, Choices) and len(set(map(comparable, part.choices))) < len(part.choices):
                raise ConfigError(f"choices of {key}", found=part.choices, wanted="different ones")

    def overrides(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the settings of a trial with `values` for the settings that are searched, as `section.key=value`."""
        return tuple(f"{key}={as_text(key, value)}" for key, value in {**self.settings, **values}.items())

    def corners(self) -> Iterator[dict[str, Any]]:
        """Yield trials that contain each bound and each choice at least once, to check them before the first run."""
        tried = {key: part.choices if isinstance(part, Choices) else [part.low, part.high] for key, part in self.search.items()}
        for number in range(max(map(len, tried.values()))):
            yield {key: values[min(number, len(values) - 1)] for key, values in tried.items()}


def as_text(key: str, value: Any) -> str:
    """Return the text of a value as `section.key=value` takes it: of text in quotes what would be read as something else."""
    if isinstance(value, str) and (schema_at(key.split("."), {}) or {}).get("type") == "string":
        return value  # a setting that takes any text as it is
    try:
        plain = isinstance(value, str) and [parse_yaml(each, source="") for each in split_values(value)] == [value]
    except ConfigError:
        plain = False
    return value if plain else json.dumps(value)


def read_sweep(path: Path) -> Sweep:
    """Return the sweep in the file `path`. Raises `ConfigError` for the first value that is not valid."""
    text = read_text(str(path), what="file of the sweep", wanted="a YAML file")
    values = parse_yaml(text, source=f"file {path}")
    try:
        return Sweep.model_validate(values, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(str(part) for part in first["loc"] if part not in {"Range", "Choices"})
        found = "nothing" if first["type"] == "missing" else first["input"]
        example = (
            "; a searched setting is {low: 1e-4, high: 1e-2, log: true} or {choices: [1, 2]}" if key.startswith("search") else ""
        )
        raise ConfigError(f"{path} {key}".rstrip(), found=found, wanted=first["msg"] + example) from error
