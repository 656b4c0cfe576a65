"""Loading of the policies that a worker receives."""

from __future__ import annotations

from common.algorithms.api import Policy
from common.errors import DropReason, PeerError
from common.models.snapshot import to_tensor
from common.transport.link import Link
from common.wire.messages import Snapshot


def load_newest(link: Link, policy: Policy) -> Snapshot | None:
    """Load the newest policy that arrived; None without one, or where it does not fit, which is counted and logged."""
    snapshot = link.take_snapshot()
    if snapshot is None:
        return None
    try:
        load(snapshot, policy)
    except PeerError as error:
        link.refuse_snapshot(error)
        return None
    return snapshot


def load(snapshot: Snapshot, policy: Policy) -> None:
    """Load the parameters; raises `PeerError` where they are not one array of the policy's size and a dtype of snapshots."""
    if list(snapshot.arrays) != ["parameters"]:
        raise PeerError(DropReason.SCHEMA, "arrays of a snapshot", found=list(snapshot.arrays), wanted="parameters alone")
    policy.load(snapshot.version, to_tensor(snapshot.arrays["parameters"]), env_steps=snapshot.env_steps)
