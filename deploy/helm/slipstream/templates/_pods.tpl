{{/* One Deployment for every role. Takes root, role, pool ("" for none), name, pod (the values of the role), replicas
     ("" where a scaler sets them), image, config (the text of the configuration), threads (the setting that takes the
     number of CPUs, "" for none), model (whether it reads one). */}}

{{- define "slipstream.deployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "slipstream.metadata" . | nindent 2 }}
    app.kubernetes.io/component: {{ .role }}
  {{- if eq (toString .replicas) "" }}
  annotations: {slipstream/replicas: scaler}
  {{- end }}
spec:
  {{- if ne (toString .replicas) "" }}
  replicas: {{ .replicas }}
  {{- end }}
  revisionHistoryLimit: 3
  {{- /* A new pod may have to wait until the old one has ended and freed its devices; and no router is ready before a target is. */}}
  {{- $slowest := 0 }}
  {{- range list .pod (ternary .root.Values.target .pod (eq .role "router")) }}
  {{- $slowest = max $slowest (add (int .startupSeconds) (int .terminationGracePeriodSeconds)) }}
  {{- end }}
  progressDeadlineSeconds: {{ add $slowest 60 }}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      {{- toYaml .pod.strategy | nindent 6 }}
  selector:
    matchLabels:
      {{- include "slipstream.selector" . | nindent 6 }}
  template:
    {{- include "slipstream.podTemplate" . | nindent 4 }}
{{- end -}}

{{/* Targets of several pods, which compute one model together: the first of a group serves. Takes what a Deployment takes. */}}
{{- define "slipstream.groups" -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  {{- include "slipstream.metadata" (dict "root" .root "name" (include "slipstream.groupName" .root)) | nindent 2 }}
    app.kubernetes.io/component: {{ .role }}
  {{- if eq (toString .replicas) "" }}
  annotations: {slipstream/replicas: scaler}
  {{- end }}
spec:
  {{- if ne (toString .replicas) "" }}
  replicas: {{ .replicas }}
  {{- end }}
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration:
      {{- toYaml .pod.strategy | nindent 6 }}
  leaderWorkerTemplate:
    size: {{ .pod.nodes }}
    restartPolicy: RecreateGroupOnPodRestart  # the pods of a vLLM group must start together
    workerTemplate:
      {{- include "slipstream.podTemplate" . | nindent 6 }}
{{- end -}}

{{- define "slipstream.podTemplate" -}}
metadata:
  annotations:
    checksum/config: {{ .config | sha256sum }}
    {{- with .pod.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  labels:
    {{- include "slipstream.selector" . | nindent 4 }}
    {{- with .pod.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "slipstream.podSpec" . | nindent 2 }}
{{- end -}}

{{- define "slipstream.podSpec" -}}
{{- $watches := and .root.Values.discovery.enabled (ne .role "draft") -}}
serviceAccountName: {{ include "slipstream.fullname" .root }}-{{ .role }}
automountServiceAccountToken: {{ $watches }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ int64 .pod.terminationGracePeriodSeconds }}
securityContext:
  {{- include "slipstream.podSecurity" .root | nindent 2 }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with .pod.resourceClaims }}
resourceClaims:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .pod.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- include "slipstream.nodes" .pod }}
{{- with .pod.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  {{- if .pod.topologySpread }}
  {{- toYaml .pod.topologySpread | nindent 2 }}
  {{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "slipstream.selector" . | nindent 8 }}
  {{- end }}
{{- if and .root.Values.model.prepare .model }}
initContainers:
  - name: prepare-model
    image: {{ include "slipstream.engineImage" .root }}
    imagePullPolicy: {{ .root.Values.images.pullPolicy }}
    args: [models, prepare, {{ .root.Values.model.path | quote }}, --to, {{ printf "/models/%s" .root.Values.model.path | quote }}]
    env:
      {{- include "slipstream.cacheEnv" . | nindent 6 }}
    securityContext:
      {{- include "slipstream.containerSecurity" . | nindent 6 }}
    resources:
      {{- include "slipstream.resources" .root.Values.model.prepareResources | nindent 6 }}
    volumeMounts:
      - {name: model, mountPath: /models}
      - {name: scratch, mountPath: /tmp, subPath: tmp}
      - {name: scratch, mountPath: /cache, subPath: cache}
{{- end }}
containers:
  - {{ include "slipstream.container" . | nindent 4 | trim }}
volumes:
  {{- include "slipstream.volumes" . | nindent 2 }}
{{- end -}}

{{/* Which nodes may have a pod; takes the values of a role. */}}
{{- define "slipstream.nodes" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "slipstream.container" -}}
name: {{ .role }}
image: {{ .image }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
args:
  - {{ .role }}
  - --config=/etc/slipstream/slipstream.yaml
  {{- $cpu := include "slipstream.cpuField" . }}
  {{- if $cpu }}
  - --set={{ .threads }}=$(CPUS)
  {{- end }}
  {{- if include "slipstream.grouped" . }}
  - --set=target.engine.vllm.node_rank=$(LWS_WORKER_INDEX)
  - --set=target.engine.vllm.master_addr=$(LWS_LEADER_ADDRESS)
  {{- end }}
  {{- range .pod.extraArgs }}
  - {{ . | quote }}
  {{- end }}
env:
  {{- $given := list }}
  {{- range .pod.extraEnv }}{{ $given = append $given .name }}{{ end }}
  {{- range include "slipstream.cacheEnv" . | fromYamlArray }}
  {{- if not (has .name $given) }}
  - {{ toJson . }}
  {{- end }}
  {{- end }}
  {{- if $cpu }}
  - name: CPUS
    valueFrom:
      resourceFieldRef: {containerName: {{ .role }}, resource: {{ $cpu }}, divisor: "1"}
  {{- end }}
  {{- with .pod.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  {{- range $name, $number := index (include "slipstream.ports" . | fromYaml) .role }}
  - {name: {{ $name }}, containerPort: {{ $number }}, protocol: TCP}
  {{- end }}
{{- /* None of the three depends on a peer, except that a router is ready when a target is. */}}
startupProbe:
  httpGet: {path: /live, port: metrics}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: {{ divf .pod.startupSeconds 2 | ceil | int }}
readinessProbe:
  httpGet: {path: /ready, port: metrics}
  periodSeconds: 3
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /live, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- if .pod.preStopSeconds }}
lifecycle:
  preStop:
    exec:
      command: [sleep, {{ .pod.preStopSeconds | quote }}]
{{- end }}
securityContext:
  {{- include "slipstream.containerSecurity" . | nindent 2 }}
resources:
  {{- include "slipstream.resources" .pod.resources | nindent 2 }}
volumeMounts:
  - {name: config, mountPath: /etc/slipstream, readOnly: true}
  {{- if .model }}
  - {name: model, mountPath: /models, readOnly: true}
  {{- end }}
  - {name: scratch, mountPath: /tmp, subPath: tmp}
  - {name: scratch, mountPath: /cache, subPath: cache}
  {{- if include "slipstream.ranks" . }}
  - {name: shared-memory, mountPath: /dev/shm}
  {{- end }}
  {{- if .root.Values.tls.enabled }}
  - {name: tls, mountPath: /etc/slipstream-tls, readOnly: true}
  {{- end }}
  {{- if and (eq .role "router") .root.Values.router.apiKeys.existingSecret }}
  - {name: api-keys, mountPath: /etc/slipstream-keys, readOnly: true}
  {{- end }}
  {{- with .pod.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- /* Quantities as strings: Kubernetes 1.20 does not apply numbers. A quantity of null is left out. Input: a container's
resources. */ -}}
{{- define "slipstream.resources" -}}
{{- $found := deepCopy (default dict .) -}}
{{- range $kind := list "limits" "requests" -}}
{{- range $name, $quantity := default dict (get $found $kind) -}}
{{- if kindIs "invalid" $quantity -}}
{{- $_ := unset (get $found $kind) $name -}}
{{- else -}}
{{- $_ := set (get $found $kind) $name (toString $quantity) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{- /* Whether several processes of a pod compute one model: they need shared memory. vLLM always has several. */ -}}
{{- define "slipstream.ranks" -}}
{{- $model := default dict .root.Values.config.model -}}
{{- if and (eq .role "target") (or (gt (int (default 1 $model.tensor_parallel)) 1) (include "slipstream.vllm" .root)) -}}
true
{{- end -}}
{{- end -}}

{{- /* Whether this pod is one of several that compute one model. */ -}}
{{- define "slipstream.grouped" -}}
{{- if and (eq .role "target") (gt (int .root.Values.target.nodes) 1) -}}
true
{{- end -}}
{{- end -}}

{{- define "slipstream.volumes" -}}
- name: config
  configMap:
    name: {{ .name }}
- name: scratch
  emptyDir: {}
{{- if include "slipstream.ranks" . }}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ ternary "8Gi" "1Gi" (eq "true" (include "slipstream.vllm" .root)) }}}
{{- end }}
{{- if .model }}
- name: model
  {{- with .root.Values.model }}
  {{- if or .claim.existing .claim.create }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-model" (include "slipstream.fullname" $.root)) .claim.existing | quote }}
    {{- if not .prepare }}
    readOnly: true
    {{- end }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .sizeLimit | quote }}
  {{- end }}
  {{- end }}
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "slipstream.tlsSecret" . | quote }}
    defaultMode: 0440
{{- end }}
{{- if and (eq .role "router") .root.Values.router.apiKeys.existingSecret }}
- name: api-keys
  secret:
    secretName: {{ .root.Values.router.apiKeys.existingSecret | quote }}
    defaultMode: 0440
{{- end }}
{{- with .pod.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Where the number of a model's threads comes from: the CPU limit, else the request. Empty: neither is set, or a target's
     config.model.threads is. */}}
{{- define "slipstream.cpuField" -}}
{{- if and .threads (or (ne .role "target") (not (default dict .root.Values.config.model).threads)) -}}
{{- $resources := default dict .pod.resources -}}
{{- if (default dict $resources.limits).cpu -}}
limits.cpu
{{- else if (default dict $resources.requests).cpu -}}
requests.cpu
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The root file system is read-only: all caches are written here. */}}
{{- define "slipstream.cacheEnv" -}}
- {name: HOME, value: /tmp}
- {name: XDG_CACHE_HOME, value: /cache}
{{- if ne .role "router" }}
- {name: HF_HUB_OFFLINE, value: "1"}
- {name: TRITON_CACHE_DIR, value: /cache/triton}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /cache/inductor}
- {name: TORCH_EXTENSIONS_DIR, value: /cache/torch}
- {name: FLASHINFER_WORKSPACE_BASE, value: /cache}
- {name: CUDA_CACHE_PATH, value: /cache/cuda}
{{- if and (eq .role "target") (include "slipstream.vllm" .root) }}
- {name: VLLM_CACHE_ROOT, value: /cache/vllm}
- {name: VLLM_CONFIG_ROOT, value: /cache/vllm}
- {name: VLLM_NO_USAGE_STATS, value: "1"}
{{- end }}
{{- end }}
{{- end -}}

{{/* The restricted profile of Pod Security, in its two halves. */}}
{{- define "slipstream.podSecurity" -}}
runAsNonRoot: true
{{- with int64 .Values.runAsUser }}
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "slipstream.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
