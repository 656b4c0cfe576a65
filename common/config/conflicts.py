"""Settings that are valid each and cannot work together, one sentence for each set of them, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from common.algorithms.sections import ReplaySection
from common.config.endpoint import parse_endpoints
from common.protocol.limits import STRING_BYTES

if TYPE_CHECKING:
    from common.config.schema import Settings

WELCOME_BYTES = STRING_BYTES - 4096
"""Of the sections with `kwargs`, as JSON; a Welcome carries them in one string, with small settings of other sections."""


def conflicts(settings: Settings) -> Iterator[str]:
    """Yield a sentence for each set of valid settings that cannot work together, with the reason."""
    learner, actor, scale = settings.learner, settings.actor, settings.scale
    yield from settings.algorithm.conflicts(scale)
    yield from _open_addresses(settings)
    if actor.count > learner.max_actors:
        yield f"actor.count: found {actor.count}, wanted at most {learner.max_actors} = learner.max_actors: more would be refused"
    if scale.batch_env_steps > scale.env_steps:
        yield f"target.env_steps: found {scale.env_steps}, wanted at least {scale.batch_words}: one update trains on that many"
    if settings.checkpoint.replay and not isinstance(settings.algorithm, ReplaySection):
        yield f"checkpoint.replay: found true, wanted false: {settings.algorithm.name} has no replay memory"
    size = sum(len(section.model_dump_json().encode()) for section in (settings.env, settings.model, settings.algorithm))
    if size > WELCOME_BYTES:
        longest = max("env", "model", key=lambda name: len(str(getattr(settings, name).kwargs)))
        yield (
            f"{longest}.kwargs: found {size:,} bytes of env, model and algorithm as JSON, wanted at most {WELCOME_BYTES:,}: the "
            "learner sends them to each worker; keep large arguments in a file of your package, and give its name here"
        )
    if settings.lockstep:
        yield from _lockstep_conflicts(settings)


def _open_addresses(settings: Settings) -> Iterator[str]:
    """Yield a sentence for each process without keys whose address is not of this machine alone."""
    for section, key, risk in (
        ("learner", "bind", "any process that reaches the learner may connect"),
        ("actor", "learner", "any process that answers there is taken for the learner"),
        ("evaluator", "learner", "any process that answers there is taken for the learner"),
        ("policy_server", "bind", "any process that reaches the policy server may connect"),
        ("env_worker", "policy_server", "any process that answers there is taken for the policy server"),
    ):
        own = getattr(settings, section)
        address = getattr(own, key)
        if not (own.keys or own.insecure or all(each.loopback for each in parse_endpoints(address))):
            yield (
                f"{section}.{key}: found {address}, wanted an address of this machine alone (127.0.0.1), or {section}.keys, a "
                f"folder that `rookery keys` makes: without keys {risk}; on a network that you trust set {section}.insecure=true"
            )


def _lockstep_conflicts(settings: Settings) -> Iterator[str]:
    """Yield a sentence for each setting that would make two runs of one seed differ."""
    learner, actor, target, workers = settings.learner, settings.actor, settings.target, settings.policy_server.workers
    if workers:
        yield f"policy_server.workers: found {workers}, wanted 0 in lockstep: the clock would decide which env workers are late"
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
