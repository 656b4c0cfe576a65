"""`rookery export`: an ONNX file, compared with its policy before it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.errors import ConfigError, ResourceError, RookeryError
from common.policies.export import can_check, compare, require_packages, to_onnx
from common.policies.trained import TrainedPolicy
from common.runtime.disk import write_atomically

OBSERVATIONS = 1000  # of a comparison


def require_possible(file: Path, *, observations: int | None) -> None:
    """Raise `ConfigError` or `ResourceError` where `file` cannot be written, or a package is missing."""
    require_packages(check=bool(observations))
    found = "" if file.parent.is_dir() else f"no directory {file.parent}"
    if file.exists() and not file.is_file():  # the model would take the place of a device such as /dev/null
        found = "a directory" if file.is_dir() else "a device or pipe"
    if found:
        raise ConfigError(f"{file} cannot be written", found=found, wanted="a file in a directory that exists")


def export(policy: TrainedPolicy, file: Path, *, observations: int | None) -> str:
    """Write the policy to `file`, and return what was written, in lines.

    Greedy actions are compared on `observations`; None: on 1,000 where onnxruntime is installed; 0: not at all.
    Raises `RookeryError`, and writes nothing, where they differ.
    """
    model = to_onnx(policy)
    check = _checked(model, policy, observations=observations)
    try:
        write_atomically(file, model)
    except OSError as error:
        raise ResourceError(f"{file} cannot be written", found=str(error.strerror), wanted="room and permission") from error
    run = f"{policy.run_id}, {policy.settings.algorithm.name}, version {policy.version}, {policy.env_steps:,} env steps"
    facts = {"file": f"{file}, {len(model):,} bytes", "run": run} | _interface(model) | {"check": check}
    return "\n".join(f"{name:<18}{fact}" for name, fact in facts.items())


def _checked(model: bytes, policy: TrainedPolicy, *, observations: int | None) -> str:
    if observations is None and not can_check():
        return "not done, because onnxruntime is not installed"
    if observations == 0:
        return "not done"
    found = compare(model, policy, observations=observations or OBSERVATIONS)
    if found.different:
        differ = f"{found.different:,} of {found.observations:,} observations"
        raise RookeryError(
            "the exported policy takes other greedy actions", found=differ, wanted="none", fix="the file was not written"
        )
    ties = f"; {found.ties:,} are ties" if found.ties else ""
    return f"{found.equal:,} of {found.observations:,} greedy actions equal by onnxruntime{ties}"


def _interface(model: bytes) -> dict[str, str]:
    import onnx  # noqa: PLC0415 - slow, and not always installed

    graph = onnx.load_model_from_string(model).graph

    def shown(value: Any) -> str:
        tensor = value.type.tensor_type
        shape = ", ".join(str(size.dim_param or size.dim_value) for size in tensor.shape.dim)
        return f"{value.name} {onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)} [{shape}]"

    return {"inputs": ", ".join(map(shown, graph.input)), "outputs": ", ".join(map(shown, graph.output))}
