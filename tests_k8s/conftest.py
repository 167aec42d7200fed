"""The cluster of these tests, and a namespace in it for each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests_k8s.cluster import Cluster, own_cluster
from tests_k8s.own_server import OwnServer, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    named = os.environ.get("KUBECONFIG", "")
    if named:
        found = Cluster(Path(named), None)
        yield found
        found.close()
        return
    if missing():
        pytest.skip(f"no cluster: {', '.join(missing())} not there; run `make k8s-cluster`, or set KUBECONFIG")
    with own_cluster(tmp_path_factory.mktemp("own")) as found:
        yield found


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    with cluster.namespace() as name:
        yield name


@pytest.fixture(scope="module")
def controlled(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with its controllers and scheduler at work."""
    if cluster.own is None:
        pytest.skip("nodes of processes are for an API server of one's own; on yours, `helm test` asks the question")
    cluster.own.start_controllers()
    yield cluster
    cluster.own.end_controllers()


@pytest.fixture
def own(cluster: Cluster) -> OwnServer:
    if cluster.own is None:
        pytest.skip("a cluster that KUBECONFIG names is not killed or compacted")
    return cluster.own
