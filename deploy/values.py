"""The chart's values, with their defaults and what they mean; ``values.yaml`` and its schema are printed from here.

Rules:
1. Names are written as Kubernetes writes them. What Kubernetes defines (resources, affinity, ...) is passed on.
2. ``config`` is the YAML of ``slipstream.base.config``, less what the chart sets itself (``OWNED``).
3. What one value cannot say about itself is checked in ``templates/_checks.tpl``, with a sentence that names it.

It knows nothing about templates.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from slipstream.base.config import Config, DraftSection, Section

Blob = dict[str, Any]
Blobs = list[dict[str, Any]]
# Of a container. With a letter less a pod would have no limits, and nobody would say so.
Resources = Annotated[Blob, WithJsonSchema({
    "type": "object", "additionalProperties": False,
    "properties": {"limits": {"type": "object"}, "requests": {"type": "object"}, "claims": {"type": "array"}}})]
Variables = Annotated[Blobs, WithJsonSchema({"type": "array", "items": {
    "type": "object", "required": ["name"], "properties": {"value": {"type": ["string", "null"]}}}})]
Texts = dict[str, str]  # labels and annotations: the API server takes no number or truth for a text

# Settings that follow from the chart's own values; the schema refuses them under ``config``.
OWNED = {
    "ModelSection": ("path",),
    "TargetSection": ("listen", "metrics_listen", "drafts"),
    "DraftSection": ("listen", "metrics_listen", "model"),
    "RouterSection": ("listen", "grpc_listen", "metrics_listen", "targets", "api_keys_file"),
    "WireSection": ("tls", "insecure_allow_plaintext"),
}


class ImageValues(Section):
    repository: str = Field("slipstream", description="with the registry's host, if there is one")
    tag: str = Field("", description="empty: the chart's appVersion and the variant, as in 0.1.0-cpu")
    digest: str = Field("", pattern="^(sha256:[0-9a-f]{64})?$", description="sha256:...; wins over the tag")


class EngineImageValues(ImageValues):
    variant: Literal["cpu", "cuda"] = "cpu"


class ImagesValues(Section):
    pullPolicy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pullSecrets: list[str] = Field([])
    router: ImageValues = Field(ImageValues(), description="without torch")
    engine: EngineImageValues = Field(EngineImageValues(), description="for target, draft and the preparing of models")
    vllm: ImageValues = Field(ImageValues(), description="for targets where config.target.engine is vllm")


class ClaimValues(Section):
    existing: str = Field("", description="name of a claim that is there")
    create: bool = Field(False, description="make one; it goes when the release goes")
    size: str = "2Gi"
    storageClass: str = ""
    accessModes: list[Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"]] = Field(["ReadWriteMany"],
                                                                                         min_length=1)


class ModelValues(Section):
    """The target's model, and the volume that holds it and the draft models, mounted at /models."""

    path: str = Field("smollm2-135m", pattern="^[A-Za-z0-9][A-Za-z0-9._/-]*$", description="a folder of the volume")
    prepare: bool = Field(True, description="an init container makes it from the image's package; known names only")
    # Less than the pods' own where it can be: each pod, a router too, is scheduled by the larger of the two.
    prepareResources: Resources = Field({"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}})
    sizeLimit: str = Field("2Gi", description="of the volume when there is no claim")
    claim: ClaimValues = Field(ClaimValues(), description="neither: an emptyDir of each pod, which needs prepare")


class StrategyValues(Section):
    maxSurge: int | str = 1
    maxUnavailable: int | str = 0


class BudgetValues(Section):
    enabled: bool = Field(True, description="made where more than one pod runs")
    maxUnavailable: int | str = 1


class PodValues(Section):
    """What every kind of pod has."""

    resources: Resources = Field({})
    resourceClaims: Blobs = Field([], description="devices that resources.claims names, each with its template")
    nodeSelector: Texts = Field({})
    tolerations: Blobs = Field([])
    affinity: Blob = Field({})
    topologySpread: Blobs = Field([], description="empty: over nodes, as far as that goes")
    runtimeClassName: str = ""
    priorityClassName: str = ""
    podAnnotations: Texts = Field({})
    podLabels: Texts = Field({})
    extraEnv: Variables = Field([])
    extraArgs: list[str] = Field([], description="as in --set=router.max_in_flight=4")
    extraVolumes: Blobs = Field([])
    extraVolumeMounts: Blobs = Field([])
    startupSeconds: int = Field(600, ge=10, description="a pod that does not start within is killed")
    preStopSeconds: int = Field(5, ge=0, description="from leaving the endpoints to the signal, so that peers notice")


class ServiceValues(Section):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    annotations: Texts = Field({})
    httpPort: int = Field(8000, ge=1, le=65535)
    grpcPort: int = Field(8001, ge=1, le=65535)


class ApiKeysValues(Section):
    existingSecret: str = Field("", description="empty: whoever reaches the router may ask")
    key: str = Field("api-keys", min_length=1, description="its entry: one key a line, then its tenant, as in "
                                                           "name=alice")


class RouterValues(PodValues):
    replicas: int = Field(2, ge=0)
    resources: Resources = Field({"requests": {"cpu": "250m", "memory": "384Mi"}, "limits": {"memory": "1Gi"}})
    strategy: StrategyValues = StrategyValues()
    budget: BudgetValues = BudgetValues()
    service: ServiceValues = ServiceValues()
    apiKeys: ApiKeysValues = ApiKeysValues()
    terminationGracePeriodSeconds: int = Field(75, ge=1, description="above preStopSeconds + config.router.drain_s + 5")


class HpaValues(Section):
    enabled: bool = Field(False, description="needs an adapter that serves slipstream_sessions as a pods metric")


class KedaValues(Section):
    enabled: bool = Field(False, description="needs KEDA and the address of a Prometheus")
    serverAddress: str = ""
    authenticationRef: Texts = Field({}, description="name and kind of a TriggerAuthentication, where that Prometheus "
                                                     "wants one")
    triggerMetadata: Texts = Field({}, description="more of the triggers, as in {authModes: bearer}")
    fallbackReplicas: int = Field(0, ge=0, description="while Prometheus has no data; 0: as many as there are")


class AutoscalingValues(Section):
    """Targets follow the answers that run and wait in them. One of the two, or neither."""

    minReplicas: int = Field(1, ge=1)
    maxReplicas: int = Field(4, ge=1)
    runningPerTarget: int = Field(0, ge=0, description="answers that a target is meant to decode at the same time; 0: "
                                                       "three quarters of config.target.max_sessions")
    waitingPerTarget: int = Field(4, ge=1, description="answers that may wait for room in a target")
    cooldownSeconds: int = Field(300, ge=0, le=3600, description="a target goes when it was not needed for so long")
    hpa: HpaValues = HpaValues()
    keda: KedaValues = KedaValues()


class TargetValues(PodValues):
    replicas: int = Field(1, ge=0)
    nodes: int = Field(1, ge=1, le=64, description="pods that compute one model together; more than one need "
                                                   "config.target.engine vllm, and LeaderWorkerSet in the cluster")
    # What it may come to: 1.2 GB at start, 1.7 GB of KV slots that are not touched before they are used, and a step.
    resources: Resources = Field({"requests": {"cpu": "1", "memory": "3584Mi"}, "limits": {"memory": "4Gi"}})
    strategy: StrategyValues = StrategyValues()
    budget: BudgetValues = BudgetValues()
    # preStopSeconds, the router's request_timeout_s, and time to close: no answer takes longer.
    terminationGracePeriodSeconds: int = Field(
        630, ge=1, description="above preStopSeconds + config.target.drain_s + 5; an answer whose model no other "
                               "target has may take all of it")
    autoscaling: AutoscalingValues = AutoscalingValues()


class PoolValues(Section):
    """Draft pods of one kind. Targets give a new answer to their least busy draft, so a share of the pods is a share of
    the answers."""

    name: str = Field(pattern="^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$")
    share: int = Field(0, ge=0, le=99,
                       description="per cent of draft.replicas, at least one pod; 0: its part of the rest")
    model: str = Field("", pattern="^([A-Za-z0-9][A-Za-z0-9._/-]*)?$",
                       description="a folder of the volume; not for auto and ngram")
    config: DraftSection = Field(DraftSection(), description="what differs from config.draft")


class DraftValues(PodValues):
    replicas: int = Field(1, ge=0, description="of all pools together; 0: plain decoding")
    pools: list[PoolValues] = Field([PoolValues(name="main")], max_length=8,
                                    description="each: name, share, model, config; a canary is a pool with a share")
    resources: Resources = Field({"requests": {"cpu": "500m", "memory": "768Mi"}, "limits": {"memory": "2Gi"}})
    strategy: StrategyValues = StrategyValues(maxSurge=0, maxUnavailable=1)
    budget: BudgetValues = Field(BudgetValues(enabled=False), description="answers go on without drafts")
    terminationGracePeriodSeconds: int = Field(30, ge=1, description="above preStopSeconds + 7")


class DiscoveryValues(Section):
    enabled: bool = Field(False, description="watch the EndpointSlices; else one pod of a kind, by its name")
    existingRole: bool = Field(False, description="somebody else lets the service accounts RELEASE-slipstream-router "
                                                  "and -target get, list and watch endpointslices")


class CertManagerValues(Section):
    enabled: bool = False
    issuerKind: Literal["Issuer", "ClusterIssuer"] = "Issuer"
    issuerName: str = ""
    duration: str = "2160h"
    renewBefore: str = "360h"


class TlsValues(Section):
    """Between the pods, both sides showing a certificate. Replaced certificates are taken without a restart."""

    enabled: bool = True
    existingSecret: str = Field("", description="with tls.crt, tls.key and ca.crt, good for the names of all services")
    certManager: CertManagerValues = CertManagerValues()
    allowedNames: list[str] = Field([], description="targets and drafts take only clients that show one of these; "
                                                    "empty: routers' and targets' names with certManager, else anyone "
                                                    "with a certificate of ca.crt")
    insecurePlaintext: bool = Field(False, description="with enabled=false: yes, really in plain text")


class NetworkPolicyValues(Section):
    """Everything is denied but what is named here and what the pods need of each other."""

    enabled: bool = True
    clients: Blobs = Field([{"podSelector": {}}], description="who may reach the router; default: this namespace")
    prometheus: Blobs = Field([{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
                              description="who may scrape")
    dns: Blobs = Field([{"namespaceSelector": {}}], description="who answers port 53, or 5353; a cache of the node's "
                                                                "is no pod: add its address, as in {ipBlock: {cidr: "
                                                                "169.254.20.10/32}}")
    apiServer: Blobs = Field([{"ipBlock": {"cidr": "0.0.0.0/0"}}, {"ipBlock": {"cidr": "::/0"}}],
                             description="where the Kubernetes API is; discovery only. For Cilium no block has nodes: "
                                         "where it runs on some, allow the entity kube-apiserver in extraObjects")
    # Without ports a rule opens all. minikube's listens on 8443, MicroK8s' on 16443.
    apiServerPorts: list[int] = Field([443, 6443, 8443, 16443], min_length=1)
    collector: Blobs = Field([{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
                             description="who takes spans, where config.log.spans names one")
    collectorPorts: list[int] = Field([4317], min_length=1)


class DashboardsValues(Section):
    enabled: bool = True
    labels: Texts = Field({"grafana_dashboard": "1"}, description="what Grafana's sidecar looks for")
    annotations: Texts = Field({"grafana_folder": "Slipstream"})


class PodMonitorValues(Section):
    enabled: Literal["auto", "always", "never"] = Field("auto", description="auto: where the cluster knows the kind")
    labels: Texts = Field({}, description="which a Prometheus looks for, as in release: kube-prometheus-stack")
    interval: str = "15s"


class RulesValues(Section):
    enabled: Literal["auto", "always", "never"] = Field("auto", description="auto: where the cluster knows the kind")
    labels: Texts = Field({}, description="as podMonitor's: which rules a Prometheus reads")
    runbooks: str = Field("", description="address before the runbook's file name; empty: its path in the repository")


class MonitoringValues(Section):
    podMonitor: PodMonitorValues = PodMonitorValues()
    rules: RulesValues = RulesValues()
    dashboards: DashboardsValues = DashboardsValues()


class Values(Section):
    nameOverride: str = ""
    fullnameOverride: str = ""
    images: ImagesValues = ImagesValues()
    model: ModelValues = ModelValues()
    config: Config = Field(Config(), description="settings of docs/CONFIG.md; the chart sets addresses and paths")
    router: RouterValues = RouterValues()
    target: TargetValues = TargetValues()
    draft: DraftValues = DraftValues()
    discovery: DiscoveryValues = DiscoveryValues()
    tls: TlsValues = TlsValues()
    networkPolicy: NetworkPolicyValues = NetworkPolicyValues()
    monitoring: MonitoringValues = MonitoringValues()
    bindAddress: str = Field("0.0.0.0", min_length=1,
                             description="[::] where the first address of pods is IPv6, which probes ask")
    runAsUser: int = Field(65532, ge=0, description="also the group, and the owner of volumes; 0: whom the cluster "
                                                    "names, as OpenShift does for each namespace, but never root")
    extraObjects: list[Blob | str] = Field([], description="rendered with the release")
