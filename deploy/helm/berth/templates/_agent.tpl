{{- /* What the pods of agents have in common, beside an engine of theirs or of the node's. */ -}}

{{- /* Copies the shim, which has no dependency but SGLang's, to where the engine finds it. */ -}}
{{- define "berth.installShim" -}}
- name: install-shim
  image: {{ include "berth.image" (list . .Values.agent.image) }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [cp, -rT, /usr/lib/berth/shim, {{ ternary "/shim" "/run/berth/shim" (eq .Values.agent.mode "sidecar") }}]
  securityContext: {{- include "berth.securityContext" . | nindent 4 }}
  resources:
    requests: { cpu: 10m, memory: 16Mi }
    limits: { memory: 64Mi }
  volumeMounts:
    {{- if eq .Values.agent.mode "sidecar" }}
    - { name: shim, mountPath: /shim }
    {{- else }}
    - { name: state, mountPath: /run/berth }
    {{- end }}
{{- end -}}

{{- define "berth.agentContainer" -}}
{{- $tls := .Values.routerProof.tls -}}
- name: agent
  image: {{ include "berth.image" (list . .Values.agent.image) }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args: [--config, /etc/berth/agent/agent.toml]
  securityContext: {{- include "berth.securityContext" . | nindent 4 }}
  env:
    # The agent's name in the fleet.
    - name: WORKER_ID
      valueFrom:
        fieldRef: { fieldPath: {{ ternary "metadata.name" "spec.nodeName" (eq .Values.agent.mode "sidecar") }} }
    {{- if .Values.agent.nvidia }}
    # NVML of all the host's GPUs, and no right to use one.
    - { name: NVIDIA_VISIBLE_DEVICES, value: all }
    - { name: NVIDIA_DRIVER_CAPABILITIES, value: utility }
    {{- end }}
    {{- with .Values.engine.apiKeySecret }}
    - name: BERTH_ENGINE_API_KEY
      valueFrom:
        secretKeyRef: { name: {{ . }}, key: api-key }
    {{- end }}
    {{- with .Values.agent.env }}{{ toYaml . | nindent 4 }}{{ end }}
  ports:
    - { name: data, containerPort: 31000 }
    - { name: control, containerPort: 31001 }
    - { name: admin, containerPort: 31002 }
  {{- include "berth.probes" . | nindent 2 }}
  {{- if not $tls.enabled }}
  lifecycle:
    preStop:
      exec:
        command:
          - berth
          - drain
          - --token-file=/etc/berth/proof/token
          - --wait-ms={{ mul .Values.agent.drainWaitSeconds 1000 }}
  {{- end }}
  resources: {{- toYaml .Values.agent.resources | nindent 4 }}
  volumeMounts:
    - { name: settings, mountPath: /etc/berth/agent, readOnly: true }
    - { name: proof, mountPath: /etc/berth/proof, readOnly: true }
    {{- if include "berth.keysSecret" . }}
    - { name: keys, mountPath: /etc/berth/keys, readOnly: true }
    {{- end }}
    - { name: state, mountPath: {{ ternary "/run/berth" .Values.agent.daemonset.hostPath (eq .Values.agent.mode "sidecar") }} }
{{- end -}}

{{- define "berth.agentVolumes" -}}
- name: settings
  configMap: { name: {{ include "berth.fullname" . }}-agent }
- name: proof
  secret:
    secretName: {{ ternary .Values.routerProof.tls.agentSecret (include "berth.tokenSecret" .) .Values.routerProof.tls.enabled }}
    defaultMode: 0440
{{- with include "berth.keysSecret" . }}
- name: keys
  secret: { secretName: {{ . }}, defaultMode: 0440 }
{{- end }}
{{- end -}}

{{- /*
How long a pod may take to end: the wait of the hook, the agent's own drain and aborts, the engine.
*/ -}}
{{- define "berth.agentGraceSeconds" -}}
{{- $settings := include "berth.agentSettings" (index . 0) | fromJson -}}
{{- $drain := div (add (int $settings.shutdown.drain_ms_max) 999) 1000 -}}
{{- add (index . 0).Values.agent.drainWaitSeconds $drain 15 5 (index . 1) -}}
{{- end -}}
