"""The configuration tree: every setting of a run, its type, range, unit and effect. `config` fills it from its layers.

Sections `env`, `model` and `algorithm` have their home beside the code they configure. Values are immutable and
checked when they are built; a type is never guessed: validated strictly, text is no number and a number no text.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from common import extensions
from common.algorithms.settings import AlgorithmSettings
from common.algorithms.settings.base import AlgorithmSection, Scale
from common.algorithms.settings.ppo import PPOSettings
from common.algorithms.settings.replay import ReplaySection
from common.envs.spec import EnvSettings
from common.errors import ConfigError
from common.models.spec import ModelSettings, Precision
from common.wire.messages import PEER_NAME

MAX_PORT = 65535


def _endpoint(text: str) -> str:
    scheme, _, rest = text.partition("://")
    host, _, port = rest.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    plain = host and not set(host) & set(":/[] ")
    if scheme != "tcp" or not (bracketed or plain) or not (port.isdecimal() and int(port) <= MAX_PORT):
        raise ValueError(f"tcp://host:port with a port in 0..{MAX_PORT}, such as tcp://127.0.0.1:5700")
    return text


Endpoint: TypeAlias = Annotated[str, AfterValidator(_endpoint)]


def _module_name(text: str) -> str:
    if not all(part.isidentifier() for part in text.split(".")):
        raise ValueError("the name of a package or module, such as mygames or mygames.envs")
    return text


ModuleName: TypeAlias = Annotated[str, AfterValidator(_module_name)]


class Section(BaseModel):
    """Base of the sections: immutable, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunSettings(Section):
    """Which run this is."""

    preset: str = Field(default="", description="name the run goes by in its summary; set by the preset or file it came from")
    id: str = Field(
        default="", pattern=r"^[A-Za-z0-9._-]{0,128}$", description="peers of another run are refused; empty: a new one"
    )
    seed: int = Field(default=1, ge=0, le=2**31 - 1, description="every random stream of the run grows from it")
    dir: str = Field(default="", description="run directory; empty: runs/<preset>-<date>-<time>-s<seed>")
    mode: Literal["asynchronous", "lockstep"] = Field(
        default="asynchronous",
        description="lockstep: actors and learner take turns, and two runs of one seed on one machine end with the same weights",
    )


class RolloutSettings(Section):
    """One experience message."""

    length: int = Field(default=128, ge=1, le=8192, description="env steps of each environment in one trajectory (T)")


class LearnerSettings(Section):
    """The process that trains."""

    bind: Endpoint = Field(default="tcp://127.0.0.1:5700", description="address on which peers are awaited; port 0: any free one")
    keys: str = Field(
        default="",
        description="folder of its secret key and of the public keys of peers that may connect, as `rookery keys` makes it; "
        "empty: nothing is encrypted, and whoever reaches it may connect",
    )
    insecure: bool = Field(
        default=False, description="without keys, await peers of other machines all the same: only where the network is trusted"
    )
    batch: int = Field(
        default=2,
        ge=1,
        le=4096,
        description="trajectories per update; larger: steadier gradients, fewer updates; in lockstep raised to a multiple of "
        "actor.count",
    )
    batch_seconds: float | None = Field(
        default=None,
        gt=0,
        description="longest that a message waits for the rest of its batch; then what is there is trained on; null: for ever",
    )
    credits: int = Field(
        default=2,
        ge=1,
        le=1024,
        description="unacknowledged trajectories per actor; bounds queue and policy lag; raised where few fill a batch; in "
        "lockstep not used: as many as one batch has of each",
    )
    max_actors: int = Field(default=64, ge=1, le=65536, description="actors welcomed at once; more are refused")
    max_policy_lag: int = Field(
        default=20, ge=0, description="policy versions; experience that is older is dropped and counted as stale"
    )
    snapshot_precision: Precision = Field(default="fp32", description="weights sent to peers; bf16 halves the bytes and rounds")
    torch_threads: int = Field(default=1, ge=1, le=256, description="CPU threads of the training computation")
    device: Literal["cpu", "cuda"] = Field(
        default="cpu", description="where the networks are trained; replay stays in main memory"
    )


class CheckpointSettings(Section):
    """What a resumed run starts from."""

    every_seconds: float = Field(default=60.0, gt=0, description="time between checkpoints; at most this much training is lost")
    keep: int = Field(default=3, ge=1, le=1000, description="newest checkpoints kept; older ones are removed")
    replay: bool = Field(
        default=False,
        description="whether checkpoints hold the replay memory, so that a resumed run does not fill it anew; it takes as much "
        "of the disk as of the memory, and each checkpoint writes what is new since the last",
    )


class PeerSettings(Section):
    """A process that joins a learner."""

    learner: Endpoint = Field(default="tcp://127.0.0.1:5700", description="address of the learner")
    keys: str = Field(
        default="", description="folder of its secret key and the learner's public one; needed where learner.keys is set"
    )
    insecure: bool = Field(
        default=False,
        description="without keys, join a learner of another machine: only where the network is trusted",
    )
    allow_code: tuple[ModuleName, ...] = Field(
        default=(),
        description="packages or modules of which the learner's configuration may name code, such as [mygames]; other code must "
        "be named in this process's own settings",
    )
    name: str = Field(
        default="",
        pattern=rf"^({PEER_NAME.pattern})?$",
        description="unique in the run, stable over restarts; empty: from host and process",
    )
    torch_threads: int = Field(default=1, ge=1, le=256, description="CPU threads of acting")


class ActorSettings(PeerSettings):
    """The processes that step environments."""

    precision: Precision = Field(default="fp32", description="arithmetic of acting; bf16 where the CPU has it, else fp32")
    count: int = Field(default=2, ge=0, le=1024, description="actors that `rookery train` starts; 0: all are started elsewhere")


class EvaluationSettings(Section):
    """How the newest policy is judged: a run has one way, whichever evaluator plays."""

    episodes: int = Field(default=10, ge=1, le=10_000, description="episodes per evaluation and mode (greedy, sampled)")
    every_seconds: float = Field(default=60.0, ge=0, description="time between the starts of two evaluations")
    cpu_share: float = Field(
        default=0.04,
        gt=0.0,
        le=1.0,
        description="part of the machine's cores it uses while training goes on; it rests to keep to it",
    )


class EvaluatorSettings(EvaluationSettings, PeerSettings):
    """The process that plays the newest policy for the score alone."""

    enabled: bool = Field(default=True, description="whether `rookery train` starts an evaluator")


class TargetSettings(Section):
    """When the run ends by itself: at the score, or when a budget is spent, whichever comes first."""

    mean100: float | None = Field(default=None, description="mean raw return of the last 100 training episodes; reached: solved")
    env_steps: int = Field(default=10_000_000, ge=1, description="budget of env steps trained on; schedules run over it")
    wall_seconds: float | None = Field(default=None, gt=0, description="budget of wall-clock time; none: no limit")


class MetricsSettings(Section):
    """The HTTP port of every service: /metrics, /healthz, /readyz."""

    host: str = Field(default="127.0.0.1", min_length=1, description="interface served; 0.0.0.0 lets other machines scrape")
    port: int = Field(default=0, ge=0, le=MAX_PORT, description="0: any free port")


class LogSettings(Section):
    """Log lines on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least severity written")
    format: Literal["auto", "plain", "json"] = Field(
        default="auto", description="auto: live view on a terminal, else plain lines"
    )


class Settings(Section):
    """The whole tree."""

    run: RunSettings = RunSettings()
    env: EnvSettings = EnvSettings()
    model: ModelSettings = ModelSettings()
    algorithm: AlgorithmSettings = PPOSettings()
    rollout: RolloutSettings = RolloutSettings()
    learner: LearnerSettings = LearnerSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    actor: ActorSettings = ActorSettings()
    evaluator: EvaluatorSettings = EvaluatorSettings()
    target: TargetSettings = TargetSettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()

    @property
    def lockstep(self) -> bool:
        """Whether actors and learner take turns."""
        return self.run.mode == "lockstep"

    @property
    def batch(self) -> int:
        """Experience messages per update: the setting, in lockstep raised until every actor has the same share."""
        actors = max(1, self.actor.count)
        return -(-self.learner.batch // actors) * actors if self.lockstep else self.learner.batch

    @property
    def scale(self) -> Scale:
        """The size of this run, for its algorithm."""
        return Scale(
            length=self.rollout.length,
            num_envs=self.env.num_envs,
            batch=self.batch,
            credits=1 if self.lockstep else self.learner.credits,
            max_policy_lag=self.learner.max_policy_lag,
            actors=self.actor.count,
            env_steps=self.target.env_steps,
        )

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        problems = list(_conflicts(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _conflicts(settings: Settings) -> Iterator[str]:
    """Sentences on settings that are fine alone and impossible together, each with the reason."""
    learner, actor, scale = settings.learner, settings.actor, settings.scale
    yield from settings.algorithm.conflicts(scale)
    if not (learner.keys or learner.insecure or is_loopback(learner.bind)):
        yield (
            f"learner.bind: found {learner.bind}, wanted an address of this machine alone (127.0.0.1), or learner.keys, a "
            "folder that `rookery keys` makes: without keys whoever reaches the learner may connect; on a network that you "
            "trust set learner.insecure=true"
        )
    for role, worker in (("actor", actor), ("evaluator", settings.evaluator)):
        if not (worker.keys or worker.insecure or is_loopback(worker.learner)):
            yield (
                f"{role}.learner: found {worker.learner}, wanted an address of this machine alone (127.0.0.1), or {role}.keys, a "
                "folder that `rookery keys` makes: without keys any process that answers there is taken for the learner; on a "
                f"network that you trust set {role}.insecure=true"
            )
    if actor.count > learner.max_actors:
        yield f"actor.count: found {actor.count}, wanted at most {learner.max_actors} = learner.max_actors: more would be refused"
    if scale.batch_env_steps > scale.env_steps:
        yield f"target.env_steps: found {scale.env_steps}, wanted at least {scale.batch_words}: one update trains on that many"
    if settings.checkpoint.replay and not isinstance(settings.algorithm, ReplaySection):
        yield f"checkpoint.replay: found true, wanted false: {settings.algorithm.name} has no replay memory"
    if settings.lockstep:
        yield from _lockstep_conflicts(settings)


def is_loopback(endpoint: str) -> bool:
    """Whether only this machine reaches it; a name other than localhost may be anything."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _lockstep_conflicts(settings: Settings) -> Iterator[str]:
    """What would make two runs differ though their seeds do not."""
    learner, actor, target = settings.learner, settings.actor, settings.target
    if actor.count == 0:
        yield "actor.count: found 0, wanted at least 1 in lockstep: each update waits for every actor, so it must know how many"
    if learner.batch_seconds is not None:
        yield (
            f"learner.batch_seconds: found {learner.batch_seconds:g}, wanted null in lockstep: the clock would decide what is "
            "in a batch"
        )
    if target.wall_seconds is not None:
        yield (
            f"target.wall_seconds: found {target.wall_seconds:g}, wanted null in lockstep: the clock would decide how many "
            "updates there are; target.env_steps is the budget"
        )
    if learner.device != "cpu":
        yield f"learner.device: found {learner.device}, wanted cpu in lockstep: its kernels add in an order of their own"
    for section, threads in (("learner", learner.torch_threads), ("actor", actor.torch_threads)):
        if threads > 1:
            yield f"{section}.torch_threads: found {threads}, wanted 1 in lockstep: how a sum is shared decides how it is rounded"


class RunConfig(Section):
    """What a peer needs to know about its run; the learner hands it over in its Welcome."""

    run_id: str
    seed: int
    preset: str
    env: EnvSettings
    model: ModelSettings
    algorithm: AlgorithmSettings
    rollout: RolloutSettings
    target: TargetSettings
    actors: int  # that the run expects; more may come
    acting_precision: Precision  # asked of all actors; what they record comes from the weights as they act
    evaluation: EvaluationSettings

    @classmethod
    def of(cls, settings: Settings, *, run_id: str) -> Self:
        """The part of `settings` that is the run's and not one process's."""
        return tree_of(cls, settings.algorithm.name)(
            run_id=run_id,
            seed=settings.run.seed,
            preset=settings.run.preset,
            env=settings.env,
            model=settings.model,
            algorithm=settings.algorithm,
            rollout=settings.rollout,
            target=settings.target,
            actors=settings.actor.count,
            acting_precision=settings.actor.precision,
            evaluation=EvaluationSettings(**settings.evaluator.model_dump(include=set(EvaluationSettings.model_fields))),
        )

    def to_json(self) -> str:
        """Text for `Welcome.config`."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the configuration that `to_json` wrote. Raises `ConfigError` for a setting or value unknown to this version.

        Imports the package of a user's own algorithm: for text from a learner use `common.service.allowed_code.read_run`.
        """
        try:
            return tree_of(cls, _algorithm_in(text)).model_validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            raise ConfigError(
                f"the learner's run configuration does not fit here ({'.'.join(map(str, first['loc']))})",
                found=first["input"],
                wanted=first["msg"],
                fix="run the same rookery version on both sides, and the same packages of your own",
            ) from error


def _algorithm_in(text: str) -> object:
    try:
        return json.loads(text)["algorithm"]["name"]
    except (ValueError, KeyError, TypeError):
        return None  # whoever checks all of it says what is wrong


T = TypeVar("T", bound=Section)


def tree_of(base: type[T], algorithm: object) -> type[T]:
    """`base` with the section `algorithm` that belongs to an algorithm of this name: of a user's package, that package's own.

    Raises ConfigError where that cannot be had.
    """
    if not extensions.named(algorithm):
        return base
    from common.algorithms.registry import entry  # noqa: PLC0415  needs torch, for which ours need not wait

    return _with_section(base, entry(str(algorithm)).settings)  # type: ignore[return-value]


@cache
def _with_section(base: type[Section], section: type[AlgorithmSection]) -> type[Section]:
    fields: dict[str, Any] = {"algorithm": (section, ...)}
    return create_model(base.__name__, __base__=base, **fields)
