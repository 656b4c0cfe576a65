"""A trained policy as one ONNX file: a batch of observations in, greedy actions out, and the metadata that a user of it needs.

Input `observation` [batch, *input] has the shape and dtype of the run's observations: scaling and normalisation are in the graph,
stacks of images are not. Of an observation of several arrays each is an input, named by its path, the mask as `action_mask`.
Output `action` is the greedy action as the environment takes it. Beside it are the outputs that it was chosen from, where the
network has them: `logits` [batch, n] (of several components those of each, joined), `mean` [batch, A] before it is clipped, or
`q_values` [batch, n].

A policy with memory has two more inputs, `memory` [batch, S] float32 and `start` [batch] bool (the observation is the first of an
episode), and output `next_memory`, which is `memory` for the next observation.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from common.algorithms.api import NetworkPolicy
from common.algorithms.payload import MEMORY
from common.envs.spec import ACTION_MASK, EnvSpec, Leaf
from common.errors import ConfigError, ResourceError
from common.models.distributions import Categoricals, DiagonalGaussian
from common.models.leaves import Observation
from common.models.memory import Past, finite_states
from common.models.nets import ActorCritic, QNetwork
from common.policies.trained import TrainedPolicy

_EXPORTS, _CHECKS = ("onnx", "onnxscript"), "onnxruntime"
_EXTRA = "pip install 'rookery[export]'"
START = "start"
_ROWS = 500  # of one batch of a comparison
_TIE = 1e-5  # between scores in the arithmetic of torch and in that of onnxruntime, both float32
_FORBIDDEN = np.finfo(np.float32).min / 2  # scores of actions that a mask forbids are below it, and of no others
_OF_RANGE = 1e-4  # between continuous actions, whose network may magnify the difference tenfold


def require_packages(*, check: bool) -> None:
    """Raise `ResourceError` where a package that exports, or one that checks, is not installed."""
    wanted = (*_EXPORTS, _CHECKS) if check else _EXPORTS
    if missing := [name for name in wanted if importlib.util.find_spec(name) is None]:
        raise ResourceError("packages for ONNX are not installed", found=f"no {', '.join(missing)}", fix=_EXTRA)


def can_check() -> bool:
    """Return whether the package is installed with which an exported policy is compared."""
    return importlib.util.find_spec(_CHECKS) is not None


# --- export ---


def to_onnx(policy: TrainedPolicy) -> bytes:
    """Return the policy as an ONNX model with metadata.

    Raises `ResourceError` where a package is missing, `ConfigError` for a network that cannot be exported with any batch size.
    """
    require_packages(check=False)
    from onnx.helper import set_model_props  # noqa: PLC0415 - slow, and not always installed

    inputs = _inputs(policy)
    example = tuple(torch.ones((2, *leaf.shape), dtype=getattr(torch, leaf.dtype)) for leaf in inputs)
    memory = ["next_memory"] * bool(policy.settings.model.recurrent)
    batch = torch.export.Dim("batch")
    try:
        with _quiet():
            outputs = ["action", *_scores(policy.module, *_split(policy, example)), *memory]
            _require_different([leaf.path for leaf in inputs], outputs)
            program = torch.onnx.export(
                _Graph(policy),
                example,
                input_names=[leaf.path for leaf in inputs],
                output_names=outputs,
                dynamic_shapes={"inputs": tuple({0: batch} for _ in inputs)},
                dynamo=True,
                verbose=False,
            )
    except ConfigError:
        raise
    except Exception as error:  # a network of a user's own may do what cannot be traced, and the tracer raises many types
        found = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        raise ConfigError("the policy cannot be exported", found=found, wanted="a network that torch.export can trace") from error
    assert program is not None
    model = program.model_proto
    rows = model.graph.input[0].type.tensor_type.shape.dim[0]
    if not rows.dim_param:
        fix = "in your network, use x.shape[0] or x.flatten(1) in place of len(x)"
        raise ConfigError("the network fixes the batch size", found=rows.dim_value, wanted="any batch size", fix=fix)
    model.producer_name, model.producer_version = "rookery", importlib.metadata.version("rookery")
    set_model_props(model, metadata(policy))
    content: bytes = model.SerializeToString()
    return content


class _Graph(nn.Module):
    """The function that is exported."""

    def __init__(self, policy: TrainedPolicy) -> None:
        super().__init__()
        self.network = policy.module  # registered, so that its parameters keep their names
        self._trained = policy
        self._policy, self._discrete = policy.policy, policy.env.action.discrete
        self._first = torch.from_numpy(_first_action(policy))
        self._dtype = self._first.dtype
        self._low, self._high = (
            torch.tensor(bounds, dtype=self._dtype) for bounds in (policy.env.action.low, policy.env.action.high)
        )

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The arrays [N, *shape] of `_inputs` → action, what it was chosen from, and the memory after it where there is one."""
        observation, past = _split(self._trained, inputs)
        memory: list[Tensor] = []
        if past is not None and isinstance(self.network, ActorCritic):  # no `act`, which keeps the memory itself
            policy, state = self.network.policy(observation, past)
            chosen, memory = policy.mode(), [] if state is None else [finite_states(state)]
        elif past is not None and isinstance(self.network, QNetwork):
            values, state = self.network(observation, past)
            chosen, memory = values.argmax(dim=1), [] if state is None else [finite_states(state)]
        else:
            given: Any = observation
            chosen = self._policy.act(given, greedy=True)["action"]
        action = chosen.to(self._dtype)
        if not self._discrete:
            action = action.clamp(self._low, self._high)
        action = action.reshape(-1, *self._first.shape[1:])
        return action + self._first if self._discrete else action, *_scores(self.network, observation, past).values(), *memory


def _require_different(inputs: list[str], outputs: list[str]) -> None:
    if same := sorted({name for name in inputs if (inputs + outputs).count(name) > 1}):
        fact, fix = "arrays of an exported model", "name them otherwise in the environment"
        raise ConfigError(fact, found=f"observations {same}", wanted="names that are free", fix=fix)


def _inputs(policy: TrainedPolicy) -> tuple[Leaf, ...]:
    """Return the inputs of the model: arrays of the observation, then those of the memory."""
    size = policy.settings.model.state_size
    memory = (Leaf(path=MEMORY, shape=(size,), dtype="float32"), Leaf(path=START, shape=(), dtype="bool")) if size else ()
    return *policy.env.inputs, *memory


def _split(policy: TrainedPolicy, inputs: tuple[Tensor, ...]) -> tuple[Observation, Past | None]:
    """Return observation and past of the arrays of `_inputs`."""
    leaves, past = inputs, None
    if policy.settings.model.recurrent:
        leaves, (memory, start) = inputs[:-2], inputs[-2:]
        # Side by side once: onnxruntime would repeat an array of batch 1 for all rows of the others without a word.
        joined = torch.cat([memory, start.unsqueeze(1).float(), leaves[0].reshape(leaves[0].shape[0], -1)[:, :1].float()], dim=1)
        past = Past(joined[:, :-2], joined[:, -2].unsqueeze(0) != 0)
    return leaves if policy.env.leaves else leaves[0], past


def _first_action(policy: TrainedPolicy) -> NDArray[Any]:
    """Return the action of zeros [1, ...] as the environment takes it: of discrete ones the first."""
    return policy.to_native(np.zeros((1, *policy.env.action.shape), policy.env.action.dtype))


def _scores(network: nn.Module, observation: Observation, past: Past | None) -> dict[str, Tensor]:
    """Return the outputs that the greedy action is chosen from, by name; none of a network that is not known here."""
    if isinstance(network, ActorCritic):
        chosen_from, _ = network.policy(observation, past)
        if isinstance(chosen_from, DiagonalGaussian):
            return {"mean": chosen_from.mean}
        parts = chosen_from.parts if isinstance(chosen_from, Categoricals) else (chosen_from,)
        return {"logits": torch.cat([part.log_probs for part in parts], dim=-1)}
    return {"q_values": network(observation, past)[0]} if isinstance(network, QNetwork) else {}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter from writing what its users cannot act on: warnings of its own packages, and a logger's hints."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# --- metadata ---


def metadata(policy: TrainedPolicy) -> dict[str, str]:
    """Return the metadata properties of the model: which policy it is, and how its input and output are to be read."""
    env, settings = policy.env, policy.settings
    native = _first_action(policy)
    space: dict[str, Any] = {"type": "box", "shape": native.shape[1:], "dtype": str(native.dtype)}
    if not env.action.discrete:
        bounds = {"low": env.action.low, "high": env.action.high}
        space |= {name: [bound if math.isfinite(bound) else None for bound in values] for name, values in bounds.items()}
    elif env.action.shape:
        space |= {"type": "multi_discrete", "n": env.action.choices, "start": native.ravel().tolist()}
    else:
        space = {"type": "discrete", "n": env.action.n, "start": int(native[0])}
    values = {
        "run_id": policy.run_id,
        "version": policy.version,
        "env_steps": policy.env_steps,
        "algorithm": settings.algorithm.name,
        "env_id": settings.env.name,
        "env": json.dumps(settings.env.model_dump(mode="json")),
        **_described(env),
        "frame_stack": env.frame_stack,
        "preprocessing": _preprocessing(policy),
        "action_space": json.dumps(space),
    }
    return {f"rookery.{name}": str(value) for name, value in values.items()}


def _described(env: EnvSpec) -> dict[str, str]:
    if env.leaves:
        return {"observation": json.dumps([{"name": leaf.path, "shape": leaf.shape, "dtype": leaf.dtype} for leaf in env.inputs])}
    return {"observation_shape": json.dumps(env.network_input_shape), "observation_dtype": env.observation_dtype}


def _preprocessing(policy: TrainedPolicy) -> str:
    env, settings = policy.env, policy.settings.env
    several = [f"{leaf.path}: {_frames(part)}" for leaf, part in zip(env.seen, env.parts, strict=False)]
    if several:
        masks = ["action_mask: 1 for each action that is allowed, else 0."] * env.action_mask
        frames = " ".join([*several, *masks])
    elif settings.is_atari:
        top, bottom = settings.crop
        frames = (
            f"An env step is {settings.frame_skip} emulator frames. A frame is the grey screen of ale_py's AtariVectorEnv, "
            f"{settings.height} x {settings.width}, without {top} rows at the top and {bottom} at the bottom."
        )
    else:
        chosen = f"The observation is {', '.join(settings.leaves)} alone, by env.leaves. " if settings.leaves else ""
        frames = chosen + _frames(env)
    size = env.frame_stack
    stacks = f"The input is a stack of the newest {size} frames, the oldest first; frames before the first of an episode are 0."
    inside = "Scaling and normalisation are inside the model."
    return " ".join([frames, stacks if env.network_input_shape != env.observation_shape else "The input is one frame.", inside])


def _frames(env: EnvSpec) -> str:
    if env.is_image:
        limit = "and, but for integers of 8 and 16 bits, below the limit of its dtype"
        scaled = f", divided by the largest absolute bound of its space if that is above 1 {limit}"
        scaled = "" if env.observation_dtype == "uint8" else scaled
        return f"A frame is the image of the environment, {list(env.observation_shape)}, colours first{scaled}."
    if env.observation_choices:
        below = list(env.observation_choices)
        less = "less the start of its space, which makes it"
        return f"A frame has the components of the discrete observation, flattened, each {less} 0 to below {below}."
    return "A frame is the observation of the environment, flattened, as float32."


# --- comparison ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Greedy actions of an exported model and of its policy, on the same observations."""

    observations: int
    equal: int  # discrete: the same action; continuous: no component differs by more than 1e-4 of its range, or of max(1, |a|)
    ties: int  # discrete and not equal, where the policy's own scores of both actions differ by no more than 1e-5 of the largest

    @property
    def different(self) -> int:
        """Observations on which the two act differently."""
        return self.observations - self.equal - self.ties


def compare(model: bytes, policy: TrainedPolicy, *, observations: int) -> Comparison:
    """Return how the greedy actions of `model`, computed by onnxruntime, agree with those of `policy` on random observations.

    Raises `ResourceError` where onnxruntime is not installed.
    """
    require_packages(check=True)
    import onnxruntime  # noqa: PLC0415 - slow, and not always installed

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(1)
    equal = ties = 0
    for begin in range(0, observations, _ROWS):
        observation = random_observations(policy, min(_ROWS, observations - begin), random)
        named = dict(observation) if isinstance(observation, dict) else {"observation": observation}
        past = _random_past(policy, len(named[policy.env.inputs[0].path]), random)
        if past is not None and isinstance(policy.policy, NetworkPolicy):
            named |= {MEMORY: past.state.numpy(), START: past.start[0].numpy()}
            policy.policy.memory = past.state
            policy.policy.begin_episodes(past.start[0])
        (found,), wanted = session.run(["action"], named), policy(observation)
        same = _same(policy, found, wanted)
        equal += int(same.sum())
        differing = torch.from_numpy(~same)
        rest = None if past is None else Past(past.state[differing], past.start[:, differing])
        ties += int(_tied(policy, policy.batch(observation)[0][differing], rest, found[~same], wanted[~same]).sum())
    policy.reset()
    return Comparison(observations=observations, equal=equal, ties=ties)


def random_observations(policy: TrainedPolicy, count: int, random: np.random.Generator) -> Any:
    """Return observations [count, *input]: uniform bytes or choices, or normal numbers of a scale from 0.1 to 10 for each.

    Of several arrays a dict of them by path; each mask allows one action at least of each component.
    """
    arrays = {leaf.path: _random_leaf(leaf, count, random) for leaf in policy.env.inputs}
    if policy.env.action_mask:
        offsets = np.cumsum([0, *policy.env.action.choices[:-1]])
        kept = random.integers(policy.env.action.choices, size=(count, len(offsets))) + offsets
        np.put_along_axis(arrays[ACTION_MASK], kept, 1, axis=1)
    return arrays if policy.env.leaves else arrays["observation"]


def _random_past(policy: TrainedPolicy, count: int, random: np.random.Generator) -> Past | None:
    """Return states as an LSTM has them, and episodes that begin for a tenth of the observations; None without memory."""
    if not (size := policy.settings.model.state_size):
        return None
    state = np.tanh(random.normal(size=(count, size))).astype(np.float32)
    return Past(torch.from_numpy(state), torch.from_numpy(random.random((1, count)) < 0.1))  # noqa: PLR2004


def _random_leaf(leaf: Leaf, count: int, random: np.random.Generator) -> NDArray[Any]:
    shape = (count, *leaf.shape)
    if leaf.dtype != "float32":
        return random.integers(0, leaf.choices or 256, shape, leaf.dtype)
    scale = 10.0 ** random.uniform(-1.0, 1.0, (count, *(1 for _ in leaf.shape)))
    return (random.normal(size=shape) * scale).astype(np.float32)


def _same(policy: TrainedPolicy, found: NDArray[Any], wanted: NDArray[Any]) -> NDArray[np.bool_]:
    action = policy.env.action
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return np.zeros(len(wanted), np.bool_)
    found, wanted = (actions.reshape(len(wanted), -1) for actions in (found, wanted))
    if action.discrete:
        return np.asarray((found == wanted).all(axis=1))
    ranges = np.array(action.high) - np.array(action.low)
    most = _OF_RANGE * np.where(np.isfinite(ranges), ranges, np.maximum(1.0, np.abs(wanted)))
    return np.asarray((np.abs(found - wanted) <= most).all(axis=1))


def _tied(
    policy: TrainedPolicy, observation: Tensor, past: Past | None, found: NDArray[Any], wanted: NDArray[Any]
) -> NDArray[np.bool_]:
    """Return whether the policy itself hardly prefers the one discrete action to the other, in each component."""
    if not (policy.env.action.discrete and len(observation)):
        return np.zeros(len(observation), np.bool_)
    with torch.inference_mode():
        scores = next(iter(_scores(policy.module, observation, past).values()), None)
    if scores is None:
        return np.zeros(len(observation), np.bool_)
    values, choices = scores.numpy(), policy.env.action.choices
    offsets = np.cumsum([0, *choices[:-1]])  # of each component's scores
    of_wanted, of_found = (
        np.take_along_axis(values, (actions - _first_action(policy)).reshape(len(values), -1).astype(np.int64) + offsets, axis=1)
        for actions in (wanted, found)
    )
    gap = (of_wanted - of_found).max(axis=1)
    allowed = np.where(values > _FORBIDDEN, values, 0.0)
    return np.asarray(gap <= _TIE * np.maximum(1.0, np.abs(allowed).max(axis=1)))
