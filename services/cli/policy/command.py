"""`rookery evaluate`, `rookery play` and `rookery export`: their options and their help."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from common.runtime.lifecycle import handled
from services.cli.parser import add_allow_code, add_command, count

if TYPE_CHECKING:
    from common.policies.trained import TrainedPolicy

RUN_HELP = """\
RUN is the directory of a run, or of one of its checkpoints, or the address of its copy, such as s3://BUCKET/runs/NAME.
env.key=value changes the environment, such as env.sticky_actions=0.25; `rookery config show` lists the settings.
"""
EVALUATE_EXAMPLES = f"""\
{RUN_HELP}
Each environment plays a number of episodes that is fixed beforehand, so that short episodes do not count more often than long
ones. env.num_envs is the number of environments side by side.

examples:
  rookery evaluate runs/mine
  rookery evaluate runs/mine --episodes 30 --sampled
  rookery evaluate runs/mine --checkpoint best env.sticky_actions=0.25 --json

exit code: 0 evaluated; 2 bad input; 130 interrupted.
"""
PLAY_EXAMPLES = f"""\
{RUN_HELP}
examples:
  rookery play runs/mine --episodes 5
  rookery play runs/mine --video game.mp4
  rookery play runs/mine --render --sampled

exit code: 0 played; 2 bad input, or no display for --render; 130 interrupted.
"""
EXPORT_EXAMPLES = """\
RUN is the directory of a run, or of one of its checkpoints, or the address of its copy. FILE.onnx takes batches of
observations and returns greedy actions; its metadata describes both. The packages for it are in the extra rookery[export].

examples:
  rookery export runs/mine policy.onnx
  rookery export runs/mine policy.onnx --checkpoint best --check 10000

exit code: 0 written; 1 it acts differently and was not written; 2 bad input, or a package is missing; 130 interrupted.
"""

_number = partial(count, least=0)


def add(commands: Any) -> None:
    """Add all."""
    evaluate = _add(commands, "evaluate", _evaluate, "the mean return of a trained policy", EVALUATE_EXAMPLES)
    evaluate.add_argument("--episodes", metavar="N", type=count, default=100, help="default: 100")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object, with the return of each episode")
    play = _add(commands, "play", _play, "watch a trained policy, in a window or as a video", PLAY_EXAMPLES)
    play.add_argument("--episodes", metavar="N", type=count, default=1, help="default: 1")
    play.add_argument("--video", metavar="FILE", type=Path, help="write the pictures to FILE.mp4")
    play.add_argument("--render", action="store_true", help="show the pictures in a window")
    export = add_command(
        commands,
        "export",
        _export,
        "a trained policy as an ONNX file",
        usage="rookery export RUN FILE.onnx [options]",
        epilog=EXPORT_EXAMPLES,
        max_names=2,
    )
    _add_checkpoint(export)
    help_check = (
        "random observations on which onnxruntime must take the policy's greedy actions; default: 1000, if it is installed"
    )
    export.add_argument("--check", metavar="N", type=_number, help=help_check)


def _add(
    commands: Any, name: str, function: Callable[[argparse.Namespace], int], summary: str, epilog: str
) -> argparse.ArgumentParser:
    usage = f"rookery {name} RUN [env.key=value ...] [options]"
    parser = add_command(commands, name, function, summary, usage=usage, epilog=epilog, takes_settings=True, max_names=1)
    _add_checkpoint(parser)
    help_sampled = "draw actions, as actors do at the end of training; default: the best action"
    parser.add_argument("--sampled", action="store_true", help=help_sampled)
    parser.add_argument("--seed", metavar="S", type=_number, default=1, help="of environments and drawn actions; default: 1")
    return parser


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    help_checkpoint = "newest, best (by the run's evaluations) or a version; default: newest"
    parser.add_argument("--checkpoint", metavar="NAME", default="newest", help=help_checkpoint)
    add_allow_code(parser)


def _load(options: argparse.Namespace, *, seed: int = 1) -> TrainedPolicy:
    import torch  # noqa: PLC0415

    from common.policies.load import load_policy  # noqa: PLC0415

    policy = load_policy(
        options.names[0],
        checkpoint=options.checkpoint,
        overrides=options.overrides,
        seed=seed,
        allow_code=options.allow_code,
    )
    torch.set_num_threads(policy.settings.evaluator.torch_threads)
    return policy


def _require_run(options: argparse.Namespace) -> None:
    """Raise `ConfigError` where no run is named. A directory such as learning_rate=1e-3-s1 is one, and no setting."""
    if not options.names and (folder := next((word for word in options.overrides if Path(word).is_dir()), None)):
        options.names.append(folder)
        options.overrides.remove(folder)
    if not options.names:
        raise ConfigError(
            "no run named", wanted="the directory of a run", fix=f"try `rookery {options.parser.prog.split()[-1]} runs/NAME`"
        )


def _ended_by_sigterm() -> AbstractContextManager[None]:
    """Let SIGTERM end the command while inside as Ctrl-C does: SDL, with which many environments draw, would swallow it."""
    return handled([signal.SIGTERM], lambda number, _: sys.exit(128 + number))


def _evaluate(options: argparse.Namespace) -> int:
    _require_run(options)
    from services.cli.policy.evaluate import evaluate  # noqa: PLC0415

    with _ended_by_sigterm(), redirect_stdout(sys.stderr):  # what the environment prints: a program may read the result
        policy = _load(options, seed=options.seed)
        result = evaluate(policy, episodes=options.episodes, seed=options.seed, greedy=not options.sampled)
    print(result.to_json() if options.json else result.to_text())
    return 0


def _play(options: argparse.Namespace) -> int:
    _require_run(options)
    from common.policies.environment import UNHEEDED  # noqa: PLC0415
    from common.policies.trained import require_heeded  # noqa: PLC0415
    from services.cli.policy.play import play, require_display, require_writable  # noqa: PLC0415

    if options.render:
        require_display()
    if options.video:
        require_writable(options.video)
    policy = _load(options, seed=options.seed)
    require_heeded(policy.settings.env, options.overrides, UNHEEDED)
    with _ended_by_sigterm():
        play(
            policy,
            episodes=options.episodes,
            seed=options.seed,
            greedy=not options.sampled,
            video=options.video,
            window=options.render,
        )
    return 0


def _export(options: argparse.Namespace) -> int:
    if len(options.names) < 2:  # noqa: PLR2004 - a run and a file
        raise ConfigError(
            "a run and a file are needed", found=f"{len(options.names)} names", fix="try `rookery export runs/NAME policy.onnx`"
        )
    from services.cli.policy.export import export, require_possible  # noqa: PLC0415

    file = Path(options.names[1])
    require_possible(file, observations=options.check)
    print(export(_load(options), file, observations=options.check))
    return 0
