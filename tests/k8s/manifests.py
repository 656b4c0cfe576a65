"""The manifests as a cluster would get them: rendered by kustomize, read back as plain values."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import yaml

Manifest: TypeAlias = Mapping[str, Any]

K8S = Path(__file__).parents[2] / "k8s"
OVERLAYS = sorted(path.parent.name for path in (K8S / "overlays").glob("*/kustomization.yaml"))
COMPONENTS = sorted(path.parent.name for path in (K8S / "components").glob("*/kustomization.yaml"))
WORKLOADS = ("StatefulSet", "Deployment")
CUSTOM = (
    "jobset.x-k8s.io/",
    "keda.sh/",
    "monitoring.coreos.com/",
)  # groups of custom resources: their schema is not Kubernetes' own


def kubectl() -> str:
    """The renderer: of this environment (a development dependency), else whichever is found first."""
    beside = Path(sys.executable).with_name("kubectl")
    found = str(beside) if beside.exists() else shutil.which("kubectl")
    assert found, "no kubectl: run `make setup`"
    return found


def render(folder: Path) -> list[Manifest]:
    """All objects that `kubectl apply -k FOLDER` would make."""
    made = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert "deprecated" not in made.stderr, made.stderr
    return [manifest for manifest in yaml.safe_load_all(made.stdout) if manifest]


@cache
def overlay(name: str, *components: str) -> tuple[Manifest, ...]:
    """An overlay as it is, or with more components, as in a user's own kustomization."""
    if not components:
        return tuple(render(K8S / "overlays" / name))
    with TemporaryDirectory() as folder:
        return tuple(render(on_top(Path(folder), name, components=components)))


def on_top(folder: Path, name: str, *, components: Sequence[str] = (), **more: Any) -> Path:
    """Write a kustomization on top of the overlay `name` into `folder`; returns the folder."""
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "rookery",  # of what the components add
        "resources": [_relative(folder, "overlays", name)],
        "components": [_relative(folder, "components", component) for component in components],
        **more,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return folder


def _relative(folder: Path, *parts: str) -> str:
    return os.path.relpath(K8S.joinpath(*parts), folder.resolve())  # kustomize takes no absolute path


@cache
def held(name: str) -> frozenset[str]:
    """The components that an overlay has already, by itself or by the overlay below it."""
    written = yaml.safe_load((K8S / "overlays" / name / "kustomization.yaml").read_text())
    own = {Path(component).name for component in written.get("components", ())}
    below = [Path(resource).name for resource in written["resources"] if Path(resource).name in OVERLAYS]
    return frozenset(own.union(*map(held, below)))


def combinations() -> Iterable[tuple[str, ...]]:
    """Every overlay alone, and with each component that it has not: what may be asked of `overlay`."""
    for name in OVERLAYS:
        yield (name,)
        yield from ((name, component) for component in COMPONENTS if component not in held(name))


def of(manifests: Iterable[Manifest], *kinds: str) -> list[Manifest]:
    """Those of some kinds."""
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def named(manifests: Iterable[Manifest], kind: str, name: str) -> Manifest:
    """The one of this kind and name."""
    (found,) = [manifest for manifest in of(manifests, kind) if manifest["metadata"]["name"] == name]
    return found


def run_of(manifests: Iterable[Manifest]) -> Manifest:
    """The ConfigMap that holds the run; its name ends in a hash."""
    (found,) = [manifest for manifest in of(manifests, "ConfigMap") if manifest["metadata"]["name"].startswith("run-")]
    return found


def pod_of(workload: Manifest) -> Manifest:
    """The pod template of a workload, or of the only Job of a JobSet."""
    if workload["kind"] != "JobSet":
        template: Manifest = workload["spec"]["template"]
        return template
    (job,) = workload["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]  # type: ignore[no-any-return]


def title(manifest: Manifest) -> str:
    """Return the name of a manifest in failure messages: kind/name."""
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def selects(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector matches these labels; supports equality and `In`."""
    if "matchLabels" not in selector and "matchExpressions" not in selector:
        return not selector  # {} takes all; anything else is no selector
    expressions = selector.get("matchExpressions", ())
    assert all(expression["operator"] == "In" for expression in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )
