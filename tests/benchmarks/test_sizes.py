"""The table of sizes: every image of the Dockerfile is in it, and none has more packages than it installs."""

from __future__ import annotations

import re

import pytest

from benchmarks import sizes

pytestmark = pytest.mark.service


def test_each_image_for_cpus_is_measured():
    targets = re.findall(r"^FROM service AS (\S+)$", (sizes.ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)
    assert set(sizes.images()) == set(targets) - {"learner-gpu"}


def test_an_image_has_the_packages_that_its_requirements_need_and_no_others():
    found = {image: sizes.packages(sizes.requirements(left_out)) for image, left_out in sizes.images().items()}
    assert {"numpy", "pyzmq", "ale-py", "pydantic-core"} <= found["env-worker"].keys()
    assert "torch" not in found["env-worker"]
    assert {"torch", "sympy"} <= found["actor"].keys()  # torch needs the second
    assert found["env-worker"].keys() < found["actor"].keys() < found["learner"].keys()
    assert min(min(each.values()) for each in found.values()) > 0
    assert "| `actor` |" in sizes.report_packages(found)


def test_a_package_of_an_extra_alone_is_not_counted():
    """Many environments of gymnasium are such extras."""
    assert "mujoco" not in sizes.packages(["gymnasium"])
    with pytest.raises(SystemExit, match="no-such-package is not installed here"):
        sizes.packages(["no-such-package"])


def test_the_memory_of_each_process_is_a_row():
    assert sizes.report_memory({"learner": 600 * 2**20, "env_worker-0-0": 2**26}).splitlines()[-2:] == [
        "| learner | 600 |",
        "| env_worker-0-0 | 64 |",
    ]
