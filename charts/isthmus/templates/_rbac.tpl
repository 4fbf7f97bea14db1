{{/*
What a role may do with the API server: each rule is there only with its feature. With `kubernetes.namespaces.only` the rules for
what is in namespaces are in Roles, without it in the ClusterRole.
*/}}

{{/* Services, and what is behind them. */}}
{{- define "isthmus.role.services" -}}
- apiGroups: [""]
  resources: [services, pods]
  verbs: [list, watch]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
{{- end }}

{{/* Gateways of networks. */}}
{{- define "isthmus.role.gateways" -}}
{{- if (include "isthmus.role.features" . | fromJson).gateways }}
- apiGroups: [gateway.networking.k8s.io]
  resources: [gateways]
  verbs: [list, watch]
{{- end }}
{{- end }}

{{/* Marks of services. */}}
{{- define "isthmus.role.marks" -}}
{{- $features := include "isthmus.role.features" . | fromJson }}
- apiGroups: [multicluster.x-k8s.io]
  resources: [serviceexports, serviceimports]
  verbs: [list, watch]
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

{{/* Rules of the mesh for services: their subsets, and where mTLS is off. */}}
{{- define "isthmus.role.destinationRules" -}}
{{- if (include "isthmus.role.features" . | fromJson).destinationRules }}
- apiGroups: [networking.istio.io]
  resources: [destinationrules]
  verbs: [list, watch]
- apiGroups: [security.istio.io]
  resources: [peerauthentications]
  verbs: [list, watch]
{{- end }}
{{- end }}

{{/* Services and workloads outside of Kubernetes, which are only counted with `destinationRules` alone. */}}
{{- define "isthmus.role.serviceEntries" -}}
{{- if (include "isthmus.role.features" . | fromJson).serviceEntries }}
- apiGroups: [networking.istio.io]
  resources: [serviceentries, workloadentries]
  verbs: [list, watch]
{{- end }}
{{- end }}

{{/* Gateways and routes of the Gateway API, and their status. */}}
{{- define "isthmus.role.gatewayApi" -}}
{{- if (include "isthmus.role.features" . | fromJson).gatewayApi }}
- apiGroups: [gateway.networking.k8s.io]
  resources: [gateways, listenersets, tlsroutes, tcproutes]
  verbs: [get, list, watch]
- apiGroups: [gateway.networking.k8s.io]
  resources: [referencegrants]
  verbs: [list, watch]
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
{{- $features := include "isthmus.role.features" . | fromJson }}
{{- if $features.wds }}
{{- if $features.only }}
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
{{- end }}
- apiGroups: [authentication.k8s.io]
  resources: [tokenreviews]
  verbs: [create]
- apiGroups: [security.istio.io]
  resources: [authorizationpolicies, peerauthentications]
  verbs: [list, watch]
- apiGroups: [gateway.networking.k8s.io]
  resources: [gateways]
  verbs: [list, watch]
{{- end }}
{{- end }}

{{/* Gateways as waypoints of services, which HBONE callers are connected to; they may be in any namespace. */}}
{{- define "isthmus.role.waypoints" -}}
{{- $features := include "isthmus.role.features" . | fromJson }}
{{- if and $features.waypoints (not $features.wds) (or $features.only (not $features.gateways)) }}
- apiGroups: [gateway.networking.k8s.io]
  resources: [gateways]
  verbs: [list, watch]
{{- end }}
{{- end }}

{{/* What the ClusterRole has of the registry. */}}
{{- define "isthmus.role.cluster" -}}
{{- $features := include "isthmus.role.features" . | fromJson -}}
- apiGroups: [""]
  resources: [namespaces, nodes]
  verbs: [list, watch]
{{- if $features.gatewayApi }}
- apiGroups: [gateway.networking.k8s.io]
  resources: [gatewayclasses]
  verbs: [get, list, watch]
- apiGroups: [gateway.networking.k8s.io]
  resources: [gatewayclasses/status]
  verbs: [patch]
{{- end }}
{{- include "isthmus.role.wds" . }}
{{- include "isthmus.role.waypoints" . }}
{{- if not $features.only }}
{{ include "isthmus.role.services" . }}
{{- include "isthmus.role.gateways" . }}
{{- include "isthmus.role.marks" . }}
{{- include "isthmus.role.destinationRules" . }}
{{- include "isthmus.role.serviceEntries" . }}
{{- include "isthmus.role.gatewayApi" . }}
{{- end }}
{{- end }}

{{/* A Role or ClusterRole and its binding to the service account of a role: `dict "scope" … "name" … "namespace" … "rules" …`. */}}
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
  {{- .rules | nindent 2 }}
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
