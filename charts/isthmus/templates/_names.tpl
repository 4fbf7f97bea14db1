{{/*
Names and labels. A template that takes a role gets `dict "root" $ "role" "gateway"` (or "aggregator").
*/}}

{{- define "isthmus.name" -}}
{{- .Values.name | default .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end }}

{{/* The name of a role's objects: the gateway has the plain one, as with Istio's chart. */}}
{{- define "isthmus.role.name" -}}
{{- include "isthmus.name" .root }}{{ if eq .role "aggregator" }}-aggregator{{ end -}}
{{- end }}

{{/* The values of a role: the gateway's are at the top level. */}}
{{- define "isthmus.role.values" -}}
{{- if eq .role "aggregator" }}{{ toJson .root.Values.aggregator }}{{ else }}{{ toJson .root.Values }}{{ end -}}
{{- end }}

{{/* What pods are selected by: `app` and `istio`, as with Istio's chart. */}}
{{- define "isthmus.role.selector" -}}
{{- $name := include "isthmus.role.name" . -}}
{{- if eq .role "aggregator" -}}
app: {{ $name | quote }}
istio: {{ $name | trimPrefix "istio-" | quote }}
{{- else -}}
app: {{ .root.Values.labels.app | default $name | quote }}
istio: {{ .root.Values.labels.istio | default ($name | trimPrefix "istio-") | quote }}
{{- end }}
{{- end }}

{{/* Labels of all objects of the release. */}}
{{- define "isthmus.labels" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
app.kubernetes.io/part-of: isthmus
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with omit .Values.labels "app" "istio" }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels of the objects of a role. */}}
{{- define "isthmus.role.labels" -}}
{{ include "isthmus.role.selector" . }}
app.kubernetes.io/name: {{ include "isthmus.role.name" . | quote }}
{{ include "isthmus.labels" .root }}
{{- end }}

{{/* Name, namespace, labels and annotations of an object that has the name of its role. */}}
{{- define "isthmus.role.metadata" -}}
name: {{ include "isthmus.role.name" . }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "isthmus.role.labels" . | nindent 2 }}
{{- with .root.Values.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "isthmus.role.serviceAccount" -}}
{{- $account := (include "isthmus.role.values" . | fromJson).serviceAccount -}}
{{- if $account.create -}}
{{- $account.name | default (include "isthmus.role.name" .) -}}
{{- else -}}
{{- required "serviceAccount.name is empty, and serviceAccount.create is false: name a service account that exists" $account.name -}}
{{- end }}
{{- end }}

{{/* The Leases of the replicas that write to the API server: one of each for all releases of a namespace, but of the Gateway API one for each class. */}}
{{- define "isthmus.leases" -}}
{{- $features := include "isthmus.role.features" . | fromJson -}}
{{- $leases := list -}}
{{- if $features.leader }}{{ $leases = append $leases "isthmus-service-exports" }}{{ end -}}
{{- if $features.imports }}{{ $leases = append $leases "isthmus-service-imports" }}{{ end -}}
{{- if $features.gatewayApi }}{{ $leases = append $leases (printf "isthmus-gateway-api-%s" .root.Values.kubernetes.gatewayApi.class) }}{{ end -}}
{{- join ", " $leases -}}
{{- end }}

{{- define "isthmus.image" -}}
{{- $image := .Values.image -}}
{{- $repository := required "image.repository is empty: no image of Isthmus is published; build examples/docker/Dockerfile, push it, and name it here" $image.repository -}}
{{- if $image.digest -}}
{{ $repository }}@{{ $image.digest }}
{{- else -}}
{{ $repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{/* The roles of the release, as a JSON object with a list. */}}
{{- define "isthmus.roles" -}}
{{- $roles := list -}}
{{- if .Values.roles.gateway }}{{ $roles = append $roles "gateway" }}{{ end -}}
{{- if .Values.roles.aggregator }}{{ $roles = append $roles "aggregator" }}{{ end -}}
{{- dict "list" $roles | toJson -}}
{{- end }}

{{/* What a role does with the API server, as a JSON object of booleans; RBAC, tokens and registries follow from it. */}}
{{- define "isthmus.role.features" -}}
{{- $values := include "isthmus.role.values" . | fromJson -}}
{{- $kubernetes := .root.Values.kubernetes -}}
{{- $registry := $kubernetes.enabled -}}
{{- if eq .role "aggregator" }}{{ $registry = and $kubernetes.enabled $values.kubernetes }}{{ end -}}
{{- $only := and $registry (gt (len $kubernetes.namespaces.only) 0) -}}
{{- $secrets := $values.remoteClusters.watch.enabled -}}
{{- dict
      "registry" $registry
      "only" $only
      "gateways" (and $registry $kubernetes.gateways.enabled)
      "destinationRules" (and $registry $kubernetes.destinationRules)
      "serviceEntries" (and $registry (or $kubernetes.serviceEntries $kubernetes.destinationRules))
      "replicas" (and $registry $kubernetes.replicas)
      "meshConfig" (and $registry $kubernetes.meshConfig)
      "leader" (and $registry $kubernetes.serviceExports.conditions)
      "imports" (and $registry $kubernetes.serviceImports.write)
      "slices" (and $registry $kubernetes.serviceImports.slices)
      "derivedServices" (and $registry $kubernetes.serviceImports.derivedServices)
      "gatewayApi" (and $registry (eq .role "gateway") (ne $kubernetes.gatewayApi.class ""))
      "wds" (and $registry (ne (dig "xds" "wds" "" (default dict $values.config) | toString) ""))
      "waypoints" (and $registry (eq .role "gateway") .root.Values.hbone.enabled)
      "secrets" $secrets
      "token" (or $registry $secrets)
    | toJson -}}
{{- end }}

{{/* Where the certificate of a role comes from: none, istioCa, secret or workloadApi. */}}
{{- define "isthmus.role.identity" -}}
{{- $source := .root.Values.identity.source -}}
{{- if eq $source "auto" -}}
{{- if or (eq .role "aggregator") .root.Values.hbone.enabled }}istioCa{{ else }}none{{ end -}}
{{- else -}}
{{- $source -}}
{{- end }}
{{- end }}

{{/* Data-plane threads: `workers`, else the CPU request, rounded up. */}}
{{- define "isthmus.role.workers" -}}
{{- $values := include "isthmus.role.values" . | fromJson -}}
{{- $workers := $values.workers | toString -}}
{{- if $workers -}}
{{- $workers -}}
{{- else -}}
{{- $cpu := dig "requests" "cpu" "" $values.resources | toString -}}
{{- if not $cpu -}}
auto
{{- else if hasSuffix "m" $cpu -}}
{{- max 1 (divf (trimSuffix "m" $cpu | float64) 1000.0 | ceil | int) -}}
{{- else -}}
{{- max 1 ($cpu | float64 | ceil | int) -}}
{{- end }}
{{- end }}
{{- end }}

{{/* The ports of the gateway's Service, in the order of Istio's chart: what a load balancer checks comes first. */}}
{{- define "isthmus.gateway.ports" -}}
{{- $ports := list (dict "name" "status-port" "port" 15021 "targetPort" 15021) -}}
{{- if .Values.sni.enabled -}}
{{- $ports = append $ports (dict "name" "tls" "port" 15443 "targetPort" (int .Values.sni.containerPort)) -}}
{{- end -}}
{{- if or .Values.istiod.passthrough (and .Values.sni.enabled .Values.networkGateway) -}}
{{- $ports = append $ports (dict "name" "tls-istiod" "port" 15012 "targetPort" 15012) -}}
{{- $ports = append $ports (dict "name" "tls-webhook" "port" 15017 "targetPort" 15017) -}}
{{- end -}}
{{- if .Values.hbone.enabled -}}
{{- $ports = append $ports (dict "name" "mesh" "port" 15008 "targetPort" (int .Values.hbone.containerPort)) -}}
{{- end -}}
{{- if (include "isthmus.role.features" (dict "root" . "role" "gateway") | fromJson).gatewayApi -}}
{{- range .Values.kubernetes.gatewayApi.ports -}}
{{- $ports = append $ports (dict "name" (printf "gateway-%d" (int .)) "port" (int .) "targetPort" (int .)) -}}
{{- end -}}
{{- end -}}
{{- range .Values.service.extraPorts -}}
{{- $ports = append $ports (dict "name" .name "port" (int .port) "targetPort" (int (.targetPort | default .port))) -}}
{{- end -}}
{{- dict "list" $ports | toJson -}}
{{- end }}

{{/* The ports that a role's container listens on: number by name. */}}
{{- define "isthmus.role.containerPorts" -}}
{{- $root := .root -}}
{{- $ports := list (dict "name" "status-port" "containerPort" 15021) (dict "name" "metrics" "containerPort" 15020) -}}
{{- if eq .role "aggregator" -}}
{{- $ports = append $ports (dict "name" "xds" "containerPort" (int $root.Values.aggregator.xds.port)) -}}
{{- else -}}
{{- if $root.Values.sni.enabled }}{{ $ports = append $ports (dict "name" "tls" "containerPort" (int $root.Values.sni.containerPort)) }}{{ end -}}
{{- if $root.Values.istiod.passthrough -}}
{{- $ports = append $ports (dict "name" "tls-istiod" "containerPort" 15012) -}}
{{- $ports = append $ports (dict "name" "tls-webhook" "containerPort" 15017) -}}
{{- end -}}
{{- if $root.Values.hbone.enabled }}{{ $ports = append $ports (dict "name" "mesh" "containerPort" (int $root.Values.hbone.containerPort)) }}{{ end -}}
{{- if (include "isthmus.role.features" . | fromJson).gatewayApi -}}
{{- range $root.Values.kubernetes.gatewayApi.ports }}{{ $ports = append $ports (dict "name" (printf "gateway-%d" (int .)) "containerPort" (int .)) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- dict "list" $ports | toJson -}}
{{- end }}
