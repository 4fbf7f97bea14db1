{{/*
What a role may do with the API server: each rule is there only with its feature. With `kubernetes.namespaces.only` the rules for
what is in namespaces are in Roles, without it in the ClusterRole. Several features need some of these rights: a right is always
asked for by the same rule, and `isthmus.rules` leaves each rule in one place.
*/}}

{{/* Rules, each once, without those of another text: `dict "rules" … "except" …`. */}}
{{- define "isthmus.rules" -}}
{{- $except := regexSplit "\\s*- apiGroups: " (trim .except) -1 }}
{{- range $rule := regexSplit "\\s*- apiGroups: " (trim .rules) -1 | uniq }}
{{- if and $rule (not (has $rule $except)) }}
- apiGroups: {{ $rule }}
{{- end }}
{{- end }}
{{- end }}

{{/* Reading kinds of a group: `list GROUP KIND…`. */}}
{{- define "isthmus.reads" -}}
{{- $group := first . }}
{{- range $kind := rest . }}
- apiGroups: [{{ $group | quote }}]
  resources: [{{ $kind }}]
  verbs: [list, watch]
{{- end }}
{{- end }}

{{/* What every registry reads of a cluster as a whole. */}}
{{- define "isthmus.reads.cluster" -}}
{{- include "isthmus.reads" (list "" "namespaces" "nodes") }}
{{- end }}

{{/* Services, and what is behind them. */}}
{{- define "isthmus.reads.services" -}}
{{- include "isthmus.reads" (list "" "services" "pods") }}
{{- include "isthmus.reads" (list "discovery.k8s.io" "endpointslices") }}
{{- end }}

{{/* Gateways of networks, and waypoints. */}}
{{- define "isthmus.reads.gateways" -}}
{{- include "isthmus.reads" (list "gateway.networking.k8s.io" "gateways") }}
{{- end }}

{{/* Classes of Gateways, which say the traffic of their waypoints. */}}
{{- define "isthmus.reads.classes" -}}
{{- include "isthmus.reads" (list "gateway.networking.k8s.io" "gatewayclasses") }}
{{- end }}

{{/* Marks of services. */}}
{{- define "isthmus.reads.marks" -}}
{{- include "isthmus.reads" (list "multicluster.x-k8s.io" "serviceexports" "serviceimports") }}
{{- end }}

{{/* Rules of the mesh for services: their subsets, and where mTLS is off. */}}
{{- define "isthmus.reads.destinationRules" -}}
{{- include "isthmus.reads" (list "networking.istio.io" "destinationrules") }}
{{- include "isthmus.reads" (list "security.istio.io" "peerauthentications") }}
{{- end }}

{{/* Services and workloads outside of Kubernetes. */}}
{{- define "isthmus.reads.serviceEntries" -}}
{{- include "isthmus.reads" (list "networking.istio.io" "serviceentries" "workloadentries") }}
{{- end }}

{{/* The numbers of replicas of workloads. */}}
{{- define "isthmus.reads.replicas" -}}
{{- include "isthmus.reads" (list "apps" "deployments" "statefulsets") }}
{{- end }}

{{/* All that a registry of another cluster may read. */}}
{{- define "isthmus.reads.all" -}}
{{- include "isthmus.reads.cluster" . }}
{{- include "isthmus.reads.services" . }}
{{- include "isthmus.reads.gateways" . }}
{{- include "isthmus.reads.classes" . }}
{{- include "isthmus.reads.marks" . }}
{{- include "isthmus.reads.destinationRules" . }}
{{- include "isthmus.reads.serviceEntries" . }}
{{- if .Values.kubernetes.replicas }}
{{- include "isthmus.reads.replicas" . }}
{{- end }}
{{- end }}

{{/* Gateways of networks. */}}
{{- define "isthmus.role.gateways" -}}
{{- if (include "isthmus.role.features" . | fromJson).gateways }}
{{- include "isthmus.reads.gateways" . }}
{{- end }}
{{- end }}

{{/* Marks of services. */}}
{{- define "isthmus.role.marks" -}}
{{- $features := include "isthmus.role.features" . | fromJson }}
{{- include "isthmus.reads.marks" . }}
{{- if $features.leader }}
- apiGroups: [multicluster.x-k8s.io]
  resources: [serviceexports/status]
  verbs: [patch]
{{- end }}
{{- if $features.imports }}
- apiGroups: [multicluster.x-k8s.io]
  resources: [serviceimports]
  verbs: [get, create, patch, delete]
- apiGroups: [multicluster.x-k8s.io]
  resources: [serviceimports/status]
  verbs: [patch]
{{- end }}
{{- if and $features.imports (or $features.slices $features.derivedServices) }}
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, create, patch, delete]
{{- end }}
{{- if and $features.imports $features.derivedServices }}
- apiGroups: [""]
  resources: [services]
  verbs: [get, create, patch, delete]
{{- end }}
{{- end }}

{{/* Rules of the mesh for services. */}}
{{- define "isthmus.role.destinationRules" -}}
{{- if (include "isthmus.role.features" . | fromJson).destinationRules }}
{{- include "isthmus.reads.destinationRules" . }}
{{- end }}
{{- end }}

{{/* Services and workloads outside of Kubernetes, which are only counted with `destinationRules` alone. */}}
{{- define "isthmus.role.serviceEntries" -}}
{{- if (include "isthmus.role.features" . | fromJson).serviceEntries }}
{{- include "isthmus.reads.serviceEntries" . }}
{{- end }}
{{- end }}

{{/* The numbers of replicas of workloads. */}}
{{- define "isthmus.role.replicas" -}}
{{- if (include "isthmus.role.features" . | fromJson).replicas }}
{{- include "isthmus.reads.replicas" . }}
{{- end }}
{{- end }}

{{/* Gateways and routes of the Gateway API, and their status. */}}
{{- define "isthmus.role.gatewayApi" -}}
{{- if (include "isthmus.role.features" . | fromJson).gatewayApi }}
{{- include "isthmus.reads.gateways" . }}
{{- include "isthmus.reads" (list "gateway.networking.k8s.io" "listenersets" "tlsroutes" "tcproutes" "referencegrants") }}
- apiGroups: [gateway.networking.k8s.io]
  resources: [gateways, listenersets, tlsroutes, tcproutes]
  verbs: [get]
- apiGroups: [gateway.networking.k8s.io]
  resources: [gateways/status, listenersets/status, tlsroutes/status, tcproutes/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end }}
{{- end }}

{{/*
What ztunnels need of the cluster: their tokens are reviewed, policies pass through, and Gateways are waypoints. The WDS server
reads all namespaces.
*/}}
{{- define "isthmus.role.wds" -}}
{{- if (include "isthmus.role.features" . | fromJson).wds }}
{{- include "isthmus.reads" (list "" "pods") }}
{{- include "isthmus.reads" (list "security.istio.io" "authorizationpolicies" "peerauthentications") }}
{{- include "isthmus.reads.gateways" . }}
{{- include "isthmus.reads.classes" . }}
- apiGroups: [authentication.k8s.io]
  resources: [tokenreviews]
  verbs: [create]
{{- end }}
{{- end }}

{{/* Gateways as waypoints of services, which HBONE callers are connected to; they may be in any namespace. */}}
{{- define "isthmus.role.waypoints" -}}
{{- if (include "isthmus.role.features" . | fromJson).waypoints }}
{{- include "isthmus.reads.gateways" . }}
{{- include "isthmus.reads.classes" . }}
{{- end }}
{{- end }}

{{/* What the ClusterRole has of the registry. */}}
{{- define "isthmus.role.cluster" -}}
{{- $features := include "isthmus.role.features" . | fromJson -}}
{{- include "isthmus.reads.cluster" . }}
{{- if $features.gatewayApi }}
{{- include "isthmus.reads.classes" . }}
- apiGroups: [gateway.networking.k8s.io]
  resources: [gatewayclasses]
  verbs: [get]
- apiGroups: [gateway.networking.k8s.io]
  resources: [gatewayclasses/status]
  verbs: [patch]
{{- end }}
{{- include "isthmus.role.wds" . }}
{{- include "isthmus.role.waypoints" . }}
{{- if not $features.only }}
{{- include "isthmus.reads.services" . }}
{{- include "isthmus.role.gateways" . }}
{{- include "isthmus.role.marks" . }}
{{- include "isthmus.role.destinationRules" . }}
{{- include "isthmus.role.serviceEntries" . }}
{{- include "isthmus.role.replicas" . }}
{{- include "isthmus.role.gatewayApi" . }}
{{- end }}
{{- end }}

{{/*
A Role or ClusterRole and its binding to the service account of a role: `dict "scope" … "name" … "namespace" … "rules" … "except" …`,
where `except` are rules that the account has elsewhere.
*/}}
{{- define "isthmus.grant" -}}
{{- $root := .scope.root -}}
{{- $kind := ternary "Role" "ClusterRole" (hasKey . "namespace") -}}
{{- $namespace := .namespace }}
{{- $name := .name }}
{{- $scope := .scope }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}
metadata:
  name: {{ $name }}
  {{- with $namespace }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- include "isthmus.role.labels" $scope | nindent 4 }}
  {{- with $root.Values.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
rules:
  {{- include "isthmus.rules" (dict "rules" .rules "except" (.except | default "")) | trim | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}Binding
metadata:
  name: {{ $name }}
  {{- with $namespace }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- include "isthmus.role.labels" $scope | nindent 4 }}
  {{- with $root.Values.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ $kind }}
  name: {{ $name }}
subjects:
  - kind: ServiceAccount
    name: {{ include "isthmus.role.serviceAccount" $scope }}
    namespace: {{ $root.Release.Namespace }}
{{- end }}
