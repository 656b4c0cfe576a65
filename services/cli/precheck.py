"""The check of a run's environment before torch is imported and before any process of the run starts."""

from __future__ import annotations

import sys
import warnings
from contextlib import redirect_stdout

from common.config.schema import Settings
from common.envs.spec import IMAGE_RANK
from common.envs.trial import spec_of
from common.runtime.lifecycle import BUILD_SECONDS, time_limit
from common.units import Seconds

FIRST_ENV_STEPS = 1000  # random ones: faults that begin after some env steps are found here and not by crashing actors


def check_environment(settings: Settings) -> None:
    """Build one environment of the run, take its first env steps, and compare its spaces with algorithm and network.

    Raises `ConfigError` or `ResourceError` with what is to be changed. What the environment itself prints goes to stderr, because
    the lines on stdout may be read by a program. An environment that hangs ends the process with exit code 1.
    """
    stderr, name = sys.stderr, settings.env.name

    def on_slow(seconds: Seconds) -> None:
        waits = f"it is waited for, {BUILD_SECONDS:.0f} s at most; Ctrl-C ends the command"
        print(f"rookery: {name} has not taken its first env steps after {seconds:.0f} s; {waits}", file=stderr, flush=True)

    def on_limit(seconds: Seconds) -> None:
        found = f"found nothing within {seconds:.0f} s; correct the environment, or env.kwargs"
        print(f"rookery: error: {name} hangs when it is built, reset or stepped: {found}", file=stderr, flush=True)

    with (
        warnings.catch_warnings(),
        redirect_stdout(sys.stderr),
        time_limit(BUILD_SECONDS, on_slow=on_slow, on_limit=on_limit),
    ):
        warnings.simplefilter("ignore")  # the learner builds the environment too, and its log has them
        env = spec_of(settings.env, env_steps=FIRST_ENV_STEPS)
    settings.algorithm.require_actions(env.action)
    settings.algorithm.require_observations(env, settings.model)
    if env.is_image and not settings.model.entry_point:
        settings.model.convolutions(env.observation_shape[-IMAGE_RANK:])
