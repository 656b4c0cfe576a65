"""The sections of a configuration that belong to its processes: every setting with its type, range, unit and effect.

The sections `env`, `model` and `algorithm` are declared beside the code that they configure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from common.conditions import PER_ENVIRONMENT, OnlyIf, Unless
from common.config.endpoint import MAX_PORT, parse_endpoint, parse_endpoints
from common.models.spec import Precision
from common.protocol.messages import WORKER_NAME


def _accepted_by(parse: Callable[[str], object]) -> AfterValidator:
    """Return the check that `parse` takes a text."""

    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


EndpointText: TypeAlias = Annotated[str, _accepted_by(parse_endpoint)]

COMMA_LIST = "comma-list"
"""Format, in the JSON schema, of text that is a list by itself."""

EndpointsText: TypeAlias = Annotated[str, _accepted_by(parse_endpoints), Field(json_schema_extra={"format": COMMA_LIST})]


def _module_name(text: str) -> str:
    if not all(part.isidentifier() for part in text.split(".")):
        raise ValueError("the name of a package or module, such as mygames or mygames.envs")
    return text


def _address(text: str) -> str:
    if text and not re.match(r"[a-z][a-z0-9+.-]*://.", text):
        raise ValueError("an address such as s3://BUCKET/runs or file:///FOLDER")
    return text


def _by_the_clock(what: str) -> Unless:
    return Unless("run.mode", "lockstep", why=f"the clock would decide {what}")


class Section(BaseModel):
    """Base of the sections: immutable, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    every_setting: ClassVar[tuple[Any, ...]] = ()  # conditions and marks of `common.conditions`


def as_run_name(text: str) -> str:
    """Return `text` in the characters of a run id, such as `my-run` for "my run", at most 100 of them."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:100]


class RunSettings(Section):
    """Identity of the run."""

    preset: str = Field(
        default="",
        description="name the run goes by in its summary; set by the preset or file it came from, or, where env.id or "
        "env.entry_point is another than there, by environment and algorithm",
    )
    id: str = Field(
        default="", pattern=r"^[A-Za-z0-9._-]{0,128}$", description="workers of another run are refused; empty: a new one"
    )
    seed: int = Field(default=1, ge=0, le=2**31 - 1, description="every random stream of the run grows from it")
    dir: str = Field(default="", description="run directory; empty: runs/<preset>-<date>-<time>-s<seed>")
    init: str = Field(
        default="",
        description="checkpoint of another run, from which the network takes its first weights; empty: random weights; "
        "`rookery train --init` finds the newest of a run",
    )
    mode: Literal["asynchronous", "lockstep"] = Field(
        default="asynchronous",
        description="lockstep: actors and learner take turns, and two runs of one seed on one machine end with the same weights",
    )

    tracking: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = Field(
        default=("tensorboard",),
        description="programs that get curves, settings and result, of [tensorboard, wandb, mlflow, trackio]; all but the first "
        "need the extra of their name, and are configured by their own environment variables",
    )
    store: Annotated[str, AfterValidator(_address)] = Field(
        default="",
        description="address of a bucket, such as s3://BUCKET/runs, to which checkpoints and results are uploaded under the name "
        "of the run directory; empty: none",
    )


class RolloutSettings(Section):
    """One experience message."""

    length: int = Field(default=128, ge=1, le=8192, description="env steps of each environment in one trajectory (T)")


class LearnerSettings(Section):
    """The process that trains."""

    bind: EndpointText = Field(
        default="tcp://127.0.0.1:5700", description="address at which workers connect; port 0: any free one"
    )
    keys: str = Field(
        default="",
        description="folder of its secret key and of the public keys of workers that may connect, as `rookery keys` makes it; "
        "empty: nothing is encrypted, and any process that reaches it may connect",
    )
    insecure: bool = Field(
        default=False,
        description="accept workers of other machines without keys, and connect to ranks of the learner on other machines, which "
        "never use keys: only where the network is trusted",
    )
    ranks: int = Field(
        default=1,
        ge=1,
        le=64,
        description="learner processes that train one network together, each on the experience of its own actors; N ranks with "
        "a batch and a minibatch each train as one with N times both",
    )
    ranks_seconds: Annotated[float | None, Unless("ranks", 1)] = Field(
        default=60.0,
        gt=0,
        description="longest wait for the other ranks at the start, before it fails; null: no limit, as `rookery train` sets it, "
        "which restarts a rank that ends",
    )
    batch: int = Field(
        default=2,
        ge=1,
        le=4096,
        description="trajectories per update, of each rank; larger: steadier gradients, fewer updates; in lockstep raised to a "
        "multiple of the actors of a rank",
    )
    batch_seconds: Annotated[float | None, _by_the_clock("which messages are in a batch")] = Field(
        default=None,
        gt=0,
        description="longest time that a message waits for a full batch, before a smaller batch is trained on, and a rank of the "
        "learner for its first message; null: no limit",
    )
    credits: Annotated[int, Unless("run.mode", "lockstep")] = Field(
        default=2,
        ge=1,
        le=1024,
        description="unacknowledged trajectories per actor; bounds queue and policy lag; raised where few actors fill a batch; "
        "in lockstep it is the number of trajectories that one batch takes from each actor",
    )
    max_actors: Annotated[int, Unless("run.mode", "lockstep")] = Field(
        default=64, ge=1, le=65536, description="actors connected at once, in lockstep actor.count; more are refused"
    )
    max_policy_lag: int = Field(default=20, ge=0, description="policy versions; older experience is dropped and counted as stale")
    snapshot_precision: Precision = Field(default="fp32", description="weights sent to workers; bf16 halves the bytes and rounds")
    torch_threads: int = Field(default=1, ge=1, le=256, description="CPU threads of the training computation")
    device: Annotated[Literal["cpu", "cuda"], Unless("run.mode", "lockstep", why="its kernels do not add in a fixed order")] = (
        Field(default="cpu", description="where the networks are trained; replay stays in main memory")
    )


class CheckpointSettings(Section):
    """Checkpoints, from which a run resumes."""

    every_seconds: float = Field(default=60.0, gt=0, description="time between checkpoints; at most this much training is lost")
    keep: int = Field(default=3, ge=1, le=1000, description="newest checkpoints kept; older ones are removed")
    replay: Annotated[bool, Unless("algorithm.replay_capacity", None)] = Field(
        default=False,
        description="true: checkpoints hold the replay memory, so that a resumed run does not fill it again; it takes as much "
        "disk as memory, and each checkpoint writes the transitions inserted since the last",
    )


class ConnectedSettings(Section):
    """A process that connects to a server: to a learner, or to a policy server."""

    keys: str = Field(
        default="",
        description="folder of its secret key and the public one of the process that it connects to; needed where that has keys",
    )
    insecure: bool = Field(
        default=False, description="without keys, connect to another machine: only where the network is trusted"
    )
    allow_code: tuple[Annotated[str, AfterValidator(_module_name)], ...] = Field(
        default=(),
        description="packages or modules whose code the learner's configuration may name, such as [mygames]; other code must "
        "be named in the settings of this process",
    )
    name: str = Field(
        default="",
        pattern=rf"^({WORKER_NAME.pattern})?$",
        description="unique in the run, stable over restarts; empty: from host and process",
    )


class WorkerSettings(ConnectedSettings):
    """A process that connects to a learner."""

    learner: EndpointsText = Field(
        default="tcp://127.0.0.1:5700",
        description="address of the learner; where it has several ranks, those of all ranks in their order, separated by commas",
    )
    torch_threads: int = Field(default=1, ge=1, le=256, description="CPU threads of acting")


class ActorSettings(WorkerSettings):
    """The processes that step environments."""

    precision: Precision = Field(default="fp32", description="arithmetic of acting; bf16 where the CPU has it, else fp32")
    count: int = Field(default=2, ge=0, le=1024, description="actors that `rookery train` starts; 0: all are started elsewhere")


class PolicyServerSettings(Section):
    """The actor that acts for env workers: towards the learner it has the settings of `actor`."""

    every_setting = (Unless("policy_server.workers", 0),)

    workers: Annotated[int, _by_the_clock("which env workers are late")] = Field(
        default=0,
        ge=0,
        le=1024,
        description="env workers of each policy server, among which env.num_envs environments are divided; 0: actors step "
        "their own environments",
    )
    bind: EndpointText = Field(
        default="tcp://127.0.0.1:5800", description="address at which env workers connect; port 0: any free one"
    )
    keys: str = Field(
        default="",
        description="folder of its secret key and of the public keys of env workers, as `rookery keys` makes it for a learner; "
        "empty: nothing is encrypted",
    )
    insecure: bool = Field(
        default=False, description="accept env workers of other machines without keys: only where the network is trusted"
    )
    step_timeout_ms: float = Field(
        default=1000.0,
        gt=0,
        le=600_000,
        description="milliseconds that one step waits for env workers. A slower one loses its episodes, so that this should "
        "only end the wait for one that failed",
    )
    learner_seconds: float | None = Field(
        default=50.0,
        gt=0,
        description="seconds without an answer of a learner, at the start, after which a policy server ends with exit code 2; "
        "null: it waits without limit, as actors do",
    )


class EnvWorkerSettings(ConnectedSettings):
    """The processes that step environments for a policy server, without torch."""

    policy_server: EndpointText = Field(default="tcp://127.0.0.1:5800", description="address of the policy server")


class EvaluationSettings(Section):
    """Evaluation of the newest policy: the learner's settings, of which an evaluator may override each."""

    episodes: int = Field(
        default=10,
        ge=1,
        le=10_000,
        description="episodes per evaluation and mode (greedy, sampled); rounded up to the same number of each of several agents",
    )
    every_seconds: float = Field(
        default=60.0,
        ge=1,
        description="time between the starts of two evaluations of two results each; the learner admits four results in a second",
    )
    cpu_share: float = Field(
        default=0.04,
        gt=0.0,
        le=1.0,
        description="largest share of the machine's cores that it uses while training goes on; it sleeps to stay below",
    )


class EvaluatorSettings(EvaluationSettings, WorkerSettings):
    """The process that plays the newest policy for its score, without training on it."""

    enabled: bool = Field(default=True, description="true: `rookery train` starts an evaluator")


class TargetSettings(Section):
    """The end of the run: a target score or a spent budget, whichever comes first."""

    every_setting = (PER_ENVIRONMENT,)

    mean100: float | None = Field(default=None, description="mean raw return of the last 100 training episodes; reached: solved")
    evaluation: Annotated[
        float | None,
        _by_the_clock("which policies are evaluated; target.mean100 is the target"),
        OnlyIf("evaluator.enabled", True, unless_set="learner.bind"),
    ] = Field(
        default=None,
        description="mean raw return of one greedy evaluation, evaluator.episodes episodes; reached: solved. For environments "
        "with long episodes",
    )
    env_steps: int = Field(default=10_000_000, ge=1, description="budget of env steps trained on; schedules run over it")
    wall_seconds: Annotated[float | None, _by_the_clock("how many updates there are; target.env_steps is the budget")] = Field(
        default=None,
        gt=0,
        description="budget of wall-clock time, without what a killed learner lost and time between processes; null: no limit",
    )


class MetricsSettings(Section):
    """The HTTP port of every service: /metrics, /healthz, /readyz."""

    host: str = Field(default="127.0.0.1", min_length=1, description="interface served; 0.0.0.0 lets other machines scrape")
    port: int = Field(default=0, ge=0, le=MAX_PORT, description="0: any free port")


class LogSettings(Section):
    """Log lines on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="lowest severity that is written")
    format: Literal["auto", "plain", "json"] = Field(
        default="auto", description="auto: live view on a terminal, else plain lines"
    )
