"""The actor's command line. It needs one fact, the learner's address; all about the run comes in the Welcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.runtime.arguments import Invocation
from common.service import peer


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Invocation:
    """Read the command line. Raises `ConfigError`; argparse itself exits with 2 for an unknown option."""
    return peer.parse("actor", "Step environments with the learner's newest policy and send what happens.", argv, environ)
