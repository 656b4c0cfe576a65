"""The policy of a worker, which actors, policy servers and evaluators have: built from the Welcome, loaded from snapshots."""

from __future__ import annotations

from common.algorithms.api import Policy, WorkerContext
from common.algorithms.registry import build_policy
from common.config.run_config import RunConfig
from common.envs.spec import EnvSpec
from common.errors import DropReason, ProtocolError
from common.models import arithmetic
from common.models.snapshot import to_tensor
from common.observability import logs
from common.protocol.messages import Snapshot
from common.runtime import process
from common.transport.link import Link
from services.worker import WelcomedWorker

_log = logs.EventLog(__name__)


def policy_of(worker: WelcomedWorker[RunConfig], spec: EnvSpec, *, num_envs: int, training: bool) -> Policy:
    """Return the run's policy for `num_envs` environments of `spec`, those of this process, for `training` or for evaluation.

    Raises `ConfigError` where that is not the learner's environment.
    """
    process.set_torch_threads(getattr(worker.invocation.settings, worker.role).torch_threads)
    worker.link.check_environment(spec)
    precision = worker.run.acting_precision if training else "fp32"
    if arithmetic.native(precision, arithmetic.CPU) != precision:
        _log.info("no_bfloat16", setting="actor.precision", device="cpu", precision="fp32")
    policy = build_policy(
        worker.run.algorithm,
        model=worker.run.model,
        env=spec,
        precision=precision,
        seed=worker.seed("policy"),
        context=WorkerContext(index=worker.welcome.index, workers=worker.run.actors, num_envs=num_envs, training=training),
    )
    worker.link.layout = policy.layout
    return policy


def load_newest_policy(link: Link, policy: Policy) -> Snapshot | None:
    """Load the newest policy that arrived; None without one, or where it does not fit, which is counted and logged."""
    snapshot = link.take_snapshot()
    if snapshot is None:
        return None
    try:
        load_policy(snapshot, policy)
    except ProtocolError as error:
        link.refuse_snapshot(error)
        return None
    return snapshot


def load_policy(snapshot: Snapshot, policy: Policy) -> None:
    """Load the parameters; raises `ProtocolError` where they are not one array of the policy's size and a dtype of snapshots."""
    if list(snapshot.arrays) != ["parameters"]:
        raise ProtocolError(DropReason.SCHEMA, "arrays of a snapshot", found=list(snapshot.arrays), wanted="parameters alone")
    policy.load(snapshot.version, to_tensor(snapshot.arrays["parameters"]), env_steps=snapshot.env_steps)
