"""A run that is installed in a namespace of its own on the cluster of the current kubeconfig, by kubectl alone.

Everything goes through the API server: `exec` reads /status in the pod, so the tests need no route to pods.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.protocol.ledger import sum_counts
from tests.k8s.manifests import on_top

RUN = """
env: {id: CartPole-v1, num_envs: 8}
model: {hidden: [16], activation: tanh}
algorithm: {name: ppo, epochs: 2, minibatch: 64}
rollout: {length: 16}
learner: {batch: 1, credits: 2}
evaluator: {every_seconds: 1.0, episodes: 4}
checkpoint: {every_seconds: 0.5}
target: {env_steps: 100_000_000}
"""
DEADLINE = 300.0  # seconds for anything awaited; only a fault lets it pass
COMMAND_SECONDS = 600.0  # of one kubectl; some wait for a rollout or a deletion themselves
POLL = 1.0
NOT_PULLED = {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"}
FEWER_CORES = """
# Two policy servers fit into two cores.
- {op: replace, path: /spec/template/spec/containers/1/resources/requests/cpu, value: 100m}
- {op: replace, path: /spec/template/spec/containers/2/resources/requests/cpu, value: 100m}
"""
STATE = ".status.containerStatuses[0]"
STATUS = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9100/status', timeout=5).read().decode())"
SIGNAL = """
import os, pathlib, sys
number, word = int(sys.argv[1]), sys.argv[2].encode()
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        words = [found for name in ("cmdline", "environ") for found in (folder / name).read_bytes().split(bytes(1))]
    except OSError:
        continue
    if word in words and int(folder.name) != os.getpid():
        os.kill(int(folder.name), number)
"""


class Kubectl:
    """kubectl in one namespace of the cluster that the current kubeconfig names."""

    def __init__(self, program: str, namespace: str) -> None:
        """Run nothing yet."""
        self.program, self.namespace = program, namespace

    def __call__(self, *words: str, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `kubectl --namespace NAMESPACE WORDS`; a failure shows its output where `check` is set."""
        done = subprocess.run(
            self.command(*words), input=stdin, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
        assert done.returncode == 0 or not check, f"kubectl {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def command(self, *words: str) -> list[str]:
        """Return the argument vector of `kubectl WORDS` in the namespace."""
        return [self.program, "--namespace", self.namespace, *words]

    def unreachable(self) -> str:
        """Return the last line of kubectl's error where no API server answers; empty where one does."""
        done = self("version", "--request-timeout=10s", check=False)
        return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no output"])[-1]


class Pod(NamedTuple):
    """The newest state of a pod that the API server reported, and of its first container. Empty: not set."""

    uid: str
    name: str
    component: str
    ready: str  # true or false
    restarts: str
    exit_code: str  # of a container that has ended and is not started again
    last_exit_code: str  # of the container before the present one
    waiting: str  # reason why the container does not run
    started_at: str
    deleted_at: str


PATHS = Pod(
    uid=".metadata.uid",
    name=".metadata.name",
    component=r".metadata.labels.app\.kubernetes\.io/component",
    ready=f"{STATE}.ready",
    restarts=f"{STATE}.restartCount",
    exit_code=f"{STATE}.state.terminated.exitCode",
    last_exit_code=f"{STATE}.lastState.terminated.exitCode",
    waiting=f"{STATE}.state.waiting.reason",
    started_at=f"{STATE}.state.running.startedAt",
    deleted_at=".metadata.deletionTimestamp",
)
LINE = ",".join(f"{{{path}}}" for path in PATHS) + "{'\\n'}"  # no tabs: kubectl aligns them in a watch


class Watch:
    """Reads `kubectl get pods --watch` in a thread, so that exit codes of deleted pods are known. `close` it when done."""

    def __init__(self, kubectl: Kubectl) -> None:
        """Start watching; a stream that the server ends is opened again."""
        self._command = kubectl.command("get", "pods", "--watch", f"--output=jsonpath={LINE}")
        self._pods: dict[str, Pod] = {}
        self._closing = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._read, name="watch of pods", daemon=True)
        self._thread.start()

    def pod(self, uid: str) -> Pod | None:
        """Return the last state of a pod, also of one that is deleted."""
        return self._pods.get(uid)

    def close(self) -> None:
        """End the thread and its kubectl."""
        self._closing.set()
        if self._process is not None:
            self._process.terminate()
        self._thread.join()

    def _read(self) -> None:
        while not self._closing.is_set():
            with subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
                self._process = process
                if self._closing.is_set():
                    process.terminate()
                for line in process.stdout or ():
                    if (pod := parse_pod(line)) is not None:
                        self._pods[pod.uid] = pod
            self._closing.wait(POLL)


def parse_pod(line: str) -> Pod | None:
    """Return the pod of one line in the format `LINE`; None for an incomplete line."""
    values = line.rstrip("\n").split(",")
    return Pod(*values) if len(values) == len(Pod._fields) and values[0] else None


class Installation:
    """The overlay `local` with a small run, in a namespace of its own."""

    def __init__(self, kubectl: Kubectl, folder: Path, *, registry: str = "", components: Sequence[str] = ()) -> None:
        """Nothing is applied yet. `registry` is prefixed to the names of the images."""
        self.kubectl, self.folder = kubectl, folder
        self._registry, self._components = registry.rstrip("/"), components
        self.ranks = 2 if "ranks" in components else 1
        self._watch: Watch | None = None

    def write(self, run: str = RUN, overlay: str = "local", components: Sequence[str] | None = None) -> str:
        """Write a kustomization on top of `overlay`; return its folder."""
        folder = self.folder / overlay
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.yaml").write_text(run)
        names = ("rookery-actor", "rookery-learner") if self._registry else ()
        components = self._components if components is None else components
        fewer = [{"target": {"kind": "Deployment", "name": "actor"}, "patch": FEWER_CORES}]
        on_top(
            folder,
            overlay,
            components=components,
            patches=fewer if "policy-server" in components else [],
            namespace=self.kubectl.namespace,
            configMapGenerator=[{"name": "run", "behavior": "replace", "files": ["run.yaml"]}],
            images=[{"name": name, "newName": f"{self._registry}/{name}"} for name in names],
        )
        return str(folder)

    def apply(self, run: str = RUN) -> str:
        """`kubectl apply -k`; returns its warnings."""
        warnings = self.kubectl("apply", "-k", self.write(run)).stderr
        self._watch = self._watch or Watch(self.kubectl)
        return warnings

    def delete(self) -> None:
        """Delete the namespace and everything in it, and wait until it is gone."""
        if self._watch is not None:
            self._watch.close()
        self.kubectl("delete", "namespace", self.kubectl.namespace, "--ignore-not-found", f"--timeout={DEADLINE:.0f}s")

    # -- what the cluster reports ------------------------------------------------------------------------------------------

    def pods(self, component: str = "") -> list[Pod]:
        """Return the pods that are not being deleted, by name."""
        done = self.kubectl("get", "pods", f"--output=jsonpath={{range .items[*]}}{LINE}{{end}}")
        found = [pod for line in done.stdout.splitlines() if (pod := parse_pod(line)) is not None]
        return sorted(
            (pod for pod in found if pod.component.startswith(component) and not pod.deleted_at), key=lambda pod: pod.name
        )

    def pod(self, component: str) -> Pod:
        """Return the first pod of a component."""
        return self.wait(lambda: self.pods(component), f"a pod of {component}")[0]

    def containers(self, pod: Pod) -> dict[str, Mapping[str, Any]]:
        """Return the `containerStatuses` of a pod by the name of the container."""
        statuses = json.loads(self.kubectl("get", "pod", pod.name, "--output=json").stdout)["status"]["containerStatuses"]
        return {status["name"]: status for status in statuses}

    def exit_code(self, pod: Pod) -> str:
        """Return the exit code of a pod that is being deleted, once its container has ended."""
        assert self._watch is not None
        watch = self._watch
        return self.wait(lambda: (seen := watch.pod(pod.uid)) and seen.exit_code, f"{pod.name} ends")

    def status(self, rank: int = 0) -> dict[str, Any]:
        """Return /status of the learner, or of another of its ranks; empty where it does not answer."""
        done = self.kubectl("exec", f"learner-{rank}", "--", "python", "-c", STATUS, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def statuses(self) -> list[dict[str, Any]]:
        """Return /status of every rank; empty where one of them does not answer."""
        found = [self.status(rank) for rank in range(self.ranks)]
        return found if all(found) else []

    def workers(self) -> dict[str, int]:
        """Return the connected workers of all ranks by role."""
        return sum_counts([status.get("workers", {}) for status in self.statuses()] or [{}])

    def signal(self, pod: Pod, number: int, word: str = "") -> None:
        """Send a signal to the processes of a pod that have `word` as an argument or a variable; without it, to the service.

        It is sent from within the first container, which may end with it.
        """
        words = ("python", "-c", SIGNAL, str(number), word or f"services.{pod.component}")
        self.kubectl("exec", pod.name, "--", *words, check=False)

    def wait(self, happened: Callable[[], Any], what: str) -> Any:
        """Call `happened` until its result is true, and return it. Fails at once where an image cannot be pulled."""
        deadline, pause = time.monotonic() + DEADLINE, threading.Event()
        while not (answer := happened()):
            for pod in self.pods():
                fix = "load the images into the nodes (docs/kubernetes.md), or push them and name REGISTRY="
                assert pod.waiting not in NOT_PULLED, f"the image of {pod.name} cannot be pulled: {pod.waiting}; {fix}"
            assert time.monotonic() < deadline, f"never happened: {what}\n{self.kubectl('get', 'pods,events').stdout}"
            pause.wait(POLL)
        return answer

    def flows(self, actors: int = 2) -> Mapping[str, Any]:
        """Wait until all pods are ready, `actors` are connected and the learner trains; check the ledger of each rank.

        Return /status of rank 0. No rank is waited for to train on experience of its own: one without actors trains too.
        """
        self.wait(lambda: len(self.pods("learner")) == self.ranks, f"{self.ranks} learners")
        self.wait(lambda: len(self.pods("actor")) == actors, f"{actors} actors")
        self.wait(lambda: all(pod.ready == "true" for pod in self.pods()), "all pods are ready")
        self.wait(lambda: self.workers() == {"actor": actors, "evaluator": 1}, "all workers are connected")
        before = self.wait(self.status, "the learner answers")["env_steps"]
        self.wait(lambda: self.status().get("env_steps", 0) > before, "the learner trains")
        statuses = self.wait(self.statuses, "every rank answers")
        assert [unexplained(status["ledger"]) for status in statuses] == [0] * self.ranks, statuses
        return statuses[0]


def unexplained(ledger: Mapping[str, Any]) -> int:
    """Return the env steps that were produced and are in no other column of the ledger."""
    explained = ledger["trained"] + ledger["queued"] + ledger["in_flight"] + sum(ledger["dropped"].values())
    return int(ledger["produced"] - explained)
