{{- define "berth.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "berth.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "berth.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "berth.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "berth.selector" -}}
app.kubernetes.io/name: {{ include "berth.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "berth.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Values.image.tag | default .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: berth
{{ include "berth.selector" . }}
{{- end -}}

{{- /* An image, from a list: the root, and the repository. */ -}}
{{- define "berth.image" -}}
{{- $root := index . 0 -}}
{{- $registry := $root.Values.image.registry -}}
{{- if $registry }}{{ $registry | trimSuffix "/" }}/{{ end -}}
{{ index . 1 }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end -}}

{{- define "berth.pools" -}}
{{- .Values.pools | default (dict "main" (dict "replicas" 1)) | toJson -}}
{{- end -}}

{{- define "berth.roles" -}}
{{- $roles := list -}}
{{- range include "berth.pools" . | fromJson }}{{ $roles = append $roles (.role | default "aggregated") }}{{ end -}}
{{- uniq $roles | toJson -}}
{{- end -}}

{{- define "berth.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "berth.keysSecret" -}}
{{- if .Values.auth.existingSecret -}}
{{ .Values.auth.existingSecret }}
{{- else if .Values.auth.keys -}}
{{ include "berth.fullname" . }}-keys
{{- end -}}
{{- end -}}

{{- define "berth.tokenSecret" -}}
{{- .Values.routerProof.token.existingSecret | default (printf "%s-router-token" (include "berth.fullname" .)) -}}
{{- end -}}

{{- /* What every container of Berth's own may do: nothing beyond its sockets and volumes. */ -}}
{{- define "berth.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "berth.probes" -}}
readinessProbe:
  httpGet: { path: /readyz, port: admin }
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
livenessProbe:
  httpGet: { path: /healthz, port: admin }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
{{- end -}}

{{- /* Stops an installation that could not work, with what to set. */ -}}
{{- define "berth.check" -}}
{{- $auth := .Values.auth -}}
{{- $hasKeys := or $auth.keys $auth.existingSecret -}}
{{- if and $auth.disabled $hasKeys -}}
{{- fail "auth.disabled is true, but keys are set: remove one of them" -}}
{{- end -}}
{{- if not (or $auth.disabled $hasKeys) -}}
{{- fail "who may use the router? Set auth.keys or auth.existingSecret, or auth.disabled=true to serve everybody" -}}
{{- end -}}
{{- if and $auth.keys $auth.existingSecret -}}
{{- fail "auth.keys and auth.existingSecret are both set: remove one of them" -}}
{{- end -}}
{{- if and $auth.disabled (eq $auth.metrics "key") -}}
{{- fail "auth.metrics is key, but there are no keys: set auth.metrics=none" -}}
{{- end -}}
{{- if and .Values.monitoring.enabled (eq $auth.metrics "key") (not .Values.monitoring.keySecret.name) -}}
{{- fail "monitoring needs a key: set monitoring.keySecret.name to a Secret with a key that may scrape, or auth.metrics=none" -}}
{{- end -}}
{{- $tls := .Values.routerProof.tls -}}
{{- if and $tls.enabled (not (and $tls.agentSecret $tls.routerSecret $tls.serverName)) -}}
{{- fail "routerProof.tls needs agentSecret, routerSecret and serverName" -}}
{{- end -}}
{{- if eq .Values.agent.mode "sidecar" -}}
{{- range $name, $pool := include "berth.pools" . | fromJson -}}
{{- if not ($pool.model | default $.Values.engine.model) -}}
{{- fail (printf "pools.%s: which model? Set engine.model, or pools.%s.model" $name $name) -}}
{{- end -}}
{{- end -}}
{{- $roles := include "berth.roles" . | fromJsonArray -}}
{{- if and (has "prefill" $roles) (not (has "decode" $roles)) -}}
{{- fail "pools: a pool with role prefill needs one with role decode" -}}
{{- end -}}
{{- if and (has "decode" $roles) (not (has "prefill" $roles)) -}}
{{- fail "pools: a pool with role decode needs one with role prefill" -}}
{{- end -}}
{{- end -}}
{{- end -}}
