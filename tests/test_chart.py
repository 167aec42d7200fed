"""The chart: what it renders, what it refuses, and that its generated parts are in step with the code.

Rendering needs helm, and some tests more; what is not there is skipped with the command that brings it.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deploy.__main__ import pages
from deploy.values import CHART_SETTINGS, Values
from draft_service.__main__ import DRAIN_S
from slipstream.base.address import service_address
from slipstream.base.config import Config, load
from target_service.vllm_start import arguments, node_rank
from tests.kube import CHART, PROFILES, ROOT, VLLM, helm, only, rendered, run

ROLES = ("router", "target", "draft")
KUBERNETES = ("1.25", "1.37")  # the oldest and the newest: what both take is taken by those between
BETWEEN = ("1.30", "1.33", "1.35")
MONITORING = ("--api-versions", "monitoring.coreos.com/v1")

# What is refused, and words of the sentence that says so. The profile is cpu.
WRONG = {
    "tls without a secret": (("tls.insecurePlaintext=false", "tls.enabled=true"),
                             "tls.enabled is true but there are no certificates"),
    "tls and plain text": (("tls.enabled=true", "tls.existingSecret=s"), "tls.insecurePlaintext is true"),
    "plain text, not in as many words": (("tls.insecurePlaintext=false",), "say so with tls.insecurePlaintext=true"),
    "two sources of certificates": (("tls.insecurePlaintext=false", "tls.enabled=true", "tls.existingSecret=mine",
                                     "tls.certManager.enabled=true", "tls.certManager.issuerName=i"),
                                    'tls.existingSecret is "mine" but tls.certManager.enabled is true'),
    "names without tls": (("tls.allowedNames={a}",), "tls.allowedNames is set"),
    "no issuer": (("tls.insecurePlaintext=false", "tls.enabled=true", "tls.certManager.enabled=true"),
                  "tls.certManager.issuerName is empty"),
    "HPA and KEDA": (("discovery.enabled=true", "target.autoscaling.hpa.enabled=true",
                      "target.autoscaling.keda.enabled=true"), "hpa.enabled and target.autoscaling.keda.enabled"),
    "KEDA without Prometheus": (("discovery.enabled=true", "target.autoscaling.keda.enabled=true"),
                                "target.autoscaling.keda.serverAddress is empty"),
    "scaling without discovery": (("target.autoscaling.hpa.enabled=true",), "set discovery.enabled=true"),
    "fewest above most": (("target.autoscaling.minReplicas=5",), "minReplicas is 5 but maxReplicas is 4"),
    "targets without discovery": (("target.replicas=2",), "target.replicas is 2 but discovery.enabled is false"),
    "drafts without discovery": (("draft.replicas=3",), 'gives the pool "main" 3 pods but discovery.enabled is false'),
    "router's grace": (("router.terminationGracePeriodSeconds=50",), "router.terminationGracePeriodSeconds is 50"),
    "target's drain": (("config.target.drain_s=620",), "target.terminationGracePeriodSeconds is 630"),
    "draft's drain": (("draft.preStopSeconds=25",), "draft.terminationGracePeriodSeconds is 30"),
    "no model": (("model.prepare=false",), "model.prepare is false and model.claim names no volume"),
    "a model that no image has": (("model.path=my-llama", "model.claim.existing=c"),
                                  'model.path is "my-llama", and the image has no model but smollm2-135m to prepare'),
    "two claims": (("model.claim.existing=c", "model.claim.create=true"), 'model.claim.existing is "c"'),
    "a model that the image lacks": (("images.engine.variant=cuda",), "whose image holds no model to prepare: set "
                                     "model.claim.existing to a claim that holds the model and model.prepare=false, or "
                                     "images.engine.variant=cpu"),
    "a new claim for a model that the image lacks": (("images.engine.variant=cuda", "model.claim.create=true"),
                                                     "whose image holds no model to prepare"),
    "cuda on the cpu image": (("config.model.device=cuda",), 'config.model.device is "cuda"'),
    "drafts on cuda on the cpu image": (("config.draft.device=cuda",), 'pool "main" has the device "cuda" but images'),
    "a pool on cuda on the cpu image": (("draft.pools[0].name=a", "draft.pools[1].name=b",
                                         "draft.pools[1].config.device=cuda:1"), 'pool "b" has the device "cuda:1"'),
    "standalone without a model": (("draft.pools[0].name=a", "draft.pools[0].config.drafter=standalone"),
                                   'pool "a" has the drafter "standalone" but no model'),
    "a model for ngram": (("draft.pools[0].name=a", "draft.pools[0].model=m", "config.draft.drafter=ngram"),
                          "its drafter is ngram"),
    "a model for auto": (("draft.pools[0].name=a", "draft.pools[0].model=m"), "say for which one with config.drafter"),
    "a head without a volume": (("draft.pools[0].name=a", "draft.pools[0].model=m", "config.draft.drafter=eagle3"),
                                'pool "a" has the model "m" but no claim holds it'),
    "a map for what": (("config.draft.token_map=ids.json",), "say for which one with config.drafter"),
    "pools of one name": (("draft.pools[0].name=a", "draft.pools[1].name=a"), 'the name "a" is there twice'),
    "a name that is too long": ((f"fullnameOverride={'n' * 40}", f"draft.pools[0].name={'p' * 17}"),
                                "which has 64 characters, and a Service's has 63 at most"),
    "a name that no Service has": (("fullnameOverride=llama-3.1",), 'the names of Services begin with "llama-3.1"'),
    "a name that begins with a digit": (("fullnameOverride=70b",), 'the names of Services begin with "70b"'),
    "no pools": (("draft.pools=null",), "draft.pools is empty but draft.replicas is 1"),
    "nothing but shares": (("draft.pools[0].name=a", "draft.pools[0].share=10"), "every pool has a share"),
    "shares above all": (("draft.pools[0].name=a", "draft.pools[1].name=b", "draft.pools[0].share=60",
                          "draft.pools[1].share=60"), "the shares add up to 120 per cent"),
    "too few drafts": (("draft.pools[0].name=a", "draft.pools[1].name=b", "draft.pools[1].share=10"),
                       'which leaves none for the pool "a"'),
    "no way to roll": (("target.strategy.maxSurge=0",), "target.strategy: maxSurge and maxUnavailable are both 0"),
    "fewer GPUs than ranks": (("images.engine.variant=cuda", "config.model.device=cuda", "model.claim.existing=c",
                               "config.model.tensor_parallel=4", r"target.resources.limits.nvidia\.com/gpu=2"),
                              "tensor_parallel is 4 but target.resources.limits has 2"),
    "fewer GPUs than stages": (("config.model.device=cuda", "config.target.engine.vllm.pipeline_parallel_size=2",
                                "draft.replicas=0", r"target.resources.limits.nvidia\.com/gpu=1"),
                               "tensor_parallel is 1 but target"),
    "stages with drafts": (("config.target.engine.vllm.pipeline_parallel_size=2",),
                           "pipeline_parallel_size is 2, which vLLM cannot do with drafts"),
    "a GPU that nobody computes on": (("images.engine.variant=cuda", "model.claim.existing=c",
                                       r"target.resources.limits.nvidia\.com/gpu=1"), 'config.model.device is "cpu"'),
    "a GPU that no draft computes on": ((r"draft.resources.limits.nvidia\.com/gpu=1",),
                                        'draft.resources.limits has 1 of nvidia.com/gpu'),
    "nodes without vLLM": (("target.nodes=2",), "target.nodes is 2 but config.target.engine is not vllm"),
    "uneven nodes": (("config.target.engine=vllm", "config.model.tensor_parallel=4", "target.nodes=3"),
                     "4 ranks (config.model.tensor_parallel by vLLM's pipeline_parallel_size)"),
    "a section that is null": (("draft=null",), "missing property 'draft'"),
    "a section in a section that is null": (("target.autoscaling=null",), "missing property 'autoscaling'"),
    "a switch that is null": (("networkPolicy.enabled=null",), "missing property 'enabled'"),
    "a number that is null": (("target.startupSeconds=null",), "missing property 'startupSeconds'"),
    "a name that is null": (("images.engine.variant=null",), "missing property 'variant'"),
    "ports that are null": (("networkPolicy.apiServerPorts=null",), "missing property 'apiServerPorts'"),
    "modes of a claim that are null": (("model.claim.accessModes=null",), "missing property 'accessModes'"),
    "nothing to listen on": (("bindAddress=",), "at '/bindAddress': minLength"),
    "keys in no entry": (("router.apiKeys.key=",), "at '/router/apiKeys/key': minLength"),
    "settings that are null": (("config=null",), "missing property 'config'"),
    "unknown value": (("target.replica=2",), "'replica' not allowed"),
    "unknown setting": (("config.target.policy.max_node=2",), "'max_node' not allowed"),
    "setting that the chart owns": (("config.router.listen=x",), "'listen' not allowed"),
    "a limit that is none": (("target.resources.limit.cpu=2",), "at '/target/resources': additional propert"),
    "wrong kind": (("target.replicas=many",), "got string, want integer"),
    "a label that is no text": (("monitoring.dashboards.labels.grafana_dashboard=1",), "got number, want string"),
    "an annotation that is no text": (("router.podAnnotations.scrape=true",), "got boolean, want string"),
    "out of range": (("config.draft.growth.topk=99",), "maximum"),
}


def settings(objects: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return dict(yaml.safe_load(only(objects, "ConfigMap", name)["data"]["slipstream.yaml"]))


def config_of(objects: list[dict[str, Any]], name: str, folder: Path, overrides: tuple[str, ...] = ()) -> Config:
    """The configuration that a service reads, from a file in ``folder``."""
    file = folder / f"{name}.yaml"
    file.write_text(only(objects, "ConfigMap", name)["data"]["slipstream.yaml"])
    return load(file, overrides)


def sets(*changes: str) -> list[str]:
    """Arguments of helm that set values."""
    return [word for change in changes for word in ("--set", change)]


def deployments(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "Deployment"}


def pods(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The spec of every pod that the chart makes."""
    return [s["template"]["spec"] for s in deployments(objects).values()] + [
        o["spec"] for o in objects if o["kind"] == "Pod"]


def test_generated_files_are_in_step() -> None:
    stale = [str(path) for path, text in pages().items()
             if not (ROOT / path).exists() or (ROOT / path).read_text(encoding="utf-8") != text]
    assert not stale, f"{stale} differ from the code: run `make chart`"


def test_values_yaml_says_the_defaults() -> None:
    assert Values.model_validate(yaml.safe_load((CHART / "values.yaml").read_text())) == Values()


@pytest.mark.parametrize("files", PROFILES.values(), ids=PROFILES)
def test_profiles_are_values(files: tuple[Path, ...]) -> None:
    for file in files:
        Values.model_validate(yaml.safe_load(file.read_text()))


def test_the_schema_follows_the_configuration() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["$defs"]
    for section, known in (("Config", Config.model_fields), *(
            (type(value).__name__, type(value).model_fields) for _, value in Config())):
        assert set(schema[section]["properties"]) == set(known) - set(CHART_SETTINGS.get(section, ())), section
        assert schema[section]["additionalProperties"] is False


@pytest.mark.parametrize("profile", PROFILES)
def test_lint(profile: str) -> None:
    done = helm("lint", profile, "--strict")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_refused_with_a_sentence(case: str) -> None:
    changes, words = WRONG[case]
    done = helm("template", "cpu", *sets(*changes))
    assert done.returncode != 0 and words in done.stderr, done.stderr or "it rendered"


@pytest.mark.parametrize("changes", [
    ("router.terminationGracePeriodSeconds=50", "config.router.drain_s=0"),  # not the default for being empty
    ("config.model.device=cuda", "config.target.engine=vllm"),  # drafts on the CPU have the CPU's image
    (f"fullnameOverride={'n' * 40}", f"draft.pools[0].name={'p' * 16}"),
    ("images.engine.variant=cuda", "model.claim.existing=c"),
    ("config.target.engine=vllm", r"target.resources.limits.nvidia\.com/gpu=1"),  # whose device is its image's affair
    # What is said by an empty line: nothing of it.
    ("target.resources=null", "model.prepareResources=null", "router.nodeSelector=null", "images.pullSecrets=null")])
def test_what_is_right_is_not_refused(changes: tuple[str, ...]) -> None:
    assert rendered("cpu", *sets(*changes))


def test_the_plain_install_asks_for_certificates() -> None:
    done = run("helm", "template", "r", CHART)
    assert done.returncode != 0 and "tls.enabled is true but there are no certificates" in done.stderr


@pytest.mark.parametrize("profile", PROFILES)
def test_services_read_their_files(profile: str, tmp_path: Path) -> None:
    objects = rendered(profile)
    names = list(deployments(objects))
    assert len(names) >= 3
    for name in names:
        config = config_of(objects, name, tmp_path)
        assert config.model.path.startswith("/models/")
        assert (config.wire.tls.folder != "") == (profile != "cpu")


@pytest.mark.parametrize("version", [
    *KUBERNETES, *(pytest.param(version, marks=pytest.mark.long) for version in BETWEEN)])
def test_kubernetes_takes_what_is_rendered(version: str, tmp_path: Path) -> None:
    files = [tmp_path / f"{profile}.yaml" for profile in PROFILES]
    for file in files:
        file.write_text(yaml.safe_dump_all(o for o in rendered(file.stem, "--kube-version", version)
                                           if not o["apiVersion"].startswith("cert-manager.io")))
    done = run("kubernetes-validate", "-k", version, "--strict", *files)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("profile", PROFILES)
def test_pods_are_restricted(profile: str) -> None:
    for pod in pods(rendered(profile)):
        security = pod["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}
            assert own["readOnlyRootFilesystem"] is True
            assert container["resources"]["limits"]["memory"] and "latest" not in container["image"]
        kinds = {kind for volume in pod.get("volumes", []) for kind in set(volume) - {"name"}}
        assert kinds <= {"configMap", "emptyDir", "secret", "persistentVolumeClaim"}


@pytest.mark.parametrize("profile", PROFILES)
def test_probes_ask_nobody_else_whether_to_live(profile: str) -> None:
    for name, spec in deployments(rendered(profile)).items():
        container = spec["template"]["spec"]["containers"][0]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        paths = {probe: container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "readiness", "liveness")}
        assert {get["port"] for get in paths.values()} == {"metrics"} and ports["metrics"] in (9100, 9101, 9102), name
        assert (paths["startup"]["path"], paths["readiness"]["path"], paths["liveness"]["path"]) == (
            "/live", "/ready", "/live")


@pytest.mark.parametrize("profile", PROFILES)
def test_a_pod_has_time_to_drain(profile: str, tmp_path: Path) -> None:
    objects = rendered(profile)
    for name, spec in deployments(objects).items():
        pod = spec["template"]["spec"]
        config = config_of(objects, name, tmp_path)
        drain_s = getattr(getattr(config, pod["containers"][0]["name"]), "drain_s", DRAIN_S)
        stop_s = float(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] > stop_s + drain_s
        assert spec["progressDeadlineSeconds"] > 2 * pod["containers"][0]["startupProbe"]["failureThreshold"]


@pytest.mark.parametrize("profile", PROFILES)
def test_services_select_their_pods_and_addresses_name_services(profile: str) -> None:
    objects = rendered(profile)
    labels = {name: spec["template"]["metadata"]["labels"] for name, spec in deployments(objects).items()}
    services = {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "Service"}
    assert set(services) == set(labels)
    for name, service in services.items():
        assert all(port["protocol"] for port in service["ports"]), "Kubernetes 1.20 does not apply ports without"
        chosen = [pod for pod, found in labels.items() if service["selector"].items() <= found.items()]
        assert chosen == [name]
    wanted = [*settings(objects, "r-slipstream-router")["router"]["targets"],
              *settings(objects, "r-slipstream-target")["target"]["drafts"]]
    for address in wanted:
        host, _, port = address.removeprefix("kubernetes:///").rpartition(":")
        assert int(port) in {p["port"] for p in services[host.partition(".")[0]]["ports"]}


def test_a_router_waits_as_long_as_a_target_may_take() -> None:
    """It is not ready before, and a Deployment that is late counts as failed. Where a pod waits for its forerunner's
    GPU, that one's last answers come first."""
    late = {name.rpartition("-")[2]: spec["progressDeadlineSeconds"] for name, spec in deployments(rendered(
        "cpu", "--set", "target.startupSeconds=1800", "--set", "draft.startupSeconds=300")).items()}
    assert late == {"router": 2490, "target": 2490, "main": 390}


def test_only_who_discovers_may_watch_and_nothing_else() -> None:
    objects = rendered("h100")
    assert only(objects, "Role")["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}]
    assert {s["name"] for s in only(objects, "RoleBinding")["subjects"]} == {"r-slipstream-router",
                                                                             "r-slipstream-target"}
    tokens = {name: spec["template"]["spec"]["automountServiceAccountToken"]
              for name, spec in deployments(objects).items()}
    assert tokens == {"r-slipstream-router": True, "r-slipstream-target": True, "r-slipstream-draft-eagle3": False}
    quiet = rendered("cpu")
    assert not [o for o in quiet if o["kind"] in ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")]
    assert not any(pod["automountServiceAccountToken"] for pod in pods(quiet))


@pytest.mark.parametrize("profile", PROFILES)
def test_who_reaches_whom(profile: str) -> None:
    policies = {o["metadata"]["name"].rpartition("-")[2]: o["spec"] for o in rendered(profile)
                if o["kind"] == "NetworkPolicy"}
    assert set(policies) == {*ROLES, "test"}
    callers = {"target": "router", "draft": "target"}
    for role, spec in policies.items():
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        assert all(rule["from"] and rule["ports"] for rule in spec["ingress"]), "an empty list would let all in"
        assert all(rule["to"] and rule["ports"] for rule in spec["egress"])
        if role in callers:
            data = spec["ingress"][0]
            assert [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in data["from"]] == [
                callers[role]]
    assert policies["draft"]["egress"] == []
    assert policies["router"]["egress"][0]["ports"] == [{"protocol": "TCP", "port": 50051}]
    assert policies["target"]["egress"][0]["ports"] == [{"protocol": "TCP", "port": 50052}]


@pytest.mark.parametrize(("value", "port"), [("dns", 53), ("collector", 4317), ("apiServer", 6443)])
def test_a_list_of_nobody_denies(value: str, port: int) -> None:
    """An empty ``to`` in a policy would allow every destination."""
    def opened(*changes: str) -> set[int]:
        objects = rendered("h100", "--set", "config.log.spans=http://collector:4317", *changes)
        rules = [rule for o in objects if o["kind"] == "NetworkPolicy" for rule in o["spec"]["egress"]]
        assert all(rule["to"] for rule in rules), rules
        return {found["port"] for rule in rules for found in rule["ports"]}

    assert port in opened()
    assert port not in opened("--set-json", f"networkPolicy.{value}=[]")


def test_names_are_asked_of_the_port_that_pods_have() -> None:
    """A policy sees a pod's port, not its Service's: OpenShift's, which answer port 53, listen on 5353."""
    for role in ("router", "target"):
        rules = only(rendered("cpu"), "NetworkPolicy", f"r-slipstream-{role}")["spec"]["egress"]
        asked = [rule["ports"] for rule in rules if {"protocol": "UDP", "port": 53} in rule["ports"]]
        assert asked == [[{"protocol": kind, "port": port} for kind in ("UDP", "TCP") for port in (53, 5353)]]


def test_an_api_server_is_reached_over_ipv6_too() -> None:
    """Where pods have such addresses only, discovery finds nobody otherwise."""
    objects = rendered("h100", "--set", "bindAddress=[::]")
    for role in ("router", "target"):
        rules = only(objects, "NetworkPolicy", f"r-slipstream-{role}")["spec"]["egress"]
        (asked,) = [rule["to"] for rule in rules if {"protocol": "TCP", "port": 6443} in rule["ports"]]
        assert {peer["ipBlock"]["cidr"] for peer in asked} == {"0.0.0.0/0", "::/0"}


@pytest.mark.parametrize("ports", ["apiServerPorts", "collectorPorts"])
def test_a_rule_has_ports(ports: str) -> None:
    """Without any it would open all of them."""
    with pytest.raises(ValidationError, match=f"networkPolicy.{ports}\n.*at least 1 item"):
        Values.model_validate({"networkPolicy": {ports: []}})
    schema = json.loads((CHART / "values.schema.json").read_text())["$defs"]["NetworkPolicyValues"]
    assert schema["properties"][ports]["minItems"] == 1


def test_spans_reach_their_collector_and_nobody_else_does() -> None:
    place = "http://collector.monitoring:4317"
    for given, expected in (((), []), (("--set", f"config.log.spans={place}"), [{"protocol": "TCP", "port": 4317}])):
        objects = rendered("cpu", *given)
        for role in ROLES:
            rules = only(objects, "NetworkPolicy", f"r-slipstream-{role}")["spec"]["egress"]
            assert [port for rule in rules for port in rule["ports"] if port["port"] == 4317] == expected, role
        files = [o["data"]["slipstream.yaml"] for o in objects if "slipstream.yaml" in o.get("data", {})]
        assert len(files) == 3 and all((place in file) == bool(given) for file in files)


@pytest.mark.parametrize(("version", "budget", "scaler"), [
    ("1.20.2", "policy/v1beta1", "autoscaling/v2beta2"), ("1.22.0", "policy/v1", "autoscaling/v2beta2"),
    ("1.23.0", "policy/v1", "autoscaling/v2"), ("1.37.0", "policy/v1", "autoscaling/v2")])
def test_versions_of_kinds_follow_the_cluster(version: str, budget: str, scaler: str) -> None:
    objects = rendered("h100", "--kube-version", version, "--set", "target.autoscaling.hpa.enabled=true",
                       "--set", "target.autoscaling.minReplicas=2")
    budgets = [o for o in objects if o["kind"] == "PodDisruptionBudget"]
    assert {o["apiVersion"] for o in budgets} == {budget}
    unready = "AlwaysAllow" if version == "1.37.0" else None  # may leave a node that drains, where a cluster knows that
    assert {o["spec"].get("unhealthyPodEvictionPolicy") for o in budgets} == {unready}
    assert only(objects, "HorizontalPodAutoscaler")["apiVersion"] == scaler


def test_names_that_yaml_reads_otherwise_stay_texts() -> None:
    objects = rendered("cpu", "--set-string", "draft.pools[0].name=on,draft.pools[1].name=off,nameOverride=7",
                       "--set", "draft.replicas=2,fullnameOverride=on", *MONITORING)
    assert all(isinstance(o["metadata"]["name"], str) for o in objects)
    labels = [spec["template"]["metadata"]["labels"] for spec in deployments(objects).values()]
    assert {found.get("slipstream/pool") for found in labels} == {None, "on", "off"}
    services = [o for o in objects if o["kind"] == "Service"]
    labels += [only(objects, "PodMonitor")["spec"]["selector"]["matchLabels"],
               *(o["metadata"]["labels"] for o in services), *(o["spec"]["selector"] for o in services)]
    assert all(isinstance(value, str) for found in labels for value in found.values())


def test_numbers_of_a_file_stay_whole(tmp_path: Path) -> None:
    """Helm reads them as floating point, and writes a user's number on OpenShift as 1e+09."""
    file = tmp_path / "values.yaml"
    file.write_text("runAsUser: 1000000000\ntarget: {terminationGracePeriodSeconds: 1000000}\n")
    found = pods(rendered("cpu", "-f", str(file)))
    assert {pod["securityContext"][name] for pod in found for name in ("runAsUser", "runAsGroup", "fsGroup")} == {10**9}
    assert 10**6 in [pod.get("terminationGracePeriodSeconds") for pod in found]


def test_the_user_is_left_to_a_cluster_that_picks_one() -> None:
    """OpenShift gives each namespace its own, and refuses pods that name another."""
    for pod in pods(rendered("cpu", "--set", "runAsUser=0")):
        assert pod["securityContext"] == {"runAsNonRoot": True, "fsGroupChangePolicy": "OnRootMismatch",
                                          "seccompProfile": {"type": "RuntimeDefault"}}


def test_namespaces_secrets_and_claims_may_be_called_by_numbers(tmp_path: Path) -> None:
    named = ("images.pullSecrets[0]", "model.claim.existing", "tls.existingSecret", "router.apiKeys.existingSecret",
             "router.priorityClassName", "router.runtimeClassName")
    objects = rendered("cpu", "--namespace", "7", "--set", "tls.enabled=true,tls.insecurePlaintext=false",
                       "--set-string", ",".join(f"{name}=7" for name in named))
    file = tmp_path / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    done = run("kubernetes-validate", "-k", KUBERNETES[-1], "--strict", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_cluster_that_is_too_old_is_refused() -> None:
    done = helm("template", "cpu", "--kube-version", "1.19.0")
    assert done.returncode != 0 and "1.20" in done.stderr


@pytest.mark.parametrize("scaler", ["hpa", "keda"])
def test_a_scaler_has_the_replicas_to_itself(scaler: str) -> None:
    objects = rendered("h100", "--set", f"target.autoscaling.{scaler}.enabled=true",
                       "--set", "target.autoscaling.keda.serverAddress=http://prometheus:9090")
    assert "replicas" not in deployments(objects)["r-slipstream-target"]
    assert deployments(objects)["r-slipstream-router"]["replicas"] == 2
    kinds = {o["kind"] for o in objects} & {"HorizontalPodAutoscaler", "ScaledObject"}
    assert kinds == {"HorizontalPodAutoscaler" if scaler == "hpa" else "ScaledObject"}
    assert only(objects, "PodDisruptionBudget", "r-slipstream-target"), "it may grow: 1 to 4 by default"


@contextmanager
def cluster(objects: list[dict[str, Any]], live: dict[str, Any]) -> Iterator[str]:
    """The address of an API server that knows the kinds of ``objects``, and has ``live``."""
    groups = dict[str, set[str]]()
    for one in objects:
        groups.setdefault(one["apiVersion"], set()).add(one["kind"])
    named, place = [group for group in groups if "/" in group], live["metadata"]
    found: dict[str, Any] = {
        "/version": {"major": "1", "minor": "30", "gitVersion": "v1.30.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [
            {"name": group.partition("/")[0], "versions": [{"groupVersion": group, "version": group.partition("/")[2]}]}
            for group in named]},
        f"/apis/{live['apiVersion']}/namespaces/ns/{live['kind'].lower()}s/{place['name']}": live,
    } | {f"/apis/{group}" if "/" in group else "/api/v1": {
        "kind": "APIResourceList", "groupVersion": group, "resources": [
            {"name": f"{kind.lower()}s", "kind": kind, "namespaced": True, "verbs": ["get"]} for kind in kinds]}
        for group, kinds in groups.items()}

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = found.get(self.path.partition("?")[0])
            self.send_response(200 if answer else 404)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer or {"kind": "Status", "reason": "NotFound", "code": 404}).encode())

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_scaler_begins_with_the_targets_that_are_there(nodes: int) -> None:
    """Where the manifest had replicas and has none any more, the API server sets them to 1: all targets but one would
    go as a scaler is turned on."""
    changes = ("--set", "target.autoscaling.hpa.enabled=true", "--set", f"target.nodes={nodes}",
               "--set", f"config.model.tensor_parallel={nodes}", "--kube-version", "1.30.0")
    objects = rendered("vllm", *changes)
    scaled = only(objects, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    owner = {"labels": {"app.kubernetes.io/managed-by": "Helm"},
             "annotations": {"meta.helm.sh/release-name": "r", "meta.helm.sh/release-namespace": "ns"}}
    live = {**scaled, "metadata": {"namespace": "ns", "name": scaled["name"], **owner}, "spec": {"replicas": 3}}

    def upgraded() -> dict[str, Any]:
        with cluster(objects, live) as address:
            done = helm("template", "vllm", *changes[:-2], "-n", "ns", "--dry-run=server", "--kube-apiserver", address,
                        "--disable-openapi-validation")
        assert done.returncode == 0, done.stderr
        return only([found for found in yaml.safe_load_all(done.stdout) if found], scaled["kind"], scaled["name"])

    begun = upgraded()
    assert begun["spec"]["replicas"] == 3 and "annotations" not in begun["metadata"]
    # Whose number no revision has written has it to this day: a rollback to one without would take it away.
    owner["annotations"] |= only(objects, scaled["kind"], scaled["name"])["metadata"]["annotations"]
    assert "replicas" not in upgraded()["spec"]


@pytest.mark.parametrize(("changes", "most"), [((), 12), (("config.target.max_sessions=64",), 48),
                                               (("target.autoscaling.runningPerTarget=7",), 7)])
def test_a_scaler_follows_what_runs_and_what_waits(changes: tuple[str, ...], most: int) -> None:
    metrics = only(rendered("cpu", *sets(*changes), "--set", "discovery.enabled=true", "--set",
                            "target.autoscaling.hpa.enabled=true"), "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert [(one["pods"]["metric"]["selector"]["matchLabels"]["state"], one["pods"]["target"]["averageValue"])
            for one in metrics] == [("running", str(most)), ("waiting", "4")]


@pytest.mark.parametrize("given", [0, 2])
def test_keda_takes_no_loaded_target_away(given: int) -> None:
    """Nor while Prometheus is gone, nor sooner than it may. Nor does it ask for all there may be where no target says
    anything yet, as at an install, or a rollout of the only one: without data a scaler leaves all as it is."""
    spec = only(rendered("h100", "--set", "target.autoscaling.keda.enabled=true", "--set",
                         "target.autoscaling.keda.serverAddress=http://prometheus:9090", "--set",
                         f"target.autoscaling.keda.fallbackReplicas={given}"), "ScaledObject")["spec"]
    assert spec.get("fallback", {}).get("replicas", 0) == given and "cooldownPeriod" not in spec
    assert {trigger["metadata"]["ignoreNullValues"] for trigger in spec["triggers"]} == {"false"}
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == {"scaleDown": {"stabilizationWindowSeconds": 300}}
    assert len(spec["triggers"]) == 2


@pytest.mark.parametrize(("total", "shares", "expected"), [
    (10, (0, 10), (9, 1)), (2, (0, 1), (1, 1)), (7, (0, 0), (4, 3)), (20, (0, 25, 0), (8, 5, 7)), (0, (0, 10), (0, 0))])
def test_a_share_of_the_drafts(total: int, shares: tuple[int, ...], expected: tuple[int, ...]) -> None:
    changes = [f"draft.replicas={total}"]
    for i, share in enumerate(shares):
        changes += [f"draft.pools[{i}].name=p{i}", f"draft.pools[{i}].share={share}", f"draft.pools[{i}].model=m"]
    objects = rendered("h100", *sets(*changes))
    found = tuple(deployments(objects)[f"r-slipstream-draft-p{i}"]["replicas"] for i in range(len(shares)))
    assert found == expected
    assert sum(found) == total and all(n >= math.ceil(total * s / 100) for n, s in zip(found, shares, strict=True))


def test_a_change_restarts_only_whom_it_concerns() -> None:
    def sums(*arguments: str) -> dict[str, str]:
        return {name: spec["template"]["metadata"]["annotations"]["checksum/config"]
                for name, spec in deployments(rendered("cpu", *arguments)).items()}

    before = sums()
    for setting, concerned in (("config.draft.run_ahead=8", {"draft-main"}),
                               ("config.router.max_in_flight=4", {"router"}),
                               ("config.target.max_sessions=8", {"target"}),
                               ("config.target.policy.max_nodes=8", {"router", "target"}),
                               ("config.log.level=debug", {"router", "target", "draft-main"})):
        after = sums("--set", setting)
        assert {name.removeprefix("r-slipstream-") for name in after if after[name] != before[name]} == concerned


def test_threads_follow_the_cpus_unless_they_are_set() -> None:
    def arguments(*changes: str) -> list[str]:
        spec = deployments(rendered("cpu", *changes))["r-slipstream-target"]["template"]["spec"]
        return list(spec["containers"][0]["args"])

    assert "--set=model.threads=$(CPUS)" in arguments()
    assert not [a for a in arguments("--set", "config.model.threads=3") if "threads" in a]


def test_a_variable_of_ones_own_takes_the_place_of_the_charts() -> None:
    """As for caches that outlive a pod. Of two with one name server-side apply, which is Helm 4's, refuses both."""
    objects = rendered("vllm", "--set", "target.extraEnv[0].name=VLLM_CACHE_ROOT,target.extraEnv[0].value=/kept")
    for pod in pods(objects):
        for container in pod["containers"]:
            names = [variable["name"] for variable in container.get("env", [])]
            assert len(names) == len(set(names)), names
    (target,) = deployments(objects)["r-slipstream-target"]["template"]["spec"]["containers"]
    assert {"name": "VLLM_CACHE_ROOT", "value": "/kept"} in target["env"]


def test_a_quantity_of_a_profile_may_be_taken_back() -> None:
    """As where a GPU is cut into parts that have names of their own. Null is what Helm has for it."""
    changes = (r"requests.nvidia\.com/gpu=null", r"limits.nvidia\.com/gpu=null", "limits.cpu=null",
               r"limits.nvidia\.com/mig-3g\.40gb=1")
    objects = rendered("h100", *sets(*(f"target.resources.{one}" for one in changes)))
    spec = deployments(objects)["r-slipstream-target"]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"memory": "64Gi", "nvidia.com/mig-3g.40gb": "1"},
                                      "requests": {"cpu": "8", "memory": "32Gi"}}
    (cpus,) = [env["valueFrom"]["resourceFieldRef"] for env in container["env"] if env["name"] == "CPUS"]
    assert cpus["resource"] == "requests.cpu"


def test_only_a_target_whose_model_is_shared_out_has_shared_memory() -> None:
    def shared(profile: str) -> set[str]:
        return {name for name, spec in deployments(rendered(profile)).items()
                for container in spec["template"]["spec"]["containers"] for mount in container["volumeMounts"]
                if mount["mountPath"] == "/dev/shm"}

    (name,) = shared("70b-tp")
    assert name.endswith("-target") and not shared("h100")


@pytest.mark.parametrize("profile", ["vllm", *VLLM])
def test_a_target_may_have_vllms_engine(profile: str, tmp_path: Path) -> None:
    for file in {**PROFILES, **VLLM}[profile]:
        Values.model_validate(yaml.safe_load(file.read_text()))
    objects = rendered(profile)
    pod = deployments(objects)["r-slipstream-target"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["image"].endswith("-vllm") and not [a for a in container["args"] if "threads" in a]
    assert "VLLM_CACHE_ROOT" in {env["name"] for env in container["env"]}
    assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 1800
    drafts = [spec for name, spec in deployments(objects).items() if "-draft-" in name]
    assert drafts and not any(spec["template"]["spec"]["containers"][0]["image"].endswith("-vllm") for spec in drafts)
    config = config_of(objects, "r-slipstream-target", tmp_path)
    asked = arguments(config, Path(config.model.path), "m", list(config.target.vllm or ()))
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert asked["tensor_parallel_size"] == int(gpus) and asked["max_num_seqs"] == config.target.max_sessions
    slipstream = asked["additional_config"]["slipstream"]
    assert slipstream["layers"] and slipstream["drafts"] == list(config.target.drafts)
    assert slipstream["tls"]["folder"] == config.wire.tls.folder != ""
    assert 1 <= asked["speculative_config"]["num_speculative_tokens"] <= 8


def test_a_target_may_be_several_pods(tmp_path: Path) -> None:
    objects = rendered("deepseek-v3", "--set", "target.nodes=2", "--set", "config.model.tensor_parallel=16", "--set",
                       "target.autoscaling.hpa.enabled=true")
    assert "r-slipstream-target" not in deployments(objects)
    group = only(objects, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2 and only(objects, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["kind"] == (
        "LeaderWorkerSet")
    (container,) = group["workerTemplate"]["spec"]["containers"]
    own = {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "r-slipstream-targets-0.r-slipstream-targets"}
    overrides = tuple(word.removeprefix("--set=").replace("$(", "{").replace(")", "}").format(**own)
                      for word in container["args"] if word.startswith("--set=target.engine"))
    first, config = (config_of(objects, "r-slipstream-target", tmp_path, given) for given in ((), overrides))
    assert config.target.vllm is not None and node_rank(config) == 1 and node_rank(first) == 0
    asked = arguments(config, Path("/m"), "m", list(config.target.vllm))
    assert (asked["nnodes"], asked["node_rank"], asked["master_addr"]) == (2, 1, own["LWS_LEADER_ADDRESS"])
    assert asked["enable_expert_parallel"], "what the values say of vLLM stays"
    labels = group["workerTemplate"]["metadata"]["labels"]
    served = only(objects, "Service", "r-slipstream-target")["spec"]["selector"]
    assert served == {**labels, "leaderworkerset.sigs.k8s.io/worker-index": "0"}
    (policy,) = (o["spec"] for o in objects if o["kind"] == "NetworkPolicy" and "target" in o["metadata"]["name"])
    among = {"podSelector": {"matchLabels": labels}}
    assert {"from": [among]} in policy["ingress"] and {"to": [among]} in policy["egress"]


def test_pods_of_a_group_find_the_first_before_it_is_ready() -> None:
    """LeaderWorkerSet makes a Service of its own name that publishes pods that are not ready, unless one of that name
    is there: the one that routers read publishes none, and no pod of a group is ready before all have met."""
    objects = rendered("vllm", "--set", "target.nodes=2", "--set", "config.model.tensor_parallel=2", "--set",
                       "target.autoscaling.keda.enabled=true", "--set",
                       "target.autoscaling.keda.serverAddress=http://p:9090", "--set", f"fullnameOverride={'n' * 40}")
    group = only(objects, "LeaderWorkerSet")["metadata"]["name"]
    assert group not in {o["metadata"]["name"] for o in objects if o["kind"] == "Service"}
    scaled = only(objects, "ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["name"] == group
    assert all(f'pod=~"{group}-.*"' in trigger["metadata"]["query"] for trigger in scaled["triggers"])
    # A group's StatefulSet has its number behind that, and its pods a hash of ten letters behind it, in a label.
    assert len(f"{group}-99-") + 10 <= 63


def test_without_drafts_vllm_has_its_own_way() -> None:
    objects = rendered("vllm", "--set", "draft.replicas=0")
    assert settings(objects, "r-slipstream-target")["target"]["drafts"] == []


@pytest.mark.parametrize(("drafter", "reads"), [("", True), ("auto", True), ("mtp", True), ("ngram", False)])
def test_a_drafter_that_may_need_the_model_has_it(drafter: str, reads: bool, tmp_path: Path) -> None:
    objects = rendered("cpu", *(("--set", f"config.draft.drafter={drafter}") if drafter else ()))
    pod = deployments(objects)["r-slipstream-draft-main"]["template"]["spec"]
    mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert ("/models" in mounts) == reads == bool(pod.get("initContainers"))
    assert config_of(objects, "r-slipstream-draft-main", tmp_path).draft.drafter == (drafter or "auto")


def test_monitoring_is_made_where_its_kinds_are_known() -> None:
    kinds = {"PodMonitor", "PrometheusRule"}
    assert not kinds & {o["kind"] for o in rendered("cpu")}
    objects = rendered("cpu", *MONITORING, "--set", "monitoring.rules.runbooks=https://runbooks.example/")
    rules = only(objects, "PrometheusRule")["spec"]["groups"][0]["rules"]
    assert rules[0]["annotations"]["runbook_url"] == f"https://runbooks.example/{rules[0]['alert']}.md"
    assert only(objects, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"] == "metrics"
    boards = [o for o in objects if o["kind"] == "ConfigMap" and "-dashboard-" in o["metadata"]["name"]]
    assert len(boards) == 3
    for board in boards:
        assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
        (text,) = board["data"].values()
        assert json.loads(text)["uid"].startswith("slipstream-") and len(text) < 900_000


def test_releases_have_boards_of_their_own() -> None:
    """Grafana's sidecar writes what it finds to files, and Grafana knows boards by uid, and in a folder by title: of
    releases that share them one has boards, and who leaves takes them along."""
    taken = set[str]()
    for changes in ((), ("--namespace", "other"), ("--set", "fullnameOverride=second")):
        objects = rendered("cpu", *changes)
        files = {name: json.loads(text) for o in objects if "-dashboard-" in o["metadata"]["name"]
                 for name, text in o["data"].items()}
        named = {*files, *(board["uid"] for board in files.values()), *(board["title"] for board in files.values())}
        assert len(named) == 9 and not named & taken
        taken |= named
        for name, board in files.items():
            (namespace,) = (one for one in board["templating"]["list"] if one["name"] == "namespace")
            assert namespace["current"]["value"] == [objects[0]["metadata"]["namespace"]]
            assert len(board["uid"]) <= 40 and name.endswith(".json")


def test_certificates_are_good_for_the_names_that_are_dialled() -> None:
    objects = rendered("h100", "--set", "draft.pools[0].name=a", "--set", "draft.pools[0].model=m",
                       "--set", "discovery.enabled=false", "--set", "target.replicas=1", "--set", "draft.replicas=1")
    names = {o["metadata"]["name"]: o["spec"]["dnsNames"] for o in objects if o["kind"] == "Certificate"}
    assert set(names) == {"r-slipstream-router", "r-slipstream-target", "r-slipstream-draft"}
    (target,) = settings(objects, "r-slipstream-router")["router"]["targets"]
    (draft,) = settings(objects, "r-slipstream-target")["target"]["drafts"]
    assert target.rpartition(":")[0] in names["r-slipstream-target"]
    assert draft.rpartition(":")[0] in names["r-slipstream-draft"]


def test_a_release_without_pools_asks_for_no_certificate_without_names() -> None:
    """cert-manager refuses one, and with it the install."""
    objects = rendered("h100", "--set-json", "draft.pools=[]", "--set", "draft.replicas=0")
    names = {o["metadata"]["name"]: o["spec"]["dnsNames"] for o in objects if o["kind"] == "Certificate"}
    assert set(names) == {"r-slipstream-router", "r-slipstream-target"} and all(names.values())


def test_services_take_only_their_callers() -> None:
    """With discovery pods are dialled by address: the name that clients check then is the Service's, SERVICE.NS.svc."""
    objects = rendered("h100")
    names = {o["metadata"]["name"].removeprefix("r-slipstream-"): o["spec"]["dnsNames"] for o in objects
             if o["kind"] == "Certificate"}
    allowed = {name.removeprefix("r-slipstream-"): settings(objects, name)["wire"]["tls"].get("allowed_names", [])
               for name in deployments(objects)}
    assert allowed["router"] == []
    assert len(allowed["target"]) == len(allowed["draft-eagle3"]) == 1
    assert allowed["target"][0] in names["router"] and allowed["target"][0] not in names["draft"] + names["target"]
    assert allowed["draft-eagle3"][0] in names["target"] and allowed["draft-eagle3"][0] not in names["router"]
    (target,) = settings(objects, "r-slipstream-router")["router"]["targets"]
    service = service_address(target)
    assert service is not None and service.host in names["target"]
    for draft in settings(objects, "r-slipstream-target")["target"]["drafts"]:
        service = service_address(draft)
        assert service is not None and service.host in names["draft"]


def test_names_of_a_secret_of_ones_own() -> None:
    own = ("--set", "tls.certManager.enabled=false", "--set", "tls.certManager.issuerName=", "--set",
           "tls.existingSecret=mine")
    quiet = rendered("h100", *own)
    named = rendered("h100", *own, "--set", "tls.allowedNames={all.llm}")
    for name in deployments(quiet):
        assert "allowed_names" not in settings(quiet, name)["wire"]["tls"]
        assert ("allowed_names" in settings(named, name)["wire"]["tls"]) == (name != "r-slipstream-router")


def test_the_test_pod_asks_as_clients_do() -> None:
    pod = only(rendered("h100"), "Pod")
    (container,) = pod["spec"]["containers"]
    assert container["command"][:2] == ["python3", "-c"] and container["args"][1:] == [
        "drafts", "/etc/slipstream-keys/api-keys"]
    compile(container["command"][2], "ask.py", "exec")


def test_the_test_pod_goes_where_routers_may_go() -> None:
    """It has their image: on a node of another kind of processor it could not begin, and where all nodes are tainted it
    waited for ever."""
    pod = only(rendered("cpu", "--set-json", 'router.nodeSelector={"kubernetes.io/arch": "amd64"}', "--set-json",
                        'router.tolerations=[{"key": "dedicated", "operator": "Exists"}]'), "Pod")["spec"]
    assert pod["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
    assert pod["tolerations"] == [{"key": "dedicated", "operator": "Exists"}]


@pytest.mark.parametrize(("key", "mode", "patience_s", "said"), [
    ("right", "speculative", 120, "64 tokens, 40 of them drafted or copied, mode speculative"),
    ("base", "speculative", 120, "64 tokens, 40 of them drafted or copied, mode speculative"),  # a model without chats
    ("right", "plain", 1, "drafts did not serve the answer"),  # every draft is dead: what is accepted was copied
    ("wrong", "speculative", 120, "401")])
def test_the_question_of_helm_test(key: str, mode: str, patience_s: int, said: str, tmp_path: Path) -> None:
    class Router(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say({"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            details = {"accepted_prediction_tokens": 40}
            self._say({"usage": {"completion_tokens": asked["max_tokens"], "completion_tokens_details": details}})

        def _say(self, body: dict[str, Any]) -> None:
            known = self.headers["Authorization"] in ("Bearer right", "Bearer base")
            self.send_response(401 if not known else 400 if key == "base" and "chat" in self.path else 200)
            self.send_header("x-slipstream-mode", mode)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    (tmp_path / "keys").write_text(f"# ours\n\n{key} name=alice max_in_flight=4\nsecond\n")
    script = (CHART / "files/ask.py").read_text().replace("PATIENCE_S = 120", f"PATIENCE_S = {patience_s}")
    with HTTPServer(("127.0.0.1", 0), Router) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        done = subprocess.run([sys.executable, "-c", script, address, "drafts", tmp_path / "keys"],
                              capture_output=True, text=True, timeout=300)
        server.shutdown()
    assert (done.returncode == 0) == (said.startswith("64")) and said in done.stdout + done.stderr


def notes(*changes: str) -> str:
    """What the install of the CPU profile says."""
    done = helm("install", "cpu", *(word for change in changes for word in ("--set-json", change)))
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


def test_the_notes_ask_for_no_log_of_a_pod_that_goes() -> None:
    policy = only(rendered("cpu"), "Pod")["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
    assert "helm test r -n " in notes() and ("hook-succeeded" not in policy or "--logs" not in notes())


def test_the_notes_wait_as_long_as_a_target_may_take() -> None:
    """No router is ready before."""
    assert "--timeout=660s" in notes() and "--timeout=7260s" in notes("target.startupSeconds=7200")


def test_the_notes_say_when_a_service_is_open_and_its_policy_is_not() -> None:
    for kind in ("NodePort", "LoadBalancer"):
        opened = f'router.service.type="{kind}"'
        assert f"{kind}, but networkPolicy.clients" in notes(opened)
        for enough in ('networkPolicy.clients=[{"ipBlock":{"cidr":"10.0.0.0/8"}}]', "networkPolicy.enabled=false"):
            assert "networkPolicy.clients" not in notes(opened, enough)
    assert "networkPolicy.clients" not in notes()


def test_the_notes_say_what_a_new_claim_lacks() -> None:
    """Nothing fills it: targets would end again and again, with no more in their log than that a folder is missing."""
    lacks = "NOTE: nothing puts a model into the new claim r-slipstream-model"
    assert lacks in notes("model.claim.create=true", "model.prepare=false")
    assert lacks not in notes("model.claim.create=true") and lacks not in notes()


def test_a_chart_around_it_may_have_it_on_a_condition(tmp_path: Path) -> None:
    """Helm hands the condition on as a value, which a strict schema would refuse."""
    shutil.copytree(CHART, tmp_path / "charts/slipstream")
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump({
        "apiVersion": "v2", "name": "around", "version": "1.0.0",
        "dependencies": [{"name": "slipstream", "version": ">=0.1.0", "condition": "slipstream.enabled"}]}))
    for enabled in (True, False):
        (tmp_path / "values.yaml").write_text(yaml.safe_dump({"global": {"team": "a"}, "slipstream": {
            "enabled": enabled, "tls": {"enabled": False, "insecurePlaintext": True}}}))
        done = run("helm", "template", "r", tmp_path)
        assert done.returncode == 0 and ("r-slipstream-router" in done.stdout) is enabled, done.stderr


def test_extra_objects_are_rendered(tmp_path: Path) -> None:
    file = tmp_path / "extra.yaml"
    file.write_text("extraObjects:\n- apiVersion: v1\n  kind: Secret\n  metadata: {name: '{{ .Release.Name }}-x'}\n")
    assert only(rendered("cpu", "-f", str(file)), "Secret", "r-x")["apiVersion"] == "v1"


# Findings of trivy that are not followed, with the reason.
ACCEPTED = {
    "KSV-0011": "no CPU limits: throttling makes a step many times as slow; requests share the CPUs fairly",
    "KSV-01010": "a ConfigMap names the files of keys and tokens; their contents are in secrets",
}


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What a policy scanner says of each profile: checks that fail, and why."""
    root = tmp_path_factory.mktemp("scanned")
    folder = root / "objects"
    folder.mkdir()
    for profile in PROFILES:
        (folder / f"{profile}.yaml").write_text(yaml.safe_dump_all(rendered(profile)))
    done = run("trivy", "config", "--skip-check-update", "--cache-dir", root / "cache", "--format", "json", "--quiet",
               folder)
    assert done.returncode == 0, done.stderr
    return {Path(result["Target"]).stem: {
        finding["AVDID"].replace("AVD-", ""): finding["Message"] for finding in result.get("Misconfigurations", [])
        if finding["Status"] == "FAIL"} for result in json.loads(done.stdout).get("Results", [])}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_policy_scanner_finds_nothing_that_is_not_explained(profile: str, scanned: dict[str, dict[str, str]]) -> None:
    found = scanned[profile]
    assert set(found) <= set(ACCEPTED), {key: text for key, text in found.items() if key not in ACCEPTED}
