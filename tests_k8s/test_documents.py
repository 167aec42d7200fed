"""The commands of docs/, in order, with the CPU profile: its pods prepare the default model and its own head drafts."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.kube import ROOT, program
from tests_k8s.cluster import Cluster
from tests_k8s.node import Node, on_node

pytestmark = pytest.mark.timeout(3000)
PAGES = ("INSTALL", "UPGRADE", "OPERATE", "TROUBLESHOOT")
NOT_HERE = ("kubectl -n llm port-forward", "curl")  # the tests' node forwards no ports
SAYS_NO = "kubectl auth can-i"  # without discovery, and it is no
SECONDS = 900


def commands(page: str) -> list[str]:
    """The lines of a page's shell blocks, joined where they go on."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", (ROOT / f"docs/{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := line.partition("  #")[0].strip())]


def run(command: str, kubeconfig: Path) -> str:
    path = os.pathsep.join([*(str(Path(program(name)).parent) for name in ("helm", "kubectl")), os.environ["PATH"]])
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS,
                          env={**os.environ, "PATH": path, "KUBECONFIG": str(kubeconfig)})
    said = done.stdout + done.stderr
    assert (done.returncode == 0) != command.startswith(SAYS_NO), f"{command}\n{said}"
    return said


async def ask(node: Node) -> int:
    """Ask through the router's service, as any client does. Returns the tokens that came from drafts."""
    address = await node.service("llm-slipstream-router", "llm")
    async with AsyncOpenAI(base_url=f"http://{address}:8000/v1", api_key="none", timeout=300) as client:
        answer = await client.chat.completions.create(model="smollm2-135m", max_tokens=48, temperature=0, messages=[
            {"role": "user", "content": "Copy this text: The quick brown fox jumps over the lazy dog. The quick fox."}])
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    drafted = answer.usage.completion_tokens_details.accepted_prediction_tokens
    print(f"{answer.usage.completion_tokens} tokens, {drafted} of them from drafts")
    return drafted or 0


async def rolled_out(kubeconfig: Path) -> None:
    for role in ("router", "target", "draft-main"):
        await asyncio.to_thread(run, f"kubectl -n llm rollout status deployment/llm-slipstream-{role} --timeout=10m",
                                kubeconfig)


async def test_the_commands_of_the_documents(controlled: Cluster, tmp_path: Path) -> None:
    kubeconfig = controlled.kubeconfig
    async with on_node(controlled, tmp_path / "node") as node:
        try:
            for page in PAGES:
                for command in commands(page):
                    if not command.startswith(NOT_HERE):
                        print(f"{page}: {command}")
                        print(await asyncio.to_thread(run, command, kubeconfig))
                await rolled_out(kubeconfig)
                if page == "INSTALL":
                    assert await ask(node)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{node.logs()}") from error
        left = {found.split("/")[0] for found in await asyncio.to_thread(controlled.objects, "llm")}
        assert {"deployments", "pods", "services"} <= left
        await asyncio.to_thread(run, "helm uninstall llm -n llm", kubeconfig)
        async with asyncio.timeout(300):
            while await asyncio.to_thread(controlled.objects, "llm") - {
                    "serviceaccounts/default", "configmaps/kube-root-ca.crt"} - _tokens(controlled):
                await asyncio.sleep(0.5)
    await asyncio.to_thread(controlled.delete, "/api/v1/namespaces/llm")


def _tokens(cluster: Cluster) -> set[str]:
    """The default account's secret, which every namespace has in Kubernetes 1.20."""
    return {found for found in cluster.objects("llm") if found.startswith("secrets/default-token-")}
