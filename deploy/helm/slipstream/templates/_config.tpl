{{/* The configuration file of each role: the user's settings, overridden by what follows from the chart's own values.
     A role gets only the sections that it reads, so that a change restarts only the pods that it concerns. */}}

{{- define "slipstream.defaults" -}}
{{- .Files.Get "files/defaults.yaml" -}}
{{- end -}}

{{/* Sections that all roles read; takes root, plaintext and client (the role that calls this one, "" for none). */}}
{{- define "slipstream.config.shared" -}}
{{- $config := .root.Values.config -}}
{{- $wire := dict "insecure_allow_plaintext" .plaintext -}}
{{- if .root.Values.tls.enabled -}}
{{- $tls := dict "folder" "/etc/slipstream-tls" -}}
{{- if and .client .root.Values.tls.allowedNames -}}
{{- $_ := set $tls "allowed_names" .root.Values.tls.allowedNames -}}
{{- else if and .client .root.Values.tls.certManager.enabled -}}
{{- $_ := set $tls "allowed_names" (list (printf "%s-%s.%s.svc" (include "slipstream.fullname" .root) .client .root.Release.Namespace)) -}}
{{- end -}}
{{- $_ := set $wire "tls" $tls -}}
{{- end -}}
{{- dict
  "model" (merge (dict "path" (printf "/models/%s" .root.Values.model.path)) (deepCopy (default dict $config.model)))
  "wire" (merge $wire (deepCopy (default dict $config.wire)))
  "log" (default dict $config.log)
  | toYaml -}}
{{- end -}}

{{- define "slipstream.config.router" -}}
{{- $name := include "slipstream.fullname" . -}}
{{- $ports := (include "slipstream.ports" . | fromYaml).router -}}
{{- $own := dict
  "listen" (printf "%s:%v" .Values.bindAddress $ports.http)
  "grpc_listen" (printf "%s:%v" .Values.bindAddress $ports.grpc)
  "metrics_listen" (printf "%s:%v" .Values.bindAddress $ports.metrics)
  "targets" (list (include "slipstream.address" (dict "root" . "role" "target" "name" (printf "%s-target" $name)))) -}}
{{- if .Values.router.apiKeys.existingSecret -}}
{{- $_ := set $own "api_keys_file" (printf "/etc/slipstream-keys/%s" .Values.router.apiKeys.key) -}}
{{- end -}}
{{- $config := include "slipstream.config.shared" (dict "root" . "plaintext" true "client" "") | fromYaml -}}
{{- $_ := set $config "router" (merge $own (deepCopy (default dict .Values.config.router))) -}}
{{- with (default dict .Values.config.target).policy -}}
{{- $_ := set $config "target" (dict "policy" .) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{- define "slipstream.config.target" -}}
{{- $name := include "slipstream.fullname" . -}}
{{- $drafts := list -}}
{{- $vllm := include "slipstream.vllm" . -}}
{{- if or (not $vllm) (gt (int .Values.draft.replicas) 0) -}}
{{- range .Values.draft.pools -}}
{{- $drafts = append $drafts (include "slipstream.address" (dict "root" $ "role" "draft" "name" (printf "%s-draft-%s" $name .name))) -}}
{{- end -}}
{{- end -}}
{{- $ports := (include "slipstream.ports" . | fromYaml).target -}}
{{- $own := dict
  "listen" (printf "%s:%v" .Values.bindAddress $ports.grpc)
  "metrics_listen" (printf "%s:%v" .Values.bindAddress $ports.metrics)
  "drafts" $drafts -}}
{{- $config := include "slipstream.config.shared" (dict "root" . "plaintext" (not .Values.tls.enabled) "client" "router") | fromYaml -}}
{{- $target := merge $own (deepCopy (default dict .Values.config.target)) -}}
{{- if include "slipstream.grouped" (dict "root" . "role" "target") -}}
{{- $arguments := ternary dict (default dict $target.engine) (kindIs "string" $target.engine) -}}
{{- $_ := set $target "engine" (dict "vllm" (merge (dict "nnodes" (int .Values.target.nodes) "distributed_executor_backend" "mp") (default dict $arguments.vllm))) -}}
{{- end -}}
{{- $_ := set $config "target" $target -}}
{{- with (default dict .Values.config.router).model_name -}}
{{- $_ := set $config "router" (dict "model_name" .) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* Takes root and pool. */}}
{{- define "slipstream.config.draft" -}}
{{- $ports := (include "slipstream.ports" . | fromYaml).draft -}}
{{- $own := dict
  "listen" (printf "%s:%v" .root.Values.bindAddress $ports.grpc)
  "metrics_listen" (printf "%s:%v" .root.Values.bindAddress $ports.metrics) -}}
{{- with .pool.model -}}
{{- $_ := set $own "model" (printf "/models/%s" .) -}}
{{- end -}}
{{- $config := include "slipstream.config.shared" (dict "root" .root "plaintext" (not .root.Values.tls.enabled) "client" "target") | fromYaml -}}
{{- $_ := set $config "draft" (merge $own (include "slipstream.poolSettings" . | fromYaml)) -}}
{{- toYaml $config -}}
{{- end -}}

{{/* What the user set for a pool: its own settings over those of all pools; takes root and pool. */}}
{{- define "slipstream.poolSettings" -}}
{{- mergeOverwrite (deepCopy (default dict .root.Values.config.draft)) (deepCopy (default dict .pool.config)) | toYaml -}}
{{- end -}}
