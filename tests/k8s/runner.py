"""Runs rendered manifests as local processes: as close to a cluster as a machine without containers comes.

A pod is one process, started by the command of its manifest with the environment, volumes and addresses that the manifest gives
it, and looked after by a thread that does a kubelet's work: probes, restarts with back-off, SIGTERM and the termination period.

Each pod has a loopback address of its own (Linux answers on all of 127.0.0.0/8), so ports stay those of the manifests. The name
of a Service is the address of the pod behind it, and a path in a volume is one in that volume's folder. Not done: images, users,
limits of CPU and memory, a read-only root.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.k8s.manifests import WORKLOADS, Manifest, named, of
from tests.system.conftest import DEADLINE, Http

ENTRY_POINT = (sys.executable, "-m", "services.cli")  # of the images: `rookery`
SPEED = 5.0  # periods, back-off and the end of what is not alive pass so much faster
LOOK = 0.05  # seconds between two looks of a kubelet at its pod
SOAK = int(os.environ.get("SOAK", "0"))  # `make k8s-soak`: number of times that each service gets SIGTERM, and must end in time
BACK_OFF = (10.0, 300.0)  # seconds before the second restart, doubling up to the last figure; the first is at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The columns of `kubectl get pod`."""

    ready: bool = False
    restarts: int = 0
    exit_code: int | None = None  # of the container's last end
    lived: int = 0  # times that the liveness probe was answered well, by this container


@dataclass(slots=True)
class Probing:
    """One probe of one life of a container."""

    spec: Mapping[str, Any]
    stopped: Callable[[], bool]  # whether the process was stopped, so that it cannot answer
    patience: float = 1.0  # times as many failures as the manifest allows
    asked: int = 0
    failures: int = 0
    succeeded: bool = False
    due: float = field(default_factory=time.monotonic)  # never while an answer is awaited

    def ask(self, address: str, ports: Mapping[str, int]) -> None:
        """Ask if it is time to, in a thread: each probe waits for its own answer, as with a kubelet."""
        if time.monotonic() >= self.due:
            self.due = math.inf
            threading.Thread(target=self._ask, args=(address, ports), name="probe", daemon=True).start()

    def _ask(self, address: str, ports: Mapping[str, int]) -> None:
        """Ask, and count the answer; ask again where a process that is not stopped is late, because this machine may be busy."""
        get, code, late = self.spec["httpGet"], 0, True
        while late:
            began, stopped = time.monotonic(), self.stopped()
            limit = self.spec["timeoutSeconds"] / (SPEED if stopped else 1.0)
            code, _ = Http(ports[get["port"]], host=address, seconds=limit).get(get["path"])
            late = code == 0 and not stopped and time.monotonic() - began >= limit
        self.asked += 1
        self.succeeded = 200 <= code < 400
        self.failures = 0 if self.succeeded else self.failures + 1
        self.due = time.monotonic() + self.spec["periodSeconds"] / SPEED

    @property
    def failed(self) -> bool:
        """Return whether the probe has reached its `failureThreshold`."""
        return self.failures >= self.patience * self.spec["failureThreshold"]


class Pod:
    """One pod of a workload, from `start` to `delete`."""

    def __init__(self, cluster: Cluster, template: Manifest, *, name: str, address: str, claims: Iterable[str] = ()) -> None:
        """Nothing runs yet."""
        self.name, self.address = name, address
        self._cluster, self._spec = cluster, template["spec"]
        (self.container,) = self._spec["containers"]
        self._folder = cluster.folder / "pods" / f"{len(cluster.pods)}-{name}"
        self._claims = {claim: cluster.folder / "claims" / f"{claim}-{name}" for claim in claims}
        self.ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        self.http = Http(self.ports["http"], host=address)
        self.status = Status()
        self.process: subprocess.Popen[bytes] | None = None
        self._stopped = False  # by SIGSTOP
        self._took = 0.0  # seconds that its last end took
        self._ending = threading.Event()
        self._kubelet = threading.Thread(target=self._look_after, name=f"kubelet of {name}", daemon=True)

    @property
    def volumes(self) -> list[Path]:
        """The folders of its claims, which outlive it."""
        return list(self._claims.values())

    def start(self) -> Pod:
        """Start the thread that runs and restarts the pod."""
        self._folder.mkdir(parents=True)
        self._kubelet.start()
        return self

    def delete(self) -> tuple[float, int | None]:
        """`kubectl delete pod`: seconds from SIGTERM to the end, and the exit code; -9 where it did not end in time."""
        self._ending.set()
        self._kubelet.join()
        return self._took, self.status.exit_code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its process, as the kernel or an accident would."""
        assert self.process is not None
        self._stopped = number == signal.SIGSTOP
        self.process.send_signal(number)

    @property
    def logs(self) -> str:
        """All that its containers have said."""
        said = self._folder / "said"
        return said.read_text() if said.exists() else ""

    # -- a kubelet's work ------------------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        first, longest = BACK_OFF
        period = self._spec["terminationGracePeriodSeconds"]
        pause, grace = 0.0, period if SOAK else max(period, DEADLINE)
        while not self._ending.is_set():
            self.process, self._stopped = self._started(), False
            try:
                self._watch(self.process)
            finally:
                code = self._ended(self.process, grace=grace)
            self.status = replace(self.status, ready=False, lived=0, exit_code=code)
            if not self._ending.wait(pause / SPEED):
                self.status = replace(self.status, restarts=self.status.restarts + 1)
            pause = min(max(first, 2 * pause), longest)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Probe it until it has ended, shall end, or does not live."""
        stopped = lambda: self._stopped  # noqa: E731
        readiness, liveness = (Probing(self.container[f"{name}Probe"], stopped) for name in ("readiness", "liveness"))
        startup = Probing(self.container["startupProbe"], stopped, patience=SPEED)  # starting is no faster here than in a cluster
        while process.poll() is None and not self._ending.wait(LOOK):
            if not startup.succeeded:
                startup.ask(self.address, self.ports)
            else:
                readiness.ask(self.address, self.ports)
                liveness.ask(self.address, self.ports)
                ready = readiness.succeeded or (self.status.ready and not readiness.failed)
                self.status = replace(self.status, ready=ready, lived=liveness.asked if liveness.succeeded else 0)
            if startup.failed or liveness.failed:
                self._ended(process, grace=self._spec["terminationGracePeriodSeconds"] / SPEED)

    def _ended(self, process: subprocess.Popen[bytes], *, grace: float) -> int:
        """End it, if it has not: SIGTERM, `grace` seconds, SIGKILL. Returns its exit code."""
        began = time.monotonic()
        if process.poll() is None:
            process.terminate()
        try:
            return process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        finally:
            self._took = time.monotonic() - began

    # -- from the manifest to a process ------------------------------------------------------------------------------------

    def _started(self) -> subprocess.Popen[bytes]:
        assert "command" not in self.container, "the entry point is the image's"
        volumes = {volume["name"]: volume for volume in self._spec.get("volumes", ())}
        mounts = {m["mountPath"]: self._mounted(m["name"], volumes) for m in self.container["volumeMounts"]}
        own = {name: self._local(self._value(variable), mounts) for name, variable in _by_name(self.container["env"]).items()}
        host = {name: value for name, value in os.environ.items() if not name.startswith(("ROOKERY_", "OMP_"))}
        root = self._folder / "root"
        root.mkdir(exist_ok=True)
        with (self._folder / "said").open("ab") as said:
            return subprocess.Popen(
                [*ENTRY_POINT, *(self._local(word, mounts) for word in self.container["args"])],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                cwd=root,
                env={**host, "TMPDIR": str(mounts["/tmp"]), **own},
                start_new_session=True,
            )

    def _mounted(self, name: str, volumes: Mapping[str, Manifest]) -> Path:
        """The folder of a volume, with what is to be in it."""
        if name in self._claims:
            folder = self._claims[name]
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        folder = self._folder / "volumes" / name
        folder.mkdir(parents=True, exist_ok=True)
        if source := volumes[name].get("configMap"):
            for key, text in self._cluster.config_map(source["name"]).items():
                (folder / key).write_text(text)
        return folder

    def _value(self, variable: Manifest) -> str:
        if "value" in variable:
            return str(variable["value"])
        ((kind, source),) = variable["valueFrom"].items()
        if kind == "fieldRef" and source["fieldPath"] == "metadata.name":
            return self.name
        if kind == "resourceFieldRef" and source["resource"] == "limits.cpu":
            return str(math.ceil(_cores(self.container["resources"]["limits"]["cpu"])))
        raise NotImplementedError(f"{kind} {source}")

    def _local(self, text: str, mounts: Mapping[str, Path]) -> str:
        """`text` of a manifest with the paths and addresses of this machine."""
        for inside, outside in mounts.items():
            if text == inside or text.startswith(f"{inside}/"):
                return str(outside) + text.removeprefix(inside)
        text = re.sub(r"(?<=^tcp://)([a-z-]+):(\d+)$", lambda found: self._cluster.resolve(found[1], int(found[2])), text)
        return text.replace("0.0.0.0", self.address)


class Cluster:
    """The pods of a set of manifests, in one folder."""

    def __init__(self, manifests: Iterable[Manifest], folder: Path) -> None:
        """No pod runs yet."""
        self.manifests, self.folder = list(manifests), folder
        self.pods: list[Pod] = []
        self._net = f"127.{secrets.randbelow(254) + 1}.{secrets.randbelow(254) + 1}"  # tests of environments seed `random`
        self._numbers, self._hosts = itertools.count(), itertools.count(1)
        self._stable: dict[str, str] = {}  # addresses of the pods that a Service leads to

    def start(self, name: str) -> Pod:
        """Start one more pod of the workload `name`; of a StatefulSet the next life of its one pod, on the same volume."""
        return self.pod(name).start()

    def pod(self, name: str) -> Pod:
        """The same, not started yet."""
        (workload,) = [manifest for manifest in of(self.manifests, *WORKLOADS) if manifest["metadata"]["name"] == name]
        spec = workload["spec"]
        if workload["kind"] == "StatefulSet":
            claims = [claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]]
            pod = Pod(self, spec["template"], name=f"{name}-0", address=self._address(name), claims=claims)
        else:
            pod = Pod(self, spec["template"], name=f"{name}-{next(self._numbers)}", address=self._new_address())
        self.pods.append(pod)
        return pod

    def resolve(self, service: str, port: int) -> str:
        """HOST:PORT of the pod behind a Service."""
        spec = named(self.manifests, "Service", service)["spec"]
        (target,) = [entry["targetPort"] for entry in spec["ports"] if entry["port"] == port]
        (workload,) = [
            manifest
            for manifest in of(self.manifests, *WORKLOADS)
            if spec["selector"].items() <= manifest["spec"]["template"]["metadata"]["labels"].items()
        ]
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        ports = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
        return f"{self._address(workload['metadata']['name'])}:{ports[target]}"

    def config_map(self, name: str) -> Mapping[str, str]:
        """Its keys and texts."""
        data: Mapping[str, str] = named(self.manifests, "ConfigMap", name)["data"]
        return data

    def close(self) -> None:
        """Leave nobody behind."""
        for pod in self.pods:
            pod._ending.set()
            if pod.process is not None and pod.process.poll() is None:
                pod.process.kill()
        for pod in self.pods:
            pod._kubelet.join()

    def _address(self, name: str) -> str:
        if name not in self._stable:
            self._stable[name] = self._new_address()
        return self._stable[name]

    def _new_address(self) -> str:
        return f"{self._net}.{next(self._hosts)}"


def _by_name(variables: Iterable[Manifest]) -> dict[str, Manifest]:
    return {variable["name"]: variable for variable in variables}


def _cores(quantity: str) -> float:
    return float(quantity.removesuffix("m")) / 1000 if quantity.endswith("m") else float(quantity)
