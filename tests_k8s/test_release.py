"""The chart against a real API server: install, upgrade, roll back, uninstall; who may do what; what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kube import CHART, PROFILES
from tests_k8s.cluster import Cluster

pytestmark = pytest.mark.timeout(900)
CPU = [word for file in PROFILES["cpu"] for word in ("-f", file)]
DISCOVERING = ("--set", "discovery.enabled=true", "--set", "target.replicas=2")
ACCOUNTS = ("r-slipstream-router", "r-slipstream-target", "r-slipstream-draft")


@pytest.fixture(scope="module")
def place(cluster: Cluster) -> Iterator[str]:
    with cluster.namespace() as name:
        yield name


@pytest.fixture(autouse=True)
def clean(cluster: Cluster, place: str) -> Iterator[None]:
    """No release is left for the next test."""
    yield
    cluster.run("helm", "uninstall", "r", "-n", place, "--ignore-not-found")


def helm(cluster: Cluster, namespace: str, *arguments: object) -> str:
    done = cluster.run("helm", *map(str, arguments), "-n", namespace)
    assert done.returncode == 0, done.stderr
    return done.stdout


def replicas(cluster: Cluster, namespace: str) -> dict[str, int]:
    found = cluster.get(f"/apis/apps/v1/namespaces/{namespace}/deployments")["items"]
    return {item["metadata"]["name"]: item["spec"]["replicas"] for item in found}


def test_a_release_lives_and_leaves_nothing_behind(cluster: Cluster, place: str) -> None:
    before = cluster.objects(place)
    said = helm(cluster, place, "install", "r", CHART, *CPU)
    assert "STATUS: deployed" in said and "helm test r" in said
    installed = replicas(cluster, place)
    assert installed == {"r-slipstream-router": 1, "r-slipstream-target": 1, "r-slipstream-draft-main": 1}
    helm(cluster, place, "upgrade", "r", CHART, *CPU, *DISCOVERING)
    assert replicas(cluster, place)["r-slipstream-target"] == 2
    helm(cluster, place, "rollback", "r", "1")
    assert replicas(cluster, place) == installed
    assert len(helm(cluster, place, "history", "r").splitlines()) == 4, "a head and three revisions"
    assert "roles/r-slipstream-discovery" not in cluster.objects(place), "the upgrade made it, the rollback took it"
    helm(cluster, place, "uninstall", "r")
    assert cluster.objects(place) == before


@pytest.mark.parametrize("profile", PROFILES)
def test_the_server_takes_every_profile(cluster: Cluster, place: str, profile: str) -> None:
    """All but certificates, whose kind is cert-manager's. Helm's own dry run asks less, so it is installed."""
    files = [word for file in PROFILES[profile] for word in ("-f", file)]
    without = () if profile == "cpu" else ("--set", "tls.certManager.enabled=false", "--set",
                                           "tls.certManager.issuerName=", "--set", "tls.existingSecret=mine")
    before = cluster.objects(place)
    helm(cluster, place, "install", "r", CHART, *files, *without, "--dry-run=server")
    assert cluster.objects(place) == before, "a dry run changes nothing"
    helm(cluster, place, "install", "r", CHART, *files, *without)
    found = cluster.objects(place)
    helm(cluster, place, "uninstall", "r")
    assert "deployments/r-slipstream-target" in found
    assert ("roles/r-slipstream-discovery" in found) == (profile != "cpu")
    assert cluster.objects(place) == before


def test_the_server_refuses_what_makes_no_sense(cluster: Cluster, place: str) -> None:
    """And what it had taken of it is gone, or can be taken away."""
    before = cluster.objects(place)
    done = cluster.run("helm", "install", "r", CHART, *CPU, "--set", "target.resources.requests.cpu=much", "-n", place)
    assert done.returncode != 0 and "quantities must match" in done.stderr, done.stderr
    cluster.run("helm", "uninstall", "r", "-n", place)
    assert cluster.objects(place) == before


@pytest.mark.parametrize("side", ["true", "false"])
def test_a_scaler_keeps_its_targets(cluster: Cluster, place: str, side: str) -> None:
    """Through upgrades and rollbacks, by the server's merging and by Helm's own: as it is turned on, and where it was
    there from the beginning."""
    scaler = ("--set", "target.autoscaling.hpa.enabled=true")

    def targets(*arguments: str) -> int:
        helm(cluster, place, *arguments, f"--server-side={side}")
        return replicas(cluster, place)["r-slipstream-target"]

    def scaled(number: int) -> None:
        done = cluster.run("kubectl", "scale", "deployment/r-slipstream-target", f"--replicas={number}", "-n", place)
        assert done.returncode == 0, done.stderr

    assert targets("install", "r", CHART, *CPU, *DISCOVERING, *scaler) == 1
    scaled(3)
    assert targets("upgrade", "r", CHART, *CPU, *DISCOVERING, *scaler, "--set", "config.target.max_sessions=8") == 3
    assert targets("rollback", "r", "1") == 3, "of its revisions none has a number"
    assert targets("upgrade", "r", CHART, *CPU, *DISCOVERING) == 2
    assert targets("upgrade", "r", CHART, *CPU, *DISCOVERING, *scaler) == 2, "turned on"
    scaled(4)
    assert targets("upgrade", "r", CHART, *CPU, *DISCOVERING, *scaler, "--set", "config.target.max_sessions=8") == 4


def test_accounts_may_read_slices_if_they_discover_and_nothing_else(cluster: Cluster, place: str) -> None:
    slices = ("discovery.k8s.io", "endpointslices")
    others = [("", "secrets"), ("", "configmaps"), ("", "pods"), ("apps", "deployments"), ("", "serviceaccounts")]

    def reads(account: str) -> list[bool]:
        return [cluster.may(account, place, verb, *slices) for verb in ("get", "list", "watch")]

    helm(cluster, place, "install", "r", CHART, *CPU)
    assert not any(allowed for account in ACCOUNTS for allowed in reads(account)), "nobody discovers"
    helm(cluster, place, "upgrade", "r", CHART, *CPU, *DISCOVERING)
    found = {account: reads(account) for account in ACCOUNTS}
    assert found == dict(zip(ACCOUNTS, ([True] * 3, [True] * 3, [False] * 3), strict=True))
    for account in ACCOUNTS:
        assert not [(verb, *what) for what in [*others, slices] for verb in ("create", "update", "delete")
                    if cluster.may(account, place, verb, *what)]
        assert not [what for what in others for verb in ("get", "list") if cluster.may(account, place, verb, *what)]
        assert not cluster.may(account, "kube-system", "list", *slices), "its own namespace alone"
