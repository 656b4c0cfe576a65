"""Write `docs/images/train.svg`, the picture of the README: the live view of a real run, exported by rich.

Run `python -m benchmarks.picture` on an idle machine; options are those of `rookery train`. The picture shows the last refresh
before 70 % of the run.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from rich.console import Console

from services.cli.app import main as rookery
from services.cli.train import run
from services.cli.train.view import LineView, ViewFrame, panel

PICTURE = Path(__file__).parents[1] / "docs/images/train.svg"
SHARE = 0.7  # of the run
WIDTH = 100  # columns


class RecordingView(LineView):
    """Prints one line per refresh and keeps the last one before `SHARE` of the run."""

    kept: ViewFrame | None = None

    def show(self, frame: ViewFrame) -> None:
        """Keep and print the refresh."""
        super().show(frame)
        if frame.status.phase == "training" and frame.status.progress.fraction <= SHARE:
            self.kept = frame


def main(argv: Sequence[str] | None = None) -> int:
    """Train with the options in `argv`, then write the picture; returns the exit code of `rookery train`."""
    words = list(sys.argv[1:] if argv is None else argv) or ["cartpole", "--seed", "3"]
    view = RecordingView(sys.stdout, style="plain")
    with patch.object(run, "make_view", lambda *_, **__: view):
        code = rookery(["train", *words])
    if view.kept is not None:
        with Path(os.devnull).open("w") as nowhere:
            console = Console(record=True, width=WIDTH, force_terminal=True, file=nowhere)
            console.print(panel(view.kept))
        text = re.sub(r"\s*@font-face \{.*?\}", "", console.export_svg(title=f"rookery train {words[0]}"), flags=re.DOTALL)
        PICTURE.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
