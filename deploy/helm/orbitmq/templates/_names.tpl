{{/* What every object is called, and how it is found. */}}

{{- define "orbitmq.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "orbitmq.labels" -}}
app.kubernetes.io/name: orbitmq
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* Arguments: the chart's context, and the role. */}}
{{- define "orbitmq.selector" -}}
app.kubernetes.io/name: orbitmq
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "orbitmq.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* What every pod has. Links to services are off because Kubernetes would write variables for them,
     as ORBITMQ_BROKER_PORT=tcp://..., which are names of our settings. */}}
{{- define "orbitmq.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- with .Values.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "orbitmq.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end -}}

{{/* How clients of ours find the cluster, and who they are. */}}
{{- define "orbitmq.client" -}}
- name: ORBITMQ_NAME_SERVER
  value: {{ include "orbitmq.name" . }}-namesrv:9876
{{- with .Values.accounts.clientSecret }}
- name: ORBITMQ_ACCESS_KEY
  valueFrom: { secretKeyRef: { name: {{ . }}, key: accessKey } }
- name: ORBITMQ_SECRET_KEY
  valueFrom: { secretKeyRef: { name: {{ . }}, key: secretKey } }
{{- end }}
{{- end -}}

{{/* What must be decided before anything is installed. */}}
{{- define "orbitmq.check" -}}
{{- if not (or .Values.insecure .Values.accounts.existingSecret) -}}
{{- fail "nothing protects the brokers: set accounts.existingSecret to a Secret with accounts.toml, or insecure=true if everybody who reaches the pods may read and delete messages" -}}
{{- end -}}
{{- if and .Values.broker.metrics (not .Values.insecure) -}}
{{- fail "broker.metrics serves pages that ask nobody for credentials: it needs insecure=true as well (accounts stay in force)" -}}
{{- end -}}
{{- if and .Values.console.enabled (not .Values.console.existingSecret) -}}
{{- fail "the console needs a password: set console.existingSecret to a Secret with the key password, or console.enabled=false" -}}
{{- end -}}
{{- end -}}
