{{/* Values that contradict each other: each is refused with a sentence that names the value and what to do. */}}

{{- define "slipstream.checks" -}}
{{- include "slipstream.checks.name" . -}}
{{- include "slipstream.checks.tls" . -}}
{{- include "slipstream.checks.model" . -}}
{{- include "slipstream.checks.scaling" . -}}
{{- include "slipstream.checks.pools" . -}}
{{- include "slipstream.checks.drain" . -}}
{{- end -}}

{{/* Helm lets a release be called 70b or llama-3.1; the API server no Service. */}}
{{- define "slipstream.checks.name" -}}
{{- $name := include "slipstream.fullname" . -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the names of Services begin with %q, and may only have small letters, digits and hyphens, a letter first: set fullnameOverride, or give the release another name" $name) -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.checks.tls" -}}
{{- with .Values.tls -}}
{{- if and .enabled .insecurePlaintext -}}
{{- fail "tls.insecurePlaintext is true but tls.enabled is true too: set one of them to false" -}}
{{- end -}}
{{- if and .enabled (not .existingSecret) (not .certManager.enabled) -}}
{{- fail "tls.enabled is true but there are no certificates: set tls.existingSecret or tls.certManager.enabled, or, for plain text between the pods, tls.enabled=false and tls.insecurePlaintext=true" -}}
{{- end -}}
{{- if and .enabled .existingSecret .certManager.enabled -}}
{{- fail (printf "tls.existingSecret is %q but tls.certManager.enabled is true: choose one of them" .existingSecret) -}}
{{- end -}}
{{- if and .certManager.enabled (not .enabled) -}}
{{- fail "tls.certManager.enabled is true but tls.enabled is false: set both or neither" -}}
{{- end -}}
{{- if and .certManager.enabled (not .certManager.issuerName) -}}
{{- fail "tls.certManager.issuerName is empty: name the issuer that signs for this namespace" -}}
{{- end -}}
{{- if and (not .enabled) .allowedNames -}}
{{- fail "tls.allowedNames is set but tls.enabled is false: names are checked by TLS alone" -}}
{{- end -}}
{{- if and (not .enabled) (not .insecurePlaintext) -}}
{{- fail "tls.enabled is false: to let the pods speak in plain text, say so with tls.insecurePlaintext=true" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.checks.model" -}}
{{- with .Values.model -}}
{{- if and .claim.existing .claim.create -}}
{{- fail (printf "model.claim.existing is %q but model.claim.create is true: choose one of them" .claim.existing) -}}
{{- end -}}
{{- $known := $.Files.Get "files/models.yaml" | fromYamlArray -}}
{{- if and .prepare (not (has .path $known)) -}}
{{- fail (printf "model.prepare is true but model.path is %q, and the image has no model but %s to prepare: set model.prepare=false, and model.claim.existing to a claim with a folder %s" .path (join ", " $known) .path) -}}
{{- end -}}
{{- if and (not .prepare) (not .claim.existing) (not .claim.create) -}}
{{- fail "model.prepare is false and model.claim names no volume: set model.claim.existing to the claim that holds the model, or model.prepare=true" -}}
{{- end -}}
{{- if and .prepare (not .claim.existing) (eq $.Values.images.engine.variant "cuda") -}}
{{- fail "model.prepare is true but images.engine.variant is \"cuda\", whose image holds no model to prepare: set model.claim.existing to a claim that holds the model and model.prepare=false, or images.engine.variant=cpu" -}}
{{- end -}}
{{- end -}}
{{- $model := default dict .Values.config.model -}}
{{- $vllm := include "slipstream.vllm" . -}}
{{- if and (not $vllm) (hasPrefix "cuda" (default "cpu" $model.device)) (eq .Values.images.engine.variant "cpu") -}}
{{- fail (printf "config.model.device is %q but images.engine.variant is \"cpu\": set images.engine.variant=cuda" $model.device) -}}
{{- end -}}
{{- $nodes := int .Values.target.nodes -}}
{{- if and (gt $nodes 1) (not $vllm) -}}
{{- fail (printf "target.nodes is %d but config.target.engine is not vllm: our own engine has the GPUs of one node" $nodes) -}}
{{- end -}}
{{- $engine := default dict (default dict .Values.config.target).engine -}}
{{- $stages := ternary (get (default dict (get (ternary $engine dict (kindIs "map" $engine)) "vllm")) "pipeline_parallel_size") 1 (kindIs "map" $engine) -}}
{{- $all := mul (int (default 1 $model.tensor_parallel)) (int (default 1 $stages)) -}}
{{- if ne (mod $all $nodes) 0 -}}
{{- fail (printf "target.nodes is %d, among which %d ranks (config.model.tensor_parallel by vLLM's pipeline_parallel_size) cannot be shared evenly" $nodes $all) -}}
{{- end -}}
{{- if and (gt (int (default 1 $stages)) 1) (gt (int .Values.draft.replicas) 0) -}}
{{- fail (printf "pipeline_parallel_size is %d, which vLLM cannot do with drafts: use config.model.tensor_parallel, or set draft.replicas=0" (int $stages)) -}}
{{- end -}}
{{- $ranks := div $all $nodes | int -}}
{{- $gpus := get (default dict (default dict .Values.target.resources).limits) "nvidia.com/gpu" -}}
{{- if and (hasPrefix "cuda" (default "cpu" $model.device)) (gt $all 1) $gpus (ne (int $gpus) $ranks) -}}
{{- fail (printf "config.model.tensor_parallel is %d but target.resources.limits has %d of nvidia.com/gpu: give a target's pod as many GPUs as share its part of the model (%d)" (int (default 1 $model.tensor_parallel)) (int $gpus) $ranks) -}}
{{- end -}}
{{- if and (int $gpus) (not $vllm) (not (hasPrefix "cuda" (default "cpu" $model.device))) -}}
{{- fail (printf "target.resources.limits has %d of nvidia.com/gpu but config.model.device is \"cpu\", which leaves them idle: set config.model.device=cuda" (int $gpus)) -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.checks.scaling" -}}
{{- $auto := .Values.target.autoscaling -}}
{{- $on := or $auto.hpa.enabled $auto.keda.enabled -}}
{{- if and $auto.hpa.enabled $auto.keda.enabled -}}
{{- fail "target.autoscaling.hpa.enabled and target.autoscaling.keda.enabled are both true: two scalers would fight, choose one" -}}
{{- end -}}
{{- if and $auto.keda.enabled (not $auto.keda.serverAddress) -}}
{{- fail "target.autoscaling.keda.serverAddress is empty: give the address of a Prometheus, as in http://prometheus.monitoring:9090" -}}
{{- end -}}
{{- if gt (int $auto.minReplicas) (int $auto.maxReplicas) -}}
{{- fail (printf "target.autoscaling.minReplicas is %d but maxReplicas is %d" (int $auto.minReplicas) (int $auto.maxReplicas)) -}}
{{- end -}}
{{- if not .Values.discovery.enabled -}}
{{- if $on -}}
{{- fail "target.autoscaling is on but discovery.enabled is false: routers would not see new targets, set discovery.enabled=true" -}}
{{- end -}}
{{- if gt (int .Values.target.replicas) 1 -}}
{{- fail (printf "target.replicas is %d but discovery.enabled is false: without it a router knows one target, set discovery.enabled=true" (int .Values.target.replicas)) -}}
{{- end -}}
{{- end -}}
{{- range $role := list "router" "target" "draft" -}}
{{- $strategy := (index $.Values $role).strategy -}}
{{- if and (has (toString $strategy.maxSurge) (list "0" "0%")) (has (toString $strategy.maxUnavailable) (list "0" "0%")) -}}
{{- fail (printf "%s.strategy: maxSurge and maxUnavailable are both 0, so no pod could ever be replaced" $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.checks.pools" -}}
{{- $names := list -}}
{{- $shares := 0 -}}
{{- $open := 0 -}}
{{- $cuda := false -}}
{{- range .Values.draft.pools -}}
{{- if has .name $names -}}
{{- fail (printf "draft.pools: the name %q is there twice" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- $name := printf "%s-draft-%s" (include "slipstream.fullname" $) .name -}}
{{- if gt (len $name) 63 -}}
{{- fail (printf "draft.pools: the pool %q makes the name %s, which has %d characters, and a Service's has 63 at most: give the pool a shorter name, or the release one with fullnameOverride" .name $name (len $name)) -}}
{{- end -}}
{{- $shares = add $shares (int (default 0 .share)) -}}
{{- if not .share -}}{{- $open = add1 $open -}}{{- end -}}
{{- $settings := include "slipstream.poolSettings" (dict "root" $ "pool" .) | fromYaml -}}
{{- if and (hasPrefix "cuda" (default "cpu" $settings.device)) (eq $.Values.images.engine.variant "cpu") -}}
{{- fail (printf "draft.pools: pool %q has the device %q but images.engine.variant is \"cpu\": set images.engine.variant=cuda" .name $settings.device) -}}
{{- end -}}
{{- $cuda = or $cuda (hasPrefix "cuda" (default "cpu" $settings.device)) -}}
{{- $drafter := default "auto" $settings.drafter -}}
{{- if and (eq $drafter "auto") (or .model $settings.token_map) -}}
{{- fail (printf "draft.pools: pool %q has a model or token_map but no drafter: say for which one with config.drafter" .name) -}}
{{- end -}}
{{- if and (eq $drafter "ngram") .model -}}
{{- fail (printf "draft.pools: pool %q has the model %q but its drafter is ngram, which needs none: set config.drafter or leave model empty" .name .model) -}}
{{- end -}}
{{- if and (not (has $drafter (list "auto" "ngram" "mtp"))) (not .model) -}}
{{- fail (printf "draft.pools: pool %q has the drafter %q but no model: set model to a folder of the volume" .name $drafter) -}}
{{- end -}}
{{- $claim := $.Values.model.claim -}}
{{- if and .model (ne .model $.Values.model.path) (not $claim.existing) (not $claim.create) -}}
{{- fail (printf "draft.pools: pool %q has the model %q but no claim holds it, and without one a pod has %s alone: set model.claim.existing to a claim with a folder for each" .name .model $.Values.model.path) -}}
{{- end -}}
{{- end -}}
{{- $gpus := get (default dict (default dict .Values.draft.resources).limits) "nvidia.com/gpu" -}}
{{- if and (int $gpus) .Values.draft.pools (not $cuda) -}}
{{- fail (printf "draft.resources.limits has %d of nvidia.com/gpu but no pool has the device cuda, which leaves them idle: set config.draft.device=cuda" (int $gpus)) -}}
{{- end -}}
{{- if gt (int $shares) 99 -}}
{{- fail (printf "draft.pools: the shares add up to %d per cent; leave some for a pool without a share" (int $shares)) -}}
{{- end -}}
{{- if and (not .Values.draft.pools) .Values.draft.replicas -}}
{{- fail (printf "draft.pools is empty but draft.replicas is %d: name a pool for them, or set draft.replicas=0 to decode without drafts" (int .Values.draft.replicas)) -}}
{{- end -}}
{{- if and .Values.draft.pools (eq (int $open) 0) -}}
{{- fail "draft.pools: every pool has a share; one without a share takes the rest" -}}
{{- end -}}
{{- range .Values.draft.pools -}}
{{- $replicas := include "slipstream.poolReplicas" (dict "root" $ "pool" .) | int -}}
{{- if and (gt (int $.Values.draft.replicas) 0) (lt $replicas 1) -}}
{{- fail (printf "draft.replicas is %d, which leaves none for the pool %q: raise it, or set it to 0 to decode without drafts" (int $.Values.draft.replicas) .name) -}}
{{- end -}}
{{- if and (gt $replicas 1) (not $.Values.discovery.enabled) -}}
{{- fail (printf "draft.replicas gives the pool %q %d pods but discovery.enabled is false: without it a target knows one of them, set discovery.enabled=true" .name $replicas) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Kubernetes kills a pod terminationGracePeriodSeconds after it asked it to end; preStop and drain count. */}}
{{- define "slipstream.checks.drain" -}}
{{- $defaults := include "slipstream.defaults" . | fromYaml -}}
{{- range $role := list "router" "target" -}}
{{- $drain := dig "drain_s" (index $defaults $role).drain_s (default dict (index $.Values.config $role)) -}}
{{- include "slipstream.checks.grace" (dict "role" $role "where" (printf "config.%s.drain_s" $role) "drain" $drain "pod" (index $.Values $role)) -}}
{{- end -}}
{{- include "slipstream.checks.grace" (dict "role" "draft" "where" "its time to stop" "drain" 2 "pod" .Values.draft) -}}
{{- end -}}

{{- define "slipstream.checks.grace" -}}
{{- $needed := addf (float64 .pod.preStopSeconds) (float64 .drain) 5 -}}
{{- if le (float64 .pod.terminationGracePeriodSeconds) $needed -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d, but preStopSeconds (%d) and %s (%v) and 5 s to close need more than %v: running answers would be killed" .role (int .pod.terminationGracePeriodSeconds) (int .pod.preStopSeconds) .where .drain $needed) -}}
{{- end -}}
{{- end -}}
