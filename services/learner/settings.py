"""The learner's command line. The learner is the one source of the run's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from common.runtime import arguments, config
from common.runtime.run_directory import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation(arguments.Invocation):
    """How this process was asked to run; `run_dir` None: where the root thinks best."""

    run_dir: Path | None
    resume: bool
    run_lock: int | None  # descriptor of the run directory's lock, inherited from `rookery train`
    config_named: bool  # whether `--config` is the run's own config.yaml: `rookery train` writes that file, the learner does not


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Invocation:
    """Read the command line. Raises `ConfigError`; argparse itself exits with 2 for an unknown option."""
    what = "Train on what actors send, publish the policy, keep the run directory."
    parser = arguments.parser("learner", what, "rookery learner --config pong learner.bind=tcp://127.0.0.1:5700")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="where the run is kept (run.dir)")
    parser.add_argument("--keys", metavar="DIR", help="folder of keys: encrypt, and let only known peers connect (learner.keys)")
    parser.add_argument("--run-lock", type=int, metavar="FD", help="the run's lock, as rookery train passes it to its learner")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the run directory")
    start.add_argument("--resume-if-found", action="store_true", help="the same where the directory holds a run; else begin it")
    parsed = parser.parse_intermixed_args(argv)
    goes_on = parsed.resume or parsed.resume_if_found
    config_named = None not in (parsed.config, parsed.run_dir) and Path(parsed.config) == RunDirectory(parsed.run_dir).config
    if parsed.config is None and goes_on and parsed.run_dir is not None:
        own = RunDirectory(parsed.run_dir)
        parsed.config = str(own.config) if own.begun else None  # a run goes on with its own settings
    loaded = config.rooted(arguments.load(parsed, {"learner.keys": parsed.keys}, environ))
    named = loaded.settings.run.dir
    run_dir = parsed.run_dir or (Path(named) if named else None)
    if goes_on and run_dir is None:
        option = "--resume" if parsed.resume else "--resume-if-found"
        raise ConfigError("no run to resume", found=f"{option} alone", wanted="the run's directory", fix="set --run-dir to it")
    resume = parsed.resume or (parsed.resume_if_found and run_dir is not None and RunDirectory(run_dir).begun)
    return Invocation(
        loaded=loaded,
        run_dir=run_dir,
        resume=resume,
        run_lock=parsed.run_lock,
        config_named=config_named,
        linger=parsed.linger,
        debug=parsed.debug,
    )
