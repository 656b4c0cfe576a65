"""Makes torch as slow as `SLOW_TORCH` says: with 4, each forward pass, backward pass and optimizer step takes four times as long.

Python runs a module of this name at the start of each process; tests/conftest.py puts this folder on the path
of all that the tests start.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import threading
import time
import zlib

FACTOR = float(os.environ["SLOW_TORCH"])
WORK = bytes(1 << 13)
inside = threading.local()  # a module calls its submodules: the outermost call alone is prolonged


def slowed(function):
    """Return `function`, which then computes until that time is over: it has less CPU, and other threads go on meanwhile."""

    @functools.wraps(function)
    def slow(*args, **kwargs):
        if getattr(inside, "call", False):
            return function(*args, **kwargs)
        inside.call, began = True, time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            inside.call = False
            until = began + FACTOR * (time.thread_time() - began)
            while time.thread_time() < until:
                zlib.crc32(WORK)  # without Python's lock, as torch

    return slow


def slow_down(torch):
    """Replace the methods of the imported package."""
    torch.nn.Module.__call__ = slowed(torch.nn.Module.__call__)
    torch.Tensor.backward = slowed(torch.Tensor.backward)
    profiled = torch.optim.Optimizer.profile_hook_step  # each optimizer's `step` passes through it
    torch.optim.Optimizer.profile_hook_step = staticmethod(lambda step: profiled(slowed(step)))


class Finder:
    """Finds torch as without it, and slows it down after its import: a process that does not import torch goes on as before."""

    def find_spec(self, name, *_):
        """As `MetaPathFinder.find_spec`."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), slow_down(module))
        return spec


sys.meta_path.insert(0, Finder())
