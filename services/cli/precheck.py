"""The check of a run's environment before torch is imported and before any process of the run starts."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import NoReturn

from common.config.schema import Settings
from common.envs.make import wrong_number
from common.envs.spec import IMAGE_RANK, EnvSpec
from common.envs.trial import tried_out
from common.errors import ConfigError, RookeryError
from common.runtime.lifecycle import BUILD_SECONDS, CLOSE_SECONDS, SIGNALS, SLOW_SECONDS
from common.runtime.process import end_process
from services.cli.train.exit_with_parent import exit_with_parent
from services.cli.train.instructions import describe_exit

FIRST_ENV_STEPS = 1000  # random ones: faults that begin after some env steps are found here and not by crashing actors
_FORK = multiprocessing.get_context("fork")  # the environment's module is imported already, and no thread runs yet


def check_environment(settings: Settings) -> None:
    """Build one environment of the run, take its first env steps, and compare its spaces with algorithm and network.

    Raises `ConfigError` or `ResourceError` with what is to be changed. The environment runs in a process of its own, which it may
    end or block. What it prints goes to stderr, because the lines on stdout may be read by a program.
    """
    env, offers_masks = _first_look(settings)
    if offers_masks:
        consequence = "the policy also chooses actions that it forbids"
        print(f"rookery: warning: {settings.env.name} offers an action_mask, which is not used: {consequence}", file=sys.stderr)
    settings.algorithm.require_actions(env.action)
    settings.algorithm.require_observations(env, settings.model)
    if env.is_image and not settings.model.entry_point:
        settings.model.convolutions(env.observation_shape[-IMAGE_RANK:])


def _first_look(settings: Settings) -> tuple[EnvSpec, bool]:
    """Return the spec of the environment, and whether it offers action masks.

    Raises the error of the child process that looks, or `ConfigError` where the environment ends or blocks that process.
    """
    receiver, sender = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_look, args=(settings, sender))
    child.start()
    sender.close()
    name, fault, found = settings.env.name, "hangs", f"nothing within {BUILD_SECONDS:.0f} s"
    try:
        if not receiver.poll(min(SLOW_SECONDS, BUILD_SECONDS)):
            waits = f"it is waited for, {BUILD_SECONDS:.0f} s at most; Ctrl-C ends the command"
            print(f"rookery: {name} has not taken its first env steps after {SLOW_SECONDS:.0f} s; {waits}", file=sys.stderr)
        if receiver.poll(BUILD_SECONDS):
            answer: tuple[EnvSpec, bool] | RookeryError = receiver.recv()
            child.join(CLOSE_SECONDS)
            if isinstance(answer, RookeryError):
                raise answer
            return answer
    except EOFError:
        child.join()
        fault, found = "ends its process", describe_exit(child.exitcode or 0)
    finally:
        child.kill()
    fact = f"{name} {fault} when it is built, reset or stepped"
    raise ConfigError(fact, found=found, wanted=f"{FIRST_ENV_STEPS} env steps", fix="correct the environment, or env.kwargs")


def _look(settings: Settings, sender: Connection) -> NoReturn:
    """Send a first look at the environment, or its error, and end this process."""
    atexit._clear()  # noqa: SLF001 - those of the parent
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    exit_with_parent(os.getppid())
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    warnings.simplefilter("ignore")  # the learner builds the environment too, and its log has them
    answer: tuple[EnvSpec, bool] | RookeryError
    try:
        with tried_out(settings.env, env_steps=FIRST_ENV_STEPS) as environment:
            wanted = settings.env.num_envs // (settings.policy_server.workers or 1)
            if environment.num_envs not in (1, wanted):  # of a user's function that takes no number
                raise wrong_number(settings.env, found=environment.num_envs, wanted=wanted)
            answer = environment.spec, environment.offers_masks
    except RookeryError as error:
        answer = type(error)(str(error))
        answer.add_note(traceback.format_exc())  # for --debug
    sender.send(answer)
    end_process(0)
