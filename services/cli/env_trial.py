"""The trial of a run's environment before torch is imported and before any process of the run starts.

`python -m services.cli.env_trial FD` is its process: it reads section `env` as JSON from stdin, and writes a line of JSON to FD.
It is a new interpreter, because a fork lacks the threads that a user's module has started.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from threading import Thread
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from common.algorithms.sections import ActorCriticSection
from common.envs.make import wrong_number
from common.envs.spec import IMAGE_RANK, EnvSettings, EnvSpec
from common.envs.trial import trial
from common.errors import ConfigError, RookeryError
from common.runtime.lifecycle import BUILD_SECONDS, SLOW_SECONDS, handled
from common.runtime.process import end_process
from services.cli.train.exit_with_parent import wrapper

if TYPE_CHECKING:
    from common.config.schema import Settings  # the process of the trial has no use for the other sections

FIRST_ENV_STEPS = 1000  # random ones: faults that begin after some env steps are found here and not by crashing actors


def check_environment(*runs: Settings) -> None:
    """Build two environments of the runs, or the only one, take first env steps, and compare spaces with algorithm and network.

    Those that several runs have are built once, and what has no effect in several is named once. Raises `ConfigError` with what
    is to be changed, also where the environment crashes or hangs: the trial has a process of its own. What the environment
    prints goes to stderr, because the lines on stdout may be read by a program.
    """
    answers: dict[str, dict[str, Any]] = {}
    warned: dict[str, None] = {}
    for settings in runs:
        env = _of_one_process(settings)
        key = env.model_dump_json()
        answers[key] = answers.get(key) or _answer(env)
        warned |= dict.fromkeys(_compare(settings, answers[key]))
    for text in warned:
        print(f"rookery: warning: {text}", file=sys.stderr)


def _of_one_process(settings: Settings) -> EnvSettings:
    """Return section `env` as a process that steps environments of the run has it."""
    workers = settings.policy_server.workers
    if workers and settings.env.num_envs % workers:
        wanted = f"a divisor of env.num_envs = {settings.env.num_envs}: each env worker steps the same number of environments"
        raise ConfigError("policy_server.workers", found=workers, wanted=wanted)
    return settings.env.model_copy(update={"num_envs": settings.env.num_envs // (workers or 1)})


def _compare(settings: Settings, answer: dict[str, Any]) -> Iterator[str]:
    """Compare a run with the answer of its trial; yield warnings of what has no effect. Raises `ConfigError`."""
    if "error" in answer:
        error = ConfigError(answer["error"])
        error.add_note(answer["traceback"])  # for --debug
        raise error
    env = TypeAdapter(EnvSpec).validate_python(answer["spec"])
    if answer["offers_masks"]:
        fact = "offers an action_mask, which is not used: the policy also chooses actions that it forbids"
        yield f"{settings.env.name} {fact}; env.action_mask=true uses it"
    settings.algorithm.require_actions(env.action)
    settings.algorithm.require_observations(env, settings.model)
    settings.model.normalises(env)
    if settings.model.conv != "auto" and not any(part.is_image for part in env.parts):
        yield f"model.conv has no effect: {settings.env.name} has no images"
    if isinstance(settings.algorithm, ActorCriticSection):
        kind = "discrete" if env.action.discrete else "continuous"
        chosen = settings.algorithm.for_actions(discrete=env.action.discrete)
        if env.action.discrete and settings.model.initial_log_std:
            yield f"model.initial_log_std has no effect: actions of {settings.env.name} are discrete"
        if chosen.entropy_env_steps and chosen.entropy_coef == chosen.entropy_final:
            fact = f"algorithm.entropy_coef of {kind} actions is algorithm.entropy_final = {chosen.entropy_final:g}"
            yield f"algorithm.entropy_env_steps has no effect: {fact}"
    for part in env.parts:
        if part.is_image and not settings.model.entry_point:
            settings.model.convolutions(part.observation_shape[-IMAGE_RANK:])
    for name in answer["unheeded"]:
        yield f"env.{name} has no effect on {settings.env.name}, which does not heed it"


def _answer(env: EnvSettings) -> dict[str, Any]:
    """Return what `_try` returns in the process of the trial. Raises `ConfigError` where that ends without it, or hangs."""
    (read, write), answers = os.pipe(), queue.SimpleQueue[str]()
    command = [*wrapper(), sys.executable, "-P", "-u", "-m", "services.cli.env_trial", str(write)]
    stops = handled([signal.SIGTERM], lambda number, _: sys.exit(128 + number))  # not before the processes below have ended
    with os.fdopen(read) as lines, os.fdopen(write, "w") as end, stops:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, pass_fds=[write], process_group=0, text=True)
        Thread(target=lambda: answers.put(lines.readline()), name="answer", daemon=True).start()
        try:
            code = _wait(process, env)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the processes that the environment started
            process.wait()
            print(file=end, flush=True)  # ends the line of no answer: processes of the environment may hold the pipe open
            text = answers.get().strip()
    if text:
        return dict(json.loads(text))
    from services.cli.train.instructions import describe_exit  # noqa: PLC0415  imports metrics, which a trial does not need

    fault = "hangs" if code is None else "ends its process"
    found = f"nothing within {BUILD_SECONDS:.0f} s" if code is None else describe_exit(code)
    fact = f"{env.name} {fault} when it is built, reset or stepped"
    raise ConfigError(fact, found=found, wanted=f"{FIRST_ENV_STEPS} env steps", fix="correct the environment, or env.kwargs")


def _wait(process: subprocess.Popen[str], env: EnvSettings) -> int | None:
    """Pass `env` to the process; return its exit code, or None where it still runs after `BUILD_SECONDS`."""
    with suppress(subprocess.TimeoutExpired):
        process.communicate(env.model_dump_json(), SLOW_SECONDS)
        return process.returncode
    waits = f"it is waited for, {BUILD_SECONDS:.0f} s at most; Ctrl-C ends the command"
    print(f"rookery: {env.name} has not taken its first env steps after {SLOW_SECONDS:.0f} s; {waits}", file=sys.stderr)
    with suppress(subprocess.TimeoutExpired):
        return process.wait(BUILD_SECONDS - SLOW_SECONDS)
    return None


def _try(env: EnvSettings) -> dict[str, Any]:
    """Return the spec of the environment, whether it offers action masks and which settings it does not heed, or its error."""
    warnings.simplefilter("ignore")  # the learner builds the environment too, and its log has them
    try:
        # A batch of one hides axes in the wrong order, and a function that returns the same environment each time.
        rows = min(2, env.num_envs)
        with trial(env, num_envs=rows, env_steps=FIRST_ENV_STEPS) as environment:
            # A user's function may take no number, and agents come by whole copies of their environment.
            rows = max(rows, environment.agents)
            if environment.num_envs not in (rows, env.num_envs) or env.num_envs % environment.agents:
                raise wrong_number(env, environment)
            said = {"offers_masks": environment.offers_masks, "unheeded": environment.unheeded}
            return {"spec": asdict(environment.spec)} | said
    except RookeryError as error:
        return {"error": str(error), "traceback": traceback.format_exc()}


if __name__ == "__main__":
    answer = _try(EnvSettings.model_validate_json(sys.stdin.read(), strict=True))
    with os.fdopen(int(sys.argv[1]), "w") as file:
        print(json.dumps(answer), file=file)
    end_process(0)
