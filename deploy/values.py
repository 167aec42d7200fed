"""The chart's values, with their defaults and what they mean; ``values.yaml`` and its schema are printed from here.

Rules:
1. Names are written as Kubernetes writes them. What Kubernetes defines (resources, affinity, ...) is passed on.
2. ``config`` is the YAML of ``slipstream.base.config``, less what the chart sets itself (``CHART_SETTINGS``).
3. What one value cannot say about itself is checked in ``templates/_checks.tpl``, with a sentence that names it.

It knows nothing about templates.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from slipstream.base.config import Config, DraftSection, Section

Object = dict[str, Any]
Objects = list[dict[str, Any]]
# Of a container. Unknown names are refused: with a misspelt one a pod would silently have no limits.
Resources = Annotated[Object, WithJsonSchema({
    "type": "object", "additionalProperties": False,
    "properties": {"limits": {"type": "object"}, "requests": {"type": "object"}, "claims": {"type": "array"}}})]
Variables = Annotated[Objects, WithJsonSchema({"type": "array", "items": {
    "type": "object", "required": ["name"], "properties": {"value": {"type": ["string", "null"]}}}})]
StringMap = dict[str, str]  # labels and annotations: the API server refuses numbers and booleans as values

# Settings that follow from the chart's own values; the schema refuses them under ``config``.
CHART_SETTINGS = {
    "ModelSection": ("path",),
    "TargetSection": ("listen", "metrics_listen", "drafts"),
    "DraftSection": ("listen", "metrics_listen", "model"),
    "RouterSection": ("listen", "grpc_listen", "metrics_listen", "targets", "api_keys_file"),
    "WireSection": ("tls", "insecure_allow_plaintext"),
}


class ImageValues(Section):
    repository: str = Field("slipstream", description="with the host of the registry, if there is one")
    tag: str = Field("", description="empty: the chart's appVersion and the variant, as in 0.1.0-cpu")
    digest: str = Field("", pattern="^(sha256:[0-9a-f]{64})?$", description="sha256:...; wins over the tag")


class EngineImageValues(ImageValues):
    variant: Literal["cpu", "cuda"] = "cpu"


class ImagesValues(Section):
    pullPolicy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pullSecrets: list[str] = Field([])
    router: ImageValues = Field(ImageValues(), description="without torch")
    engine: EngineImageValues = Field(EngineImageValues(), description="for targets, drafts and preparing models")
    vllm: ImageValues = Field(ImageValues(), description="for targets where config.target.engine is vllm")


class ClaimValues(Section):
    existing: str = Field("", description="name of an existing PersistentVolumeClaim")
    create: bool = Field(False, description="create a claim; it is deleted with the release")
    size: str = "2Gi"
    storageClass: str = ""
    accessModes: list[Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"]] = Field(["ReadWriteMany"],
                                                                                         min_length=1)


class ModelValues(Section):
    """The target's model, and the volume that holds it and the draft models, mounted at /models."""

    path: str = Field("smollm2-135m", pattern="^[A-Za-z0-9][A-Za-z0-9._/-]*$", description="a folder of the volume")
    prepare: bool = Field(True, description="an init container makes it from a package in the image; known names only")
    # Below the pods' own where possible: Kubernetes schedules each pod, a router too, by the larger of the two.
    prepareResources: Resources = Field({"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}})
    sizeLimit: str = Field("2Gi", description="of the emptyDir, if there is no claim")
    claim: ClaimValues = Field(ClaimValues(), description="with neither: an emptyDir in each pod, which needs prepare")


class StrategyValues(Section):
    maxSurge: int | str = 1
    maxUnavailable: int | str = 0


class BudgetValues(Section):
    enabled: bool = Field(True, description="a PodDisruptionBudget, if more than one pod runs")
    maxUnavailable: int | str = 1


class PodValues(Section):
    """What every kind of pod has."""

    resources: Resources = Field({})
    resourceClaims: Objects = Field([], description="devices of the pod, which resources.claims names")
    nodeSelector: StringMap = Field({})
    tolerations: Objects = Field([])
    affinity: Object = Field({})
    topologySpread: Objects = Field([], description="empty: spread over nodes, if possible")
    runtimeClassName: str = ""
    priorityClassName: str = ""
    podAnnotations: StringMap = Field({})
    podLabels: StringMap = Field({})
    extraEnv: Variables = Field([])
    extraArgs: list[str] = Field([], description="as in --set=router.max_in_flight=4")
    extraVolumes: Objects = Field([])
    extraVolumeMounts: Objects = Field([])
    startupSeconds: int = Field(600, ge=10, description="a container that has not started by then is restarted")
    preStopSeconds: int = Field(5, ge=0, description="wait before SIGTERM, so that peers stop using the pod first")


class ServiceValues(Section):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    annotations: StringMap = Field({})
    httpPort: int = Field(8000, ge=1, le=65535)
    grpcPort: int = Field(8001, ge=1, le=65535)


class ApiKeysValues(Section):
    existingSecret: str = Field("", description="empty: anyone who reaches the router can use it")
    key: str = Field("api-keys", min_length=1, description="entry of the Secret: one key a line, followed by its "
                                                           "tenant, as in name=alice")


class RouterValues(PodValues):
    replicas: int = Field(2, ge=0)
    resources: Resources = Field({"requests": {"cpu": "250m", "memory": "384Mi"}, "limits": {"memory": "1Gi"}})
    strategy: StrategyValues = StrategyValues()
    budget: BudgetValues = BudgetValues()
    service: ServiceValues = ServiceValues()
    apiKeys: ApiKeysValues = ApiKeysValues()
    terminationGracePeriodSeconds: int = Field(75, ge=1, description="must be above preStopSeconds + "
                                                                 "config.router.drain_s + 5")


class HpaValues(Section):
    enabled: bool = Field(False, description="needs an adapter that serves slipstream_sessions as a pods metric")


class KedaValues(Section):
    enabled: bool = Field(False, description="needs KEDA and the address of a Prometheus")
    serverAddress: str = ""
    authenticationRef: StringMap = Field({}, description="name and kind of a TriggerAuthentication, if that Prometheus "
                                                     "needs one")
    triggerMetadata: StringMap = Field({}, description="more metadata of the triggers, as in {authModes: bearer}")
    fallbackReplicas: int = Field(0, ge=0, description="targets while Prometheus has no data; 0: no change")


class AutoscalingValues(Section):
    """The number of targets follows the answers that run and wait in them. Enable hpa or keda, or neither."""

    minReplicas: int = Field(1, ge=1)
    maxReplicas: int = Field(4, ge=1)
    runningPerTarget: int = Field(0, ge=0, description="answers that should run in a target at the same time; 0: three "
                                                       "quarters of config.target.max_sessions")
    waitingPerTarget: int = Field(4, ge=1, description="answers that may wait in a target before one is added")
    cooldownSeconds: int = Field(300, ge=0, le=3600, description="a target not needed for this long is removed")
    hpa: HpaValues = HpaValues()
    keda: KedaValues = KedaValues()


class TargetValues(PodValues):
    replicas: int = Field(1, ge=0)
    nodes: int = Field(1, ge=1, le=64, description="pods that compute one model together; more than 1 needs "
                                                   "config.target.engine vllm, and LeaderWorkerSet in the cluster")
    # It may use 1.2 GB at the start, 1.7 GB of KV slots (as they are used), and the memory of a step.
    resources: Resources = Field({"requests": {"cpu": "1", "memory": "3584Mi"}, "limits": {"memory": "4Gi"}})
    strategy: StrategyValues = StrategyValues()
    budget: BudgetValues = BudgetValues()
    # preStopSeconds, the router's request_timeout_s, and time to close: no answer takes longer.
    terminationGracePeriodSeconds: int = Field(
        630, ge=1, description="must be above preStopSeconds + config.target.drain_s + 5; an answer that can move to "
                               "no other target may use all of it")
    autoscaling: AutoscalingValues = AutoscalingValues()


class PoolValues(Section):
    """Draft pods of one kind. Targets give a new answer to their least busy draft, so a pool gets the same share of the
    answers as of the pods."""

    name: str = Field(pattern="^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$")
    share: int = Field(0, ge=0, le=99,
                       description="percentage of draft.replicas, at least one pod; 0: a part of the rest")
    model: str = Field("", pattern="^([A-Za-z0-9][A-Za-z0-9._/-]*)?$",
                       description="a folder of the volume; not for auto and ngram")
    config: DraftSection = Field(DraftSection(), description="settings that differ from config.draft")


class DraftValues(PodValues):
    replicas: int = Field(1, ge=0, description="of all pools together; 0: no drafts")
    pools: list[PoolValues] = Field([PoolValues(name="main")], max_length=8,
                                    description="each: name, share, model, config; a canary is a pool with a share")
    resources: Resources = Field({"requests": {"cpu": "500m", "memory": "768Mi"}, "limits": {"memory": "2Gi"}})
    strategy: StrategyValues = StrategyValues(maxSurge=0, maxUnavailable=1)
    budget: BudgetValues = Field(BudgetValues(enabled=False), description="answers go on without drafts")
    terminationGracePeriodSeconds: int = Field(30, ge=1, description="above preStopSeconds + 7")


class DiscoveryValues(Section):
    enabled: bool = Field(False, description="find pods by EndpointSlices; false: one pod of each kind, by its name")
    existingRole: bool = Field(False, description="true: the chart makes no Role; you let the service accounts "
                                                  "RELEASE-slipstream-router and -target get, list and watch "
                                                  "endpointslices")


class CertManagerValues(Section):
    enabled: bool = False
    issuerKind: Literal["Issuer", "ClusterIssuer"] = "Issuer"
    issuerName: str = ""
    duration: str = "2160h"
    renewBefore: str = "360h"


class TlsValues(Section):
    """Mutual TLS between the pods. Replaced certificates are used without a restart."""

    enabled: bool = True
    existingSecret: str = Field("", description="with tls.crt (for the names of all services), tls.key and ca.crt")
    certManager: CertManagerValues = CertManagerValues()
    allowedNames: list[str] = Field([], description="names, one of which a client of targets and drafts must have in "
                                                    "its certificate; empty: routers' and targets' names with "
                                                    "certManager, else any certificate of ca.crt")
    insecurePlaintext: bool = Field(False, description="must be true with enabled=false, to confirm plain text")


class NetworkPolicyValues(Section):
    """Only traffic that is named here, and that the pods need between each other, is allowed."""

    enabled: bool = True
    clients: Objects = Field([{"podSelector": {}}], description="who may reach the router; default: this namespace")
    prometheus: Objects = Field([{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
                              description="who may scrape metrics")
    dns: Objects = Field([{"namespaceSelector": {}}], description="DNS servers, on port 53 or 5353; a node-local cache "
                                                                "is not a pod: add its address, as in {ipBlock: {cidr: "
                                                                "169.254.20.10/32}}")
    apiServer: Objects = Field([{"ipBlock": {"cidr": "0.0.0.0/0"}}, {"ipBlock": {"cidr": "::/0"}}],
                             description="where the Kubernetes API is; for discovery only. In Cilium an ipBlock "
                                         "matches no nodes: if the API runs on nodes, allow the entity "
                                         "kube-apiserver in extraObjects")
    # A rule without ports opens all ports. minikube's API listens on 8443, that of MicroK8s on 16443.
    apiServerPorts: list[int] = Field([443, 6443, 8443, 16443], min_length=1)
    collector: Objects = Field([{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
                             description="where spans go, if config.log.spans is set")
    collectorPorts: list[int] = Field([4317], min_length=1)


class DashboardsValues(Section):
    enabled: bool = True
    labels: StringMap = Field({"grafana_dashboard": "1"}, description="by which Grafana's sidecar finds them")
    annotations: StringMap = Field({"grafana_folder": "Slipstream"})


class PodMonitorValues(Section):
    enabled: Literal["auto", "always", "never"] = Field("auto", description="auto: if the cluster has this kind")
    labels: StringMap = Field({}, description="by which Prometheus selects it, as in release: kube-prometheus-stack")
    interval: str = "15s"


class RulesValues(Section):
    enabled: Literal["auto", "always", "never"] = Field("auto", description="auto: if the cluster has this kind")
    labels: StringMap = Field({}, description="by which Prometheus selects rules, as with podMonitor")
    runbooks: str = Field("", description="URL of the folder of runbooks; empty: their path in the repository")


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
                             description="[::] if the first address of pods is IPv6, because probes use it")
    runAsUser: int = Field(65532, ge=0, description="also the group, and the owner of volumes; 0: the user that the "
                                                    "cluster assigns, as OpenShift does, but never root")
    extraObjects: list[Object | str] = Field([], description="rendered with the release")
