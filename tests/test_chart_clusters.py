"""The chart where a cluster asks for more: its own ways to Prometheus, quotas, rights, devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.kube import PROFILES, VLLM, helm, only, rendered, run
from tests.test_chart import KUBERNETES, pods

KEDA = ("--set", "target.autoscaling.keda.enabled=true", "--set",
        "target.autoscaling.keda.serverAddress=https://thanos-querier.openshift-monitoring.svc:9092")


def test_keda_may_show_prometheus_who_it_is() -> None:
    """OpenShift's Prometheus, and those that are rented, answer nobody without a token."""
    for trigger in only(rendered("h100", *KEDA), "ScaledObject")["spec"]["triggers"]:
        assert "authenticationRef" not in trigger
    given = ("target.autoscaling.keda.authenticationRef.name=thanos",
             "target.autoscaling.keda.triggerMetadata.authModes=bearer")
    triggers = only(rendered("h100", *KEDA, *(word for one in given for word in ("--set", one))),
                    "ScaledObject")["spec"]["triggers"]
    for trigger, state in zip(triggers, ("running", "waiting"), strict=True):
        assert trigger["authenticationRef"] == {"name": "thanos"}
        query = ('sum(slipstream_sessions{service="target",state="STATE",namespace="ns",pod=~"r-slipstream-target-.*"})'
                 .replace("STATE", state))
        assert trigger["metadata"] == {
            "authModes": "bearer", "ignoreNullValues": "false", "query": query,
            "serverAddress": "https://thanos-querier.openshift-monitoring.svc:9092",
            "threshold": trigger["metadata"]["threshold"]}


def test_where_a_quota_wants_limits_every_container_has_them() -> None:
    """It refuses a pod that has one without: helm test's had no way to get one."""
    limits = {"cpu": "2", "ephemeral-storage": "1Gi", "memory": "4Gi"}
    places = ("router.resources", "target.resources", "draft.resources", "model.prepareResources")
    given = [word for place in places for word in ("--set-json", f"{place}.limits={json.dumps(limits)}")]
    objects = rendered("cpu", *given)
    for pod in pods(objects):
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert set(container["resources"]["limits"]) == set(limits), container["name"]
    (asks,) = only(objects, "Pod")["spec"]["containers"]
    assert asks["resources"] == {"limits": {**limits, "memory": "128Mi"}, "requests": {"cpu": "50m", "memory": "64Mi"}}


def test_who_may_make_no_roles_has_discovery_too() -> None:
    """As with the role "edit": the API server refused the whole release. Somebody else binds the accounts then."""
    objects = rendered("h100", "--set", "discovery.existingRole=true")
    assert not [o for o in objects if o["kind"] in ("Role", "RoleBinding")]
    watching = [pod["serviceAccountName"] for pod in pods(objects) if pod["automountServiceAccountToken"]]
    assert watching == ["r-slipstream-router", "r-slipstream-target"]
    assert {o["metadata"]["name"] for o in objects if o["kind"] == "ServiceAccount"} >= set(watching)


def test_a_gpu_may_be_claimed(tmp_path: Path) -> None:
    """As where a driver of dynamic resource allocation hands them out: resources.claims names what the pod has, and no
    pod had any."""
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    counted = (r"requests.nvidia\.com/gpu=null", r"limits.nvidia\.com/gpu=null")
    objects = rendered("h100", "--set-json", f"target.resourceClaims={json.dumps(claims)}", "--set-json",
                       'target.resources.claims=[{"name": "gpu"}]',
                       *(word for one in counted for word in ("--set", f"target.resources.{one}")))
    found = {pod.get("serviceAccountName", "test"): pod.get("resourceClaims") for pod in pods(objects)}
    assert found == {"r-slipstream-router": None, "r-slipstream-target": claims, "r-slipstream-draft": None,
                     "test": None}
    file = tmp_path / "objects.yaml"
    file.write_text(yaml.safe_dump_all(o for o in objects if not o["apiVersion"].startswith("cert-manager.io")))
    done = run("kubernetes-validate", "-k", KUBERNETES[-1], "--strict", file)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("profile", "inside"), [("cpu", "grpc"), ("h100", "https")])
def test_ports_say_what_they_speak(profile: str, inside: str) -> None:
    """Istio takes grpc for HTTP/2 in plain text: in its mesh no call within the release came through with TLS."""
    spoken = {(o["metadata"]["name"].split("-")[2], port["name"]): port["appProtocol"]
              for o in rendered(profile) if o["kind"] == "Service" for port in o["spec"]["ports"]}
    assert spoken == {("router", "http"): "http", ("router", "grpc"): "grpc", ("target", "grpc"): inside,
                      ("draft", "grpc"): inside}


def test_the_test_pod_may_ask_where_a_namespace_denies_what_nobody_allows() -> None:
    """As hardened ones do: helm test waited two minutes for a router that it could not reach."""
    objects = rendered("cpu")
    labels = only(objects, "Pod")["metadata"]["labels"]
    (policy,) = [o["spec"] for o in objects if o["kind"] == "NetworkPolicy" and "Egress" in o["spec"]["policyTypes"]
                 and o["spec"]["podSelector"]["matchLabels"].items() <= labels.items()]
    routers = only(objects, "NetworkPolicy", "r-slipstream-router")["spec"]
    (asked,) = [rule for rule in policy["egress"] if {"protocol": "TCP", "port": 8000} in rule["ports"]]
    assert asked == {"ports": [{"protocol": "TCP", "port": 8000}], "to": [{"podSelector": routers["podSelector"]}]}
    names = [rule for rule in routers["egress"] if {"protocol": "UDP", "port": 53} in rule["ports"]]
    assert [rule for rule in policy["egress"] if rule != asked] == names and policy["ingress"] == []


def test_a_variable_that_is_no_text_is_refused_before_anything_is_made() -> None:
    """The API server takes none, and said so in the midst of an install or upgrade."""
    def said(value: str) -> str:
        return helm("template", "cpu", "--set-json", f'target.extraEnv=[{{"name": "A", "value": {value}}}]').stderr

    for value in ("4", "true"):
        assert "at '/target/extraEnv/0/value': got " in said(value)
    assert said('"4"') == said("null") == ""
    source = '{"fieldRef": {"fieldPath": "status.podIP"}}'
    assert rendered("cpu", "--set-json", f'draft.extraEnv=[{{"name": "A", "valueFrom": {source}}}]')


@pytest.mark.parametrize("port", [443, 6443, 8443, 16443])  # clouds, kubeadm and OpenShift, minikube, MicroK8s
def test_an_api_server_is_reached_where_it_listens(port: int) -> None:
    """A policy sees the API server's own port, not its Service's: without it discovery finds nobody."""
    for role in ("router", "target"):
        rules = only(rendered("h100"), "NetworkPolicy", f"r-slipstream-{role}")["spec"]["egress"]
        assert any({"protocol": "TCP", "port": port} in rule["ports"] for rule in rules), role


@pytest.mark.parametrize("profile", [*PROFILES, *VLLM])
def test_a_profile_asks_for_one_kind_of_gpu(profile: str) -> None:
    """Drafts of a model on H200s asked for H100s, and waited in a cluster that has none."""
    kinds = {pod["nodeSelector"]["nvidia.com/gpu.product"] for pod in pods(rendered(profile)) if "nodeSelector" in pod}
    assert len(kinds) == (profile != "cpu"), kinds
