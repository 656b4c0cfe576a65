"""How a run begins: its name, its directory, its record and session; all new, or as an earlier life of the run left them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from common.algorithms.api import Algorithm, Remembers, SavesReplay
from common.algorithms.registry import build_algorithm, shipment
from common.algorithms.shipment import Shipment
from common.envs.spec import EnvSpec
from common.errors import ConfigError, DropReason, ResourceError
from common.models import arithmetic
from common.models.snapshot import Layout
from common.runtime import checkpoints, config, layers, logs, memory, run_directory
from common.runtime.checkpoints import Checkpoint
from common.runtime.disk import write_atomically
from common.runtime.run_directory import RunDirectory
from common.runtime.segments import SegmentFiles
from common.runtime.tree import RunConfig, Settings
from common.session.learner_side import LearnerSide
from common.session.roster import Terms
from common.units import Seconds
from common.wire.messages import ACTOR_STATE, ArraySpec
from services.learner import accounts
from services.learner.lockstep import Lockstep
from services.learner.record import RunRecord
from services.learner.settings import Invocation

STATE = ArraySpec(name=ACTOR_STATE, dtype="uint8", shape=(-1,))

_log = logs.EventLog(__name__)


def identified(invocation: Invocation) -> Invocation:
    """Give a new run its id before anything is written, so that its own config.yaml tells it to a resumed learner."""
    run = invocation.settings.run
    chosen = run.id or _earlier_id(invocation) or f"{run.preset or 'run'}-{secrets.token_hex(4)}"
    return replace(invocation, loaded=config.settle(invocation.loaded, {"run.id": chosen}))


def _earlier_id(invocation: Invocation) -> str:
    """The id that a run which goes on began with: its peers know it by that, though no checkpoint was written yet."""
    if not invocation.resume or invocation.run_dir is None:
        return ""
    own = RunDirectory(invocation.run_dir)
    values = layers.parse(own.config.read_text(encoding="utf-8"), source=str(own.config)) if own.begun else None
    run = values.get("run") if isinstance(values, dict) else None
    return str(run.get("id", "")) if isinstance(run, dict) else ""


def build(settings: Settings, env: EnvSpec, *, seed: int) -> Algorithm:
    """The algorithm of the run, and a line each on its scaled learning rate and on how large its memory is, where it has them.

    Raises `ConfigError` where it cannot train on `env`, or where its memory is larger than what this machine has left.
    """
    fix, available = "lower algorithm.replay_capacity", memory.available_bytes()
    section, device = settings.algorithm.scaled(settings.scale), device_of(settings.learner.device)
    if section.learning_rate != settings.algorithm.learning_rate:
        _log.info("learning_rate_scaled", learning_rate=section.learning_rate, environments=settings.scale.environments)
    if arithmetic.native(section.precision, device) != section.precision:
        _log.info("no_bfloat16", setting="algorithm.precision", device=device.type, precision="fp32")
    try:
        algorithm = build_algorithm(section, model=settings.model, env=env, seed=seed, device=device)
    except MemoryError as error:  # larger than what the system would ever promise
        wanted = None if available is None else f"at most {available / 1e9:.1f} GB"
        raise ConfigError("the replay memory cannot be allocated", found=str(error), wanted=wanted, fix=fix) from error
    if settings.checkpoint.replay and not isinstance(algorithm, SavesReplay):
        fact = f"{section.name} cannot hand over its replay memory"
        raise ConfigError(fact, found="checkpoint.replay true", wanted="what common.algorithms.api.SavesReplay names, or false")
    if isinstance(algorithm, Remembers):
        needed = algorithm.replay_bytes
        if available is not None and needed > available:
            found, wanted = (f"{size / 1e9:.1f} GB" for size in (needed, available))
            fact = f"the replay memory of {algorithm.replay_env_steps:,} env steps is larger than what is free here"
            raise ConfigError(fact, found=found, wanted=f"at most {wanted}", fix=fix)
        _log.info("replay_allocated", env_steps=algorithm.replay_env_steps, gigabytes=round(needed / 1e9, 3))
    return algorithm


def device_of(name: str) -> torch.device:
    """Where the networks are trained. Raises `ConfigError` where that is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        kind = f"built for CUDA {torch.version.cuda}, and no device" if torch.version.cuda else "built for CPUs"
        raise ConfigError(
            "there is no GPU to train on",
            found=f"torch {torch.__version__}, {kind}",
            wanted="a device that CUDA sees",
            fix="run where there is one (in a container: the image rookery-learner-gpu), or set learner.device=cpu",
        )
    return torch.device(name)


def open_directory(invocation: Invocation, words: Sequence[str]) -> RunDirectory:
    """The run directory: made by who starts us, or found again, or new. Raises `ConfigError` or `ResourceError`."""
    run, path = invocation.settings.run, invocation.run_dir
    if path is not None and (
        invocation.resume or (RunDirectory(path).begun and not RunDirectory(path).learning_curve_csv.exists())
    ):
        return run_directory.find(path)  # a restarted learner trains on a read-only disk, with a warning
    if path is None:
        path = run_directory.default_path(preset=run.preset, seed=run.seed, now=datetime.now(UTC).astimezone())
    return run_directory.create(path, config=_config_text(invocation, path), command=["rookery", "learner", *words])


def write_config(invocation: Invocation, directory: RunDirectory) -> None:
    """Write the settings of this learner to the run's config.yaml, where an earlier process began with others.

    Call it once the run is known to continue with them. A disk that cannot be written costs a warning.
    """
    text = _config_text(invocation, directory.path)
    if invocation.config_named or _values(directory.config.read_text(encoding="utf-8")) == _values(text):
        return
    try:
        write_atomically(directory.config, text.encode())
    except OSError as error:
        _log.warning("config_not_written", path=directory.config, error=error, consequence="it holds the settings of before")
    else:
        _log.info("config_written", path=directory.config, why="the run goes on with other settings")


def _config_text(invocation: Invocation, path: Path) -> str:
    settled = config.settle(invocation.loaded, {"run.dir": str(path)})
    return config.as_yaml(settled.settings, settled.provenance)


def _values(text: str) -> list[str]:
    """Return the lines of a configuration without the comments that name the source of each value."""
    return [line.partition("  # ")[0] for line in text.splitlines()]


def open_state(
    invocation: Invocation, directory: RunDirectory, *, algorithm: Algorithm, env: EnvSpec, segment_files: SegmentFiles
) -> tuple[RunRecord, LearnerSide]:
    """The run's record and session: new, or as the newest good checkpoint left them, and the algorithm with them."""
    settings = invocation.settings
    size = {"length": settings.rollout.length, "num_envs": settings.env.num_envs}
    ships = shipment(settings.algorithm, model=settings.model, env=env, **size)

    def new(run_id: str) -> tuple[RunRecord, LearnerSide]:
        began = _began(directory, resumed=invocation.resume)
        record = RunRecord(settings=settings, run_id=run_id, frame_skip=env.frame_skip, started_at=began)
        return record, LearnerSide(terms(settings, env, ships, run_id), check=ships.check, episodes=ships.episodes)

    def take(checkpoint: Checkpoint) -> None:
        record, session = new(checkpoint.run_id)  # peers that outlived the learner know this one
        go_on(checkpoint, algorithm=algorithm, record=record, session=session, segment_files=segment_files)
        taken.append((record, session))

    if not invocation.resume:
        return new(settings.run.id)
    taken: list[tuple[RunRecord, LearnerSide]] = []
    warn = partial(_log.warning, "checkpoint_skipped")
    architecture = Layout.of(algorithm.model).fingerprint
    checkpoints.load_newest(directory.checkpoints, architecture=architecture, warn=lambda detail: warn(detail=detail), take=take)
    record, session = taken[0] if taken else new(settings.run.id)
    _roll_back(directory, record, session)
    if taken:
        _log.info("resumed", version=record.version, env_steps=record.env_steps)
    return record, session


def _roll_back(directory: RunDirectory, record: RunRecord, session: LearnerSide) -> None:
    """Count as rolled back the messages that a killed learner had trained on after the checkpoint."""
    try:
        state = accounts.read(directory.accounts, run_id=record.run_id, produced=session.ledger.produced)
    except ResourceError as error:
        _log.warning("accounts_skipped", error=error, consequence="what was trained on after the checkpoint is not counted")
        return
    if state is not None:
        session.load_accounts(state)
        _log.info("rolled_back", env_steps=session.ledger.dropped[DropReason.ROLLED_BACK])


def go_on(
    checkpoint: Checkpoint, *, algorithm: Algorithm, record: RunRecord, session: LearnerSide, segment_files: SegmentFiles
) -> None:
    """Restore all three from `checkpoint`; the replay memory too, where the run's checkpoints hold it."""
    record.load_state_dict(checkpoint.counters["record"], time.monotonic())
    session.load_state_dict(checkpoint.counters["session"])
    algorithm.load_state_dict(checkpoint.state)
    complete = not isinstance(algorithm, Remembers)
    if isinstance(algorithm, SavesReplay) and record.settings.checkpoint.replay and checkpoint.replay is not None:
        algorithm.load_replay_state(checkpoint.replay)
        segment_files.read(checkpoint.files, algorithm.replay_segments())
        complete = True
    if not complete and not record.lockstep_broken:
        record.lockstep_broken = "resumed without the replay memory, wanted checkpoint.replay=true"


def _began(directory: RunDirectory, *, resumed: bool) -> Seconds:
    """When the run directory was made, on the monotonic clock: starting up is part of the run's time, lying idle is not."""
    if resumed:
        return time.monotonic()
    age = time.time() - directory.command.stat().st_mtime
    return time.monotonic() - max(0.0, age)


def terms(settings: Settings, env: EnvSpec, ships: Shipment, run_id: str) -> Terms:
    """What this run offers its peers, whose experience comes as `ships` says."""
    lockstep = Lockstep.of(settings)
    return Terms(
        run=run_id,
        config=RunConfig.of(settings, run_id=run_id).to_json(),
        env_signature=env.signature,
        schema=(*ships.schema, *([STATE] if lockstep else [])),
        credits=lockstep.share if lockstep else settings.learner.credits,
        batch=settings.batch,
        max_actors=lockstep.actors if lockstep else settings.learner.max_actors,
        lockstep=lockstep is not None,
    )
