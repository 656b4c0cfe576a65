"""The state of a MuJoCo simulation as arrays. MuJoCo is an optional package: nothing here imports it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

INTEGRATED = "integrated"
_SOLVER = ("efc_", "iefc_")  # of the constraints of one step: sized and computed anew by the next


def is_simulation(value: object) -> bool:
    """Return whether `value` is MuJoCo's `MjData`, which changes with each step."""
    return _is_of(value, "MjData")


def is_model(value: object) -> bool:
    """Return whether `value` is MuJoCo's model or a renderer of it, which every process builds alike."""
    return _is_of(value, "MjModel") or type(value).__name__ == "MujocoRenderer"


def capture(data: Any) -> dict[str, NDArray[Any]]:
    """Return the state that the next step begins from, and the results of the last step that an environment may read before."""
    mujoco = sys.modules["mujoco"]
    arrays = {name: np.array(array) for name, array in _arrays(data).items()}
    return arrays | {INTEGRATED: _integrated(mujoco, data)}


def restore(data: Any, state: Mapping[str, Any]) -> bool:
    """Restore `capture`; return False, and change nothing, where the state is of another model."""
    mujoco = sys.modules["mujoco"]
    current = _arrays(data) | {INTEGRATED: _integrated(mujoco, data)}
    if set(state) != set(current):
        return False
    for name, value in state.items():
        if not isinstance(value, np.ndarray) or value.dtype != current[name].dtype or value.ndim != current[name].ndim:
            return False
    if state[INTEGRATED].shape != current[INTEGRATED].shape:
        return False
    mujoco.mj_setState(data.model, data, state[INTEGRATED], mujoco.mjtState.mjSTATE_INTEGRATION)
    for name, array in _arrays(data).items():
        if array.shape == state[name].shape:  # another: of contacts, which the next step computes anew
            array[...] = state[name]
    return True


def _is_of(value: object, name: str) -> bool:
    kind = type(value)
    return kind.__name__ == name and kind.__module__.partition(".")[0] == "mujoco"


def _arrays(data: Any) -> dict[str, NDArray[Any]]:
    names = [name for name in dir(data) if not name.startswith(("_", *_SOLVER))]
    found = ((name, getattr(data, name)) for name in names)
    return {name: value for name, value in found if isinstance(value, np.ndarray) and value.dtype.kind in "biuf"}


def _integrated(mujoco: Any, data: Any) -> NDArray[np.float64]:
    what = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(data.model, what))
    mujoco.mj_getState(data.model, data, state, what)
    return state
