"""A draft pool that is scaled to nothing and back under load: services as processes, their addresses in real slices."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.api_server import endpoint
from tests.kube import CHART
from tests.tiny import write_tiny_model
from tests_k8s.cluster import Cluster, Slices
from tests_k8s.fleet import asking, fleet

pytestmark = pytest.mark.timeout(1800)
DRAFTS = ("draft-a", "draft-b")


def helm_test(url: str, expected: str) -> None:
    """What the pod of `helm test` runs."""
    done = subprocess.run([sys.executable, CHART / "files/ask.py", url, expected],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_two_drafts_none_two_again(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    slices = Slices(cluster, namespace)
    slices.need_loopback()
    model = write_tiny_model(tmp_path / "tiny")
    settings = (f"model.path={model}", "router.model_name=tiny", "draft.drafter=ngram",
                f"wire.kubeconfig={cluster.kubeconfig}")
    async with fleet(tmp_path, DRAFTS, f"kubernetes:///target.{namespace}:grpc", f"kubernetes:///drafts.{namespace}:grpc",
                     settings) as services:

        async def listed(name: str, service: str, ready: bool = True) -> None:
            await asyncio.to_thread(slices.put, name, endpoint("127.0.0.1", ready, pod=name),
                                    port=services.port(name), service=service)

        for name in (*DRAFTS, "target"):
            await services.ready(name)
            await listed(name, "target" if name == "target" else "drafts")
        await services.ready("router")
        client = AsyncOpenAI(base_url=f"{services.url}/v1", api_key="none", max_retries=0, timeout=300)
        async with asking(client, "abcabcabcabcabcabc abcabcabc") as load:
            await load.until(drafted=True)
            await asyncio.to_thread(helm_test, services.url, "drafts")
            for name in DRAFTS:
                await listed(name, "drafts", ready=False)
                await asyncio.to_thread(services.processes[name].stop)
                await asyncio.to_thread(slices.delete, name)
            await load.until(drafted=False)
            await asyncio.to_thread(helm_test, services.url, "plain")
            for name in DRAFTS:
                services.processes[name].start()
                await services.ready(name)
                await listed(name, "drafts")
            await load.until(drafted=True)
        assert not load.failures, load.failures
        assert len({answer.text for answer in load.answered}) == 1, "the answer is the same with and without drafts"
        print(f"{len(load.answered)} answers, none failed")
