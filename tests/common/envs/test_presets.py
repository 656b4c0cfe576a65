"""The line `# Spaces: ...` of each preset against its environment."""

import pytest

from common.config.load import find_preset, load_settings, preset_header, preset_names
from common.envs.spec import EnvSpec
from common.envs.trial import spec_of
from common.errors import ResourceError

pytestmark = pytest.mark.service


def spaces(spec: EnvSpec) -> str:
    """Return an observation and an action in words, as `rookery presets` has them."""
    size = sum(spec.action.shape)
    action = f"1 of {spec.action.n}" if spec.action.discrete else f"{size} float{'s' if size > 1 else ''}"
    return f"{', '.join(map(observation, spec.parts))} -> {action}" + ", masked" * spec.action_mask


def observation(spec: EnvSpec) -> str:
    """Return one array of an observation in words."""
    if spec.observation_choices:
        return ", ".join(f"1 of {count}" for count in spec.observation_choices)
    return "x".join(map(str, spec.network_input_shape)) + (" bytes" if spec.observation_dtype == "uint8" else " floats")


@pytest.mark.filterwarnings("ignore")  # Box2D crashes at import where its DeprecationWarning is an error
@pytest.mark.parametrize("name", preset_names())
def test_the_spaces_of_a_preset_are_those_of_its_environment(name: str) -> None:
    try:
        spec = spec_of(load_settings(preset=name, environ={}).settings.env)
    except ResourceError as error:
        pytest.skip(str(error))
    assert preset_header(find_preset(name)).spaces == spaces(spec)
