"""The API server of Kubernetes: the slices of one service, listed and watched.

Rules:
1. Every failure is Unavailable with a sentence, also 410: the server no longer has the watched version of the list, and
   the caller lists again.
2. A watch ends by itself after ``WATCH_S``; one that is silent for longer counts as dead.
3. Credentials are those of the pod (its service account, read again as Kubernetes renews them), or of a kubeconfig,
   whose token file or plugin is read again, too.

The only importer of the kubernetes client. It knows nothing about the meaning of slices.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import yaml
from kubernetes.aio.client.api.custom_objects_api import CustomObjectsApi
from kubernetes.aio.client.api.discovery_api import DiscoveryApi
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from slipstream.base.address import ServiceAddress
from slipstream.base.errors import ConfigError, RemoteProtocolError, Unavailable, first_line

GROUP = "discovery.k8s.io"
VERSIONS = ("v1", "v1beta1")  # best first
REQUEST_S = 10.0
WATCH_S = 60
WATCH_MARGIN_S = 10.0  # for the server to end its watch
KINDS = ("ADDED", "MODIFIED", "DELETED", "BOOKMARK")
Change = tuple[str, Mapping[str, Any]]  # type of event, slice


class ApiServer:
    """An API server. Make it on the event loop that uses it; ``aclose`` when done."""

    def __init__(self, configuration: Configuration) -> None:
        configuration.client_session_kwargs = {"trust_env": False}  # no proxy from the environment
        self._client = ApiClient(configuration)
        self._slices = CustomObjectsApi(self._client)
        self._groups = DiscoveryApi(self._client)

    async def api_version(self) -> str:
        """The version of EndpointSlices to ask for. Raises Unavailable."""
        async with _failures_as_unavailable("say which versions of discovery.k8s.io it serves"):
            group = await self._groups.get_api_group()
        known = {version.version for version in group.versions}
        for version in VERSIONS:
            if version in known:
                return version
        raise Unavailable(f"the API server serves discovery.k8s.io in none of {', '.join(VERSIONS)}")

    async def list(self, version: str, service: ServiceAddress) -> object:
        """The list of all slices, unchecked. Raises Unavailable."""
        async with _failures_as_unavailable(f"list the slices of {service.service}"):
            slices: object = await self._slices.list_namespaced_custom_object(
                GROUP, version, service.namespace, "endpointslices", label_selector=_selector(service))
        return slices

    async def watch(self, version: str, service: ServiceAddress, since: str) -> AsyncGenerator[Change, None]:
        """What changes after ``since``. Ends when the server ends it; raises Unavailable or
        RemoteProtocolError."""
        async with _failures_as_unavailable(f"watch the slices of {service.service}"):
            response = await self._slices.list_namespaced_custom_object_without_preload_content(
                GROUP, version, service.namespace, "endpointslices", label_selector=_selector(service), watch=True,
                allow_watch_bookmarks=True, resource_version=since, timeout_seconds=WATCH_S,
                _request_timeout=WATCH_S + WATCH_MARGIN_S)
        try:
            if response.status != 200:
                raise _refused(response.status, response.reason or "", "watch")
            while True:
                async with _failures_as_unavailable("read its watch", WATCH_S + WATCH_MARGIN_S):
                    line = await response.content.readline()
                if not line:
                    return
                yield _change(line)
        finally:
            response.close()

    async def aclose(self) -> None:
        await self._client.close()


async def api_server(kubeconfig: str = "") -> ApiServer:
    """The API server of a kubeconfig, or ("") of the cluster that this pod runs in. Raises ConfigError."""
    configuration = Configuration()
    try:
        if kubeconfig:
            loader = await load_kube_config(config_file=kubeconfig, client_configuration=configuration,
                                            persist_config=False)
            configuration.refresh_api_key_hook = loader.load_and_set  # a plugin only when its token is about to end
        else:
            load_incluster_config(client_configuration=configuration)
        return ApiServer(configuration)
    except (ConfigException, OSError, ssl.SSLError) as error:
        problem, cause = str(error).rstrip("."), error
    except (TypeError, ValueError, yaml.YAMLError) as error:
        problem, cause = f"{kubeconfig} is no kubeconfig", error
    raise ConfigError(f"kubernetes:/// addresses need a cluster: {problem}; run in a pod whose service account token "
                      "is mounted, or set wire.kubeconfig") from cause


def _selector(service: ServiceAddress) -> str:
    return f"kubernetes.io/service-name={service.service}"


def _change(line: bytes) -> Change:
    try:
        event = json.loads(line)
        kind, slice_ = event["type"], event["object"]
    except (ValueError, KeyError, TypeError) as error:
        raise RemoteProtocolError("watch", "the API server sent what is no event") from error
    if not isinstance(slice_, Mapping):
        raise RemoteProtocolError("watch.object", "is none")
    if kind == "ERROR":
        raise _refused(slice_.get("code"), str(slice_.get("reason", "")), "watch")
    if kind not in KINDS:
        raise RemoteProtocolError("watch.type", "is unknown")
    return kind, slice_


def _refused(status: object, reason: str, action: str) -> Unavailable:
    if status == 410:
        return Unavailable("the API server has forgotten the version that was watched")
    hint = "; may this service account get, list and watch endpointslices?" if status in (401, 403) else ""
    return Unavailable(f"the API server refused to {action}: {status} {reason}{hint}")


@asynccontextmanager
async def _failures_as_unavailable(action: str, within_s: float = REQUEST_S) -> AsyncIterator[None]:
    """Turns every failure of a request into Unavailable. ``action``: what was asked, for the message."""
    try:
        async with asyncio.timeout(within_s):
            yield
    except ApiException as error:
        raise _refused(error.status, str(error.reason), action) from error
    except TimeoutError as error:
        raise Unavailable(f"the API server did not answer within {within_s:g} s: {action}") from error
    except (aiohttp.ClientError, ConfigException, OSError, ValueError) as error:
        raise Unavailable(f"the API server cannot be asked to {action}: {first_line(error)}") from error
