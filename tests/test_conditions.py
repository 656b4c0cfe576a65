"""The conditions under which the tests must pass as well are what they are named after."""

import os
import subprocess
import sys

import pytest

from tests.conftest import SLOW_TORCH

pytestmark = pytest.mark.service

FILES = """
import torch
optimizer = torch.optim.Adam([torch.zeros(1)])
for call in (torch.nn.Module.__call__, torch.Tensor.backward, type(optimizer).step.__wrapped__):
    print(call.__code__.co_filename)
"""


def test_torch_is_slow_in_a_process_that_a_test_starts():
    environment = {**os.environ, "SLOW_TORCH": "2", "PYTHONPATH": str(SLOW_TORCH)}
    done = subprocess.run([sys.executable, "-c", FILES], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(SLOW_TORCH / "sitecustomize.py")] * 3
