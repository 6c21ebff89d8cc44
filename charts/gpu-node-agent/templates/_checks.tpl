{{/*
check fails, with what would be right, where the agents could not start or would lose what they are to keep, and the
schema does not see it. It is called with (dict "root" $ "name" NAME "config" CONFIG), CONFIG as the agents of an entry
of nodeConfigs get it, or those of all other nodes if the name is "".
*/}}
{{- define "gpu-node-agent.check" -}}
{{- $values := .root.Values }}
{{- $config := .config }}
{{- /* Those of all other nodes are first: what is wrong of an entry only, the entry says. */}}
{{- $at := ternary (printf "nodeConfigs.%s" .name) "config" (ne .name "") }}
{{- include "gpu-node-agent.checkNames" .root }}
{{- $sim := eq (dig "source" "mode" "auto" $config) "sim" }}
{{- if and (not $sim) (hasSuffix "-sim" (include "gpu-node-agent.image" .root)) }}
{{- fail (printf "image.tag: an image whose tag ends in -sim has no DCGM and sees no GPUs; use one without, or say %s.source.mode=sim for simulated GPUs" $at) }}
{{- end }}
{{- $listen := dig "metrics" "listen" ":9400" $config }}
{{- if not (regexMatch "^(0\\.0\\.0\\.0|\\[::\\])?:[1-9][0-9]*$" $listen) }}
{{- fail (printf "%s.metrics.listen: the kubelet's probes and Prometheus come to the pod's address: %q must be :PORT, such as :9400" $at $listen) }}
{{- end }}
{{- if and (dig "metrics" "webConfigFile" "" $config) (not $values.web.secretName) }}
{{- fail (printf "%s.metrics.webConfigFile: use web.secretName, so that the probes know of it" $at) }}
{{- end }}
{{- if dig "plugin" "kubeletDir" "" $config }}
{{- fail (printf "%s.plugin.kubeletDir: the agent sees the kubelet's directory at /var/lib/kubelet; say kubeletDir, a value of the chart, where it is on the nodes" $at) }}
{{- end }}
{{- $extra := list }}
{{- range $values.extraVolumeMounts }}
{{- $extra = append $extra .mountPath }}
{{- end }}
{{- $files := default (dict) $values.files }}
{{- if hasKey $files "config.yaml" }}
{{- fail "files: config.yaml is made of `config`; say it there" }}
{{- end }}
{{- range $key, $path := dict
  "health.kubernetes.kubeconfig" (dig "health" "kubernetes" "kubeconfig" "" $config)
  "metrics.fieldsFile" (dig "metrics" "fieldsFile" "" $config)
  "metrics.webConfigFile" (dig "metrics" "webConfigFile" "" $config)
  "plugin.nvidiaConfig" (dig "plugin" "nvidiaConfig" "" $config) }}
{{- $file := trimPrefix "/etc/gpu-node-agent/" (clean $path) }}
{{- if and (ne $file (clean $path)) (not (hasKey $files $file)) (not (include "gpu-node-agent.below" (dict "path" (printf "%s/" $path) "dirs" $extra))) }}
{{- fail (printf "%s.%s: %s will not be there: write the file under files as %q, or with --set-file 'files.%s=PATH'" $at $key $path $file (replace "." "\\." $file)) }}
{{- end }}
{{- end }}
{{- $writable := concat $extra (list "/var/lib/gpu-node-agent" "/run/gpu-node-agent") }}
{{- with dig "health" "stateFile" "" $config }}
{{- if not (include "gpu-node-agent.below" (dict "path" . "dirs" $writable)) }}
{{- fail (printf "%s.health.stateFile: no volume is at %s, and findings would be lost with the pod; use a file below /var/lib/gpu-node-agent, and say stateDir, a value of the chart, where that is on the nodes" $at .) }}
{{- end }}
{{- end }}
{{- $sockets := dict "health.socket" (dig "health" "socket" "" $config) }}
{{- if $sim }}
{{- $_ := set $sockets "source.sim.control" (dig "source" "sim" "control" "" $config) }}
{{- end }}
{{- range $key, $path := $sockets }}
{{- if and $path (dig "readOnlyRootFilesystem" false (default (dict) $values.securityContext)) (not (include "gpu-node-agent.below" (dict "path" $path "dirs" $writable))) }}
{{- fail (printf "%s.%s: no volume is at %s, and the container's root is read-only; use a path below /run/gpu-node-agent" $at $key $path) }}
{{- end }}
{{- end }}
{{- end }}

{{/* "true" if a path is below one of some directories: (dict "path" PATH "dirs" LIST) */}}
{{- define "gpu-node-agent.below" -}}
{{- $path := printf "%s%s" (clean .path) (ternary "/" "" (hasSuffix "/" .path)) }}
{{- $is := false }}
{{- range .dirs }}
{{- $is = or $is (hasPrefix (printf "%s/" (clean .)) $path) }}
{{- end }}
{{- if $is }}true{{ end }}
{{- end }}

{{/* The API server would refuse the objects one by one, some after others are there. */}}
{{- define "gpu-node-agent.checkNames" -}}
{{- $name := include "gpu-node-agent.name" . }}
{{- if not (regexMatch "^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$" $name) }}
{{- fail (printf "nameOverride: %q is no value of a label; use letters, digits and -, such as gpu-node-agent" $name) }}
{{- end }}
{{- $full := include "gpu-node-agent.fullname" . }}
{{- $part := "[a-z0-9]([-a-z0-9]*[a-z0-9])?" }}
{{- /* A Service's name has no dots. */}}
{{- $names := ternary (printf "^%s$" $part) (printf "^%s([.]%s)*$" $part $part) (not (empty .Values.service.enabled)) }}
{{- if not (regexMatch $names $full) }}
{{- $key := ternary "nameOverride" "fullnameOverride" (and (empty .Values.fullnameOverride) (not (empty .Values.nameOverride))) }}
{{- fail (printf "%s: the objects would be called %q, and Kubernetes takes no such names; use small letters, digits and -, such as gpu-node-agent" $key $full) }}
{{- end }}
{{- end }}
