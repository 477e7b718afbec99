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

{{- /* The default is the release's namespace, unless other namespaces' members could then change the ConfigMaps of the jobs in it. */ -}}
{{- define "edl.store" -}}
{{- $namespaces := include "edl.namespaces" . | fromJsonArray -}}
{{- if and (not .Values.store) (gt (len $namespaces) 1) (has .Release.Namespace $namespaces) -}}
{{- fail (printf "store: members of all of watchNamespaces may change each ConfigMap of the store's namespace, and so scripts of jobs in %s: name one where nothing else is (it must exist), store=kubernetes://NAMESPACE, or say that it may be so, store=kubernetes://%s" .Release.Namespace .Release.Namespace) -}}
{{- end -}}
{{- .Values.store | default (printf "kubernetes://%s" .Release.Namespace) -}}
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

{{- /* Where the pods may go: of operator or dashboard. */ -}}
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

{{- /* The namespace that kubernetes:// names, or nothing with another store. */ -}}
{{- define "edl.storeNamespace" -}}
{{- $store := include "edl.store" . -}}
{{- if hasPrefix "kubernetes://" $store -}}
{{- regexFind "^[^/?]+" (trimPrefix "kubernetes://" $store) -}}
{{- end -}}
{{- end }}

{{- /* Kept with the resource definitions: jobs and pools outlive the release, and lose their store without these. */ -}}
{{- define "edl.kept" -}}
{{- if .Values.crds.keep }}
annotations:
  helm.sh/resource-policy: keep
{{- end }}
{{- end }}
