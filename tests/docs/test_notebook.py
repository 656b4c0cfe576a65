"""The notebook in docs/ runs from its first cell to its last."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.ports import free_ports

pytestmark = pytest.mark.system  # a kernel

ROOT = Path(__file__).parents[2]


def test_the_notebook_runs_on_a_run(make_run, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    from traitlets.config import Config

    kernel = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "tests"}
    (tmp_path / "kernels/tests").mkdir(parents=True)
    (tmp_path / "kernels/tests/kernel.json").write_text(json.dumps(kernel), encoding="utf-8")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    run, _ = make_run("model.hidden=[8]")
    notebook = nbformat.read(ROOT / "docs/policy.ipynb", as_version=4)
    cells = {cell["id"]: cell for cell in notebook.cells}
    assert not any(cell.get("outputs") for cell in notebook.cells)  # nothing of its author's machine
    assert cells["run"]["source"].startswith("RUN = ")
    cells["run"]["source"] = f"RUN = {str(run.path)!r}"
    # Jupyter would choose ports of the kernel's range, which another process may take before its kernel has started.
    names = ("shell_port", "iopub_port", "stdin_port", "hb_port", "control_port")
    config = Config(KernelManager={"cache_ports": False, **dict(zip(names, free_ports(5), strict=True))})
    nbclient.NotebookClient(notebook, kernel_name="tests", timeout=380, startup_timeout=380, config=config).execute()
    assert "tiny: version 7, trained on 7,000 env steps" in cells["load"]["outputs"][0]["text"]
    assert cells["evaluate"]["outputs"][0]["text"].startswith("mean return ")
    assert "image/png" in cells["picture"]["outputs"][-1]["data"]
