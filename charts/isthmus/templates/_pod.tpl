{{/*
The pod template of a role.
*/}}

{{- define "isthmus.securityContext" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
readOnlyRootFilesystem: true
{{- end }}

{{- define "isthmus.podSecurityContext" -}}
{{- if .Values.podSecurityContext -}}
{{ toYaml .Values.podSecurityContext }}
{{- else -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}
{{- end }}

{{- define "isthmus.role.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: SERVICE_ACCOUNT
  valueFrom: {fieldRef: {fieldPath: spec.serviceAccountName}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: INSTANCE_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- range $name, $value := (include "isthmus.role.values" . | fromJson).env }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}

{{- define "isthmus.role.volumes" -}}
{{- $root := .root -}}
{{- $values := include "isthmus.role.values" . | fromJson -}}
{{- $identity := include "isthmus.role.identity" . -}}
- name: config
  configMap:
    name: {{ include "isthmus.role.name" . }}
- name: state
  {{- toYaml ($root.Values.state.volume | default (dict "emptyDir" (dict "sizeLimit" "256Mi"))) | nindent 2 }}
{{- if eq $identity "istioCa" }}
- name: istio-token
  projected:
    sources:
      - serviceAccountToken:
          audience: {{ $root.Values.identity.istioCa.audience | quote }}
          expirationSeconds: {{ int $root.Values.identity.istioCa.expirationSeconds }}
          path: istio-token
- name: istio-ca
  configMap:
    name: {{ $root.Values.identity.istioCa.rootsConfigMap }}
{{- else if eq $identity "secret" }}
- name: identity
  secret:
    secretName: {{ required "identity.secret.name is empty: name the Secret with the certificate" $root.Values.identity.secret.name }}
{{- else if eq $identity "workloadApi" }}
- name: workload-api
  {{- toYaml ($root.Values.identity.workloadApi.volume | default (dict "csi" (dict "driver" "csi.spiffe.io" "readOnly" true))) | nindent 2 }}
{{- end }}
{{- with $values.remoteClusters.secrets }}
- name: clusters
  projected:
    sources:
      {{- range . }}
      - secret:
          name: {{ . }}
      {{- end }}
{{- end }}
{{- with $values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "isthmus.role.mounts" -}}
{{- $values := include "isthmus.role.values" . | fromJson -}}
{{- $identity := include "isthmus.role.identity" . -}}
{{- /* A folder, not a subPath, which the kubelet would never update. */ -}}
- name: config
  mountPath: /etc/isthmus
  readOnly: true
- name: state
  mountPath: {{ .root.Values.state.dir }}
{{- if eq $identity "istioCa" }}
- name: istio-token
  mountPath: /var/run/secrets/tokens
  readOnly: true
- name: istio-ca
  mountPath: /var/run/secrets/istio
  readOnly: true
{{- else if eq $identity "secret" }}
- name: identity
  mountPath: /var/run/secrets/isthmus/identity
  readOnly: true
{{- else if eq $identity "workloadApi" }}
- name: workload-api
  mountPath: /run/spiffe
  readOnly: true
{{- end }}
{{- if $values.remoteClusters.secrets }}
- name: clusters
  mountPath: /var/run/secrets/isthmus/clusters
  readOnly: true
{{- end }}
{{- with $values.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "isthmus.role.spread" -}}
{{- $values := include "isthmus.role.values" . | fromJson -}}
{{- $selector := include "isthmus.role.selector" . -}}
{{- if $values.topologySpreadConstraints -}}
{{- /* A constraint without a selector would count no pod. */}}
{{- $constraints := list }}
{{- range $constraint := $values.topologySpreadConstraints }}
{{- if not (hasKey $constraint "labelSelector") }}
{{- $constraint = merge (dict "labelSelector" (dict "matchLabels" ($selector | fromYaml))) $constraint }}
{{- end }}
{{- $constraints = append $constraints $constraint }}
{{- end }}
{{- toYaml $constraints -}}
{{- else -}}
{{- range $at, $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
{{- if $at }}{{ "\n" }}{{ end -}}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- $selector | nindent 6 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "isthmus.role.pod" -}}
{{- $root := .root -}}
{{- $values := include "isthmus.role.values" . | fromJson -}}
{{- $features := include "isthmus.role.features" . | fromJson -}}
{{- $hostNetwork := and (eq .role "gateway") $root.Values.hostNetwork -}}
{{- $ports := (include "isthmus.role.containerPorts" . | fromJson).list -}}
metadata:
  labels:
    {{- $labels := merge (dict "sidecar.istio.io/inject" "false") (include "isthmus.role.labels" . | fromYaml) }}
    {{- with $root.Values.networkGateway }}{{ $_ := set $labels "topology.istio.io/network" . }}{{ end }}
    {{- mergeOverwrite $labels $values.podLabels (include "isthmus.role.selector" . | fromYaml) | toYaml | nindent 4 }}
  annotations:
    {{- /* A changed config is taken into use without a restart, but for a few keys. */}}
    checksum/restart: {{ include "isthmus.role.restart" . | trunc 16 | quote }}
    {{- with merge (deepCopy $values.podAnnotations) $root.Values.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "isthmus.role.serviceAccount" . }}
  automountServiceAccountToken: {{ $features.token }}
  enableServiceLinks: false
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add (int $root.Values.drain.delaySeconds) (int $root.Values.drain.timeoutSeconds) 5 }}
  {{- if $hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  securityContext:
    {{- include "isthmus.podSecurityContext" $root | nindent 4 }}
    {{- $low := false }}
    {{- range $ports }}{{ if lt (int .containerPort) 1024 }}{{ $low = true }}{{ end }}{{ end }}
    {{- if eq .role "gateway" }}
    {{- range $root.Values.service.extraPorts }}{{ if lt (int (.targetPort | default .port)) 1024 }}{{ $low = true }}{{ end }}{{ end }}
    {{- end }}
    {{- if $low }}
    {{- if $hostNetwork }}
    {{- fail "hostNetwork: a pod without capabilities cannot open ports below 1024 of its node; use higher ports" }}
    {{- end }}
    sysctls:
      - name: net.ipv4.ip_unprivileged_port_start
        value: "0"
    {{- end }}
  {{- if $root.Values.validateConfig }}
  initContainers:
    - name: validate
      image: {{ include "isthmus.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args: [validate, --for-start, --offline, /etc/isthmus/isthmus.yaml]
      env:
        {{- include "isthmus.role.env" . | nindent 8 }}
      securityContext:
        {{- include "isthmus.securityContext" . | nindent 8 }}
      {{- with $values.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        {{- include "isthmus.role.mounts" . | nindent 8 }}
  {{- end }}
  containers:
    - name: isthmus
      image: {{ include "isthmus.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args: [run, -c, /etc/isthmus/isthmus.yaml]
      env:
        {{- include "isthmus.role.env" . | nindent 8 }}
      ports:
        {{- range $ports }}
        - name: {{ .name }}
          containerPort: {{ int .containerPort }}
        {{- end }}
      startupProbe:
        httpGet: {path: /readyz, port: status-port}
        {{- toYaml $root.Values.probes.startup | nindent 8 }}
      readinessProbe:
        httpGet: {path: /readyz, port: status-port}
        {{- toYaml $root.Values.probes.readiness | nindent 8 }}
      livenessProbe:
        httpGet: {path: /livez, port: status-port}
        {{- toYaml $root.Values.probes.liveness | nindent 8 }}
      {{- with $values.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- include "isthmus.securityContext" . | nindent 8 }}
      volumeMounts:
        {{- include "isthmus.role.mounts" . | nindent 8 }}
  volumes:
    {{- include "isthmus.role.volumes" . | nindent 4 }}
  topologySpreadConstraints:
    {{- include "isthmus.role.spread" . | nindent 4 }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
{{- end }}
