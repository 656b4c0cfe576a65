"""A cluster, where the current kubeconfig names one; the tests that need it are skipped with a reason where it does not."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.installation import Installation, Kubectl
from tests.k8s import manifests


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Installation]]:
    """Return a function that applies the overlay in a new namespace, and deletes the one before; the last goes at the end."""
    made: list[Installation] = []
    if error := Kubectl(manifests.kubectl(), "default").unreachable():
        pytest.skip(f"no cluster answers: {error}")

    def make(*components: str) -> Installation:
        if made:
            made.pop().delete()
        kubectl = Kubectl(manifests.kubectl(), f"rookery-test-{secrets.token_hex(4)}")
        folder, registry = tmp_path_factory.mktemp("overlays"), os.environ.get("REGISTRY", "")
        made.append(Installation(kubectl, folder, registry=registry, components=components))
        assert made[0].apply() == "", "the manifests cause warnings"
        return made[0]

    try:
        yield make
    finally:
        if made:
            made[0].delete()


@pytest.fixture(scope="module")
def running(install: Callable[..., Installation]) -> Installation:
    """The run with two actors and the component `pdb`."""
    return install("pdb")
