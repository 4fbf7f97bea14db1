{{/*
The config of a role: `isthmus.yaml` is what the chart writes, and includes `config.yaml`, which is `config` of the values.
*/}}

{{- define "isthmus.cluster" -}}
{{- printf "${ISTIO_META_CLUSTER_ID:-%s}" .Values.cluster -}}
{{- end }}

{{/* The parts of `config` that the templates read, as maps. A part without a value is empty, as in the file. */}}
{{- define "isthmus.role.readConfig" -}}
{{- $prefix := ternary "aggregator." "" (eq .role "aggregator") -}}
{{- $config := (include "isthmus.role.values" . | fromJson).config | default dict -}}
{{- $telemetry := $config.telemetry | default dict -}}
{{- if not (kindIs "map" $telemetry) -}}
{{- fail (printf "%sconfig.telemetry: found %s, expected a map such as {log: {format: json}}" $prefix (toJson $telemetry)) -}}
{{- end -}}
{{- $log := $telemetry.log | default dict -}}
{{- if not (kindIs "map" $log) -}}
{{- fail (printf "%sconfig.telemetry.log: found %s, expected a map such as {level: info, format: json}" $prefix (toJson $log)) -}}
{{- end -}}
{{- dict "config" $config "telemetry" $telemetry "log" $log | toJson -}}
{{- end }}

{{/* Refuses keys of `config` that the chart writes, with the value to set instead. */}}
{{- define "isthmus.role.checkConfig" -}}
{{- $prefix := ternary "aggregator." "" (eq .role "aggregator") -}}
{{- $read := include "isthmus.role.readConfig" . | fromJson -}}
{{- $config := $read.config -}}
{{- $instead := dict
      "include" "networks, exports, config"
      "node" "networkGateway, cluster, locality"
      "mesh" "mesh"
      "workers" (printf "%sworkers" $prefix)
      "drain" "drain.delaySeconds, drain.timeoutSeconds"
      "state" "state.dir" -}}
{{- range $key := keys $instead | sortAlpha -}}
{{- if hasKey $config $key -}}
{{- fail (printf "%sconfig.%s: the chart writes this key; set instead: %s" $prefix $key (get $instead $key)) -}}
{{- end -}}
{{- end -}}
{{- range $key := list "metrics" "health" -}}
{{- if hasKey $read.telemetry $key -}}
{{- fail (printf "%sconfig.telemetry.%s: the chart writes this key, and its probes and annotations rest on it" $prefix $key) -}}
{{- end -}}
{{- end -}}
{{- if and (hasKey $config "identity") (ne (include "isthmus.role.identity" .) "none") -}}
{{- fail (printf "%sconfig.identity: the chart writes this key; set identity, or identity.source=none" $prefix) -}}
{{- end -}}
{{- if and (hasKey $config "xds") (eq .role "aggregator") -}}
{{- fail "aggregator.config.xds: the chart writes this key; set instead: aggregator.xds" -}}
{{- end -}}
{{- end }}

{{- define "isthmus.role.config" -}}
{{- include "isthmus.role.checkConfig" . -}}
{{- $root := .root -}}
{{- $identity := include "isthmus.role.identity" . -}}
include: [config.yaml]
node:
  name: {{ printf "${POD_NAME:-%s}" (include "isthmus.role.name" .) | quote }}
  namespace: {{ printf "${POD_NAMESPACE:-%s}" $root.Release.Namespace | quote }}
  serviceAccount: {{ printf "${SERVICE_ACCOUNT:-%s}" (include "isthmus.role.serviceAccount" .) | quote }}
  cluster: {{ include "isthmus.cluster" $root | quote }}
{{- with $root.Values.networkGateway }}
  network: {{ printf "${ISTIO_META_NETWORK:-%s}" . | quote }}
{{- end }}
{{- with $root.Values.locality }}
  locality: {{ . | quote }}
{{- end }}
mesh:
  clusterDomain: {{ $root.Values.mesh.clusterDomain | quote }}
  trustDomain: {{ printf "${TRUST_DOMAIN:-%s}" $root.Values.mesh.trustDomain | quote }}
{{- if eq .role "gateway" }}
{{- include "isthmus.gateway.config" $root }}
{{- else }}
{{- include "isthmus.aggregator.config" $root }}
{{- end }}
{{- include "isthmus.role.registries" . }}
{{- include "isthmus.role.exports" . }}
{{- with $root.Values.networks }}
networks:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if eq $identity "istioCa" }}
identity:
  istioCa:
    address: {{ $root.Values.identity.istioCa.address | quote }}
    roots: /var/run/secrets/istio/root-cert.pem
    token: /var/run/secrets/tokens/istio-token
{{- else if eq $identity "secret" }}
identity:
  files:
    certificate: {{ printf "/var/run/secrets/isthmus/identity/%s" $root.Values.identity.secret.certificate | quote }}
    key: {{ printf "/var/run/secrets/isthmus/identity/%s" $root.Values.identity.secret.key | quote }}
trust:
  - trustDomain: {{ printf "${TRUST_DOMAIN:-%s}" $root.Values.mesh.trustDomain | quote }}
    roots: {{ printf "/var/run/secrets/isthmus/identity/%s" $root.Values.identity.secret.roots | quote }}
{{- else if eq $identity "workloadApi" }}
identity:
  workloadApi:
    socket: {{ $root.Values.identity.workloadApi.socket | quote }}
{{- end }}
drain:
  delay: {{ int $root.Values.drain.delaySeconds }}s
  timeout: {{ int $root.Values.drain.timeoutSeconds }}s
state:
  dir: {{ $root.Values.state.dir | quote }}
telemetry:
  metrics: {bind: ":15020"}
  health: {bind: ":15021"}
workers: {{ include "isthmus.role.workers" . }}
{{- end }}

{{/* The listeners of the gateway are called as the ports of its Service. */}}
{{- define "isthmus.gateway.config" -}}
{{- $values := .Values }}
{{- if or $values.sni.enabled $values.hbone.enabled $values.istiod.passthrough }}
listeners:
{{- end }}
{{- with $values.sni }}
{{- if .enabled }}
  - name: tls
    bind: {{ printf ":%d" (int .containerPort) | quote }}
    protocol: sni
    {{- with .alpn }}
    alpn: {{ toJson . }}
    {{- end }}
    {{- with .from }}
    from: {{ toJson . }}
    {{- end }}
{{- end }}
{{- end }}
{{- with $values.hbone }}
{{- if .enabled }}
  - name: mesh
    bind: {{ printf ":%d" (int .containerPort) | quote }}
    protocol: hbone
    {{- with .from }}
    from: {{ toJson . }}
    {{- end }}
{{- end }}
{{- end }}
{{- with $values.istiod }}
{{- if .passthrough }}
{{- $host := printf "%s.%s" .service $values.mesh.clusterDomain }}
{{- $namespace := index (splitList "." .service) 1 }}
{{- range $name, $port := dict "tls-istiod" 15012 "tls-webhook" 15017 }}
  - name: {{ $name }}
    bind: ":{{ $port }}"
    protocol: sni
    {{- with $values.istiod.from }}
    from: {{ toJson . }}
    {{- end }}
{{- end }}
routes:
  {{- /* Sidecars and API servers ask for the same name: the listener says which port of istiod is meant. */}}
  {{ .service }}:
    endpoints: [{{ printf "%s:15012" $host | quote }}]
    listeners: [tls-istiod]
  {{ $host }}:
    endpoints: [{{ printf "%s:15012" $host | quote }}]
    listeners: [tls-istiod]
  {{ printf "*.%s.svc" $namespace | quote }}:
    endpoints: [{{ printf "%s:443" $host | quote }}]
    listeners: [tls-webhook]
  {{- /* An API server that knows the webhook by an address sends no name. */}}
  "-":
    endpoints: [{{ printf "%s:443" $host | quote }}]
    listeners: [tls-webhook]
{{- end }}
{{- end }}
{{- end }}

{{- define "isthmus.aggregator.config" -}}
{{- $xds := .Values.aggregator.xds }}
xds:
  bind: {{ printf "%s:%d" $xds.address (int $xds.port) | quote }}
  tls: {}
  clients:
    {{- if not $xds.clients }}
    {{- fail "aggregator.xds.clients is empty: say which clients may claim to be on which network, such as [{identities: [\"spiffe://cluster.local/ns/istio-system/*\"], networks: [net-east]}]" }}
    {{- end }}
    {{- toYaml $xds.clients | nindent 4 }}
{{- end }}

{{- define "isthmus.role.registries" -}}
{{- $kubernetes := .root.Values.kubernetes }}
{{- $features := include "isthmus.role.features" . | fromJson }}
{{- $remote := (include "isthmus.role.values" . | fromJson).remoteClusters }}
{{- if or $features.registry $remote.secrets $features.secrets }}
registries:
{{- end }}
{{- if $features.registry }}
  - kubernetes:
      cluster: {{ include "isthmus.cluster" .root | quote }}
      {{- with $kubernetes.network }}
      network: {{ . | quote }}
      {{- end }}
      systemNamespace: {{ $kubernetes.systemNamespace | quote }}
      {{- with $kubernetes.namespaces }}
      {{- if or .only .except .labels }}
      namespaces:
        {{- with .only }}
        only: {{ toJson . }}
        {{- end }}
        {{- with .except }}
        except: {{ toJson . }}
        {{- end }}
        {{- with .labels }}
        labels: {{ toJson . }}
        {{- end }}
      {{- end }}
      {{- end }}
      {{- if $kubernetes.manualEndpoints }}
      manualEndpoints: true
      {{- end }}
      {{- if $kubernetes.destinationRules }}
      destinationRules: true
      {{- end }}
      {{- if $kubernetes.serviceEntries }}
      {{- if $kubernetes.namespaces.only }}
      {{- fail "kubernetes.serviceEntries: cannot be used with kubernetes.namespaces.only, because whose an address is is known only if all namespaces are read" }}
      {{- end }}
      serviceEntries: true
      {{- end }}
      {{- if $kubernetes.replicas }}
      replicas: true
      {{- end }}
      {{- if $kubernetes.meshConfig }}
      meshConfig: true
      {{- end }}
      {{- if not $features.gateways }}
      gateways: off
      {{- else if $kubernetes.gateways.namespaces }}
      gateways: {namespaces: {{ toJson $kubernetes.gateways.namespaces }}}
      {{- end }}
      {{- if $features.imports }}
      serviceImports: write
      {{- end }}
      {{- if $features.slices }}
      slices: true
      {{- end }}
      {{- if $features.derivedServices }}
      derivedServices: true
      {{- end }}
      {{- if $features.gatewayApi }}
      gatewayApi:
        class: {{ $kubernetes.gatewayApi.class | quote }}
        {{- with $kubernetes.gatewayApi.controllerName }}
        controllerName: {{ . | quote }}
        {{- end }}
        ports: {{ toJson $kubernetes.gatewayApi.ports }}
        {{- with $kubernetes.gatewayApi.addresses }}
        addresses: {{ toJson . }}
        {{- end }}
        {{- if ne .root.Values.service.type "None" }}
        service: {{ include "isthmus.role.name" . | quote }}
        {{- end }}
        {{- with $kubernetes.gatewayApi.pool }}
        pool: {{ toJson . }}
        {{- end }}
        {{- with $kubernetes.gatewayApi.requestable }}
        requestable: {{ toJson . }}
        {{- end }}
        {{- with $kubernetes.gatewayApi.gatewaysFrom }}
        gatewaysFrom: {{ toJson . }}
        {{- end }}
        refusal: {{ $kubernetes.gatewayApi.refusal }}
      {{- end }}
    {{- with $kubernetes.allow }}
    allow:
      {{- toYaml . | nindent 6 }}
    {{- end }}
{{- end }}
{{- if $remote.secrets }}
  - kubernetesClusters: {folder: /var/run/secrets/isthmus/clusters}
{{- end }}
{{- if $features.secrets }}
  - kubernetesClusters: {secrets: {namespace: {{ $remote.watch.namespace | quote }}}}
{{- end }}
{{- end }}

{{/* The aggregator has no listeners that a rule could name. */}}
{{- define "isthmus.role.exports" -}}
{{- $role := .role }}
{{- with .root.Values.exports }}
exports:
{{- range . }}
  -{{ (ternary (omit . "listeners") . (eq $role "aggregator")) | toYaml | nindent 4 | trimPrefix "\n   " }}
{{- end }}
{{- end }}
{{- end }}

{{/* What a running gateway cannot take over from a changed file; a change restarts the pods. */}}
{{- define "isthmus.role.restart" -}}
{{- $read := include "isthmus.role.readConfig" . | fromJson -}}
{{- list (include "isthmus.role.workers" .) $read.config.admin ($read.log.format | default "") | toJson | sha256sum -}}
{{- end }}
