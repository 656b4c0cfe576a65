"""The settings of a run that a learner sends its workers, and a policy server its env workers, in a Welcome."""

from __future__ import annotations

import json
from typing import Self, TypeVar

from pydantic import ValidationError

from common.algorithms.settings import AlgorithmSettings
from common.config.schema import Settings, with_algorithm_section
from common.config.sections import EvaluationSettings, RolloutSettings, Section, TargetSettings
from common.envs.spec import EnvSettings
from common.errors import ConfigError
from common.models.spec import ModelSettings, Precision

C = TypeVar("C", bound=Section)


class EnvRunConfig(Section):
    """The settings of a run that an env worker needs; the policy server sends them in its Welcome. No algorithm is imported."""

    run_id: str
    seed: int
    algorithm: str  # its name, as the seed for labels
    env: EnvSettings  # of one env worker: `num_envs` are its own
    environment_seed: int  # of the policy server; from it those of the slots follow

    @classmethod
    def of(cls, run: RunConfig, *, rows: int, environment_seed: int) -> Self:
        """Return the part of `run` that concerns an env worker of `rows` environments.

        They reset in the next step, or the env worker refuses them: an end is lost where its step contains a slow reset.
        """
        env = run.env.model_copy(update={"num_envs": rows, "autoreset": "next_step"})
        name = run.algorithm.name
        return cls(run_id=run.run_id, seed=run.seed, algorithm=name, env=env, environment_seed=environment_seed)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the configuration in a Welcome. Raises `ConfigError` for a setting or value unknown to this version."""
        return _read(cls, text, server="policy server")


class RunConfig(Section):
    """The settings of a run that a worker needs; the learner sends them in its Welcome."""

    run_id: str
    seed: int
    preset: str
    env: EnvSettings
    model: ModelSettings
    algorithm: AlgorithmSettings
    rollout: RolloutSettings
    target: TargetSettings
    actors: int  # number that the run expects; more may connect
    acting_precision: Precision  # of all actors
    evaluation: EvaluationSettings

    @classmethod
    def of(cls, settings: Settings, *, run_id: str) -> Self:
        """Return the part of `settings` that concerns the whole run and not one process."""
        return with_algorithm_section(cls, settings.algorithm.name)(
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

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the configuration in a Welcome. Raises `ConfigError` for a setting or value unknown to this version.

        Imports the package of a user's algorithm: for text from a learner use `services.allowed_code.read_run`.
        """
        return _read(with_algorithm_section(cls, _algorithm_in(text)), text, server="learner")


def _read(section: type[C], text: str, *, server: str) -> C:
    try:
        return section.model_validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise ConfigError(
            f"the {server}'s run configuration does not fit here ({'.'.join(map(str, first['loc']))})",
            found=first["input"],
            wanted=first["msg"],
            fix="run the same rookery version on both sides, and the same versions of your own packages",
        ) from error


def _algorithm_in(text: str) -> object:
    try:
        return json.loads(text)["algorithm"]["name"]
    except (ValueError, KeyError, TypeError):
        return None  # the validation of the whole text reports the error
