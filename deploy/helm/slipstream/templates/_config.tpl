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

{{/* The ports of targets and drafts differ from the defaults outside Kubernetes (8051, 8052). They must not change: during
     a rollout pods of the old and of the new release could not reach each other. */}}
{{- define "slipstream.config.router" -}}
{{- $name := include "slipstream.fullname" . -}}
{{- $own := dict
  "listen" (printf "%s:8000" .Values.bindAddress)
  "grpc_listen" (printf "%s:8001" .Values.bindAddress)
  "metrics_listen" (printf "%s:9100" .Values.bindAddress)
  "targets" (list (include "slipstream.address" (dict "root" . "name" (printf "%s-target" $name) "port" 50051))) -}}
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
{{- $drafts = append $drafts (include "slipstream.address" (dict "root" $ "name" (printf "%s-draft-%s" $name .name) "port" 50052)) -}}
{{- end -}}
{{- end -}}
{{- $own := dict
  "listen" (printf "%s:50051" .Values.bindAddress)
  "metrics_listen" (printf "%s:9101" .Values.bindAddress)
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
{{- $own := dict
  "listen" (printf "%s:50052" .root.Values.bindAddress)
  "metrics_listen" (printf "%s:9102" .root.Values.bindAddress) -}}
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
