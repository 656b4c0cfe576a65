"""State with which a run begins: its record and session, new or as a checkpoint left them, and the algorithm with them.

A resumed run continues from the newest good checkpoint in its directory. What a killed learner trained on since is rolled back.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import safetensors.torch

from common.algorithms.api import Algorithm, HasReplay, LoadsParameters
from common.algorithms.payload import Payload
from common.algorithms.registry import build_payload
from common.config.run_config import RunConfig
from common.config.schema import Settings
from common.envs.spec import EnvSpec
from common.errors import ConfigError, DropReason, ResourceError
from common.models.snapshot import ParameterLayout
from common.observability import logs
from common.protocol.learner_side import LearnerSide
from common.protocol.messages import ACTOR_STATE, ArraySpec
from common.protocol.session_config import SessionConfig
from common.runtime import lifecycle
from common.runtime.checkpoint_files import POLICY, BadCheckpointError, Checkpoint, flatten_state, read, restore_state
from common.runtime.checkpoints import CheckpointStore
from common.runtime.process_group import ProcessGroup
from common.runtime.run_directory import RunDirectory
from services.learner import accounts
from services.learner.lockstep import Lockstep
from services.learner.ranks import common_version
from services.learner.rates import PolicyLag
from services.learner.record import RunRecord
from services.learner.saving import facts_of, ranks_of, restore_checkpoint, restore_without_sessions
from services.learner.startup import Invocation

RunState: TypeAlias = tuple[RunRecord, LearnerSide]

STATE = ArraySpec(name=ACTOR_STATE, dtype="uint8", shape=(-1,))

NAMED_LAYERS = 3  # in an error

RANDOM_STREAMS = ("replay_rng", "generator")  # in the state of an algorithm

_log = logs.EventLog(__name__)


def open_state(
    invocation: Invocation,
    directory: RunDirectory,
    *,
    algorithm: Algorithm,
    env: EnvSpec,
    store: CheckpointStore,
    group: ProcessGroup | None = None,
) -> RunState:
    """Return the run's record and session: new, or as the newest good checkpoint left them, and the algorithm with them.

    The ranks of a `group` continue from the newest version of which each has a good checkpoint. Where there is none, or one of
    them is of another number of ranks, rank 0 continues from its own newest, with the ledgers and the policy lag of all ranks,
    and the others get its weights.
    """
    settings = invocation.settings
    new = partial(_new_state, invocation, env, group)
    if not invocation.resume:
        _load_initial_weights(settings.run.init, algorithm)
        return new(settings.run.id)
    index, count = (0, 1) if group is None else (group.index, group.count)
    architecture, warn = ParameterLayout.of(algorithm.model).fingerprint, partial(_log.warning, "checkpoint_skipped")
    load_newest = partial(store.load_newest, architecture=architecture, state_settings=settings.state_settings)
    newest = partial(store.newest_good, fits=lambda checkpoint: ranks_of(checkpoint) == count)
    version = None if group is None else common_version(group, newest)
    alone = version is not None and version < 0  # rank 0 continues from its own checkpoint, or all ranks begin

    def restored(checkpoint: Checkpoint) -> tuple[RunRecord, LearnerSide, bool]:
        record, session = new(checkpoint.run_id)  # workers that outlived the learner have this one
        ended = alone or (group is None and ranks_of(checkpoint) != 1)  # their sessions are of another number of ranks
        if ended:
            restore_without_sessions(checkpoint, algorithm=algorithm, record=record, session=session)
        else:
            restore_checkpoint(checkpoint, algorithm=algorithm, record=record, session=session, store=store)
        return record, session, ended

    found = None
    if not alone or index == 0:
        most = None if alone else version
        found = load_newest(warn=lambda detail: warn(detail=detail), restore=restored, most=most)
    if group is not None and not alone and (loaded := found[0].version if found else None) != version:
        fix = "look at the line checkpoint_skipped of this log, and remove that checkpoint of every rank"
        raise ResourceError(f"rank {index} cannot load the version of all ranks", found=loaded, wanted=version, fix=fix)
    if found is None:
        _load_initial_weights(settings.run.init, algorithm)
    record, session, ended = found or (*new(settings.run.id), False)
    if group is not None and alone:
        ended = _share_state(group, record, algorithm, known=found is not None)
    _roll_back(directory, record, session, ended=ended)
    if index == 0:
        record.best = facts_of(store.load_best(warn=lambda detail: warn(detail=detail)), settings.env)
    if found or record.updates:
        more: dict[str, Any] = {} if group is None else {"ranks": count, "sessions": not ended}
        memory = ", replay memory" if isinstance(algorithm, HasReplay) else ""
        more |= {"begins_anew": f"returns, best{memory}: {record.task_changed}"} if record.task_changed else {}
        _log.info("resumed", version=record.version, env_steps=record.env_steps, **more)
    return record, session


def _new_state(invocation: Invocation, env: EnvSpec, group: ProcessGroup | None, run_id: str) -> RunState:
    """Return the state of a run without updates. The start of this process, with its imports, is part of the run's time."""
    settings = invocation.settings
    size = {"length": settings.rollout.length, "num_envs": settings.env.num_envs}
    payload = build_payload(settings.algorithm, model=settings.model, env=env, **size)
    record = RunRecord(settings=settings, run_id=run_id, frame_skip=env.frame_skip, started_at=lifecycle.STARTED)
    config = session_config(settings, env, payload, run_id, group=group)
    return record, LearnerSide(config, check=payload.check, episodes=payload.episodes, resumed=invocation.resume)


def session_config(
    settings: Settings, env: EnvSpec, payload: Payload, run_id: str, *, group: ProcessGroup | None = None
) -> SessionConfig:
    """Return the session config of this run, for workers that send experience in the form of `payload`."""
    rank, ranks = (0, 1) if group is None else (group.index, group.count)
    lockstep = Lockstep.of(settings)
    return SessionConfig(
        run=run_id,
        run_config=RunConfig.of(settings, run_id=run_id).model_dump_json(),
        env_signature=env.signature,
        schema=(*payload.schema, *([STATE] if lockstep else [])),
        credits=lockstep.share if lockstep else settings.learner.credits,
        rollout_env_steps=settings.rollout.length * settings.env.num_envs,
        batch=settings.batch,
        max_actors=lockstep.actors if lockstep else settings.learner.max_actors,
        rank=rank,
        ranks=ranks,
        lockstep=lockstep is not None,
    )


def _share_state(group: ProcessGroup, record: RunRecord, algorithm: Algorithm, *, known: bool) -> bool:
    """Give all ranks the record and the algorithm's state of rank 0, and return True, where it has a checkpoint (`known`).

    Random streams stay those of each rank: with the same ones, all would draw the same samples and the same noise. So does the
    policy lag: the summary adds up those of all ranks.
    """
    now = time.monotonic()
    shared = {name: value for name, value in algorithm.state_dict().items() if name not in RANDOM_STREAMS}
    state = {"record": record.state_dict(now), "algorithm": shared} if known else {}
    structure, tensors = flatten_state(state)
    header = group.broadcast_bytes(json.dumps(structure).encode())
    data = group.broadcast_bytes(safetensors.torch.save(tensors) if known else b"")
    if data and group.index:
        received = restore_state(json.loads(header), safetensors.torch.load(data))
        record.load_state_dict(received["record"], now)
        record.lag = PolicyLag()
        algorithm.load_state_dict(received["algorithm"])
    return bool(data)


def _roll_back(directory: RunDirectory, record: RunRecord, session: LearnerSide, *, ended: bool) -> None:
    """Count as rolled back the messages that a killed learner had trained on after the checkpoint.

    The accounts of sessions that have `ended` are removed: their env steps are in the ledger of the checkpoint.
    """
    if ended:
        session.saved.begin_anew(record.env_steps)
        with suppress(OSError):
            directory.accounts.unlink()
        return
    try:
        state = accounts.read(directory.accounts, run_id=record.run_id, produced=session.ledger.produced)
    except ResourceError as error:
        _log.warning("accounts_skipped", error=error, consequence="what was trained on after the checkpoint is not counted")
        return
    if state is not None:
        before = session.ledger.dropped[DropReason.ROLLED_BACK]
        session.saved.load_accounts(state)
        if env_steps := session.ledger.dropped[DropReason.ROLLED_BACK] - before:
            _log.info("rolled_back", env_steps=env_steps)


# --- weights of another run ---


def _load_initial_weights(path: str, algorithm: Algorithm) -> None:
    """Load the weights of the checkpoint in `path` (`run.init`) into a run without updates; "": they stay random."""
    if not path:
        return
    if not isinstance(algorithm, LoadsParameters):
        fact, wanted = "run.init: the algorithm cannot start with other weights", "one with the method of rookery.LoadsParameters"
        raise ConfigError(fact, found=type(algorithm).__name__, wanted=wanted)
    fact, fix = f"run.init {path} cannot be used", "name another checkpoint"
    try:
        checkpoint = read(Path(path), segments=False)
    except BadCheckpointError as error:
        raise ResourceError(fact, found=str(error), wanted="a whole checkpoint", fix=fix) from error
    if POLICY in checkpoint.state:
        raise ResourceError(fact, found="a policy alone, as in best", wanted="all networks of a run", fix=fix)
    try:
        algorithm.load_parameters(checkpoint.state)
    except ResourceError as error:
        found, wanted = _layers(error.found), _layers(error.wanted)
        fix = "choose env, model and algorithm so that the network has the same layers"
        raise ResourceError(f"the weights of {path} do not fit", found=found, wanted=wanted, fix=fix) from error
    _log.info("weights_loaded", path=path, version=checkpoint.version, env_steps=checkpoint.env_steps, run=checkpoint.run_id)


def _layers(shapes: object) -> str:
    named = list(shapes.items()) if isinstance(shapes, dict) else []
    more = f" and {len(named) - NAMED_LAYERS} more" if len(named) > NAMED_LAYERS else ""
    return ", ".join(f"{name} {shape}" for name, shape in named[:NAMED_LAYERS]) + more or "no such parameters"
