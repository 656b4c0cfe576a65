"""The evaluator's command line. It needs one fact, the learner's address; all about the run comes in the Welcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.runtime import arguments
from common.runtime.tree import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """How this process was asked to run."""

    settings: Settings
    debug: bool


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Invocation:
    """Read the command line. Raises `ConfigError`; argparse itself exits with 2 for an unknown option."""
    what = "Play whole episodes with the newest policy and report the returns."
    parser = arguments.parser("evaluator", what, "rookery evaluator --learner tcp://127.0.0.1:5700")
    parser.add_argument("--learner", metavar="tcp://HOST:PORT", help="address of the learner (evaluator.learner)")
    parser.add_argument("--name", help="unique in the run, stable over restarts (evaluator.name)")
    parsed = parser.parse_intermixed_args(argv)
    named = {"evaluator.learner": parsed.learner, "evaluator.name": parsed.name}
    return Invocation(settings=arguments.settings(parsed, named, environ), debug=parsed.debug)
