"""`make test-cluster`: an installation is scaled, killed, evicted and changed on a real cluster, and counts every env step.

The tests run in this order on one installation. Each begins with a run that trains, and ends with one whose ledger balances.
"""

from __future__ import annotations

import json
import signal

import pytest

from common.errors import LostRankError
from common.protocol.ledger import sum_counts
from common.transport.curve import make as make_keys
from tests.cluster.installation import DEADLINE, RUN, unexplained

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(4 * DEADLINE)]

CHANGED = RUN.replace("epochs: 2", "epochs: 2, learning_rate: 1.25e-4")
OTHER_ENVIRONMENT = RUN.replace("CartPole-v1", "Acrobot-v1")
SHORT = OTHER_ENVIRONMENT.replace("100_000_000", "1_000")
ENDING = RUN.replace("100_000_000", "1_000")
KILLED, LOST = str(128 + signal.SIGKILL), str(LostRankError.exit_code)
ENDED = {"0", str(128 + signal.SIGTERM)}  # the second where the signal arrived while modules were imported


def restarts(installation, component):
    """Return the container restarts of each pod of a component, by name."""
    return {pod.name: pod.restarts for pod in installation.pods(component)}


def replaced(installation, pod):
    """Return a function: the pod that runs in place of `pod`, or None until it does."""
    old = {pod.uid, *(other.uid for other in installation.pods(pod.component))}
    return lambda: next((new for new in installation.pods(pod.component) if new.uid not in old and new.started_at), None)


def evict(installation, pod):
    """Request the eviction of a pod; return the error, or nothing where it is granted."""
    namespace = installation.kubectl.namespace
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": namespace},
    }
    path = f"/api/v1/namespaces/{namespace}/pods/{pod.name}/eviction"
    done = installation.kubectl("create", f"--raw={path}", "--filename=-", stdin=json.dumps(body), check=False)
    return done.stderr if done.returncode else ""


def test_the_run_trains_and_applying_it_again_would_change_nothing(running):
    running.flows()
    assert set(restarts(running, "").values()) == {"0"}
    assert running.kubectl("diff", "-k", running.write()).stdout == ""


def test_the_namespace_refuses_a_pod_that_is_not_restricted(running):
    done = running.kubectl("run", "plain", "--image=busybox", "--dry-run=server", check=False)
    assert done.returncode != 0
    assert 'violates PodSecurity "restricted' in done.stderr


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_the_server_accepts_another_overlay_in_place(running, overlay):
    running.kubectl("apply", "--dry-run=server", "-k", running.write(overlay=overlay, components=()))


def test_actors_are_scaled_from_2_to_4_to_1_and_every_env_step_is_explained(running):
    lost = running.flows()["ledger"]["dropped"].get("worker_lost", 0)
    for number in (4, 1):
        before = {pod.uid: pod for pod in running.pods("actor")}
        running.kubectl("scale", "deployment/actor", f"--replicas={number}")
        status = running.flows(actors=number)
        removed = before.keys() - {pod.uid for pod in running.pods("actor")}
        assert [running.exit_code(before[uid]) for uid in removed] == ["0"] * len(removed)
        assert status["ledger"]["dropped"].get("worker_lost", 0) == lost
    running.kubectl("scale", "deployment/actor", "--replicas=2")
    running.flows()
    assert restarts(running, "learner") == {"learner-0": "0"}


@pytest.mark.parametrize("component", ["actor", "learner"])
def test_a_pod_that_is_deleted_while_it_starts_ends_by_its_signal(running, component):
    first = running.pod(component)
    new = replaced(running, first)
    running.kubectl("delete", "pod", first.name, "--wait=false")
    starting = running.wait(new, f"the successor of {first.name} starts")
    running.kubectl("delete", "pod", starting.name, "--wait=false")
    assert running.exit_code(first) == "0"
    assert running.exit_code(starting) in ENDED
    running.flows()


def test_a_learner_that_is_deleted_continues_and_its_actors_stay(running):
    before, actors, learner = running.flows(), restarts(running, "actor"), running.pod("learner")
    running.kubectl("delete", "pod", learner.name)
    after = running.flows()
    assert running.exit_code(learner) == "0"
    assert after["run_id"] == before["run_id"]
    assert after["env_steps"] >= before["env_steps"]
    assert after["ledger"]["dropped"].get("rolled_back", 0) == before["ledger"]["dropped"].get("rolled_back", 0)
    assert restarts(running, "actor") == actors


def test_a_learner_that_is_killed_continues_and_its_actors_stay(running):
    before, actors, learner = running.flows(), restarts(running, "actor"), running.pod("learner")
    running.signal(learner, signal.SIGKILL)
    running.wait(lambda: running.pod("learner").restarts == "1", "its container is started again")
    assert running.pod("learner").last_exit_code == KILLED
    assert running.flows()["run_id"] == before["run_id"]
    assert restarts(running, "actor") == actors


def test_a_learner_that_is_deleted_by_force_continues_and_its_actors_stay(running):
    before, actors = running.flows(), restarts(running, "actor")
    running.kubectl("delete", "pod", "learner-0", "--force", "--grace-period=0")
    assert running.flows()["run_id"] == before["run_id"]
    assert restarts(running, "actor") == actors


def test_an_actor_that_hangs_is_restarted(running):
    actor = running.pod("actor")
    running.signal(actor, signal.SIGSTOP)
    running.wait(lambda: restarts(running, "actor")[actor.name] == "1", "its container is started again")
    assert next(pod for pod in running.pods("actor") if pod.name == actor.name).last_exit_code == KILLED
    running.flows()


def test_all_pods_are_replaced_at_once_and_the_run_continues(running):
    before, workloads = running.flows(), ("statefulset/learner", "deployment/actor", "deployment/evaluator")
    running.kubectl("rollout", "restart", *workloads)
    for workload in workloads:
        running.kubectl("rollout", "status", workload, f"--timeout={DEADLINE:.0f}s")
    after = running.flows()
    assert after["run_id"] == before["run_id"]
    assert after["env_steps"] >= before["env_steps"]


def test_a_changed_run_reaches_the_learner_and_its_volume(running):
    before, actors = running.flows(), restarts(running, "actor")
    running.apply(CHANGED)
    running.kubectl("rollout", "status", "statefulset/learner", f"--timeout={DEADLINE:.0f}s")
    after = running.flows()
    assert after["env_steps"] >= before["env_steps"]
    assert (
        "learning_rate: 0.000125" in running.kubectl("exec", "learner-0", "--", "cat", "/var/lib/rookery/run/config.yaml").stdout
    )
    assert restarts(running, "actor") == actors


def test_another_environment_on_the_old_volume_is_refused_in_one_line_and_the_old_run_comes_back(running):
    before = running.flows()
    running.apply(OTHER_ENVIRONMENT)
    running.wait(lambda: "2" in (running.pod("learner").exit_code, running.pod("learner").last_exit_code), "it is refused")
    logs = ("logs", "learner-0", "--tail=1")
    running.wait(lambda: "rookery learner: error: " in running.kubectl(*logs, check=False).stdout, "its log has the reason")
    running.apply(CHANGED)
    running.kubectl("delete", "pod", "learner-0")  # a StatefulSet does not replace a pod that is not ready
    assert running.flows()["env_steps"] >= before["env_steps"]


def test_the_disruption_budget_allows_one_eviction_and_refuses_the_next(running):
    running.flows()
    one, two = running.pods("actor")
    running.wait(lambda: evict(running, one) == "", "the first eviction is granted")
    assert "disruption budget" in evict(running, two)
    assert running.exit_code(one) == "0"
    running.flows()


def test_without_a_learner_the_budget_does_not_hold_a_drain(running):
    running.flows()
    running.kubectl("scale", "statefulset/learner", "--replicas=0")
    running.wait(lambda: not any(pod.ready == "true" for pod in running.pods("actor")), "no actor is ready")
    actors = running.pods("actor")
    assert [evict(running, pod) for pod in actors] == ["", ""]
    assert [running.exit_code(pod) for pod in actors] == ["0", "0"]
    running.kubectl("scale", "statefulset/learner", "--replicas=1")
    running.flows()


def test_actors_of_the_old_run_join_a_new_one_on_an_empty_volume(running):
    before, actors = running.flows(), restarts(running, "actor")
    running.kubectl("scale", "statefulset/learner", "--replicas=0")
    running.wait(lambda: not running.pods("learner"), "the learner leaves")
    running.kubectl("delete", "pvc", "rookery-learner-0")
    running.apply(OTHER_ENVIRONMENT)
    assert running.flows()["run_id"] != before["run_id"]
    assert restarts(running, "actor") == {name: str(int(number) + 1) for name, number in actors.items()}


def test_a_run_that_has_ended_stays_ended(running):
    running.apply(SHORT)
    running.wait(lambda: running.status().get("phase") == "finished", "the run ends")
    read = ("exec", "learner-0", "--", "cat", "/var/lib/rookery/run/summary.json")
    summary = json.loads(running.wait(lambda: running.kubectl(*read, check=False).stdout, "the result can be read"))
    assert unexplained(summary["ledger"]) == 0
    running.wait(lambda: all(pod.ready == "true" for pod in running.pods()), "all pods are ready")
    assert restarts(running, "learner") == {"learner-0": "0"}


@pytest.fixture(scope="module")
def ranks(install):
    """The run with two ranks of a learner and two actors, which may both belong to one rank."""
    return install("ranks")


def test_two_ranks_train_and_the_ledger_of_each_balances(ranks):
    ranks.flows()
    assert restarts(ranks, "learner") == {"learner-0": "0", "learner-1": "0"}
    assert ranks.kubectl("diff", "-k", ranks.write()).stdout == ""


def test_a_rank_that_is_killed_ends_the_other_and_both_continue(ranks):
    before, actors = ranks.flows(), restarts(ranks, "actor")
    ranks.signal(ranks.pods("learner")[1], signal.SIGKILL)
    for name, code in (("learner-1", KILLED), ("learner-0", LOST)):
        ended = {"name": name, "last_exit_code": code}
        ranks.wait(lambda ended=ended: any(ended.items() <= pod._asdict().items() for pod in ranks.pods("learner")), f"{ended}")
    assert ranks.flows()["run_id"] == before["run_id"]
    assert restarts(ranks, "actor") == actors


def test_a_rank_that_is_deleted_ends_the_other_and_no_training_is_lost(ranks):
    before, actors = ranks.flows(), restarts(ranks, "actor")
    first, second = ranks.pods("learner")
    ranks.kubectl("delete", "pod", second.name)
    assert ranks.exit_code(second) == "0"
    after = ranks.flows()
    assert int(restarts(ranks, "learner")[first.name]) > int(first.restarts)
    assert after["run_id"] == before["run_id"]
    assert after["env_steps"] >= before["env_steps"]
    assert after["ledger"]["dropped"].get("rolled_back", 0) == before["ledger"]["dropped"].get("rolled_back", 0)
    assert restarts(ranks, "actor") == actors


def test_the_ledgers_of_all_ranks_add_up_to_the_env_steps_of_the_run(ranks):
    ranks.apply(ENDING)
    ranks.kubectl("delete", "pod", "--selector=app.kubernetes.io/component=learner")  # ranks are not replaced one by one
    ranks.wait(lambda: [status["phase"] for status in ranks.statuses()] == ["finished"] * 2, "the run ends on both ranks")
    read = ("exec", "learner-0", "--", "cat", "/var/lib/rookery/run/summary.json")
    summary = json.loads(ranks.wait(lambda: ranks.kubectl(*read, check=False).stdout, "the result can be read"))
    assert [unexplained(ledger) for ledger in summary["ledgers"]] == [0, 0]
    assert summary["ledger"] == sum_counts(summary["ledgers"])
    assert summary["ledger"]["trained"] == summary["env_steps"]


@pytest.fixture(scope="module")
def policy_servers(install):
    """The run with two policy servers in place of the actors, each with two env workers in its pod."""
    return install("policy-server")


def restarts_in(installation, pod):
    """Return the restarts of a pod's containers by name, once all are ready and the run trains."""
    installation.wait(lambda: all(one["ready"] for one in installation.containers(pod).values()), f"all of {pod.name} is ready")
    installation.flows()
    return {name: one["restartCount"] for name, one in installation.containers(pod).items()}


def test_each_policy_server_trains_with_the_env_workers_of_its_pod(policy_servers):
    policy_servers.flows()
    none = {"actor": 0, "env-worker-0": 0, "env-worker-1": 0}
    assert [restarts_in(policy_servers, pod) for pod in policy_servers.pods("actor")] == [none, none]
    assert policy_servers.kubectl("diff", "-k", policy_servers.write()).stdout == ""


@pytest.mark.parametrize(
    ("killed", "word"),
    [("env-worker-1", "ROOKERY_ENV_WORKER__NAME=env-worker-1"), ("actor", "services.policy_server")],
)
def test_the_containers_beside_one_that_is_killed_continue(policy_servers, killed, word):
    pod = policy_servers.pod("actor")
    before, learner = restarts_in(policy_servers, pod), restarts(policy_servers, "learner")
    policy_servers.signal(pod, signal.SIGKILL, word)
    policy_servers.wait(lambda: policy_servers.containers(pod)[killed]["restartCount"] > before[killed], f"{killed} is restarted")
    assert str(policy_servers.containers(pod)[killed]["lastState"]["terminated"]["exitCode"]) == KILLED
    assert restarts_in(policy_servers, pod) == before | {killed: before[killed] + 1}
    assert restarts(policy_servers, "learner") == learner


def test_a_policy_server_that_is_deleted_ends_by_its_signal_and_no_env_step_is_lost(policy_servers):
    lost, pod = policy_servers.flows()["ledger"]["dropped"].get("worker_lost", 0), policy_servers.pod("actor")
    policy_servers.kubectl("delete", "pod", pod.name)
    assert policy_servers.exit_code(pod) == "0"
    assert policy_servers.flows()["ledger"]["dropped"].get("worker_lost", 0) == lost


def test_with_keys_a_missing_secret_is_named_workers_connect_and_others_are_refused(install, tmp_path):
    for name in ("ours", "theirs"):
        make_keys(tmp_path / name, ["worker"])
    guarded = install("curve-auth")
    kubectl = guarded.kubectl
    events = ("get", "events", "--field-selector=reason=FailedMount", "--output=jsonpath={.items[*].message}")
    for role in ("learner", "worker"):
        guarded.wait(lambda role=role: f'secret "{role}-keys" not found' in kubectl(*events).stdout, f"{role}-keys is named")
    for role in ("learner", "worker"):
        kubectl("create", "secret", "generic", f"{role}-keys", f"--from-file={tmp_path / 'ours' / role}")
    guarded.flows()
    assert '"insecure"' not in kubectl("logs", "learner-0").stdout
    kubectl("delete", "secret", "worker-keys")
    kubectl("create", "secret", "generic", "worker-keys", f"--from-file={tmp_path / 'theirs' / 'worker'}")
    outsider = guarded.pod("actor")
    new = replaced(guarded, outsider)
    kubectl("delete", "pod", outsider.name)
    outsider = guarded.wait(new, "an actor with keys of another learner starts")
    guarded.wait(lambda: '"handshake_failed"' in kubectl("logs", outsider.name, check=False).stdout, "it logs the failure")
    status = guarded.wait(guarded.status, "the learner answers")
    assert status["workers"] == {"actor": 1, "evaluator": 1}
    assert unexplained(status["ledger"]) == 0
