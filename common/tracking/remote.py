"""The trackers with a package of their own, which is imported when its tracker is opened: that takes seconds.

Variables of the packages choose the place. W&B: WANDB_API_KEY, WANDB_PROJECT, WANDB_MODE and others. MLflow: MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME and others. Trackio: TRACKIO_DIR for a local folder, TRACKIO_SERVER_URL, TRACKIO_SPACE_ID.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from posixpath import normpath
from types import MappingProxyType
from typing import Any

from common.errors import ConfigError
from common.tracking.background import Point, TrackedRun, Tracker
from common.units import Seconds

FINISH_SECONDS: Seconds = 8.0  # for the last uploads, also in the package's hook at the end of the process
INIT_SECONDS: Seconds = 30.0


class WandbTracker:
    """One run of W&B with the id of the run: a resumed run continues it."""

    def __init__(self, run: TrackedRun) -> None:
        """Begin or continue the run. The package keeps its files in the run directory, under `wandb/`."""
        import wandb  # noqa: PLC0415

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rookery"),
            id=run.run_id,
            name=run.name,
            dir=str(run.folder),
            resume="allow",
            config=dict(run.settings),
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, init_timeout=INIT_SECONDS, finish_timeout=FINISH_SECONDS
            ),
        )
        # W&B refuses steps that go back, as they do after a resume from a checkpoint: env steps are the x axis of all charts.
        self._run.define_metric("env_steps", hidden=True)
        self._run.define_metric("*", step_metric="env_steps")

    def write(self, points: Sequence[Point]) -> None:
        """Add points; the package stores and uploads them in a process of its own."""
        for point in points:
            self._run.log({"env_steps": point.env_steps, "_timestamp": point.unix_seconds, **point.values})

    def finish(self, result: Mapping[str, float], *, complete: bool) -> None:  # noqa: ARG002
        """Set the result in the run's summary."""
        self._run.summary.update({f"result/{name}": value for name, value in result.items()})

    def close(self) -> None:
        """End the run and wait for the uploads for `FINISH_SECONDS`; what is left stays in the run directory for `wandb sync`."""
        self._run.finish()


RUN_TAG = "rookery.run_id"
NO_VALUE = "none"  # of a setting that had one when the run began
MOST_METRICS, MOST_PARAMETERS, MOST_CHARACTERS, MOST_OF_NAME = 1000, 100, 500, 250  # of one request, one parameter, one name
# The package waits for minutes by default; points that could not be sent are kept and sent again.
PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "8", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


class MlflowTracker:
    """One run of MLflow, found again by a tag with the run's id: a resumed run continues it."""

    def __init__(self, run: TrackedRun) -> None:
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it would log each attempt of an outage
        from mlflow.entities import Metric, Param  # noqa: PLC0415
        from mlflow.tracking import MlflowClient  # noqa: PLC0415

        self._client, self._metric, self._parameter = MlflowClient(), Metric, Param
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "rookery"))
        found = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.run_id}'", max_results=1)
        self._run = found[0] if found else self._client.create_run(experiment, tags={RUN_TAG: run.run_id}, run_name=run.name)
        self._id: str = self._run.info.run_id
        if found:
            self._client.update_run(self._id, status="RUNNING")
        self._send_settings(run.settings)

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException  # noqa: PLC0415

        for _ in range(2):
            found = self._client.get_experiment_by_name(name)
            if found is not None:
                return str(found.experiment_id)
            try:
                return str(self._client.create_experiment(name))
            except MlflowException as error:  # another run created it meanwhile
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
        raise LookupError(f"the experiment {name!r} exists and cannot be read; it may be deleted")

    def _send_settings(self, settings: Mapping[str, Any]) -> None:
        """Send the settings as parameters; those that differ from when the run began, as tags: MLflow changes no parameter."""
        texts = {mlflow_name(key): str(value)[:MOST_CHARACTERS] for key, value in settings.items()}
        before = self._run.data.params
        for key, text in (dict.fromkeys(before, NO_VALUE) | texts).items():
            if before.get(key, text) != text:
                self._client.set_tag(self._id, f"changed.{key}", text)
            elif f"changed.{key}" in self._run.data.tags:  # it has its first value again
                self._client.delete_tag(self._id, f"changed.{key}")
        for some in _in_parts([self._parameter(key, text) for key, text in texts.items() if key not in before], MOST_PARAMETERS):
            self._client.log_batch(self._id, params=some)

    def write(self, points: Sequence[Point]) -> None:
        """Send points. A point that is sent twice, because its answer was lost, is stored once."""
        metrics = [
            self._metric(mlflow_name(name), value, int(point.unix_seconds * 1000), point.env_steps)
            for point in points
            for name, value in point.values.items()
        ]
        for some in _in_parts(metrics, MOST_METRICS):
            self._client.log_batch(self._id, metrics=some)

    def finish(self, result: Mapping[str, float], *, complete: bool) -> None:
        """Set the result as metrics without a curve, and the state of the run."""
        for name, value in result.items():
            self._client.log_metric(self._id, f"result/{name}", value)
        self._client.set_terminated(self._id, status="FINISHED" if complete else "KILLED")

    def close(self) -> None:
        """Nothing is open between requests."""


def mlflow_name(name: str) -> str:
    """Return `name` of a metric or setting as MLflow takes it: one name that it refuses would keep back all points, for ever."""
    return normpath(re.sub(r"[^\w\-. :/]", "_", name)[:MOST_OF_NAME])


def _in_parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


class TrackioTracker:
    """One run of trackio, named by the id of the run: a resumed run continues it."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio  # noqa: PLC0415

        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "rookery"),
            name=run.run_id,
            resume="allow",
            config=dict(run.settings),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def write(self, points: Sequence[Point]) -> None:
        """Add points; the package stores and sends them in a thread of its own."""
        for point in points:
            self._run.log(dict(point.values), step=point.env_steps)

    def finish(self, result: Mapping[str, float], *, complete: bool) -> None:  # noqa: ARG002
        """Add the result as a last point."""
        self._run.log({f"result/{name}": value for name, value in result.items()})

    def close(self) -> None:
        """End the run and wait for what is queued."""
        self._run.finish()


def check_tracking(names: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` where a tracker could never work: its package is not installed, or it has no server or account."""
    for name in names:
        if name in REMOTE and not _installed(name):
            raise ConfigError(
                f"run.tracking names {name}",
                found=f"no package {name}",
                wanted="its package",
                fix=f"pip install 'rookery[{name}]', or leave it out of run.tracking",
            )
    if "mlflow" in names and not environ.get("MLFLOW_TRACKING_URI"):
        raise ConfigError(
            "run.tracking names mlflow",
            found="no MLFLOW_TRACKING_URI",
            wanted="the address of a server",
            fix="export MLFLOW_TRACKING_URI=http://HOST:5000",
        )
    if "wandb" in names and not (any(map(environ.get, WANDB_ACCESS)) or _netrc(environ).is_file()):
        raise ConfigError(
            "run.tracking names wandb",
            found=f"none of {', '.join(WANDB_ACCESS)}, and no {_netrc(environ)}",
            wanted="an account, or a mode that needs none",
            fix="wandb login, or export WANDB_MODE=offline",
        )


WANDB_ACCESS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE")
"""Variables by one of which W&B gets along without the file in which `wandb login` writes its key."""


def _netrc(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("NETRC") or Path.home() / ".netrc")


def _installed(package: str) -> bool:
    """Return whether the package is there; a folder of its name, such as the `wandb/` of an earlier run, is no package."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


REMOTE: Mapping[str, Callable[[TrackedRun], Tracker]] = MappingProxyType(
    {"wandb": WandbTracker, "mlflow": MlflowTracker, "trackio": TrackioTracker}
)
"""The class of each tracker by its name, which is also that of its package and of the extra."""
