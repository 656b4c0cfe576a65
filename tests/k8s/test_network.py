"""The network policies allow the connections that the services make, and no other."""

from __future__ import annotations

from itertools import product

import pytest

from common.config.schema import Settings
from common.config.sections import WorkerSettings
from tests.k8s.manifests import OVERLAYS, WORKLOADS, held, of, overlay, selects

pytestmark = pytest.mark.service

SERVICES = ("learner", "actor", "evaluator")
OUTSIDE = {  # senders outside the run, by the labels of namespace and pod
    "prometheus": ({"kubernetes.io/metadata.name": "monitoring"}, {"app.kubernetes.io/name": "prometheus"}),
    "dns": ({"kubernetes.io/metadata.name": "kube-system"}, {"k8s-app": "kube-dns"}),
    "outsider": ({"kubernetes.io/metadata.name": "default"}, {"app.kubernetes.io/name": "curl"}),
    "addition": (  # of an overlay: only what `default-deny` restricts
        {"kubernetes.io/metadata.name": "rookery"},
        {"app.kubernetes.io/name": "rookery", "app.kubernetes.io/component": "notebook"},
    ),
    "neighbour": ({"kubernetes.io/metadata.name": "rookery"}, {"app.kubernetes.io/name": "notebook"}),
}
OWN = {"kubernetes.io/metadata.name": "rookery"}
PORTS = {("TCP", 53), ("UDP", 53), ("TCP", 443), ("TCP", 5700), ("TCP", 9100)}

each_overlay = pytest.mark.parametrize("name", OVERLAYS)


def manifests(name):
    """An overlay with the policies, its own or added."""
    return overlay(name) if "network-policies" in held(name) else overlay(name, "network-policies")


def places(objects):
    """{name: (labels of the namespace, labels of the pod)} of all that might speak."""
    own = {
        manifest["metadata"]["name"]: manifest["spec"]["template"]["metadata"]["labels"] for manifest in of(objects, *WORKLOADS)
    }
    return {name: (OWN, labels) for name, labels in own.items()} | OUTSIDE


def matches(peer, place):
    """Return whether one entry of `from` or `to` (a NetworkPolicyPeer) selects this place."""
    namespace, labels = place
    assert peer.keys() <= {"podSelector", "namespaceSelector"}
    ours = selects(peer["namespaceSelector"], namespace) if "namespaceSelector" in peer else namespace == OWN
    return ours and selects(peer.get("podSelector", {}), labels)


def allowed(policies, direction, here, there, port):
    """Return whether the policies of `here` allow this direction of a connection with `there`."""
    namespace, labels = here
    concerned = [
        policy["spec"]
        for policy in policies
        if namespace == OWN and selects(policy["spec"]["podSelector"], labels) and direction in policy["spec"]["policyTypes"]
    ]
    word = {"Ingress": "from", "Egress": "to"}[direction]
    rules = [rule for spec in concerned for rule in spec.get(direction.lower(), ())]
    return not concerned or any(
        any(matches(peer, there) for peer in rule[word])
        and ("ports" not in rule or port in {(entry["protocol"], entry["port"]) for entry in rule["ports"]})
        for rule in rules
    )


def edges(name, direction):
    """(from, to, protocol, port) of what the policies allow at one end: where it is sent (Egress) or received (Ingress)."""
    objects, found = manifests(name), set()
    policies, known = of(objects, "NetworkPolicy"), places(objects)
    for source, target, port in product(known, known, PORTS):
        here, there = (source, target) if direction == "Egress" else (target, source)
        if here in SERVICES and allowed(policies, direction, known[here], known[there], port):
            found.add((source, target, *port))
    return found


def wanted():
    """The same, from what the services do: workers and ranks connect to learners, by a name; Prometheus scrapes all."""
    settings = Settings()
    port = int(settings.learner.bind.rpartition(":")[2])
    workers = [name for name, section in settings if isinstance(section, WorkerSettings)]
    return {
        *((worker, "learner", "TCP", port) for worker in workers),
        *(("learner", "learner", *port) for port in PORTS),  # ranks, on ports that the system chooses
        *((service, "dns", protocol, 53) for service, protocol in product(SERVICES, ("TCP", "UDP"))),
        *(("prometheus", service, "TCP", 9100) for service in SERVICES),
    }


@each_overlay
def test_the_policies_allow_the_connections_that_services_make_and_no_other(name):
    """Without keys, the policies alone protect the learner's port. Ingress and egress are checked separately."""
    assert edges(name, "Egress") == {edge for edge in wanted() if edge[0] in SERVICES}
    assert edges(name, "Ingress") == {edge for edge in wanted() if edge[1] in SERVICES}


@each_overlay
def test_every_policy_is_needed(name):
    """A rule that allows nothing more than the others is a rule that nobody dares to remove later."""
    objects = manifests(name)
    known, policies = places(objects), of(objects, "NetworkPolicy")

    def open_edges(kept):
        return {
            (direction, source, target, port)
            for direction, source, target, port in product(("Egress", "Ingress"), known, known, PORTS)
            if allowed(kept, direction, known[source], known[target], port)
        }

    for left_out in policies:
        assert open_edges([policy for policy in policies if policy is not left_out]) != open_edges(policies), left_out["metadata"]
