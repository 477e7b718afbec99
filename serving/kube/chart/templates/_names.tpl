{{- define "edl.labels" -}}
{{ include "edl.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "edl.selector" -}}
app.kubernetes.io/name: edl
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* The namespaces that the operator works in, as a JSON list. */ -}}
{{- define "edl.namespaces" -}}
{{- default (list .Release.Namespace) .Values.watchNamespaces | uniq | toJson -}}
{{- end }}

{{- /* Where teachers and jobs meet: the store of this release, unless another is named. */ -}}
{{- define "edl.store" -}}
{{- .Values.store | default (printf "edl://%s:%d" (.Values.storeServer.clusterIP | default (printf "edl-store.%s" .Release.Namespace)) (int .Values.storeServer.port)) -}}
{{- end }}

{{- define "edl.image" -}}
{{- $why := "image.repository: no image of EDL is published; build one with serving/docker/operator.Dockerfile and name it: --set image.repository=REGISTRY/edl/operator" -}}
{{- required $why .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion -}}
{{- end }}

{{- /* What all pods of this chart have. */ -}}
{{- define "edl.pod" -}}
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "edl.container" -}}
image: {{ include "edl.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: {{- toYaml .Values.command | nindent 2 }}
securityContext: {{- toYaml .Values.securityContext | nindent 2 }}
{{- end }}

{{- /* Where the pods of operator, store or dashboard may run. */ -}}
{{- define "edl.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Kept with the resource definitions: jobs and pools outlive the release, and lose their store without these. */ -}}
{{- define "edl.kept" -}}
{{- if .Values.crds.keep }}
annotations:
  helm.sh/resource-policy: keep
{{- end }}
{{- end }}
