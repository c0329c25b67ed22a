{{/* What stands before the name of every object: nothing for a release that is called orcinus. */}}
{{- define "orcinus.prefix" -}}
{{- if gt (len .Release.Name) 40 }}{{ fail "the name of the release is longer than 40 characters" }}{{ end }}
{{- if ne .Release.Name "orcinus" }}{{ .Release.Name }}-{{ end }}
{{- end }}

{{/* The image NAME, whose tag ends with SUFFIX: (list . NAME SUFFIX) */}}
{{- define "orcinus.image" -}}
{{- $root := index . 0 }}{{ $name := index . 1 }}{{ $image := $root.Values.image }}
{{- with index $image.digests $name }}
{{- printf "%s/%s@%s" $image.registry $name . }}
{{- else }}
{{- printf "%s/%s:%s%s" $image.registry $name ($image.tag | default $root.Chart.AppVersion) (index . 2) }}
{{- end }}
{{- end }}

{{- define "orcinus.modelClaim" -}}
{{- .Values.model.claim.existing | default (print (include "orcinus.prefix" .) "orcinus-model") }}
{{- end }}

{{/* A number without an exponent, or a text. Helm reads every number of a file as a float. */}}
{{- define "orcinus.text" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ int64 . }}{{ else }}{{ toString . }}{{ end }}
{{- end }}

{{/* The settings of PART, one of pipeline, frontend, scheduler, worker: (list . PART) */}}
{{- define "orcinus.data" -}}
{{- $root := index . 0 }}{{ $part := index . 1 }}
{{- $data := include (print "orcinus.settings." $part) $root | fromYaml }}
{{- $given := dict }}
{{- if eq $part "pipeline" }}
{{- $given = include "orcinus.pipeline" $root | fromYaml }}
{{- else }}
{{- $given = index $root.Values.settings $part }}
{{- end }}
{{- if and (eq $part "scheduler") $root.Values.spares }}
{{- if $root.Values.components.pipelineAutoscaling }}
{{- $_ := set $data "ORCINUS_N_SPARE_WORKERS" (int $root.Values.spares) }}
{{- else if ge (int $root.Values.spares) (int $root.Values.stages) }}
{{- $_ := set $data "ORCINUS_MAX_PIPELINES" (int $root.Values.pipelines) }}
{{- end }}
{{- end }}
{{- range $name, $value := mergeOverwrite $data $given }}
{{ $name }}: {{ include "orcinus.text" $value | quote }}
{{- end }}
{{- end }}

{{- define "orcinus.pipeline" -}}
{{- $model := .Values.model }}
ORCINUS_N_STAGES: {{ int .Values.stages }}
LISTEN_HOST: {{ .Values.listenHost | quote }}
{{- if $model.path }}
ORCINUS_MODEL: {{ $model.path | quote }}
{{- else if and $model.source (eq $model.from "fetch") }}
ORCINUS_MODEL: {{ printf "/models/%s" (regexReplaceAll "@.*" $model.source "" | trimSuffix "/" | base) | quote }}
{{- end }}
{{- if eq $model.from "fetch" }}
{{- with $model.source }}
MODEL_SOURCE: {{ . | quote }}
{{- end }}
{{- with $model.region }}
AWS_REGION: {{ . | quote }}
{{- end }}
{{- with $model.endpoint }}
AWS_ENDPOINT_URL: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* One setting: (list . PART NAME) */}}
{{- define "orcinus.setting" -}}
{{- $data := include "orcinus.data" (list (index . 0) (index . 1)) | fromYaml }}
{{- index $data (index . 2) }}
{{- end }}

{{- define "orcinus.stages" -}}
{{- int .Values.stages }}
{{- end }}

{{- define "orcinus.workers" -}}
{{- add (mul (int .Values.stages) (int .Values.pipelines)) (int .Values.spares) }}
{{- end }}

{{/* The manifests' resources of PART, with those of the values over them: (list . PART) */}}
{{- define "orcinus.resources" -}}
{{- $root := index . 0 }}{{ $part := index . 1 }}
{{- $made := include (print "orcinus.resources." $part) $root | fromYaml }}
{{- toYaml (mergeOverwrite $made (index $root.Values $part).resources) }}
{{- end }}
