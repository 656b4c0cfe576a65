"""The evaluator's command line. It needs one fact, the learner's address; all about the run comes in the Welcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.runtime.arguments import Invocation
from common.runtime.config import Loaded
from common.runtime.layers import DEFAULT
from common.runtime.tree import EvaluationSettings, RunConfig
from common.service import peer


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Invocation:
    """Read the command line. Raises `ConfigError`; argparse itself exits with 2 for an unknown option."""
    return peer.parse("evaluator", "Play whole episodes with the newest policy and report the returns.", argv, environ)


def playing(own: Loaded, run: RunConfig) -> EvaluationSettings:
    """How to play: as the run says, but for what this very process was told."""
    told = {
        name: getattr(own.settings.evaluator, name)
        for name in EvaluationSettings.model_fields
        if own.provenance[f"evaluator.{name}"] != DEFAULT
    }
    return run.evaluation.model_copy(update=told)
