"""A progress bar on a terminal, and nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress(task: str, episodes: int) -> Iterator[Callable[[int], None]]:
    """Show on standard error how many of `episodes` have ended, while inside; yields the function that takes their number."""
    console = Console(stderr=True)
    columns = (
        TextColumn(task),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("episodes"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    shown = Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, redirect_stdout=sys.stdout.isatty()
    )
    with shown:
        number = shown.add_task("", total=episodes)
        yield lambda ended: shown.update(number, completed=ended)
