"""The manifests of every overlay with every component are valid, restricted, bounded and labelled."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import kubernetes_validate
import pytest

from common.config.endpoint import parse_endpoint
from common.config.load import load_settings
from common.observability.bottleneck import WAITING
from common.runtime.process_group import TorchrunEnvironment
from services import worker
from services.learner.ranks import check_address
from tests.k8s.manifests import (
    COMPONENTS,
    CUSTOM,
    K8S,
    OVERLAYS,
    WORKLOADS,
    combinations,
    held,
    named,
    of,
    on_top,
    overlay,
    pod_of,
    render,
    run_of,
    selects,
    title,
)

pytestmark = pytest.mark.service

ROOT = K8S.parent
VERSIONS = ("1.35", "1.36", "1.37")
SERVICES = ("learner", "actor", "evaluator")
SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
LABELS = {f"app.kubernetes.io/{name}" for name in ("name", "instance", "component", "part-of", "managed-by")}

each = pytest.mark.parametrize("combination", list(combinations()), ids="+".join)
each_overlay = pytest.mark.parametrize("name", OVERLAYS)


def pods(manifests):
    """(title, pod template) of every workload."""
    return [(title(manifest), pod_of(manifest)) for manifest in of(manifests, *WORKLOADS, "JobSet")]


def containers(manifests):
    """(title of its workload, container) of every container."""
    return [(workload, container) for workload, template in pods(manifests) for container in template["spec"]["containers"]]


def values(container):
    """Return the environment variables that have literal values."""
    return {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}


def invalid(manifest, version):
    """Return the validation error of a strict API server of `version`; None where the manifest is valid."""
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{title(manifest)} {'.'.join(map(str, error.path))}: {error.message}"
    return None


def paths(tree, prefix=""):
    """Dotted path of everything in a tree of mappings and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield f"{prefix}{key}"
        yield from paths(value, f"{prefix}{key}.")


# -- valid ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything():
    """Each different object of all combinations, once."""
    rendered = chain.from_iterable(overlay(*combination) for combination in combinations())
    return list({json.dumps(manifest, sort_keys=True): manifest for manifest in rendered}.values())


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_for_the_kubernetes_of_today(everything, version):
    """A misspelt field is dropped in silence by some servers and refused by others."""
    own = [manifest for manifest in everything if not manifest["apiVersion"].startswith(CUSTOM)]
    assert len(own) > 20
    assert [problem for manifest in own if (problem := invalid(manifest, version))] == []


def test_a_misspelt_field_would_be_seen():
    """The test above must be able to fail."""
    actor = json.loads(json.dumps(named(overlay("local"), "Deployment", "actor")))
    actor["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    assert "livenesProbe" in invalid(actor, VERSIONS[0])


# A field that came after the newest models there are for our Python (KEDA 2.16).
NEWER = {"ScaledObject": {"spec.fallback.behavior"}}


@pytest.fixture
def custom_models():
    """Models of the custom resources, by kind. Their import takes five seconds, which is for the process that needs them."""
    from cloudcoil.models.keda.v1alpha1 import ScaledObject
    from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule

    return {model.__name__: model for model in (ScaledObject, PodMonitor, PrometheusRule)}


def test_custom_resources_lose_nothing_on_the_way_through_their_models(everything, custom_models):
    """Their API servers prune what they do not know: a misspelt key would simply have no effect."""
    custom = [manifest for manifest in everything if manifest["kind"] in custom_models]
    assert "ScaledObject" in {manifest["kind"] for manifest in custom}
    for manifest in custom:
        dumped = (
            custom_models[manifest["kind"]].model_validate(manifest).model_dump(mode="json", by_alias=True, exclude_unset=True)
        )
        assert set(paths(manifest)) - set(paths(dumped)) == NEWER.get(manifest["kind"], set()), title(manifest)


# The fields that the manifests use of a JobSet v1alpha2 (https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2), of which no
# package has the schema.
JOBSET_FIELDS = {
    "spec": {"network", "failurePolicy", "replicatedJobs"},
    "network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
    "failurePolicy": {"maxRestarts", "restartStrategy"},
    "replicatedJobs": {"name", "replicas", "template"},
}


def test_a_jobset_has_only_fields_of_its_api_and_a_job_that_is_valid(everything):
    jobsets = [manifest for manifest in everything if manifest["kind"] == "JobSet"]
    assert len(jobsets) == len(OVERLAYS)
    for jobset in jobsets:
        spec = jobset["spec"]
        (job,) = spec["replicatedJobs"]
        parts = {"spec": spec, "network": spec["network"], "failurePolicy": spec["failurePolicy"], "replicatedJobs": job}
        assert {name: set(part) - JOBSET_FIELDS[name] for name, part in parts.items()} == {name: set() for name in parts}
        assert spec["failurePolicy"]["restartStrategy"] in {"Recreate", "BlockingRecreate", "InPlaceRestart"}
        as_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "rank"}, "spec": job["template"]["spec"]}
        assert [problem for version in VERSIONS if (problem := invalid(as_job, version))] == []


@each
def test_no_two_objects_have_one_name(combination):
    """The second would overwrite the first."""
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in overlay(*combination)]
    assert len(names) == len(set(names))


@each
def test_everything_lives_in_the_namespace_of_the_overlay(combination):
    """`kubectl delete namespace` must remove every object."""
    for manifest in overlay(*combination):
        expected = None if manifest["kind"] == "Namespace" else "rookery"
        assert manifest["metadata"].get("namespace") == expected, title(manifest)


# -- the run -----------------------------------------------------------------------------------------------------------


def test_the_run_is_the_preset_pong():
    """A kustomization reads no file outside of its folder, so this is a copy; it must not become another run."""
    assert (K8S / "base" / "run.yaml").read_bytes() == (ROOT / "presets" / "pong.yaml").read_bytes()


@each_overlay
def test_the_learner_would_accept_the_run_with_the_environment_of_its_pod(name, tmp_path):
    """A run that is refused crash-loops, however valid the YAML around it is."""
    manifests = overlay(name)
    config = run_of(manifests)
    (container,) = named(manifests, "StatefulSet", "learner")["spec"]["template"]["spec"]["containers"]
    environ = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
    (tmp_path / "run.yaml").write_text(config["data"]["run.yaml"])
    settings = load_settings(preset=str(tmp_path / "run.yaml"), environ=environ).settings
    assert (settings.learner.bind, settings.metrics.port) == ("tcp://0.0.0.0:5700", 9100)


def test_a_run_of_ones_own_replaces_it_and_rolls_the_learner(tmp_path):
    """The name of the ConfigMap changes with its content, so the pod that mounts it is replaced."""
    (tmp_path / "run.yaml").write_text("env: {id: CartPole-v1}\n")
    generator = {"name": "run", "behavior": "replace", "files": ["run.yaml"]}
    manifests = render(on_top(tmp_path, "local", configMapGenerator=[generator]))
    config = run_of(manifests)
    assert config["data"] == {"run.yaml": "env: {id: CartPole-v1}\n"}
    mounted = [
        volume["configMap"]["name"]
        for volume in named(manifests, "StatefulSet", "learner")["spec"]["template"]["spec"]["volumes"]
        if "configMap" in volume
    ]
    assert mounted == [config["metadata"]["name"]] != [run_of(overlay("local"))["metadata"]["name"]]


def test_the_images_have_the_version_of_the_project():
    """An old image under new manifests speaks another protocol."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name in OVERLAYS:
        for manifest in of(overlay(name), *WORKLOADS):
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            assert re.fullmatch(rf"rookery-(actor|learner|learner-gpu):{re.escape(version)}", container["image"])
            assert manifest["metadata"]["labels"]["app.kubernetes.io/version"] == version


# -- restricted Pod Security ----------------------------------------------------------------------------------------------


@each
def test_every_pod_meets_the_restricted_pod_security_standard(combination):
    """Its rules for Linux, of Kubernetes 1.35, one by one: the namespace would refuse the pod otherwise."""
    for workload, template in pods(overlay(*combination)):
        pod = template["spec"]
        containers = [*pod["containers"], *pod.get("initContainers", ())]
        assert not any(pod.get(field) for field in ("hostNetwork", "hostPID", "hostIPC", "hostUsers")), workload
        allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
        assert all(volume.keys() - {"name"} <= allowed for volume in pod.get("volumes", ())), workload
        assert pod["securityContext"]["runAsNonRoot"] is True, workload
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["runAsGroup"] == 10001, workload
        assert pod["securityContext"]["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost"), workload
        assert "sysctls" not in pod["securityContext"], workload
        for container in containers:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, workload
            assert security["capabilities"] == {"drop": ["ALL"]}, workload
            assert security.get("privileged", False) is False, workload
            assert security.get("runAsNonRoot", True) is True, workload
            assert security.get("runAsUser", 10001) != 0, workload
            assert "procMount" not in security, workload
            assert not any("hostPort" in port for port in container.get("ports", ())), workload
            probes = [container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
            assert not any("host" in probe["httpGet"] for probe in probes), workload


@each
def test_pods_can_write_only_where_they_must_and_cannot_speak_to_the_cluster(combination):
    """Beyond the standard: a read-only root, a bounded /tmp, no token, no addresses of other services."""
    for workload, template in pods(overlay(*combination)):
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False, workload
        assert pod["enableServiceLinks"] is False, workload
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, workload
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            assert volumes[mounts["/tmp"]["name"]]["emptyDir"]["sizeLimit"], workload
            writable = {path for path, mount in mounts.items() if not mount.get("readOnly")}
            assert writable == ({"/tmp", "/var/lib/rookery"} if workload.endswith("/learner") else {"/tmp"}), workload


@each_overlay
def test_the_namespace_enforces_it(name):
    """So that a pod added by hand is held to it too."""
    (namespace,) = of(overlay(name), "Namespace")
    labels = namespace["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert labels["pod-security.kubernetes.io/enforce-version"] == f"v{VERSIONS[0]}"


@each
def test_each_service_has_an_account_of_its_own_without_a_token(combination):
    """Whatever one is granted by mistake, the others are not."""
    accounts = {account["metadata"]["name"]: account for account in of(overlay(*combination), "ServiceAccount")}
    assert set(accounts) == set(SERVICES)
    assert all(account["automountServiceAccountToken"] is False for account in accounts.values())
    assert {template["spec"]["serviceAccountName"] for _, template in pods(overlay(*combination))} == set(SERVICES)


# -- labels, resources, probes, ends --------------------------------------------------------------------------------------


@each
def test_labels_are_the_recommended_ones_and_selectors_stay_the_same(combination):
    """A selector cannot be changed: what may change (a version, a tool) must not be in it."""
    for manifest in of(overlay(*combination), *WORKLOADS):
        labels = manifest["spec"]["template"]["metadata"]["labels"]
        selector = manifest["spec"]["selector"]["matchLabels"]
        assert set(labels) == LABELS, title(manifest)
        assert set(manifest["metadata"]["labels"]) >= LABELS | {"app.kubernetes.io/version"}, title(manifest)
        assert labels["app.kubernetes.io/component"] == manifest["metadata"]["name"]
        assert set(selector) == {f"app.kubernetes.io/{name}" for name in ("name", "instance", "component")}, title(manifest)
        assert selector.items() <= labels.items(), title(manifest)


def test_a_new_version_changes_nothing_that_a_volume_claim_is_made_from():
    """A StatefulSet refuses an update of its claim templates: an upgrade would need it deleted."""
    learner = named(overlay("cpu"), "StatefulSet", "learner")
    for claim in learner["spec"]["volumeClaimTemplates"]:
        assert "app.kubernetes.io/version" not in claim["metadata"].get("labels", {})


def test_one_overlay_can_become_another_in_place():
    """Kubernetes refuses a change of what these fields hold, after it has applied all else: claim sizes, selectors, names."""
    may_change = {"replicas", "template", "updateStrategy", "strategy", "minReadySeconds", "revisionHistoryLimit"}
    fixed = [
        {
            title(manifest): {key: value for key, value in manifest["spec"].items() if key not in may_change}
            for manifest in of(overlay(name), *WORKLOADS)
        }
        for name in OVERLAYS
    ]
    assert all(one == fixed[0] for one in fixed)
    assert fixed[0]["StatefulSet/learner"]["volumeClaimTemplates"]


@each
def test_every_container_says_what_it_needs_and_gets_no_more_memory(combination):
    """Memory that was promised and is not there ends in the kernel killing somebody."""
    for workload, container in containers(overlay(*combination)):
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert requests["memory"] == limits["memory"], workload
        assert {"cpu"} <= requests.keys() & limits.keys(), workload


@each
def test_threads_follow_the_cpu_limit(combination):
    """A process on one core with a thread for each core of its node spends its time switching."""
    for workload, container in containers(overlay(*combination)):
        service = container["name"]
        sources = {variable["name"]: variable.get("valueFrom", {}).get("resourceFieldRef") for variable in container["env"]}
        if container["args"][0] == "env-worker":  # without torch; the container's own limit where no other is named
            assert sources["OMP_NUM_THREADS"] == {"resource": "limits.cpu"}, workload
            continue
        expected = {"containerName": service, "resource": "limits.cpu"}
        assert sources["OMP_NUM_THREADS"] == sources[f"ROOKERY_{service.upper()}__TORCH_THREADS"] == expected, workload


@each
def test_probes_ask_the_pod_alone_and_wait_long_enough(combination):
    """Liveness never depends on another service; only startup is given a long time."""
    for workload, container in containers(overlay(*combination)):
        probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
        asked = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
        starts = (
            "/readyz" if container["name"] == "learner" else "/healthz"
        )  # a worker is ready once it is connected to a learner
        assert asked == {"startup": starts, "readiness": "/readyz", "liveness": "/healthz"}, workload
        (port,) = [port["name"] for port in container["ports"] if port["name"].startswith("http")]
        assert all(probe["httpGet"]["port"] == port for probe in probes.values()), workload
        patience = {name: probe["periodSeconds"] * probe["failureThreshold"] for name, probe in probes.items()}
        assert patience["startup"] >= 300, workload
        assert patience["liveness"] >= 30, workload
        assert all(probe["timeoutSeconds"] <= probe["periodSeconds"] for probe in probes.values()), workload


@each
def test_a_signal_ends_a_container_that_has_no_handler_yet(combination):
    """Process 1 ignores such a signal; with a process namespace for the pod a service is never process 1."""
    assert all(template["spec"]["shareProcessNamespace"] is True for _, template in pods(overlay(*combination)))


@each
def test_pods_have_time_to_end_well(combination):
    """An actor leaves within 5 s and a learner within 15; a spot machine gives pods little more than 25."""
    grace = {
        workload.partition("/")[2]: template["spec"]["terminationGracePeriodSeconds"]
        for workload, template in pods(overlay(*combination))
    }
    assert grace == {"learner": 60, "actor": 25, "evaluator": 25}


@pytest.mark.parametrize("combination", [one for one in combinations() if "ranks-jobset" not in one], ids="+".join)
def test_the_learner_is_alone_and_its_run_outlives_it(combination):
    """Two learners that are no ranks would be two runs; a claim that goes with its StatefulSet would take the run with it."""
    spec = named(overlay(*combination), "StatefulSet", "learner")["spec"]
    assert spec["replicas"] == (2 if "ranks" in combination else 1)
    assert spec["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Retain", "whenScaled": "Retain"}
    (claim,) = spec["volumeClaimTemplates"]
    (container,) = spec["template"]["spec"]["containers"]
    run_dir = Path(container["args"][container["args"].index("--run-dir") + 1])
    (mount,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == claim["metadata"]["name"]]
    assert Path(mount) in run_dir.parents


@each
def test_services_lead_to_the_learners_port(combination):
    """A Service that selects nothing looks fine, and every actor waits for ever."""
    manifests = overlay(*combination)
    (template,) = [template for workload, template in pods(manifests) if workload.endswith("/learner")]
    (container,) = template["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for service in of(manifests, "Service"):
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items(), title(service)
        assert [(port["port"], ports[port["targetPort"]]) for port in service["spec"]["ports"]] == [(5700, 5700)]


# -- components ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("component", ["autoscaling-hpa", "autoscaling-keda"])
def test_one_component_alone_sets_the_number_of_actors(component):
    """A number in the Deployment would throw the actors back to it at every apply."""
    manifests = overlay("cpu", component)
    assert "replicas" not in named(manifests, "Deployment", "actor")["spec"]
    assert named(overlay("cpu"), "Deployment", "actor")["spec"]["replicas"] == 4


@each_overlay
@pytest.mark.parametrize(
    ("component", "kind"), [("autoscaling-hpa", "HorizontalPodAutoscaler"), ("autoscaling-keda", "ScaledObject")]
)
def test_what_scales_the_actors_names_their_deployment(name, component, kind):
    """It changes nothing where it names another, and the component takes the number of replicas away."""
    manifests = overlay(name, component)
    (scaler,) = of(manifests, kind)
    target = {"apiVersion": "apps/v1", "kind": "Deployment"} | scaler["spec"]["scaleTargetRef"]
    actor = named(manifests, "Deployment", "actor")
    assert target == {"apiVersion": actor["apiVersion"], "kind": actor["kind"], "name": actor["metadata"]["name"]}


@pytest.mark.parametrize("components", [(), ("ranks-jobset",), ("policy-server",)], ids="+".join)
def test_every_container_is_scraped(components):
    """The monitor selects all pods of the run, and the port by the name that containers give it."""
    manifests = overlay("cpu", "monitoring", *components)
    (monitor,) = of(manifests, "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for workload, template in pods(manifests):
        assert selects(monitor["spec"]["selector"], template["metadata"]["labels"]), workload
        ports = [port["name"] for container in template["spec"]["containers"] for port in container["ports"]]
        assert endpoint["port"] in ports, workload


@each_overlay
def test_the_disruption_budget_is_that_of_the_actors(name):
    manifests = overlay(name, *({"pdb"} - held(name)))
    (budget,) = of(manifests, "PodDisruptionBudget")
    assert budget["spec"]["selector"] == named(manifests, "Deployment", "actor")["spec"]["selector"]
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert pod_of(named(manifests, "StatefulSet", "learner"))["metadata"]["annotations"] == {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
    }


@each
def test_nodes_of_workers_can_be_removed_by_the_cluster_autoscaler(combination):
    """By default it removes no node with a pod that has an emptyDir, unless the pod names the volume as one that may be lost."""
    for workload, template in pods(overlay(*combination)):
        named_volumes = template["metadata"].get("annotations", {}).get(SAFE_TO_EVICT)
        local = ",".join(volume["name"] for volume in template["spec"]["volumes"] if "emptyDir" in volume)
        assert named_volumes == (None if workload.endswith("/learner") else local), workload


@each_overlay
def test_the_queries_mean_this_run_and_wait_as_the_bottleneck_rule_does(name):
    """Figures of another run in the same Prometheus would scale this one; another threshold would be a second opinion."""
    (scaler,) = of(overlay(name, "autoscaling-keda"), "ScaledObject")
    queries = [trigger["metadata"]["query"] for trigger in scaler["spec"]["triggers"]]
    metrics = re.findall(r"rookery_\w+(\{.*?\})?", "".join(queries))
    assert metrics
    assert all(f'namespace="{scaler["metadata"]["namespace"]}"' in matchers for matchers in metrics)
    assert set(re.findall(r"(?:>=|<) bool ([\d.]+)", "".join(queries))) == {f"{WAITING:g}"}


def test_a_pod_of_a_job_has_the_same_name_in_prometheus_after_each_restart():
    """Restarts are counted per instance, and the JobSet gives each pod another name."""
    (monitor,) = of(overlay("cpu", "monitoring"), "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    job = {"batch_kubernetes_io_job_name": "learner-ranks-1", "batch_kubernetes_io_job_completion_index": "0"}
    pods = {
        "learner-ranks-1-0-x7k2p": job, "learner-ranks-1-0-q9d4m": job, "learner-0": {}, "actor-5c9-abcde": {},
    }  # fmt: skip
    named_so = {name: relabelled(endpoint["relabelings"], name, labels) for name, labels in pods.items()}
    assert named_so["learner-ranks-1-0-x7k2p"] == named_so["learner-ranks-1-0-q9d4m"] == "learner-ranks-1-0"
    assert (named_so["learner-0"], named_so["actor-5c9-abcde"]) == ("learner-0", "actor-5c9-abcde")


def relabelled(rules, pod, labels):
    """The label `instance` of a pod, and `pod` too, as Prometheus makes them."""
    found = {"__meta_kubernetes_pod_name": pod, "pod": pod}
    found |= {f"__meta_kubernetes_pod_label_{name}": value for name, value in labels.items()}
    for rule in rules:
        text = rule.get("separator", ";").join(found.get(label, "") for label in rule["sourceLabels"])
        if match := re.fullmatch(rule.get("regex", "(.*)"), text):
            found[rule["targetLabel"]] = match[1]
    assert found["pod"] == found["instance"]
    return found["instance"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)")
def test_a_learner_that_is_held_up_changes_no_number_of_actors(tmp_path):
    """Nothing trained over nothing made is no number; the autoscaler would take it for one, and send the actors home."""
    (scaler,) = of(overlay("cpu", "autoscaling-keda"), "ScaledObject")
    capacity = next(trigger["metadata"]["query"] for trigger in scaler["spec"]["triggers"] if trigger["name"] == "capacity")
    still = {
        'rookery_learner_env_steps_trained_total{namespace="rookery", instance="learner-0"}': "5000x20",
        'rookery_learner_phase_seconds_total{namespace="rookery", instance="learner-0", phase="wait"}': "7x20",
        'rookery_actor_env_steps_total{namespace="rookery", instance="actor-0"}': "5000x20",
        'rookery_actor_phase_seconds_total{namespace="rookery", instance="actor-0", phase="credit_wait"}': "0+15x20",
        'rookery_actor_phase_seconds_total{namespace="rookery", instance="actor-0", phase="env"}': "7x20",
    }
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in still.items()],
        "promql_expr_test": [{"expr": capacity, "eval_time": "5m", "exp_samples": []}],
    }
    (tmp_path / "test.json").write_text(json.dumps({"rule_files": [], "evaluation_interval": "15s", "tests": [test]}))
    ran = subprocess.run(["promtool", "test", "rules", str(tmp_path / "test.json")], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@each_overlay
def test_the_cpu_that_scales_actors_can_be_reached(name):
    """A target above their limit would never ask for one more."""
    manifests = overlay(name, "autoscaling-hpa")
    (scaler,) = of(manifests, "HorizontalPodAutoscaler")
    (container,) = named(manifests, "Deployment", "actor")["spec"]["template"]["spec"]["containers"]
    (metric,) = scaler["spec"]["metrics"]
    milli = int(metric["containerResource"]["target"]["averageValue"].removesuffix("m"))
    assert milli <= 900 * int(container["resources"]["limits"]["cpu"])
    assert metric["containerResource"]["container"] == container["name"]


@each_overlay
def test_the_policy_lag_of_the_actors_is_one_that_the_plain_ratio_corrects(name, tmp_path):
    """More actors on the same batch train on older experience."""
    manifests = overlay(name)
    (container,) = named(manifests, "StatefulSet", "learner")["spec"]["template"]["spec"]["containers"]
    (tmp_path / "run.yaml").write_text(run_of(manifests)["data"]["run.yaml"])
    settings = load_settings(preset=str(tmp_path / "run.yaml"), environ=values(container)).settings
    actors = named(manifests, "Deployment", "actor")["spec"]["replicas"]
    assert settings.learner.credits * actors / settings.learner.batch <= settings.algorithm.plain_ratio_lag


def test_the_gpu_is_asked_for_by_the_learner_alone():
    """Actors on GPU nodes would hold GPUs that they do not use."""
    asked = {workload: template["spec"]["containers"][0] for workload, template in pods(overlay("gpu"))}
    gpus = {workload: container["resources"]["limits"].get("nvidia.com/gpu") for workload, container in asked.items()}
    assert gpus == {"StatefulSet/learner": "1", "Deployment/actor": None, "Deployment/evaluator": None}
    assert asked["StatefulSet/learner"]["image"].startswith("rookery-learner-gpu:")


@each_overlay
def test_each_pod_gets_the_keys_of_its_role_and_of_no_other(name):
    """An actor on another machine must not be able to pose as the learner; users other than root must read the file."""
    roles = {"StatefulSet/learner": "learner-keys", "Deployment/actor": "worker-keys", "Deployment/evaluator": "worker-keys"}
    for workload, template in pods(overlay(name, "curve-auth")):
        spec, (container,) = template["spec"], template["spec"]["containers"]
        (secret,) = [volume for volume in spec["volumes"] if "secret" in volume]
        assert secret["secret"] == {"secretName": roles[workload], "defaultMode": 0o400}, workload
        assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"], workload
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == secret["name"]]
        assert mount["readOnly"] is True, workload
        environ = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
        settings = load_settings(preset=None, environ=environ).settings
        assert getattr(settings, container["name"]).keys == mount["mountPath"], workload
        assert not getattr(settings, container["name"]).insecure, workload


@each_overlay
def test_without_keys_each_pod_has_the_setting_insecure(name):
    """Without the setting the learner would not bind, nor the workers join it; with keys it must be absent."""
    for workload, template in pods(overlay(name)):
        (container,) = template["spec"]["containers"]
        assert {"name": f"ROOKERY_{container['name'].upper()}__INSECURE", "value": "true"} in container["env"], workload


@each_overlay
def test_only_actors_go_to_machines_that_can_be_taken_away(name):
    """The learner would come back, and lose up to a minute of training each time."""
    specs = {workload: template["spec"] for workload, template in pods(overlay(name, "spot"))}
    assert {workload for workload, spec in specs.items() if "affinity" in spec} == {"Deployment/actor"}
    tolerated = {
        (workload, one["key"], one["value"])
        for workload, spec in specs.items()
        for one in spec.get("tolerations", ())
        if one["key"] != "nvidia.com/gpu"
    }
    taints = {("cloud.google.com/gke-spot", "true"), ("kubernetes.azure.com/scalesetpriority", "spot")}
    assert tolerated == {("Deployment/actor", *taint) for taint in taints}
    (affinity,) = specs["Deployment/actor"]["affinity"]["nodeAffinity"].values()
    wanted = [expression for one in affinity for expression in one["preference"]["matchExpressions"]]
    labels = {("karpenter.sh/capacity-type", "spot"), ("eks.amazonaws.com/capacityType", "SPOT")}
    assert {(one["key"], *one["values"]) for one in wanted} == taints | labels


@each_overlay
def test_only_actors_wait_in_the_queue(name):
    """A learner without actors does nothing, and actors without a learner do nothing: the one that all need is not queued."""
    queued = {
        title(manifest)
        for manifest in of(overlay(name, "kueue"), *WORKLOADS)
        if "kueue.x-k8s.io/queue-name" in manifest["metadata"]["labels"]
    }
    assert queued == {"Deployment/actor"}


RANKS = [("ranks",), ("curve-auth", "ranks", "policy-server"), ("policy-server", "ranks", "curve-auth")]


@pytest.mark.parametrize("components", RANKS, ids="+".join)
@each_overlay
def test_each_rank_knows_its_place_and_each_worker_the_address_of_its_rank(name, components):
    """The number of ranks is in three places, and the name of a pod in four."""
    manifests = overlay(name, *components)
    learner = named(manifests, "StatefulSet", "learner")["spec"]
    (container,) = learner["template"]["spec"]["containers"]
    count, service = learner["replicas"], named(manifests, "Service", learner["serviceName"])
    addresses = [f"tcp://learner-{rank}.{learner['serviceName']}:5700" for rank in range(count)]
    settings = load_settings(preset=None, environ=values(container)).settings.learner
    assert (settings.ranks, settings.ranks_seconds) == (count, None)  # else a rank that waits for a node ends the others
    sources = {variable["name"]: variable["valueFrom"] for variable in container["env"] if "valueFrom" in variable}
    assert sources["RANK"] == {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    own = TorchrunEnvironment.of(count, {**values(container), "RANK": "1"})
    role, *words = container["args"]
    assert role == "learner"
    check_address(own.master, insecure="learner.insecure=true" in words)
    assert (own.rank, own.local_rank, own.master.host) == (1, 0, addresses[0][len("tcp://") :].partition(":")[0])
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert (learner["podManagementPolicy"], learner["updateStrategy"]) == ("Parallel", {"type": "OnDelete"})
    for role, own in {"actor": addresses, "evaluator": addresses[:1]}.items():
        one = named(manifests, "Deployment", role)["spec"]["template"]["spec"]["containers"][0]
        settings = worker.parse(one["args"][0], one["args"][1:], values(one)).settings
        assert getattr(settings, role).learner == ",".join(own)


JOBSETS = [("ranks-jobset",), ("curve-auth", "policy-server", "ranks-jobset")]


@pytest.mark.parametrize("components", JOBSETS, ids="+".join)
@each_overlay
def test_a_jobset_has_the_pods_of_the_statefulset_as_ranks_of_a_job(name, components):
    manifests, *before = overlay(name, *components), *components[:-1]
    (rank,) = named(manifests, "JobSet", "learner")["spec"]["replicatedJobs"]
    spec, job = named(manifests, "JobSet", "learner")["spec"], rank["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    (alone,) = named(overlay(name, *before), "StatefulSet", "learner")["spec"]["template"]["spec"]["containers"]
    same = ("image", "resources", "ports", "securityContext", "volumeMounts", "startupProbe", "readinessProbe", "livenessProbe")
    assert {key: container[key] for key in same} == {key: alone[key] for key in same}
    assert values(alone).items() <= values(container).items()
    assert container["args"] == [*alone["args"][:-1], "--job", "learner.insecure=true"]
    assert alone["args"][-1] == "--linger"
    assert set(job["template"]["metadata"]["labels"]) == LABELS
    assert of(manifests, "StatefulSet") == []

    count = job["completions"]
    assert (job["parallelism"], job["completionMode"], job["backoffLimit"], rank["replicas"]) == (count, "Indexed", 0, 1)
    settings = load_settings(preset=None, environ=values(container)).settings.learner
    assert (settings.ranks, settings.ranks_seconds) == (count, None)  # else a rank that waits for a node ends the others
    # JobSet names the host of a pod after JobSet, replicated Job, number of the Job and number of the pod.
    hosts = [f"learner-{rank['name']}-0-{number}.{spec['network']['subdomain']}" for number in range(count)]
    assert spec["network"]["enableDNSHostnames"]
    assert spec["network"]["publishNotReadyAddresses"]
    sources = {variable["name"]: variable["valueFrom"] for variable in container["env"] if "valueFrom" in variable}
    assert sources["RANK"] == {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/job-completion-index']"}}
    own = TorchrunEnvironment.of(count, {**values(container), "RANK": "1"})
    check_address(own.master, insecure=True)
    assert own.master.host == hosts[0]
    for role, own in {"actor": hosts, "evaluator": hosts[:1]}.items():
        one = named(manifests, "Deployment", role)["spec"]["template"]["spec"]["containers"][0]
        settings = worker.parse(one["args"][0], one["args"][1:], values(one)).settings
        assert getattr(settings, role).learner == ",".join(f"tcp://{host}:5700" for host in own)

    volumes = {volume["name"]: volume for volume in job["template"]["spec"]["volumes"]}
    assert volumes["run"]["configMap"]["name"] == run_of(manifests)["metadata"]["name"]
    claim = named(manifests, "PersistentVolumeClaim", volumes["rookery"]["persistentVolumeClaim"]["claimName"])
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_images_of_a_registry_reach_a_jobset(tmp_path):
    images = [{"name": "rookery-learner", "newName": "registry.example.com/rl/rookery-learner"}]
    manifests = render(on_top(tmp_path, "local", components=["ranks-jobset"], images=images))
    (container,) = pod_of(named(manifests, "JobSet", "learner"))["spec"]["containers"]
    assert container["image"].startswith("registry.example.com/rl/rookery-learner:")


@pytest.mark.parametrize("components", [("policy-server",), RANKS[1], RANKS[2]], ids="+".join)
@each_overlay
def test_each_policy_server_has_its_env_workers_in_its_pod(name, components, tmp_path):
    """They need no keys, because they connect over loopback; their number must divide the environments of the run."""
    manifests = overlay(name, *components)
    server, *workers = named(manifests, "Deployment", "actor")["spec"]["template"]["spec"]["containers"]
    own = worker.parse("policy-server", server["args"][1:], values(server)).settings
    assert server["args"][0] == "policy-server"
    assert own.policy_server.learner_seconds is None
    (tmp_path / "run.yaml").write_text(run_of(manifests)["data"]["run.yaml"])
    run = load_settings(preset=str(tmp_path / "run.yaml"), environ={}).settings
    assert own.policy_server.workers == len(workers)
    assert run.env.num_envs % len(workers) == 0
    settings = [worker.parse(one["args"][0], one["args"][1:], values(one)).settings for one in workers]
    assert {one.env_worker.policy_server for one in settings} == {own.policy_server.bind}
    assert parse_endpoint(own.policy_server.bind).loopback
    assert len({one.env_worker.name for one in settings}) == len(workers)
    assert {one["image"] for one in workers} == {server["image"]}
    ports = [(one.metrics.host, one.metrics.port) for one in (own, *settings)]
    assert ports == [("0.0.0.0", one["ports"][0]["containerPort"]) for one in (server, *workers)]
    assert len(set(ports)) == len(ports)


# -- the page ----------------------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")


def test_every_component_and_overlay_is_on_the_page():
    """A component that nobody hears of is not used."""
    assert [name for name in [*COMPONENTS, *OVERLAYS] if f"`{name}`" not in PAGE] == []


@each_overlay
def test_the_table_of_overlays_is_true(name):
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    _, _, learner, actors, components = (cell.strip() for cell in row.strip("|").split("|"))
    (container,) = named(overlay(name), "StatefulSet", "learner")["spec"]["template"]["spec"]["containers"]
    assert learner.split()[0] == container["resources"]["limits"]["cpu"]
    assert int(actors) == named(overlay(name), "Deployment", "actor")["spec"]["replicas"]
    listed = set(re.findall(r"`([\w-]+)`", components))
    assert listed - {"cpu"} | (held("cpu") if "cpu" in listed else set()) == held(name)


def test_the_overlay_that_the_page_writes_does_what_it_says(tmp_path):
    """It is the first file that a user copies."""
    (example,) = re.findall(r"```yaml\n# kustomization.yaml\n(.*?)```", PAGE, re.DOTALL)
    mine = shutil.copytree(K8S, tmp_path / "k8s") / "overlays" / "mine"
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(example)
    (mine / "run.yaml").write_text("env: {id: CartPole-v1}\n")
    manifests = render(mine)
    assert run_of(manifests)["data"] == {"run.yaml": "env: {id: CartPole-v1}\n"}
    images = {template["spec"]["containers"][0]["image"].rpartition(":")[0] for _, template in pods(manifests)}
    assert images == {"registry.example.com/rl/rookery-actor", "registry.example.com/rl/rookery-learner"}
    assert len(of(manifests, "HorizontalPodAutoscaler")) == 1
