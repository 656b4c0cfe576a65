"""CartPole without velocities by `cartpole-velocity-free` and by RecurrentPPO of sb3-contrib, to a mean of 475, in turns.

    python -m benchmarks.recurrent --seeds 1 2 3

Needs `pip install sb3-contrib`, which the project itself does not. RecurrentPPO has the settings that RL Zoo tuned for this task
(`CartPoleNoVel-v1` in hyperparams/ppo_lstm.yml), schedules over 100,000 env steps included. Both are solved where the mean of the
last 100 training episodes reaches 475. Minutes are from the start of the process to that point.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.learning import train
from common.errors import ResourceError
from common.runtime import process

PRESET, TARGET = "cartpole-velocity-free", 475.0
BUDGET = 100_000  # env steps of RecurrentPPO: its tuned schedules end here


class Solved(NamedTuple):
    """Env steps and minutes until the mean of the last 100 training episodes reached the target."""

    env_steps: int
    minutes: float


def ours(seed: int) -> Solved | None:
    """Train the preset; return when it was solved, None where it was not."""
    with tempfile.TemporaryDirectory() as folder:
        solved = train(PRESET, seed, Path(folder) / "run", ())["solved_at"]
    return solved and Solved(solved["env_steps"], solved["wall_seconds"] / 60)


def theirs(seed: int) -> Solved | None:
    """As `ours`, by RecurrentPPO in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.recurrent", "--seeds", str(seed), "--theirs"]
    began = time.time()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResourceError("RecurrentPPO did not finish", found=done.stderr.strip().rpartition("\n")[2], wanted="a result")
    env_steps, at = json.loads(done.stdout.splitlines()[-1])
    return Solved(env_steps, (at - began) / 60) if env_steps else None


def recurrent_ppo(seed: int) -> tuple[int, float]:
    """Train RecurrentPPO in this process with one thread, which is faster here than two.

    Return the env steps at which it was solved, 0 where it was not, and the time of day.
    """
    torch.set_num_threads(1)
    library, vector = importlib.import_module("sb3_contrib"), importlib.import_module("stable_baselines3.common.vec_env")
    cartpole = importlib.import_module("common.envs.hidden").cartpole
    made = importlib.import_module("stable_baselines3.common.env_util").make_vec_env(cartpole, n_envs=8, seed=seed)
    model = library.RecurrentPPO(
        "MlpLstmPolicy",
        vector.VecNormalize(made, gamma=0.98),  # of observations and rewards; the returns that decide are raw
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        ent_coef=0.0,
        clip_range=lambda left: 0.2 * left,
        learning_rate=lambda left: 1e-3 * left,
        policy_kwargs={
            "ortho_init": False,
            "activation_fn": torch.nn.ReLU,
            "lstm_hidden_size": 64,
            "enable_critic_lstm": True,
            "net_arch": {"pi": [64], "vf": [64]},
        },
        seed=seed,
        device="cpu",
    )

    def solved() -> bool:
        returns = [episode["r"] for episode in model.ep_info_buffer]
        return len(returns) == model.ep_info_buffer.maxlen and statistics.fmean(returns) >= TARGET

    model.learn(BUDGET, callback=lambda *_: not solved())
    return model.num_timesteps if solved() else 0, time.time()


def main(argv: Sequence[str] | None = None) -> int:
    """Train with each seed, theirs and ours in turns, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recurrent", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--theirs", action="store_true", help="RecurrentPPO alone, in this process: a line of JSON")
    asked = parser.parse_args(argv)

    def measure() -> int:
        if importlib.util.find_spec("sb3_contrib") is None:
            fix = "pip install sb3-contrib"
            raise ResourceError("nothing to compare with", found="no sb3_contrib", wanted="it installed", fix=fix)
        if asked.theirs:
            print(json.dumps(recurrent_ppo(asked.seeds[0])))
            return 0
        print("| seed | | env steps | minutes |\n|---|---|---|---|")
        for seed in asked.seeds:
            for name, run in (("RecurrentPPO", theirs), (PRESET, ours)):
                solved = run(seed)
                cells = f"{solved.env_steps:,} | {solved.minutes:.1f}" if solved else "not solved |"
                print(f"| {seed} | {name} | {cells} |", flush=True)
        return 0

    return process.run(measure, program="benchmarks.recurrent")


if __name__ == "__main__":
    raise SystemExit(main())
