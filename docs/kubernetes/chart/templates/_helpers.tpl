{{- define "inferengine.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "inferengine.labels" -}}
app.kubernetes.io/name: inferengine
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "inferengine.metadata" -}}
labels:
  {{- include "inferengine.labels" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "inferengine.image" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end -}}

{{- /* The configuration as environment: "engine.max_num_seqs" is INFERENGINE_ENGINE_MAX_NUM_SEQS. */ -}}
{{- define "inferengine.env" -}}
{{- range $key, $value := . }}
- name: INFERENGINE_{{ $key | replace "." "_" | upper }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end -}}

{{- /* A front end's way to the engines: one address for each pod behind the headless service. */ -}}
{{- define "inferengine.frontEnv" -}}
- name: INFERENGINE_WIRE_ENGINES
  value: dns+tcp://{{ include "inferengine.name" . }}-engines.{{ .Release.Namespace }}.svc:5555
- name: INFERENGINE_WIRE_LOAD_BALANCING
  value: {{ .Values.loadBalancing }}
- name: INFERENGINE_WIRE_CURVE_SECRET_FILE
  value: /etc/inferengine/curve/front.key
- name: INFERENGINE_WIRE_CURVE_ENGINE_KEY
  valueFrom: {secretKeyRef: {name: {{ .Values.curve.secret }}, key: engine.public}}
{{- if .Values.auth.secret }}
- name: INFERENGINE_AUTH_KEYS_FILE
  value: /etc/inferengine/keys/keys.toml
{{- end }}
{{- end -}}

{{- /* The names under which a front end without keys answers: those of its service. */ -}}
{{- define "inferengine.hosts" -}}
{{- $service := printf "%s-%s" (include "inferengine.name" .root) .part -}}
{{- $space := printf "%s.%s" $service .root.Release.Namespace -}}
{{ list $service $space (printf "%s.svc" $space) (printf "%s.svc.cluster.local" $space) | join "," }}
{{- end -}}

{{- define "inferengine.frontVolumes" -}}
volumes:
  - name: curve
    secret:
      secretName: {{ .Values.curve.secret }}
      defaultMode: 0440
      items: [{key: front.key, path: front.key}]
  - name: tmp
    emptyDir: {}
  - name: state
    emptyDir: {}
  {{- if .Values.auth.secret }}
  - name: keys
    secret: {secretName: {{ .Values.auth.secret }}, defaultMode: 0440}
  {{- end }}
{{- end -}}

{{- define "inferengine.frontMounts" -}}
volumeMounts:
  - {name: curve, mountPath: /etc/inferengine/curve, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  - {name: state, mountPath: /var/lib/inferengine}
  {{- if .Values.auth.secret }}
  - {name: keys, mountPath: /etc/inferengine/keys, readOnly: true}
  {{- end }}
{{- end -}}

{{- define "inferengine.podSecurity" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "inferengine.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- define "inferengine.spread" -}}
{{- if .root.Values.topologySpread.enabled }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ .root.Values.topologySpread.key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "inferengine.labels" . | nindent 8 }}
{{- end }}
{{- end -}}
