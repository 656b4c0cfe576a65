"""`rookery report`: one HTML file with tables and figures, which needs no network; the figures are SVG, drawn by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from textwrap import shorten
from typing import Any, TextIO

import matplotlib as mpl
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from common.errors import ConfigError, ResourceError
from common.runtime.disk import write_atomically
from services.cli.compare import tables
from services.cli.compare.runs import Configuration, RunData, configurations
from services.cli.compare.statistics import RESAMPLES, band
from services.cli.train.outcome import X_AXES


def report(runs: Sequence[RunData], *, out: Path, now: datetime, stdout: TextIO) -> int:
    """Write the report on `runs` to `out` and return the exit code.

    Raises `ConfigError` where `out` is there and no file, such as a directory, and `ResourceError` where it cannot be written.
    """
    if out.exists() and not out.is_file():  # the report would take the place of a device such as /dev/null
        found = "a directory" if out.is_dir() else "a device or pipe"
        raise ConfigError(f"{out} cannot be written", found=found, wanted="a file", fix="set --out to one")
    data = render(runs, now=now).encode(errors="replace")  # of a file name that is no UTF-8
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, data)
    except OSError as error:
        found = f"{error.strerror} at {out}"
        raise ResourceError("the report cannot be written", found=found, wanted="a writable folder", fix="set --out") from error
    print(f"wrote {out} ({len(data) / 1e3:,.0f} KB, {len(runs)} runs)", file=stdout)
    return 0


def render(runs: Sequence[RunData], *, now: datetime) -> str:
    """Return the report on `runs` as HTML."""
    groups = configurations(runs)
    by_env: dict[str, list[Configuration]] = {}  # returns of different environments have different scales
    for group in groups:
        by_env.setdefault(group.env, []).append(group)
    shown = [tables.settings_table(groups), tables.runs_table(groups), tables.ledger_table(groups)]
    template = resources.files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        title=", ".join(dict.fromkeys(group.runs[0].preset for group in groups)),
        summaries=[tables.labels_table(groups), tables.configurations_table(groups)],
        notes=tables.notes(groups),
        figures=[(name, Markup(draw_returns(alike))) for name, alike in by_env.items()],  # noqa: S704  our own SVG, text escaped
        tables=[table for table in shown if table.rows],
        commands=[(run.path.name, run.command) for group in groups for run in group.runs if run.command],
        runs=len(runs),
        resamples=RESAMPLES,
        made=f"{now:%Y-%m-%d %H:%M}",
    )


STYLE: Any = {
    "text.parse_math": False,  # a name or a value may have several $
    "svg.fonttype": "none",  # text stays text: smaller, and it can be searched and copied
    "svg.hashsalt": "rookery",  # the same runs give the same file
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
ROWS = (  # column of the curve, label, setting with its target
    ("episode_return_mean", "training return, mean of 100 episodes", "target.mean100"),
    ("evaluation_return", "evaluation return", "target.evaluation"),
)
LEGEND_WIDTH = 120  # characters
MARKED_POINTS = 12  # evaluations are few: their times are marked


def draw_returns(groups: Sequence[Configuration]) -> str:
    """Return an SVG element with the returns of `groups`, which share one environment; "" where no run has a point yet."""
    rows = [row for row in ROWS if any(run.points("env_steps", row[0])[0] for group in groups for run in group.runs)]
    if not rows:
        return ""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 3.4 * len(rows) + 0.2 * len(groups)), layout="constrained")
        FigureCanvasSVG(figure)
        grid = figure.subplots(len(rows), 2, sharey="row", squeeze=False)
        for line, (column, name, target) in zip(grid, rows, strict=True):
            for axes, (x, label, unit) in zip(line, X_AXES, strict=True):
                _draw_bands(axes, groups, x=x, y=column, unit=unit, target=target)
                axes.set_xlabel(label)
            line[0].set_ylabel(name)
        figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower left", fontsize="small", frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]  # without the XML declaration, which HTML does not have


def _draw_bands(axes: Axes, groups: Sequence[Configuration], *, x: str, y: str, unit: float, target: str) -> None:
    targets = {group.settings.get(target) for group in groups}
    for index, group in enumerate(groups):
        curves, counted = [run.points(x, y) for run in group.runs], tables.counted_runs(group.runs)
        if not any(xs for xs, _ in curves):
            continue
        shown = [run for run in counted if run.points(x, y)[0]]
        found = band([run.points(x, y) for run in shown], held=[tables.reached_target(run) for run in shown])
        color, stroke = f"C{index % 10}", "-:"[index // 10 % 2]  # after ten configurations the colors begin anew
        number = f"{len(shown)}" if len(shown) == len(group.runs) else f"{len(shown)} of {len(group.runs)}"
        apart = "" if found.count else ", without a common range"
        label = shorten(f"{group.number}. {group.label}", LEGEND_WIDTH) + f", N = {number}{apart}"
        axes.plot(found.x / unit, found.value, stroke, color=color, label=label, linewidth=1.6)
        if found.count > 1:
            axes.fill_between(found.x / unit, found.low, found.high, color=color, alpha=0.18, linewidth=0)
        for xs, ys in curves:
            mark = "." if len(xs) <= MARKED_POINTS else None
            axes.plot([value / unit for value in xs], ys, color=color, alpha=0.35, linewidth=0.6, marker=mark, markersize=3)
    for value in (each for each in targets if each is not None):
        axes.axhline(value, color="grey", linestyle="--", linewidth=0.8)
    axes.grid(visible=True, alpha=0.25)
    axes.margins(x=0.01)
