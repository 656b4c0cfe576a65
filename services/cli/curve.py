"""`learning_curve.png` from `learning_curve.csv`: the return over env steps and over wall-clock time."""

from __future__ import annotations

import csv
from pathlib import Path

from common.runtime.run_directory import RunDirectory

Points = tuple[list[float], list[float]]


def read_points(rows: list[dict[str, str]], x: str, y: str) -> Points:
    """Values of two columns, of the rows where neither is empty."""
    points = [(float(row[x]), float(row[y])) for row in rows if row.get(x) and row.get(y)]
    return [point[0] for point in points], [point[1] for point in points]


def draw_curve(directory: RunDirectory, *, title: str, target: float | None) -> Path | None:
    """Draw the curve of a run; None where it was too short to leave a point. matplotlib is imported only here: it is slow."""
    source = directory.learning_curve_csv
    if not source.is_file():
        return None
    with source.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not any(read_points(rows, "env_steps", column)[0] for column in ("episode_return_mean", "evaluation_return")):
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (x, label, unit) in zip(
        figure.subplots(1, 2, sharey=True),
        (("env_steps", "env steps", 1.0), ("wall_seconds", "wall-clock minutes", 60.0)),
        strict=True,
    ):
        for y, name, style in (
            ("episode_return_mean", "training, mean of 100 episodes", "-"),
            ("evaluation_return", "evaluation", "o"),
        ):
            xs, ys = read_points(rows, x, y)
            axes.plot([value / unit for value in xs], ys, style, label=name, markersize=4)
        if target is not None:
            axes.axhline(target, linestyle="--", color="grey", linewidth=1, label=f"target {target:g}")
        axes.set_xlabel(label)
        axes.grid(visible=True, alpha=0.3)
    figure.axes[0].set_ylabel("episode return")
    figure.axes[0].legend(loc="lower right")
    figure.suptitle(title)
    figure.savefig(directory.learning_curve_png, dpi=120)
    return directory.learning_curve_png
