{{/* Names, labels, images and addresses. */}}

{{- define "slipstream.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels of everything; takes the root. */}}
{{- define "slipstream.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* The metadata of every object; takes root and name. More labels may follow it. */}}
{{- define "slipstream.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "slipstream.labels" .root | nindent 2 }}
{{- end -}}

{{/* Labels that select the pods of a role, and of a pool if there is one; takes root, role, pool. Quoted, because a pool
     may be called "on", and a release "7". */}}
{{- define "slipstream.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .role }}
{{- with .pool }}
slipstream/pool: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* An image; takes root, image (of values.images) and variant. */}}
{{- define "slipstream.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ default (printf "%s-%s" .root.Chart.AppVersion .variant) .image.tag }}
{{- end -}}
{{- end -}}

{{- define "slipstream.engineImage" -}}
{{- include "slipstream.image" (dict "root" . "image" .Values.images.engine "variant" .Values.images.engine.variant) -}}
{{- end -}}

{{/* Whether targets have vLLM's engine: config.target.engine is its name, or its name with arguments. */}}
{{- define "slipstream.vllm" -}}
{{- $engine := default "ours" (default dict .Values.config.target).engine -}}
{{- if or (kindIs "map" $engine) (eq (toString $engine) "vllm") -}}
true
{{- end -}}
{{- end -}}

{{- define "slipstream.targetImage" -}}
{{- if include "slipstream.vllm" . -}}
{{- include "slipstream.image" (dict "root" . "image" .Values.images.vllm "variant" "vllm") -}}
{{- else -}}
{{- include "slipstream.engineImage" . -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.routerImage" -}}
{{- include "slipstream.image" (dict "root" . "image" .Values.images.router "variant" "router") -}}
{{- end -}}

{{/* The ports of all roles. Those of targets and drafts differ from the defaults outside Kubernetes (8051, 8052). They must
     not change: during a rollout pods of the old and of the new release could not reach each other. */}}
{{- define "slipstream.ports" -}}
router: {http: 8000, grpc: 8001, metrics: 9100}
target: {grpc: 50051, metrics: 9101}
draft: {grpc: 50052, metrics: 9102}
{{- end -}}

{{/* Where peers find a service: its EndpointSlices, or its pods by name; takes root, role and name. */}}
{{- define "slipstream.address" -}}
{{- $port := (index (include "slipstream.ports" . | fromYaml) .role).grpc -}}
{{- if .root.Values.discovery.enabled -}}
kubernetes:///{{ .name }}.{{ .root.Release.Namespace }}:{{ $port }}
{{- else -}}
{{ .name }}.{{ .root.Release.Namespace }}.svc:{{ $port }}
{{- end -}}
{{- end -}}

{{/* The name of the LeaderWorkerSet of targets of several pods. It must differ from the targets' Service: a LeaderWorkerSet
     creates a Service of its own name, through which pods find each other before they are ready, unless one exists. */}}
{{- define "slipstream.groupName" -}}
{{ include "slipstream.fullname" . }}-targets
{{- end -}}

{{/* The object that has the targets' replicas, as JSON. */}}
{{- define "slipstream.scaled" -}}
{{- if include "slipstream.grouped" (dict "root" . "role" "target") -}}
{{- dict "apiVersion" "leaderworkerset.x-k8s.io/v1" "kind" "LeaderWorkerSet" "name" (include "slipstream.groupName" .) | toJson -}}
{{- else -}}
{{- dict "apiVersion" "apps/v1" "kind" "Deployment" "name" (printf "%s-target" (include "slipstream.fullname" .)) | toJson -}}
{{- end -}}
{{- end -}}

{{/* The drafts that a pool runs; takes root and pool. Shares first, at least one pod each; the others split the rest. */}}
{{- define "slipstream.poolReplicas" -}}
{{- $total := int .root.Values.draft.replicas -}}
{{- $shared := 0 -}}
{{- $others := list -}}
{{- range .root.Values.draft.pools -}}
{{- if .share -}}
{{- $shared = add $shared (include "slipstream.shareReplicas" (dict "total" $total "share" .share) | int) -}}
{{- else -}}
{{- $others = append $others .name -}}
{{- end -}}
{{- end -}}
{{- if .pool.share -}}
{{- include "slipstream.shareReplicas" (dict "total" $total "share" .pool.share) -}}
{{- else -}}
{{- $rest := max 0 (sub $total $shared) | int -}}
{{- $mine := div $rest (len $others) -}}
{{- range $number, $name := $others -}}
{{- if and (eq $name $.pool.name) (lt $number (mod $rest (len $others) | int)) -}}
{{- $mine = add1 $mine -}}
{{- end -}}
{{- end -}}
{{- $mine -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.shareReplicas" -}}
{{- if .total -}}
{{- max 1 (divf (mulf .total .share) 100 | ceil | int) -}}
{{- else -}}
0
{{- end -}}
{{- end -}}

{{/* "yes" where an optional kind is wanted: takes root, wanted (auto, always, never) and kind (group/version). */}}
{{- define "slipstream.wanted" -}}
{{- if or (eq .wanted "always") (and (eq .wanted "auto") (.root.Capabilities.APIVersions.Has .kind)) -}}
yes
{{- end -}}
{{- end -}}

{{- define "slipstream.policyVersion" -}}
{{- ternary "policy/v1" "policy/v1beta1" (and (.Capabilities.APIVersions.Has "policy/v1") (semverCompare ">=1.21-0" .Capabilities.KubeVersion.Version)) -}}
{{- end -}}

{{- define "slipstream.autoscalingVersion" -}}
{{- ternary "autoscaling/v2" "autoscaling/v2beta2" (and (.Capabilities.APIVersions.Has "autoscaling/v2") (semverCompare ">=1.23-0" .Capabilities.KubeVersion.Version)) -}}
{{- end -}}

{{- define "slipstream.tlsSecret" -}}
{{- default (printf "%s-%s-tls" (include "slipstream.fullname" .root) .role) .root.Values.tls.existingSecret -}}
{{- end -}}
