"""The weights that a run begins with, of `--init RUN` or its own at a resume, and a sentence on settings that differ there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.algorithms.sections import ReplaySection
from common.config.layers import dotted, parse_yaml
from common.config.schema import Settings
from common.errors import ConfigError
from common.runtime import manifests
from common.runtime.run_directory import MANIFEST, RunDirectory, read_config

COMPARED = ("env", "model")


def find_checkpoint(path: Path) -> Path:
    """Return the absolute path of a checkpoint: `path` itself, or the newest one of the run in `path`. Raises `ConfigError`."""
    folder = RunDirectory(path).checkpoints
    found = [path] if (path / MANIFEST).is_file() else sorted(folder.glob("checkpoint-*/"))
    if not found:
        where = f"no checkpoint in {folder}" if RunDirectory(path).begun else f"no run in {path}"
        raise ConfigError("--init names no weights", found=where, wanted="a run directory with a checkpoint, or a checkpoint")
    return found[-1].absolute()


def describe(checkpoint: Path, settings: Settings) -> str:
    """Return one sentence: which weights the run starts with, and which settings of env and model were others there."""
    own = RunDirectory(checkpoint.parent.parent)
    try:
        manifest = manifests.body((checkpoint / MANIFEST).read_bytes())
        values = read_config(own)
        start = f"starts with the weights of {checkpoint}, version {manifest['version']}, {manifest['env_steps']:,} env steps"
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return f"starts with the weights of {checkpoint}"  # the learner reads the checkpoint, and checks it
    changes = list(_changes(values, settings.model_dump(mode="json")))
    return f"{start}; " + (f"other settings there: {'; '.join(changes)}" if changes else "env and model are the same there")


def describe_resume(config: bytes, settings: Settings) -> str:
    """Return one sentence where the environment is another one than by `config`, the run's config.yaml before; "" where not."""
    changes = settings.env.task_changes(parse_yaml(config.decode(), source="config.yaml").get("env", {}))
    anew = "best and replay memory begin" if isinstance(settings.algorithm, ReplaySection) else "best begins"
    return f"{changes}: returns and evaluations of before do not count any more, and {anew} anew" if changes else ""


def _changes(there: Any, here: dict[str, Any]) -> Iterator[str]:
    """Yield each setting of the compared sections that differs; of the algorithm only its name."""
    before, now = (
        dotted({name: tree.get(name, {}) for name in COMPARED}) | {"algorithm.name": tree["algorithm"]["name"]}
        for tree in (there, here)
    )
    for key in before | now:
        if before.get(key) != now.get(key):
            yield f"{key} {before.get(key)}, here {now.get(key)}"
