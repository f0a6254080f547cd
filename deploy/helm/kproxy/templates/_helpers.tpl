{{- define "kproxy.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kproxy.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kproxy.labels" -}}
{{ include "kproxy.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* The port of kproxy that stands for a broker: (dict "root" $ "id" 3). */}}
{{- define "kproxy.brokerPort" -}}
{{- add1 (int .root.Values.expose.port) | add (sub (int .id) (int .root.Values.expose.brokers.first)) -}}
{{- end -}}

{{/* The name of that port. Given out as node ids appear, the ports of the range are numbered from 0. */}}
{{- define "kproxy.brokerPortName" -}}
{{- printf "%s-%d" (ternary "any" "broker" (eq (toString .root.Values.expose.brokers.first) "any")) (int .id) -}}
{{- end -}}

{{/* What clients are told for a broker. */}}
{{- define "kproxy.advertise" -}}
{{- $name := include "kproxy.fullname" . -}}
{{- if eq .Values.expose.by "services" -}}
{{- printf "%s-{id}.%s.svc:%d" $name .Release.Namespace (int .Values.expose.port) -}}
{{- else -}}
{{- printf "%s.%s.svc:{port}" $name .Release.Namespace -}}
{{- end -}}
{{- end -}}

{{/* A map as TOML below a table's name: (list "cluster" $map). Values first, then tables and arrays of tables. */}}
{{- define "kproxy.toml" -}}
{{- $path := index . 0 -}}
{{- $map := index . 1 -}}
{{- range $key := keys $map | sortAlpha -}}
{{- $value := index $map $key -}}
{{- if not (or (kindIs "map" $value) (kindIs "invalid" $value) (and (kindIs "slice" $value) $value (kindIs "map" (first $value)))) }}
{{ $key }} = {{ $value | toJson }}
{{- end -}}
{{- end -}}
{{- range $key := keys $map | sortAlpha -}}
{{- $value := index $map $key -}}
{{- $inner := printf "%s.%s" $path $key | trimPrefix "." -}}
{{- if kindIs "map" $value }}

[{{ $inner }}]
{{- include "kproxy.toml" (list $inner $value) -}}
{{- else if and (kindIs "slice" $value) $value (kindIs "map" (first $value)) -}}
{{- range $value }}

[[{{ $inner }}]]
{{- include "kproxy.toml" (list $inner .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* kproxy.toml, whole. */}}
{{- define "kproxy.config" -}}
{{- $host := ternary (printf "[%s]" .Values.admin.host) .Values.admin.host (contains ":" .Values.admin.host) -}}
{{- $settings := merge (dict "admin" (printf "%s:%d" $host (int .Values.admin.port))) .Values.settings -}}
{{- $cluster := merge (dict "listen" (printf ":%d" (int .Values.expose.port))) .Values.cluster -}}
{{- if eq .Values.expose.by "sni" -}}
{{- $_ := set $cluster "route" "sni" -}}
{{- else -}}
{{- $last := add (int .Values.expose.port) (int .Values.expose.brokers.count) -}}
{{- if gt $last 65535 -}}
{{- fail (printf "expose.brokers: the last broker would have port %d, and there is none: lower expose.port or count" $last) -}}
{{- end -}}
{{- if and (ge (int .Values.admin.port) (int .Values.expose.port)) (le (int .Values.admin.port) (int $last)) -}}
{{- fail (printf "admin.port: %d is among the ports of clients, %d to %d" (int .Values.admin.port) (int .Values.expose.port) $last) -}}
{{- end -}}
{{- $entry := dict "port" (add1 (int .Values.expose.port)) -}}
{{- if eq (toString .Values.expose.brokers.first) "any" -}}
{{- if gt (int .Values.replicas) 1 -}}
{{- fail "expose.brokers.first: any: two replicas may give one broker different ports: set replicas to 1" -}}
{{- end -}}
{{- if ne .Values.expose.by "ports" -}}
{{- fail "expose.brokers.first: any: a Service for each broker needs its id: set expose.by to ports" -}}
{{- end -}}
{{- $_ := set $entry "ids" "any" -}}
{{- $_ := set $entry "port_count" (int .Values.expose.brokers.count) -}}
{{- with .Values.expose.brokers.portsFile -}}
{{- $_ := set $entry "ports_file" . -}}
{{- end -}}
{{- else -}}
{{- $_ := set $entry "ids" (printf "%d-%d" (int .Values.expose.brokers.first) (sub (add (int .Values.expose.brokers.first) (int .Values.expose.brokers.count)) 1)) -}}
{{- end -}}
{{- $_ := set $cluster "brokers" (list $entry) -}}
{{- if not (hasKey $cluster "advertise") -}}
{{- $_ := set $cluster "advertise" (include "kproxy.advertise" .) -}}
{{- end -}}
{{- end -}}
{{- include "kproxy.toml" (list "" (merge (dict "cluster" (list $cluster)) $settings)) | trim -}}
{{- end -}}
