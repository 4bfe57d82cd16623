{{- /*
Settings as TOML. Helm's own toToml writes whole numbers as floats, which the binaries refuse.
*/ -}}
{{- define "berth.toml" -}}
{{- $tables := dict -}}
{{- range $key, $value := . }}
{{- if kindIs "map" $value }}
{{- $_ := set $tables $key $value }}
{{- else }}
{{ $key }} = {{ include "berth.tomlValue" $value }}
{{- end }}
{{- end }}
{{- range $table, $values := $tables }}
{{- include "berth.tomlTable" (list $table $values) }}
{{- end }}
{{- end -}}

{{- define "berth.tomlTable" -}}
{{- $name := index . 0 -}}
{{- $tables := dict }}

[{{ $name }}]
{{- range $key, $value := index . 1 }}
{{- if kindIs "map" $value }}
{{- $_ := set $tables $key $value }}
{{- else }}
{{ $key }} = {{ include "berth.tomlValue" $value }}
{{- end }}
{{- end }}
{{- range $table, $values := $tables }}
{{- include "berth.tomlTable" (list (printf "%s.%s" $name $table) $values) }}
{{- end }}
{{- end -}}

{{- define "berth.tomlValue" -}}
{{- if kindIs "float64" . -}}
{{- if eq . (floor .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else if kindIs "slice" . -}}
{{- $items := list -}}
{{- range . }}{{ $items = append $items (include "berth.tomlValue" .) }}{{ end -}}
[{{ join ", " $items }}]
{{- else if kindIs "map" . -}}
{{- $items := list -}}
{{- range $key, $value := . }}{{ $items = append $items (printf "%s = %s" $key (include "berth.tomlValue" $value)) }}{{ end -}}
{ {{- join ", " $items -}} }
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end -}}

{{- define "berth.routerSettings" -}}
{{- $tls := .Values.routerProof.tls -}}
{{- $listen := dict "data_addr" "0.0.0.0:8080" "admin_addr" "0.0.0.0:8081" -}}
{{- $kubernetes := dict "selector" (printf "kubernetes.io/service-name=%s-agents" (include "berth.fullname" .)) "port_name" "control" "tls" $tls.enabled -}}
{{- $auth := dict "metrics_auth" .Values.auth.metrics -}}
{{- if .Values.auth.disabled }}{{ $_ := set $auth "mode" "none" }}
{{- else }}{{ $_ := set $auth "keys_file" "/etc/berth/keys/keys.toml" }}{{ end -}}
{{- $agents := dict -}}
{{- if $tls.enabled -}}
{{- $agents = dict "ca" "/etc/berth/proof/ca.crt" "cert" "/etc/berth/proof/tls.crt" "key" "/etc/berth/proof/tls.key" "server_name" $tls.serverName -}}
{{- else -}}
{{- $agents = dict "token_file" "/etc/berth/proof/token" -}}
{{- end -}}
{{- $own := dict "listen" $listen "discovery" (dict "kubernetes" $kubernetes) "auth" $auth "agents" $agents -}}
{{- if .Values.router.tls.secret -}}
{{- $_ := set $own "tls" (dict "cert" "/etc/berth/front/tls.crt" "key" "/etc/berth/front/tls.key") -}}
{{- end -}}
{{- mergeOverwrite $own (deepCopy .Values.router.settings) | toJson -}}
{{- end -}}

{{- define "berth.agentSettings" -}}
{{- $tls := .Values.routerProof.tls -}}
{{- $isSidecar := eq .Values.agent.mode "sidecar" -}}
{{- $port := ternary 30000 .Values.agent.daemonset.enginePort $isSidecar | int -}}
{{- $listen := dict "data_addr" "0.0.0.0:31000" "control_addr" "0.0.0.0:31001" "admin_addr" "0.0.0.0:31002" -}}
{{- $auth := dict "metrics_auth" .Values.auth.metrics -}}
{{- if not .Values.auth.disabled }}{{ $_ := set $auth "keys_file" "/etc/berth/keys/keys.toml" }}{{ end -}}
{{- $own := dict "engine" (dict "url" (printf "http://127.0.0.1:%d" $port)) "listen" $listen "auth" $auth -}}
{{- /* The folder must be the agent's own; that of an emptyDir is root's. */ -}}
{{- $_ := set $own "files" (dict "state_dir" (include "berth.stateDir" .)) -}}
{{- /* A restart of the agent alone keeps the sessions; the end of the pod ends the engine too. */ -}}
{{- $_ := set $own "shutdown" (dict "handover" true "drain_ms_max" 30000) -}}
{{- if $tls.enabled -}}
{{- $table := dict "cert" "/etc/berth/proof/tls.crt" "key" "/etc/berth/proof/tls.key" "client_ca" "/etc/berth/proof/ca.crt" -}}
{{- if $tls.clientNames }}{{ $_ := set $table "client_names" $tls.clientNames }}{{ end -}}
{{- $_ := set $own "tls" $table -}}
{{- else -}}
{{- $_ := set $auth "token_file" "/etc/berth/proof/token" -}}
{{- end -}}
{{- mergeOverwrite $own (deepCopy .Values.agent.settings) | toJson -}}
{{- end -}}

{{- define "berth.stateDir" -}}
{{- ternary "/run/berth/agent" .Values.agent.daemonset.hostPath (eq .Values.agent.mode "sidecar") -}}
{{- end -}}
