"""`python -m common.monitoring`: write rules and dashboards where Kubernetes and compose take them from."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError
from common.monitoring.dashboards import actors, learner, overview, transport
from common.monitoring.rules import groups
from common.runtime import root

FOLDER = Path("k8s/components/monitoring")
HEAD = "# Written by `make monitoring` from common/monitoring. Change it there.\n"


def files() -> dict[str, str]:
    """The text of every generated file, by its name within the folder."""
    rules = {"groups": groups()}
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "rookery", "labels": {"app.kubernetes.io/name": "rookery", "app.kubernetes.io/part-of": "rookery"}},
        "spec": rules,
    }
    dashboards = (overview.build(), learner.build(), actors.build(), transport.build())
    return {
        "rules.yml": HEAD + _yaml(rules),
        "prometheusrule.yaml": HEAD + _yaml(resource),
        **{f"dashboards/{dashboard['uid']}.json": json.dumps(dashboard, indent=2) + "\n" for dashboard in dashboards},
    }


class _Dumper(yaml.SafeDumper):
    """Text of several lines stays readable."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _yaml(document: Mapping[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10_000)


def main() -> int:
    """Replace the files; exit code 2 where this is not the root of the repository."""
    return root.run(_write, program="python -m common.monitoring")


def _write() -> int:
    if not FOLDER.is_dir():
        raise ConfigError("no folder to write into", found=str(Path.cwd()), wanted=f"one with {FOLDER}", fix="start it there")
    for name, text in files().items():
        path = FOLDER / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
