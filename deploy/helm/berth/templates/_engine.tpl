{{- /*
The engine's flags. It listens on loopback, where only the agent reaches it. With prefill and decode
it can't: the other engine must reach its bootstrap server, so a NetworkPolicy guards its port.
*/ -}}
{{- define "berth.engineArgs" -}}
{{- $engine := index . 0 -}}
{{- $role := index . 1 -}}
- --model-path={{ $engine.model }}
- --host={{ ternary "127.0.0.1" "0.0.0.0" (eq $role "aggregated") }}
- --port=30000
- --enable-cache-report
- --enable-metrics
- >-
  --kv-events-config={"publisher":"zmq","endpoint":"tcp://127.0.0.1:5557","bind":true,"replay_endpoint":"tcp://127.0.0.1:5558"}
{{- if eq $role "aggregated" }}
- --enable-streaming-session
- --enable-session-radix-cache
{{- else }}
- --disaggregation-mode={{ $role }}
- --disaggregation-bootstrap-port=8998
{{- end }}
{{- if eq $role "decode" }}
- --enable-session-radix-cache
- --disaggregation-decode-enable-radix-cache
{{- end }}
{{- with $engine.apiKeySecret }}
- --api-key=$(SGLANG_API_KEY)
{{- end }}
{{- with $engine.args }}
{{ toYaml . }}
{{- end }}
{{- end -}}
