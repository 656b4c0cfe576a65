"""Settings that are valid each and cannot work together, one sentence for each set of them, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from common.algorithms.sections import ReplaySection
from common.config.endpoint import parse_endpoint, parse_endpoints

if TYPE_CHECKING:
    from common.config.schema import Settings


def conflicts(settings: Settings) -> Iterator[str]:
    """Yield a sentence for each set of valid settings that cannot work together, with the reason."""
    learner, actor, scale = settings.learner, settings.actor, settings.scale
    yield from settings.algorithm.conflicts(scale)
    if not (learner.keys or learner.insecure or parse_endpoint(learner.bind).loopback):
        yield (
            f"learner.bind: found {learner.bind}, wanted an address of this machine alone (127.0.0.1), or learner.keys, a "
            "folder that `rookery keys` makes: without keys any process that reaches the learner may connect; on a network "
            "that you trust set learner.insecure=true"
        )
    for role, worker in (("actor", actor), ("evaluator", settings.evaluator)):
        if not (worker.keys or worker.insecure or all(each.loopback for each in parse_endpoints(worker.learner))):
            yield (
                f"{role}.learner: found {worker.learner}, wanted an address of this machine alone (127.0.0.1), or {role}.keys, a "
                "folder that `rookery keys` makes: without keys any process that answers there is taken for the learner; on a "
                f"network that you trust set {role}.insecure=true"
            )
    yield from _policy_server_conflicts(settings)
    if actor.count > learner.max_actors:
        yield f"actor.count: found {actor.count}, wanted at most {learner.max_actors} = learner.max_actors: more would be refused"
    if scale.batch_env_steps > scale.env_steps:
        yield f"target.env_steps: found {scale.env_steps}, wanted at least {scale.batch_words}: one update trains on that many"
    if settings.checkpoint.replay and not isinstance(settings.algorithm, ReplaySection):
        yield f"checkpoint.replay: found true, wanted false: {settings.algorithm.name} has no replay memory"
    if settings.lockstep:
        yield from _lockstep_conflicts(settings)


def _policy_server_conflicts(settings: Settings) -> Iterator[str]:
    """Yield a sentence for each setting with which a policy server and its env workers cannot work."""
    server, worker = settings.policy_server, settings.env_worker
    if not (server.keys or server.insecure or parse_endpoint(server.bind).loopback):
        yield (
            f"policy_server.bind: found {server.bind}, wanted an address of this machine alone (127.0.0.1), or "
            "policy_server.keys: without keys any process that reaches it may connect; on a network that you trust set "
            "policy_server.insecure=true"
        )
    if not (worker.keys or worker.insecure or parse_endpoint(worker.policy_server).loopback):
        yield (
            f"env_worker.policy_server: found {worker.policy_server}, wanted an address of this machine alone (127.0.0.1), or "
            "env_worker.keys: without keys any process that answers there is taken for the policy server; on a network that you "
            "trust set env_worker.insecure=true"
        )
    if server.workers and settings.lockstep:
        yield (
            f"policy_server.workers: found {server.workers}, wanted 0 in lockstep: the clock would decide which env "
            "workers are late"
        )


def _lockstep_conflicts(settings: Settings) -> Iterator[str]:
    """Yield a sentence for each setting that would make two runs of one seed differ."""
    learner, actor, target = settings.learner, settings.actor, settings.target
    if actor.count == 0:
        yield "actor.count: found 0, wanted at least 1 in lockstep: each update waits for a known number of actors"
    elif actor.count % learner.ranks:
        yield (
            f"actor.count: found {actor.count}, wanted a multiple of {learner.ranks} = learner.ranks in lockstep: every rank has "
            "the same number of actors"
        )
    if learner.batch_seconds is not None:
        yield (
            f"learner.batch_seconds: found {learner.batch_seconds:g}, wanted null in lockstep: the clock would decide which "
            "messages are in a batch"
        )
    if target.wall_seconds is not None:
        yield (
            f"target.wall_seconds: found {target.wall_seconds:g}, wanted null in lockstep: the clock would decide how many "
            "updates there are; target.env_steps is the budget"
        )
    if target.evaluation is not None:
        yield (
            f"target.evaluation: found {target.evaluation:g}, wanted null in lockstep: the clock would decide which policies are "
            "evaluated; target.mean100 is the target"
        )
    if learner.device != "cpu":
        yield f"learner.device: found {learner.device}, wanted cpu in lockstep: its kernels do not add in a fixed order"
    for section, threads in (("learner", learner.torch_threads), ("actor", actor.torch_threads)):
        if threads > 1:
            yield f"{section}.torch_threads: found {threads}, wanted 1 in lockstep: threads change how sums are rounded"
