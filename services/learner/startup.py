"""Start of the learner, in the order in which it runs: command line, run id, algorithm, run directory and its config.yaml."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from common.algorithms.api import Algorithm, HasReplay, SavesReplay
from common.algorithms.ranks import ALONE, Ranks
from common.algorithms.registry import build_algorithm, build_payload
from common.config import arguments
from common.config.load import as_yaml, with_absolute_key_paths, with_chosen
from common.config.schema import Settings
from common.envs.spec import EnvSpec
from common.errors import ConfigError, ResourceError
from common.models import arithmetic
from common.models.snapshot import ParameterLayout
from common.observability import logs
from common.protocol.arrays import DTYPES
from common.protocol.limits import ARRAY_BYTES
from common.runtime import machine, run_directory
from common.runtime.copies import check_resumed, copy_address, restore_missing
from common.runtime.disk import write_atomically
from common.runtime.run_directory import RunDirectory, is_config_of_a_run, require_same_run
from common.runtime.store import run_id

STOPPED_JOB = 1  # exit code of a learner that was stopped before the end of its run, with `--job`

_log = logs.EventLog(__name__)


# --- command line ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation(arguments.Invocation):
    """Command line of the learner; `run_dir` None: `open_directory` chooses."""

    run_dir: Path | None
    resume: bool
    run_lock: int | None  # descriptor of the run directory's lock, inherited from `rookery train`
    job: bool = False  # after a stop the exit code is `STOPPED_JOB`, so that the process is started again
    config_named: bool  # whether `--config` is the run's own config.yaml: `rookery train` writes that file, the learner does not


def _print_warning(text: str) -> None:  # before the log is configured
    sys.stderr.write(f"rookery learner: {text}\n")


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Invocation:
    """Read the command line. Raises `ConfigError`; argparse itself exits with 2 for an unknown option."""
    description = "Train on the experience of the actors, publish the policy, keep the run directory."
    parser = arguments.service_parser("learner", description, "rookery learner --config pong learner.bind=tcp://127.0.0.1:5700")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="where the run is kept (run.dir)")
    parser.add_argument("--keys", metavar="DIR", help="folder of keys: encrypt, and accept only known workers (learner.keys)")
    parser.add_argument("--run-lock", type=int, metavar="FD", help="the run's lock, as rookery train passes it to its learner")
    parser.add_argument(
        "--job", action="store_true", help="for a Job of Kubernetes: exit code 0 at the end of the run, 1 of a stop"
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in the run directory")
    start.add_argument("--resume-if-found", action="store_true", help="the same where the directory holds a run; else begin it")
    parsed = parser.parse_intermixed_args(argv)
    continues = parsed.resume or parsed.resume_if_found
    config_named = None not in (parsed.config, parsed.run_dir) and Path(parsed.config) == RunDirectory(parsed.run_dir).config
    if parsed.config is None and continues and parsed.run_dir is not None:
        own = RunDirectory(parsed.run_dir)
        parsed.config = str(own.config) if own.begun else None  # a run continues with its own settings
    loaded = with_absolute_key_paths(arguments.settings_from_arguments(parsed, {"learner.keys": parsed.keys}, environ))
    named = loaded.settings.run.dir
    run_dir = parsed.run_dir or (Path(named) if named else None)
    first = environ.get("RANK", "0") == "0"  # other ranks have folders of their own, without a copy
    if first and continues and run_dir is not None and restore_missing(loaded.settings.run.store, run_dir, warn=_print_warning):
        _log.info("downloaded", store=loaded.settings.run.store, run_dir=run_dir)
        if parsed.config is None:
            return parse([*argv, "--config", str(RunDirectory(run_dir).config)], environ)
    if continues and run_dir is None:
        option = "--resume" if parsed.resume else "--resume-if-found"
        raise ConfigError("no run to resume", found=f"{option} alone", wanted="the run's directory", fix="set --run-dir to it")
    resume = parsed.resume or (parsed.resume_if_found and run_dir is not None and RunDirectory(run_dir).begun)
    if resume and run_dir is not None and RunDirectory(run_dir).begun:
        require_same_run(RunDirectory(run_dir), loaded)
        store = loaded.settings.run.store
        if store and first and parsed.run_lock is None:  # `rookery train`, which holds the lock, has compared run and copy
            check_resumed(copy_address(store, run_dir), run_dir, warn=_print_warning)
    return Invocation(
        loaded=loaded,
        run_dir=run_dir,
        resume=resume,
        run_lock=parsed.run_lock,
        config_named=config_named,
        job=parsed.job,
        linger=parsed.linger,
        debug=parsed.debug,
    )


def with_run_id(invocation: Invocation) -> Invocation:
    """Give a new run its id before anything is written, so that a resumed learner reads it in the run's config.yaml."""
    run, source = invocation.settings.run, invocation.loaded.provenance["run.id"]
    known = run.id if invocation.config_named or not is_config_of_a_run(source) else ""  # another run keeps its id
    new = run_directory.new_run_id(preset=run.preset, now=datetime.now().astimezone())
    chosen = known or _earlier_id(invocation) or new
    return replace(invocation, loaded=with_chosen(invocation.loaded, {"run.id": chosen}))


def _earlier_id(invocation: Invocation) -> str:
    """Return the id with which a run that goes on began: its workers use it, though no checkpoint was written yet."""
    own = RunDirectory(invocation.run_dir) if invocation.run_dir is not None else None
    if own is None or not own.begun or not (invocation.resume or _is_untrained(own)):
        return ""
    return str(run_id(own.config.read_bytes()) or "")


# --- algorithm ---


def build_run_algorithm(
    settings: Settings, env: EnvSpec, *, seed: int, ranks: Ranks = ALONE, local_rank: int = 0, local_ranks: int = 1
) -> Algorithm:
    """Return the algorithm of the run; log the size of its replay memory, where it has one.

    Raises `ConfigError` where it cannot train on `env`, where its memory is larger than what this machine has left for each of
    `local_ranks`, and where its experience or policies do not fit into a message.
    """
    fix, available = "lower algorithm.replay_capacity", machine.available_bytes()
    section, device = settings.algorithm, _device(settings.learner.device, local_rank)
    if arithmetic.native(section.precision, device) != section.precision:
        _log.info("no_bfloat16", setting="algorithm.precision", device=device.type, precision="fp32")
    try:
        algorithm = build_algorithm(
            section,
            model=settings.model,
            env=env,
            seed=seed,
            device=device,
            ranks=ranks,
            streams=settings.scale.streams,
            normalize_reward=settings.env.normalize_reward,
            length=settings.rollout.length,
        )
    except MemoryError as error:  # larger than the system would ever promise
        wanted = None if available is None else f"at most {available / 1e9:.1f} GB"
        raise ConfigError("the replay memory cannot be allocated", found=str(error), wanted=wanted, fix=fix) from error
    _check_sizes(settings, env, algorithm)
    if settings.checkpoint.replay and not isinstance(algorithm, SavesReplay):
        fact = f"{section.name} cannot hand over its replay memory"
        raise ConfigError(
            fact, found="checkpoint.replay true", wanted="an algorithm with the methods of rookery.SavesReplay, or false"
        )
    if isinstance(algorithm, HasReplay):
        needed = algorithm.replay_bytes
        if available is not None and needed > available // local_ranks:  # pages are taken as the memory fills, by all ranks
            found, wanted = (f"{size / 1e9:.1f} GB" for size in (needed, available // local_ranks))
            fact = f"the replay memory of {algorithm.replay_env_steps:,} env steps is larger than what is free here"
            raise ConfigError(fact, found=found, wanted=f"at most {wanted}", fix=fix)
        _log.info("replay_allocated", env_steps=algorithm.replay_env_steps, gigabytes=round(needed / 1e9, 3))
    return algorithm


def _check_sizes(settings: Settings, env: EnvSpec, algorithm: Algorithm) -> None:
    """Refuse (ConfigError) arrays that no receiver takes: at each attempt the connection of the sender would end."""
    size = {"length": settings.rollout.length, "num_envs": settings.env.num_envs}
    schema = build_payload(settings.algorithm, model=settings.model, env=env, **size).schema
    arrays = {spec.name: math.prod(spec.shape) * DTYPES[spec.dtype].itemsize for spec in schema if -1 not in spec.shape}
    largest = max(arrays, key=lambda name: arrays[name])
    policy = ParameterLayout.of(algorithm.model).size * (4 if settings.learner.snapshot_precision == "fp32" else 2)
    for fact, found, fix in (
        (f"array {largest} of an experience message is too large", arrays[largest], "lower rollout.length or env.num_envs"),
        ("the policy is too large for a message", policy, "choose a smaller network, or learner.snapshot_precision=bf16"),
    ):
        if found > ARRAY_BYTES:
            raise ConfigError(fact, found=f"{found:,} bytes", wanted=f"at most {ARRAY_BYTES:,}", fix=fix)


def _device(name: str, local_rank: int) -> torch.device:
    if name == "cuda" and torch.cuda.is_available() and local_rank:
        if local_rank >= torch.cuda.device_count():
            found, wanted = f"{torch.cuda.device_count()} GPUs", f"at least {local_rank + 1}: one for each rank on this machine"
            fix = "lower learner.ranks, or let each rank see all GPUs of its machine (CUDA_VISIBLE_DEVICES)"
            raise ConfigError("learner.ranks needs more GPUs", found=found, wanted=wanted, fix=fix)
        torch.cuda.set_device(local_rank)
        return torch.device(name, local_rank)
    if name == "cuda" and not torch.cuda.is_available():
        kind = f"built for CUDA {torch.version.cuda}, and no device" if torch.version.cuda else "built for CPUs"
        raise ConfigError(
            "there is no GPU to train on",
            found=f"torch {torch.__version__}, {kind}",
            wanted="a device that CUDA sees",
            fix="run where there is one (in a container: the image rookery-learner-gpu), or set learner.device=cpu",
        )
    return torch.device(name)


# --- run directory ---


def open_directory(invocation: Invocation, argv: Sequence[str]) -> RunDirectory:
    """Return the run directory: the one of a resumed run, one that `rookery train` made, or a new one.

    Raises `ConfigError` or `ResourceError`.
    """
    run, path = invocation.settings.run, invocation.run_dir
    if path is None:
        path = run_directory.default_path(preset=run.preset, seed=run.seed, now=datetime.now(UTC).astimezone())
    elif invocation.resume or _is_untrained(RunDirectory(path)):
        return run_directory.find(path)  # a restarted learner trains on a read-only disk, with a warning
    return run_directory.create(path, config=_config_text(invocation, path), command=["rookery", "learner", *argv])


def _is_untrained(directory: RunDirectory) -> bool:
    """Return whether there is a run that trained nothing yet: the first save of a new run would remove earlier checkpoints."""
    return directory.begun and not (directory.learning_curve_csv.exists() or directory.has_checkpoints)


def existing_run(invocation: Invocation, argv: Sequence[str]) -> RunDirectory | None:
    """Return the directory of a run that exists already; None for a new run. Raises as `open_directory`."""
    if invocation.run_dir is None or not (invocation.resume or RunDirectory(invocation.run_dir).begun):
        return None
    return open_directory(invocation, argv)


def write_config(invocation: Invocation, directory: RunDirectory) -> None:
    """Write the settings of this learner to the run's config.yaml, where an earlier process began with others.

    Call it once the run is known to continue with them. A disk that cannot be written costs a warning.
    """
    text = _config_text(invocation, directory.path)
    if invocation.config_named or not directory.begun or _values(directory.config.read_text(encoding="utf-8")) == _values(text):
        return
    _write_config(directory, text, why="the run continues with other settings", otherwise="it holds the settings of before")


def require_own(invocation: Invocation, directory: RunDirectory) -> None:
    """Raise `ResourceError` where the run directory was deleted, and another run has begun in one of its name.

    The lock keeps no such run out: it belongs to the deleted directory.
    """
    own, found = invocation.settings.run.id, None
    with suppress(OSError):
        found = run_id(directory.config.read_bytes())
    if found and found != own:
        fix = "move that run elsewhere: the next checkpoint of this one creates its directory again"
        raise ResourceError("another run has taken this directory", found=f"{found} in {directory.path}", wanted=own, fix=fix)


def restore_config(invocation: Invocation, directory: RunDirectory, resources: ExitStack) -> None:
    """Write config.yaml again, with a warning, where the run directory was deleted: nothing there could be resumed without it.

    Call it after a checkpoint, which creates the directory. `resources` gets its lock. A disk that cannot be written costs a
    warning. Under `rookery train` that command writes the file.
    """
    if directory.deleted and not invocation.config_named:
        consequence = "the run goes on and writes there; what the directory held is lost"
        _log.warning("run_directory_deleted", path=directory.path, consequence=consequence)
        text = _config_text(invocation, directory.path)
        with suppress(ConfigError):  # where config.yaml alone was deleted, this process has the lock
            resources.enter_context(run_directory.held(directory))  # before the file with which another learner could resume
        _write_config(directory, text, why="it was deleted", otherwise="the checkpoints there cannot be resumed")


def _write_config(directory: RunDirectory, text: str, *, why: str, otherwise: str) -> None:
    try:
        write_atomically(directory.config, text.encode())
    except OSError as error:
        _log.warning("config_not_written", path=directory.config, error=error, consequence=otherwise)
    else:
        _log.info("config_written", path=directory.config, why=why)


def _config_text(invocation: Invocation, path: Path) -> str:
    moved = with_chosen(invocation.loaded, {"run.dir": str(path)})
    return as_yaml(moved.settings, moved.provenance)


def _values(text: str) -> list[str]:
    """Return the lines of a configuration without the comments that name the source of each value."""
    return [line.partition("  # ")[0] for line in text.splitlines()]
