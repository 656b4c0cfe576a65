"""The state of an environment as plain data, from which another process continues bit for bit.

The state consists of the plain data and numpy random generators in the attributes of a gymnasium or PettingZoo environment and of
all environments inside it, of the generators of their spaces and of the global ones, and of the data of a MuJoCo simulation.
Functions, classes and the like count as constants, which every process builds alike: `restore` compares the names of functions
and the plain data that they hold. An environment that holds anything else, such as an emulator in native code, has no state that
can be read, nor has one whose own attributes share memory, because each would get a copy of its own: `capture` names the
attribute. MuJoCo is an optional package: nothing here imports it.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import random
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Space
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.random import Generator
from numpy.typing import NDArray

from common.envs.agents import has_agents
from common.errors import RookeryError
from common.protocol.plain import TYPES, is_plain, pack, parts

_CONSTANTS = (Space, EnvSpec, type, types.ModuleType, AutoresetMode, np.dtype, np.ufunc, functools.partial)
_GENERATORS = "numpy generators"
_ALIKE = "alike"  # key of a hash of the functions in a constant and of the data that they hold
_PROCESS = "process"  # key of the global generators beside the paths of environments
_GLOBAL = (getattr(random.random, "__self__", None), getattr(np.random.random, "__self__", None))
_WORDS = 624  # of numpy's global generator
_LAST_OBSERVATIONS = "_env_obs"  # of a SyncVectorEnv: overwritten before each read, and possibly views of an environment's arrays
_INTEGRATED = "integrated"  # key of MuJoCo's own state beside the arrays of a simulation
_MODEL = "model"  # key of a hash of its model
_SOLVER_ARRAYS = ("efc_", "iefc_")  # prefixes: of the constraints of one step, sized and computed anew by the next


class StateError(RookeryError):
    """The state of an environment cannot be read, or a state does not fit the environment."""


def capture(env: Any) -> dict[str, dict[str, Any]]:
    """Return the state of `env`, plain values: for each environment by its path, attributes by name. Not a copy: pack it at once.

    Raises `StateError` that names the attribute which cannot be read.
    """
    inside = _environments(env)
    known = {id(one) for one in (*inside.values(), *_GLOBAL)}  # whose state is captured
    captured = {path: _attributes(path, inner, known) for path, inner in inside.items()}
    _require_own_memory(captured)
    version, words, gauss = random.getstate()
    twister = np.random.get_state(legacy=False)  # noqa: NPY002 - environments may draw from it
    return captured | {_PROCESS: {"random": [version, np.array(words), gauss], "numpy": twister}}


def seed_generators(seed: int) -> None:
    """Seed the global generators of this process, before an environment is built that may draw from them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - as above


def seed_spaces(env: Any, seed: int) -> None:
    """Seed the spaces of all environments inside `env`: attributes that are a space, or a list, tuple or dict of spaces alone."""
    seeds = np.random.default_rng(seed)
    members = (value for inner in _environments(env).values() for value in _members(inner).values())
    for space in {id(space): space for value in members for space in _all_of(_is_space, value)}.values():
        space.seed(int(seeds.integers(2**31)))  # and the spaces inside it


def restore(env: Any, state: Mapping[str, Any]) -> None:
    """Set the state that `capture` returned on `env`, which was built alike and reset.

    Raises `StateError` where the state is of another environment; `env` must then be built anew. Only attributes that hold
    plain data are set, to plain data: a state of unknown origin replaces no method.
    """
    inside = _environments(env)
    if not isinstance(state, Mapping) or set(state) != {*inside, _PROCESS}:
        found = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise StateError("state of another environment", found=found, wanted=sorted(inside))
    for path, inner in inside.items():
        _set_attributes(path, inner, state[path])
    _set_global_generators(state[_PROCESS])


def check_like(what: str, value: object, current: np.ndarray) -> None:
    """Raise `StateError` unless `value` is an array of the dtype and shape of `current`."""
    if not isinstance(value, np.ndarray) or (value.dtype, value.shape) != (current.dtype, current.shape):
        found = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise StateError(what, found=found, wanted=f"{current.dtype} {list(current.shape)}")


def _environments(env: Any) -> dict[str, Any]:
    """Return an environment and all environments inside it by path, each once, although one may refer to another."""
    found, known = [("env", env)], {id(env)}
    for path, outer in found:  # which grows
        for name, value in vars(outer).items():
            for number, inner in enumerate(_all_of(_is_environment, value)):
                if id(inner) not in known:
                    known.add(id(inner))
                    found.append((f"{path}.{name}" + ("" if inner is value else f"[{number}]"), inner))
    return dict(found)


def _is_environment(value: object) -> bool:
    return isinstance(value, gymnasium.Env | VectorEnv) or has_agents(value)


def _is_space(value: object) -> bool:
    return isinstance(value, Space)


def _all_of(is_kind: Callable[[object], bool], value: Any) -> Sequence[Any]:
    """Return a value of a kind, or the items of a container of nothing else; the first other item ends the search."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return list(items) if all(map(is_kind, items)) else []


def _members(env: Any) -> dict[str, Any]:
    """Return the attributes of an environment, and the spaces of its class."""
    shared = (item for kind in reversed(type(env).__mro__) for item in vars(kind).items())
    members: dict[str, Any] = vars(env)
    return {name: value for name, value in shared if isinstance(value, Space)} | members


def _attributes(path: str, env: Any, known: Collection[int]) -> dict[str, Any]:
    if any(vars(kind).get("__slots__") for kind in type(env).__mro__):
        raise StateError("the state of an environment cannot be read", found=f"slots in {path}, a {type(env).__name__}")
    attributes: dict[str, Any] = {}
    for name, value in _members(env).items():
        if name == _LAST_OBSERVATIONS and isinstance(env, SyncVectorEnv):
            continue
        if is_plain(value):
            attributes[name] = value
        elif _is_simulation(value):
            attributes[name] = _capture_simulation(value)
        elif isinstance(value, Generator) or all(id(part) in known or _is_built_alike(part) for part in _inside(value)):
            if constant := _capture_constant(value):
                attributes[name] = constant
        else:
            found = f"{path}.{name}, a {type(value).__name__}, in {type(env).__name__}"
            raise StateError("the state of an environment cannot be read", found=found, wanted="attributes of plain data")
    return attributes


def _require_own_memory(captured: Mapping[str, Any]) -> None:
    """Raise `StateError` where two places share a list, a dict, or memory as different arrays: each would get its own copy.

    One array in two places is one array again after `pack` and `unpack`. Environments side by side may share constants.
    """
    owners: dict[tuple[str, int], tuple[str, Any]] = {}  # last attribute and part with the memory of an object, by its id
    attributes = ((path, f"{path}.{name}", value) for path, each in captured.items() for name, value in each.items())
    for path, attribute, part in ((path, attribute, part) for path, attribute, value in attributes for part in parts(value)):
        owner = part
        while (base := getattr(owner, "base", None)) is not None:
            owner = base
        place = path[: path.find("]") + 1], id(owner)  # `env.envs[0]` with all inside it, or the vector environment
        before, known = owners.get(place, ("", None))
        if before and isinstance(part, list | dict | np.ndarray) and not (known is part and isinstance(part, np.ndarray)):
            found = f"{before} and {attribute}, which share memory"
            raise StateError("the state of an environment cannot be read", found=found, wanted="attributes that share no memory")
        owners[place] = attribute, part


def _inside(value: Any) -> Iterator[Any]:
    """Yield `value`, all inside it, and all that routines in it hold: owner, closure, defaults, arguments of a `partial`."""
    entered, ahead = set(), [value]
    while ahead:
        yield (part := ahead.pop())
        if id(part) in entered:
            continue
        entered.add(id(part))
        if isinstance(part, functools.partial):
            ahead += [part.func, part.args, part.keywords]
        elif inspect.isroutine(part):
            held = [getattr(part, name, None) for name in ("__self__", "__defaults__", "__kwdefaults__")]
            cells = [cell.cell_contents for cell in getattr(part, "__closure__", None) or () if cell != types.CellType()]
            ahead += [each for each in held if each is not None] + cells
        elif isinstance(part, list | tuple | dict):
            ahead += part.values() if isinstance(part, dict) else part


def _hash(value: Any) -> str:
    """Return a hash of the functions and plain data in `value`; empty where it has none."""
    content: list[Any] = []
    for part in _inside(value):
        if isinstance(part, list | tuple | dict):
            content.append([type(part).__name__, len(part), *(part if isinstance(part, dict) else ())])
        elif is_plain(part) or inspect.isroutine(part):
            content.append(getattr(part, "__qualname__", "") if inspect.isroutine(part) else part)
    return hashlib.sha256(pack(content).tobytes()).hexdigest() if content else ""


def _capture_constant(value: Any) -> dict[str, Any]:
    """Return the state of the generators in a constant, and a hash of what no step may change in it."""
    state = {_GENERATORS: [generator.bit_generator.state for generator in _generators(value)], _ALIKE: _hash(value)}
    return {key: found for key, found in state.items() if found}


def _generators(value: Any) -> list[Generator]:
    """Return a generator, or those of all spaces in a value."""
    inside = [part for part in _inside(value) if isinstance(part, Generator | Space)]
    return [found for part in inside for found in (_generators(vars(part)) if isinstance(part, Space) else [part])]


def _set_attributes(path: str, env: Any, state: Any) -> None:
    members = _members(env)
    if not isinstance(state, Mapping):
        raise StateError(f"state of {path}", found=type(state).__name__, wanted="attributes by name")
    for name, value in state.items():
        current = members.get(name)
        new = name not in members and type(name) is str and name.isidentifier() and not hasattr(type(env), name)
        if not is_plain(current) and (constant := _capture_constant(current)):
            if not isinstance(value, Mapping) or value.get(_ALIKE) != constant.get(_ALIKE):
                found, wanted = "other functions, or other data in them", "those of this process, which no step changes"
                raise StateError(f"state of {path}.{name}", found=found, wanted=wanted)
            if generators := _generators(current):
                _set_generators(f"{path}.{name}", generators, value)
        elif _is_simulation(current):
            if not isinstance(value, Mapping) or not _restore_simulation(current, value):
                wanted = "those of the model here, which no reset changes"
                raise StateError(f"state of {path}.{name}", found="arrays of another model", wanted=wanted)
        elif not (new or (name in members and is_plain(current))) or not _may_follow(current, value):
            found, wanted = type(value).__name__, type(current).__name__ if name in members else "no such attribute"
            raise StateError(f"state of {path}.{name}", found=found, wanted=wanted, fix="run the same versions on both sides")
        elif new or _hash(value) != _hash(current):  # what is as it was may also be in the closure of a function
            vars(env)[name] = value


def _set_generators(path: str, generators: Sequence[Generator], state: Any) -> None:
    try:
        for generator, saved in zip(generators, state[_GENERATORS], strict=True):
            generator.bit_generator.state = saved
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        wanted = f"states of {len(generators)} {type(generators[0].bit_generator).__name__}"
        raise StateError(f"state of {path}", found=type(error).__name__, wanted=wanted) from error


def _set_global_generators(state: Any) -> None:
    try:
        version, words, gauss = state["random"]
        random.setstate((version, tuple(words.tolist()), gauss))
        state["numpy"]["state"]["pos"] = min(max(state["numpy"]["state"]["pos"], 0), _WORDS)  # numpy does not check this index
        np.random.set_state(state["numpy"])  # noqa: NPY002 - as in `capture`
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise StateError("states of the global generators", found=type(error).__name__, wanted="of `random` and numpy") from error


def _may_follow(current: Any, value: Any) -> bool:
    """Return whether `value` may replace an attribute that is `current` after a reset: both have one form, or one is None."""
    if isinstance(value, dict) and value.keys() & {_GENERATORS, _ALIKE}:
        return False  # of a generator, space or function that this environment does not have after a reset
    if current is None or value is None:
        return True
    if isinstance(current, np.ndarray) and isinstance(value, np.ndarray):
        return bool(current.dtype.kind == value.dtype.kind and current.shape == value.shape)
    numbers, containers = (bool, int, float, np.generic), (list, tuple, dict, np.ndarray)
    return any(isinstance(current, kinds) and isinstance(value, kinds) for kinds in (numbers, containers, (str,)))


def _is_built_alike(part: object) -> bool:
    """Of a constant, without what is inside it. Other kinds of the plain types, such as named tuples, hold further data."""
    if isinstance(part, TYPES):
        return type(part) in TYPES and not (isinstance(part, dict) and any(type(key) not in {str, int} for key in part))
    return is_plain(part) or isinstance(part, _CONSTANTS) or inspect.isroutine(part) or _is_simulation_model(part)


# --- MuJoCo ---


def _is_simulation(value: object) -> bool:
    return _is_of_mujoco(value, "MjData")


def _is_simulation_model(value: object) -> bool:
    return _is_of_mujoco(value, "MjModel") or type(value).__name__ == "MujocoRenderer"


def _is_of_mujoco(value: object, name: str) -> bool:
    kind = type(value)
    return kind.__name__ == name and kind.__module__.partition(".")[0] == "mujoco"


def _capture_simulation(data: Any) -> dict[str, NDArray[Any]]:
    """Return the state that the next step begins from, and the results of the last step that an environment may read before."""
    arrays = {name: np.array(array) for name, array in _simulation_arrays(data).items()}
    return arrays | _own_state(data)


def _restore_simulation(data: Any, state: Mapping[str, Any]) -> bool:
    """Restore `_capture_simulation`; return False, and change nothing, where the state is of another model.

    Another model is also one of which a reset has drawn masses, terrain or the like: they are not part of the state.
    """
    current = _simulation_arrays(data) | _own_state(data)
    if set(state) != set(current):
        return False
    for name, value in state.items():
        if not isinstance(value, np.ndarray) or value.dtype != current[name].dtype or value.ndim != current[name].ndim:
            return False
    if state[_INTEGRATED].shape != current[_INTEGRATED].shape or not np.array_equal(state[_MODEL], current[_MODEL]):
        return False
    mujoco = sys.modules["mujoco"]
    mujoco.mj_setState(data.model, data, state[_INTEGRATED], mujoco.mjtState.mjSTATE_INTEGRATION)
    for name, array in _simulation_arrays(data).items():
        if array.shape == state[name].shape:  # another: of contacts, which the next step computes anew
            array[...] = state[name]
    return True


def _simulation_arrays(data: Any) -> dict[str, NDArray[Any]]:
    names = [name for name in dir(data) if not name.startswith(("_", *_SOLVER_ARRAYS))]
    found = ((name, getattr(data, name)) for name in names)
    return {name: value for name, value in found if isinstance(value, np.ndarray) and value.dtype.kind in "biuf"}


def _own_state(data: Any) -> dict[str, NDArray[Any]]:
    mujoco = sys.modules["mujoco"]
    components = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(data.model, components))
    mujoco.mj_getState(data.model, data, state, components)
    return {_INTEGRATED: state, _MODEL: _model_hash(data.model)}


def _model_hash(model: Any) -> NDArray[np.uint8]:
    """Return a hash of all arrays of a model and of its options, such as gravity and the time step."""
    options = {name: getattr(model.opt, name) for name in dir(model.opt) if not name.startswith("_")}
    numbers = {name: np.asarray(value) for name, value in options.items() if not callable(value)}
    digest = hashlib.sha256()
    for name, array in sorted((_simulation_arrays(model) | numbers).items()):
        digest.update(name.encode() + array.tobytes())
    return np.frombuffer(digest.digest(), np.uint8)
