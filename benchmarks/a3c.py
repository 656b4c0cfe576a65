"""A3C by data against A3C by gradients: bytes per env step, env steps/s, policy lag, time to solve, and where they cross.

Run it with `python -m benchmarks.a3c`; `--out benchmarks/results/a3c.md` keeps the page. Both Pong presets are run for a short
while with a ladder of networks. Bytes are computed from what the two ways send, and counted by the learner: up is what actors
send (trajectories or gradients), down is what they fetch (each actor the snapshot of every update, or fewer).

By data, a rollout costs the same whatever the network; by gradients, it costs the network, whatever was seen. So what is sent up
crosses at

    parameters = bytes of a rollout / bytes of a number
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from benchmarks.learning import kept, machine, newest
from benchmarks.pipeline import Window, running
from benchmarks.throughput import NO_EVALUATOR
from common.algorithms.registry import build_payload
from common.config.load import load_settings
from common.envs.trial import spec_of
from common.models import nets
from common.models.snapshot import ParameterLayout
from common.observability.deployment import LEARNER
from common.units import Seconds

PRESETS = ("pong-a3c", "pong-a3c-grad")
NATURE = ("model.conv=[[32,8,4],[64,4,2],[64,3,1]]", "model.hidden=[512]", "env.height=84", "env.width=84")
LADDER: Mapping[str, Sequence[str]] = {
    "pong x 1/4": ("model.conv=[[4,6,3],[8,4,2]]", "model.hidden=[64]"),
    "pong x 1/2": ("model.conv=[[8,6,3],[16,4,2]]", "model.hidden=[128]"),
    "pong": (),
    "pong x 2": ("model.conv=[[32,6,3],[64,4,2]]", "model.hidden=[512]"),
    "pong x 4": ("model.conv=[[64,6,3],[128,4,2]]", "model.hidden=[1024]"),
    "Nature, 84x84": NATURE,
}
COLUMNS = (
    "network", "parameters", "sent as", "up computed", "up counted", "down computed", "down counted", "core time",
    "env steps/s", "policy lag",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes per env step on the wire, computed from the sizes of its arrays without headers and ended episodes."""

    parameters: int
    up: float  # bytes per env step: a message divided by its rows
    down: float  # bytes per env step: a snapshot for each actor after each update
    rows: int  # env steps of a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One network, one way of sending."""

    network: str
    preset: str
    traffic: Traffic
    window: Window

    @property
    def up(self) -> float:
        """Bytes received by the learner per env step trained on."""
        return self._per_step("rookery_learner_message_bytes_received_total")

    @property
    def down(self) -> float:
        """Bytes sent by the learner per env step trained on."""
        return self._per_step("rookery_learner_message_bytes_sent_total")

    @property
    def cost(self) -> Seconds:
        """Core time of all processes per env step trained on: the other side of speed, on a machine that is busy as well."""
        return self.window.core_seconds_per_env_step

    @property
    def lag(self) -> float:
        """Mean policy lag of what was trained on, in versions."""
        growth = self.window.growth[LEARNER]
        return growth["rookery_learner_policy_lag_versions_sum"] / growth["rookery_learner_policy_lag_versions_count"]

    def _per_step(self, name: str) -> float:
        return self.window.growth[LEARNER][name] / (self.window.trained_per_second * self.window.seconds)


def traffic(preset: str, overrides: Sequence[str]) -> Traffic:
    """Return the traffic that follows from the settings."""
    settings = load_settings(preset=preset, overrides=overrides, environ={}).settings
    env, length, num_envs = spec_of(settings.env), settings.rollout.length, settings.env.num_envs
    ships = build_payload(settings.algorithm, model=settings.model, env=env, length=length, num_envs=num_envs)
    message = sum(int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize for spec in ships.schema if -1 not in spec.shape)
    parameters = ParameterLayout.of(nets.outline_actor_critic(settings.model, env)).size
    number = 2 if settings.learner.snapshot_precision == "bf16" else 4
    rows = length * num_envs
    down = number * parameters * settings.actor.count / (settings.learner.batch * rows)
    return Traffic(parameters=parameters, up=message / rows, down=down, rows=rows)


def measure(network: str, preset: str, overrides: Sequence[str], *, seconds: Seconds) -> Row:
    """Measure one run for a while after its first messages."""
    sizes = traffic(preset, overrides)
    with running(preset, (*overrides, NO_EVALUATOR)) as run:
        run.wait_until_trained(8 * sizes.rows)
        window = run.watch(seconds)
    return Row(network=network, preset=preset, traffic=sizes, window=window)


def table(rows: Sequence[Row]) -> list[str]:
    """Return all rows as Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        cells = [row.network, f"{row.traffic.parameters:,}", "gradients" if row.preset.endswith("grad") else "data"]
        cells += [f"{found:,.0f}" for found in (row.traffic.up, row.up, row.traffic.down, row.down)]
        cells += [f"{1e6 * row.cost:,.0f} us", f"{row.window.trained_per_second:,.0f}", f"{row.lag:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def crossovers(rows: Sequence[Row]) -> list[str]:
    """Return the computed network size at which both ways cost the same, and the measured networks that favour gradients."""
    lines = []
    for up, steps in sorted({(row.traffic.up, row.traffic.rows) for row in rows if row.preset == PRESETS[0]}):
        size = up * steps
        lines.append(
            f"- Computed: a rollout of {steps} env steps has {size:,.0f} bytes. Gradients cost as much at "
            f"{size / 4:,.0f} parameters in float32, {size / 2:,.0f} in bfloat16; above, data is cheaper."
        )
    by_network: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_network.setdefault(row.network, {})[row.preset] = row
    pairs = {name: tuple(pair[preset] for preset in PRESETS) for name, pair in by_network.items() if len(pair) == len(PRESETS)}
    fewer = [name for name, (data, gradient) in pairs.items() if gradient.up < data.up]
    cheaper = [name for name, (data, gradient) in pairs.items() if gradient.cost < data.cost]
    lines.append(f"- Counted: gradients send fewer bytes with {', '.join(fewer) or 'none of these networks'}.")
    lines.append(f"- Counted: gradients take less core time with {', '.join(cheaper) or 'none of these networks'}.")
    return lines


def solved(path: Path) -> list[str]:
    """Return lines with the time to solve of the runs on the page of `benchmarks.learning`, also of those that did not."""
    lines = []
    for preset in PRESETS:
        runs = newest(kept(path), preset)
        shown = [
            f"seed {run['seed']} {run['env_steps'] / 1e3:,.0f} k env steps in {run['wall_seconds'] / 60:.1f} minutes"
            + ("" if run["solved_at"] else ", not solved")
            for run in runs
        ]
        lines.append(f"- `{preset}` to its target: {'; '.join(shown) or 'not run'}.")
    return lines


def page(rows: Sequence[Row], *, seconds: Seconds, load_before: float, learning: Path) -> str:
    """Return the page of results in Markdown."""
    settings = load_settings(preset=rows[0].preset, environ={}).settings
    env, images = settings.env, "x".join(map(str, spec_of(settings.env).network_input_shape[1:]))
    networks = list(dict.fromkeys(row.network for row in rows))
    chosen = "" if networks == list(LADDER) else f" --networks {shlex.join(networks)}"
    lines = ["# A3C by data and by gradients", "", f"    python -m benchmarks.a3c --seconds {seconds:g}{chosen}", ""]
    lines += [f"{machine()}; load {load_before:.1f} before it began, {datetime.now(UTC).date()}."]
    lines += [
        f"{settings.actor.count} actors with {env.num_envs} games each, images of {images} where the network's name has no size,"
    ]
    lines += [f"rollouts of {rows[0].traffic.rows} env steps, real processes over loopback, no evaluator."]
    lines += ["Bytes and core time are per env step trained on.", "", *table(rows), ""]
    lines += ["## Where they cross", "", *crossovers(rows), "", "## Time to solve", "", *solved(learning)]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; write the page where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.a3c", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run, after its first messages")
    parser.add_argument("--networks", nargs="+", choices=tuple(LADDER), default=tuple(LADDER), metavar="NETWORK")
    parser.add_argument("--learning", type=Path, default=Path("benchmarks/results/learning.jsonl"), help="times to solve")
    parser.add_argument("--out", type=Path, help="such as benchmarks/results/a3c.md")
    asked = parser.parse_args(argv)
    load_before, rows = os.getloadavg()[0], []
    for network in asked.networks:
        for preset in PRESETS:
            rows.append(measure(network, preset, LADDER[network], seconds=asked.seconds))
            print(table(rows)[-1], flush=True)
    text = page(rows, seconds=asked.seconds, load_before=load_before, learning=asked.learning)
    print(text)
    if asked.out:
        asked.out.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
