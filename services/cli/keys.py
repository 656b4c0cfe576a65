"""`rookery keys`: makes the folders of keys that a learner and its peers are given, and says which is for whom."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.transport.curve import LEARNER, PEER, make


def keys(directory: Path, names: Sequence[str]) -> str:
    """Make keys in `directory` for the peers `names`, or for `peer`; what was made and where it goes, without any secret.

    Raises `ConfigError` where that would overwrite something, `ResourceError` where it cannot be written.
    """
    peers = list(dict.fromkeys(names)) or [PEER]
    lines = [f"made  {path}" for path in make(directory, peers)]
    lines += ["", f"learner:            rookery learner --keys {directory / LEARNER} learner.bind=tcp://0.0.0.0:5700"]
    for peer in peers:
        lines.append(f"actors, evaluators: rookery actor --keys {directory / peer} --learner tcp://HOST:5700")
    lines += ["", "Give each machine its own folder and no other. A learner that runs knows new peers once it is started again."]
    return "\n".join(lines)
