"""The public module: a user's own environment, network or algorithm imports from here and from nowhere else in the project.

It only re-exports. `docs/extending.md` builds a package on it. An environment is a function that returns a gymnasium environment,
a network is a function that returns a `torch.nn.Module`, and an algorithm is an `Entry`; each is named in the settings as
`package.module:attribute`.
"""

from common.algorithms.action_values import QLoss, q_loss
from common.algorithms.api import (
    Algorithm,
    Entry,
    HasRandomState,
    HasReplay,
    LoadsParameters,
    NetworkPolicy,
    ObservesExperience,
    Policy,
    RunProgress,
    SavesReplay,
    UpdateResult,
    WorkerContext,
)
from common.algorithms.batch import Batch
from common.algorithms.dqn import next_value
from common.algorithms.losses import PolicyLoss, explained_variance, importance_weight, policy_loss, standardized, value_loss
from common.algorithms.measures import NONFINITE_STEPS
from common.algorithms.off_policy import Inserted, ReplayLearner, td_target
from common.algorithms.on_policy import (
    ActorCriticLearner,
    ActorCriticPolicy,
    NetworkOutputs,
    network_outputs,
    recorded_log_prob,
    return_inputs,
)
from common.algorithms.optim import (
    build_optimizer,
    gradient_step,
    polyak_update,
    scheduled_entropy_coef,
    scheduled_learning_rate,
)
from common.algorithms.payload import Payload
from common.algorithms.ranks import ALONE, Ranks, average_gradients
from common.algorithms.returns import Returns, gae, q_lambda, vtrace
from common.algorithms.sections import ActorCriticSection, AlgorithmSection, ReplaySection, RunScale
from common.conditions import AtMost, OnlyIf, Unless
from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ConfigError, RookeryError
from common.models.arithmetic import autocast
from common.models.layers import Head, Network, TreeTrunk, Trunk, build_trunk, dense, initialised
from common.models.nets import ActionBounds
from common.models.spec import ModelSettings
from common.policies.load import load_policy
from common.policies.trained import TrainedPolicy
from common.protocol.events import Experience
from common.protocol.messages import ArraySpec
from common.replay.blocks import Segment
from common.replay.buffer import Transitions

__all__ = [
    "ALONE",
    "NONFINITE_STEPS",
    "ActionBounds",
    "ActionSpec",
    "ActorCriticLearner",
    "ActorCriticPolicy",
    "ActorCriticSection",
    "Algorithm",
    "AlgorithmSection",
    "ArraySpec",
    "AtMost",
    "Batch",
    "ConfigError",
    "Entry",
    "EnvSpec",
    "Experience",
    "HasRandomState",
    "HasReplay",
    "Head",
    "Inserted",
    "LoadsParameters",
    "ModelSettings",
    "Network",
    "NetworkOutputs",
    "NetworkPolicy",
    "ObservesExperience",
    "OnlyIf",
    "Payload",
    "Policy",
    "PolicyLoss",
    "QLoss",
    "Ranks",
    "ReplayLearner",
    "ReplaySection",
    "Returns",
    "RookeryError",
    "RunProgress",
    "RunScale",
    "SavesReplay",
    "Segment",
    "TrainedPolicy",
    "Transitions",
    "TreeTrunk",
    "Trunk",
    "Unless",
    "UpdateResult",
    "WorkerContext",
    "autocast",
    "average_gradients",
    "build_optimizer",
    "build_trunk",
    "dense",
    "explained_variance",
    "gae",
    "gradient_step",
    "importance_weight",
    "initialised",
    "load_policy",
    "network_outputs",
    "next_value",
    "policy_loss",
    "polyak_update",
    "q_lambda",
    "q_loss",
    "recorded_log_prob",
    "return_inputs",
    "scheduled_entropy_coef",
    "scheduled_learning_rate",
    "standardized",
    "td_target",
    "value_loss",
    "vtrace",
]
