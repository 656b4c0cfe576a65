"""Loads the policy of a run from a checkpoint, without a learner or a connection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from torch import Tensor

from common import extensions
from common.algorithms.api import WorkerContext
from common.algorithms.registry import build_algorithm, build_policy
from common.algorithms.sections import ReplaySection
from common.config.code_references import named_modules
from common.config.load import load_settings
from common.config.schema import Settings
from common.envs.spec import EnvSpec
from common.envs.trial import spec_of, trial
from common.errors import ConfigError, ResourceError
from common.models import snapshot
from common.policies.environment import OF_LEARNERS
from common.policies.trained import TrainedPolicy, require_fit, require_heeded, with_changes
from common.runtime import checkpoints
from common.runtime.checkpoint_files import POLICY, BadCheckpointError, Checkpoint, read
from common.runtime.checkpoints import BEST, STATE_SETTINGS, require_architecture
from common.runtime.copies import fetch
from common.runtime.run_directory import MANIFEST, RunDirectory, read_config
from common.units import Version

NEWEST: Final = "newest"
_SEEDS = 2**63  # those of torch's generators have 64 bits and a sign
_REPLAY_ENV_STEPS = 100_000  # of the memory of a learner that only restores its network: enough for any windows
_REPLAY_ROLLOUTS = 1_000  # and for the sequences of a network with memory


def load_policy(
    path: str | Path,
    *,
    checkpoint: str | Version = NEWEST,
    overrides: Sequence[str] = (),
    seed: int = 1,
    allow_code: Sequence[str] = (),
) -> TrainedPolicy:
    """Return the policy of a run.

    The run's config.yaml may name code, which is imported where it is in the current directory or in `allow_code`.

    Args:
        path: directory of a run, or of one checkpoint in it, or the address of its copy in a bucket, as text.
        checkpoint: "newest", "best" (by evaluation), or the version of a checkpoint, where `path` is a run.
        overrides: settings that differ from the run's, as text: "env.sticky_actions=0.25".
        seed: of actions that are drawn, 0 to 2**63 - 1.
        allow_code: packages of any place that the run may name.

    Raises:
        ConfigError: there is no such run or checkpoint, its settings are not those of this version, or name other code; the seed
            is no such number.
        ResourceError: the checkpoint is damaged, or does not fit the settings.
    """
    if not (isinstance(seed, int | np.integer) and 0 <= seed < _SEEDS):
        raise ConfigError("seed of drawn actions", found=repr(seed), wanted="an integer from 0 to 2**63 - 1")
    overrides, allow_code = ((each,) if isinstance(each, str) else each for each in (overrides, allow_code))
    directory, folder, saved = _read(fetch(str(path)), checkpoint)
    with extensions.restricted((*allow_code, *named_modules(overrides)), run=directory.path):
        return _load(directory, folder, saved, overrides, int(seed), best=checkpoint == BEST)


def _load(
    directory: RunDirectory, folder: Path, saved: Checkpoint, overrides: Sequence[str], seed: int, *, best: bool
) -> TrainedPolicy:
    settings = _settings(directory, overrides)
    if model := saved.counters.get(STATE_SETTINGS, {}).get("model"):  # a resume may have changed those without a parameter
        settings = with_changes(settings, "model", model, source=str(folder))
    if best:
        _require_same_task(directory, folder, saved)
    with trial(settings.env) as environment:
        spec, agents, to_native = environment.spec, environment.agents, environment.to_native
        require_heeded(settings.env, overrides, [*OF_LEARNERS, *environment.unheeded])
    if overrides and (own := _own_spec(directory)):
        require_fit(spec, own, overrides)
    policy = build_policy(
        settings.algorithm,
        model=settings.model,
        env=spec,
        precision="fp32",
        seed=seed,
        context=WorkerContext(index=0, workers=1, num_envs=1, training=False),
    )
    fix = "leave out settings that change observations, actions or the network"
    require_architecture(saved, folder, policy.layout, settings.state_settings, fix=fix)
    policy.load(saved.version, _parameters(saved, settings, spec), env_steps=saved.env_steps)
    return TrainedPolicy(
        env=spec,
        agents=agents,
        version=saved.version,
        env_steps=saved.env_steps,
        run_id=saved.run_id,
        settings=settings,
        policy=policy,
        to_native=to_native,
    )


def _read(path: Path, checkpoint: str | Version) -> tuple[RunDirectory, Path, Checkpoint]:
    """Return the run, the directory of the checkpoint, and its content. Raises `ConfigError` or `ResourceError`."""
    directory, folder = _find(path, checkpoint)
    while True:
        try:
            return directory, folder, read(folder, segments=False)
        except BadCheckpointError as error:
            bad, (_, folder) = folder, _find(path, checkpoint)
            if folder == bad:  # else a run that goes on has replaced its newest checkpoint
                fix = "name another version, or copy the checkpoint again"
                raise ResourceError(
                    f"checkpoint {bad} cannot be used", found=str(error), wanted="a whole one", fix=fix
                ) from error


def _own_spec(directory: RunDirectory) -> EnvSpec | None:
    """Return the spec of the run's environment; None where it cannot be built here, which other settings may mend."""
    try:
        return spec_of(_settings(directory, ()).env)
    except ConfigError:
        return None


def _find(path: Path, checkpoint: str | Version) -> tuple[RunDirectory, Path]:
    """Return the run, and the directory of the checkpoint, that `path` and `checkpoint` name. Raises `ConfigError`."""
    alone = (path / MANIFEST).is_file()
    directory = RunDirectory(path.absolute().parent.parent if alone else path)
    if alone and path.absolute().parent != directory.checkpoints:  # a link to the checkpoint
        directory = RunDirectory(path.resolve().parent.parent)
    if not directory.begun:
        raise ConfigError(
            "no run to load a policy from",
            found=f"no {directory.config.name} in {directory.path}",
            wanted="the directory of a run, or of a checkpoint in one",
        )
    if alone:
        if checkpoint != NEWEST:
            fix = "name the directory of the run, or no checkpoint"
            raise ConfigError("two checkpoints named", found=f"{path} and {checkpoint}", wanted="one", fix=fix)
        return directory, path
    known = checkpoints.by_version(directory.checkpoints)
    best = checkpoints.best_places(directory.checkpoints)
    names = [*([BEST] if best else []), *map(str, known)]
    if not names:
        fix = "the first one is written after checkpoint.every_seconds, or when the run ends"
        raise ConfigError("the run has no checkpoint", found=f"none in {directory.checkpoints}", wanted="at least one", fix=fix)
    if checkpoint == NEWEST and known:
        return directory, next(iter(known.values()))
    if str(checkpoint) not in names:
        wanted = f"{NEWEST} or one of {', '.join(names)}"
        raise ConfigError(f"the run in {path} has no such checkpoint", found=str(checkpoint), wanted=wanted)
    return directory, best[0] if checkpoint == BEST else known[int(checkpoint)]


def _require_same_task(directory: RunDirectory, folder: Path, best: Checkpoint) -> None:
    """Refuse (ConfigError) the best policy of the environment that a run had before it was resumed with another."""
    before = best.counters.get(STATE_SETTINGS, {}).get("env", {})
    if changes := _settings(directory, ()).env.task_changes(before):
        fact, fix = "the best policy is of another environment than the run's", f"name the newest, or {folder} for this one"
        raise ConfigError(fact, found=changes, wanted="a greedy evaluation since the change", fix=fix)


def _settings(directory: RunDirectory, overrides: Sequence[str]) -> Settings:
    """Return the settings of the run, changed by `overrides`. Raises `ConfigError`."""
    if other := [text for text in overrides if not text.startswith("env.")]:
        raise ConfigError("a trained policy takes no other settings", found=other[0], wanted="env.key=value")
    config = str(directory.config)
    read_config(directory)
    try:
        settings = load_settings(preset=config, environ={}).settings
    except extensions.NotAllowedError:
        raise
    except ConfigError as error:
        raise ConfigError(f"{error}; the run may be of another version of rookery, or of your own packages") from error
    return load_settings(preset=config, overrides=overrides, environ={}, strict=True).settings if overrides else settings


def _parameters(saved: Checkpoint, settings: Settings, env: EnvSpec) -> Tensor:
    """Return the parameters [P] of the policy: those of a checkpoint of a policy alone, else those that its learner published."""
    if POLICY in saved.state:
        alone: Tensor = saved.state[POLICY]
        return alone
    section = settings.algorithm
    if isinstance(section, ReplaySection):
        most = max(_REPLAY_ENV_STEPS, _REPLAY_ROLLOUTS * settings.rollout.length)
        section = section.model_copy(update={"replay_capacity": min(section.replay_capacity, most)})
    algorithm = build_algorithm(section, model=settings.model, env=env, seed=0, length=settings.rollout.length)
    try:
        algorithm.load_state_dict(saved.state)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise ResourceError("the checkpoint does not fit the settings of its run", found=found) from error
    return snapshot.to_tensor(snapshot.flatten(algorithm.model, "fp32"))
