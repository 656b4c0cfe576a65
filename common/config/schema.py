"""The settings of a run: all sections, checked one by one and against one another.

Values are immutable and checked when they are built. Validation is strict: text is never read as a number, nor a number as text.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Self, TypeVar

from pydantic import create_model, model_validator

from common import extensions
from common.algorithms.sections import AlgorithmSection, RunScale
from common.algorithms.settings import AlgorithmSettings, PPOSettings
from common.config.endpoint import MAX_PORT, parse_endpoints
from common.config.sections import (
    ActorSettings,
    CheckpointSettings,
    EnvWorkerSettings,
    EvaluatorSettings,
    LearnerSettings,
    LogSettings,
    MetricsSettings,
    PolicyServerSettings,
    RolloutSettings,
    RunSettings,
    Section,
    TargetSettings,
)
from common.envs.spec import EnvSettings
from common.models.spec import ModelSettings
from common.protocol.limits import STRING_BYTES

WELCOME_BYTES = STRING_BYTES - 4096
"""Of the sections with `kwargs`, as JSON; a Welcome carries them in one string, with small settings of other sections."""


class Settings(Section):
    """All settings of a run."""

    run: RunSettings = RunSettings()
    env: EnvSettings = EnvSettings()
    model: ModelSettings = ModelSettings()
    algorithm: AlgorithmSettings = PPOSettings()
    rollout: RolloutSettings = RolloutSettings()
    learner: LearnerSettings = LearnerSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    actor: ActorSettings = ActorSettings()
    policy_server: PolicyServerSettings = PolicyServerSettings()
    env_worker: EnvWorkerSettings = EnvWorkerSettings()
    evaluator: EvaluatorSettings = EvaluatorSettings()
    target: TargetSettings = TargetSettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()

    @property
    def lockstep(self) -> bool:
        """True where actors and learner take turns."""
        return self.run.mode == "lockstep"

    @property
    def batch(self) -> int:
        """Experience messages per update of a rank: the setting, in lockstep raised until every actor has the same share."""
        actors = max(1, self.rank_actors)
        return -(-self.learner.batch // actors) * actors if self.lockstep else self.learner.batch

    @property
    def rank_actors(self) -> int:
        """The most actors of one rank of the learner: all have as many, or one less."""
        return -(-self.actor.count // self.learner.ranks)

    @property
    def scale(self) -> RunScale:
        """The size of this run, with which the settings of its algorithm must agree."""
        return RunScale(
            length=self.rollout.length,
            num_envs=self.env.num_envs,
            batch=self.batch,
            credits=1 if self.lockstep else self.learner.credits,
            max_policy_lag=self.learner.max_policy_lag,
            actors=self.rank_actors,
            env_steps=self.target.env_steps,
            memory=self.model.recurrent is not None,
            ranks=self.learner.ranks,
            frame_stack=self.env.frame_stack,
        )

    @property
    def state_settings(self) -> dict[str, Any]:
        """The settings, as JSON values, that decide which state fits the run."""
        include: Any = {"env": True, "model": True, "algorithm": True, "actor": {"count"}, "learner": {"ranks"}}
        return self.model_dump(mode="json", include=include)

    @model_validator(mode="after")
    def _check__conflicts(self) -> Self:
        if problems := "\n".join(conflicts(self)):
            raise ValueError(problems)
        return self


# --- settings that are valid each and cannot work together ---


def conflicts(settings: Settings) -> Iterator[str]:
    """Yield a sentence for each set of valid settings that cannot work together, with the reason."""
    learner, actor, scale = settings.learner, settings.actor, settings.scale
    yield from settings.algorithm.conflicts(scale)
    yield from _open_addresses(settings)
    if settings.rank_actors > learner.max_actors and not settings.lockstep:  # in which the limit is that number itself
        most = f"{learner.max_actors * learner.ranks} = learner.max_actors x learner.ranks"
        yield f"actor.count: found {actor.count}, wanted at most {most}: more would be refused"
    highest = MAX_PORT - learner.ranks + 1
    for key, found, port in (
        ("learner.bind", learner.bind, max(each.port for each in parse_endpoints(learner.bind))),
        ("metrics.port", settings.metrics.port, settings.metrics.port),
    ):
        if port > highest:
            yield f"{key}: found {found}, wanted a port of at most {highest}: each rank of a machine binds the next one"
    if scale.batch_env_steps > scale.env_steps:
        yield f"target.env_steps: found {scale.env_steps}, wanted at least {scale.batch_words}: one update trains on that many"
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
    learner, actor = settings.learner, settings.actor
    if actor.count == 0:
        yield "actor.count: found 0, wanted at least 1 in lockstep: each update waits for a known number of actors"
    elif actor.count % learner.ranks:
        yield (
            f"actor.count: found {actor.count}, wanted a multiple of {learner.ranks} = learner.ranks in lockstep: every rank has "
            "the same number of actors"
        )
    for section, threads in (("learner", learner.torch_threads), ("actor", actor.torch_threads)):
        if threads > 1:
            yield f"{section}.torch_threads: found {threads}, wanted 1 in lockstep: threads change how sums are rounded"


# --- files ---


def file_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file, with which editors check one.

    Other layers may name the algorithm; of one of the user's own the settings are unknown; and a section may be empty.
    """
    schema = Settings.model_json_schema()
    sections = schema["properties"]
    variants = sections["algorithm"].pop("oneOf")
    own = {"type": "object", "properties": {"name": {"type": "string", "pattern": ":"}}, "required": ["name"]}
    del sections["algorithm"]["discriminator"]
    sections["algorithm"]["anyOf"] = [*variants, own]
    schema["properties"] = {name: {"anyOf": [section, {"type": "null"}]} for name, section in sections.items()}
    return schema


# --- the algorithm of a user's own ---

T = TypeVar("T", bound=Section)


def with_algorithm_section(base: type[T], algorithm: object) -> type[T]:
    """Return `base` with the section `algorithm` of the algorithm with this name, which may come from a user's package.

    Raises `ConfigError` where the user's package cannot be imported or has no such algorithm.
    """
    if not extensions.is_user_code(algorithm):
        return base
    from common.algorithms.registry import entry  # noqa: PLC0415  imports torch, which no other settings need

    return _with_section(base, entry(str(algorithm)).settings)  # type: ignore[return-value]


@cache
def _with_section(base: type[Section], section: type[AlgorithmSection]) -> type[Section]:
    fields: dict[str, Any] = {"algorithm": (section, ...)}
    return create_model(base.__name__, __base__=base, **fields)
