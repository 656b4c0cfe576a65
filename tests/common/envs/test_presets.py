"""The line `# Spaces: ...` of each preset against its environment."""

import pytest

from common.config.load import find_preset, load_settings, preset_header, preset_names
from common.envs.spec import EnvSpec
from common.envs.trial import spec_of
from common.errors import ResourceError

pytestmark = pytest.mark.service


def spaces(spec: EnvSpec) -> str:
    """Return an observation and an action in words, as `rookery presets` has them."""
    action = choices(spec.action.choices) or numbers(spec.action.shape, "float32")
    return f"{', '.join(map(observation, spec.parts))} -> {action}" + ", masked" * spec.action_mask


def observation(spec: EnvSpec) -> str:
    """Return one array of an observation in words."""
    return choices(spec.observation_choices) or numbers(spec.network_input_shape, spec.observation_dtype)


def choices(counts: tuple[int, ...]) -> str:
    return ", ".join(f"1 of {count}" for count in counts)


def numbers(shape: tuple[int, ...], dtype: str) -> str:
    return "x".join(map(str, shape)) + (" byte" if dtype == "uint8" else " float") + "s" * (shape != (1,))


@pytest.mark.filterwarnings("ignore")  # Box2D crashes at import where its DeprecationWarning is an error
@pytest.mark.parametrize("name", preset_names())
def test_the_spaces_of_a_preset_are_those_of_its_environment(name: str) -> None:
    settings = load_settings(preset=name, environ={}).settings.env
    if package := settings.id.rpartition(":")[0]:
        pytest.importorskip(package)
    try:
        spec = spec_of(settings)
    except ResourceError as error:
        pytest.skip(str(error))
    assert preset_header(find_preset(name)).spaces == spaces(spec)
