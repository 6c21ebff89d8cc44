{{/*
check rejects configurations with which the agents could not start or would lose their state, as far as the schema cannot
express it. The messages name the expected value. It is called with (dict "root" $ "name" NAME "config" CONFIG "agent" AGENT):
CONFIG is the configuration of the nodeConfigs entry NAME, or of all other nodes if NAME is "", AGENT what is derived from it.
*/}}
{{- define "gpu-node-agent.check" -}}
{{- $values := .root.Values }}
{{- $config := .config }}
{{- /* The other nodes are checked first, so an error that names an entry concerns only that entry. */}}
{{- $at := ternary (printf "nodeConfigs.%s" .name) "config" (ne .name "") }}
{{- include "gpu-node-agent.checkNames" .root }}
{{- $sim := eq (dig "source" "mode" "auto" $config) "sim" }}
{{- if and (not $sim) (hasSuffix "-sim" (include "gpu-node-agent.image" .root)) }}
{{- fail (printf "image.tag: an image whose tag ends in -sim contains no DCGM; use an image without -sim, or set %s.source.mode=sim for simulated GPUs" $at) }}
{{- end }}
{{- $listen := dig "metrics" "listen" ":9400" $config }}
{{- if not (regexMatch "^(0\\.0\\.0\\.0|\\[::\\])?:[1-9][0-9]*$" $listen) }}
{{- fail (printf "%s.metrics.listen: expected :PORT, such as :9400, because the kubelet and Prometheus connect to the pod's address; got %q" $at $listen) }}
{{- end }}
{{- if and (dig "metrics" "webConfigFile" "" $config) (not $values.web.secretName) }}
{{- fail (printf "%s.metrics.webConfigFile: set web.secretName instead, which also configures the probes" $at) }}
{{- end }}
{{- if dig "plugin" "kubeletDir" "" $config }}
{{- fail (printf "%s.plugin.kubeletDir: the pod mounts the kubelet's directory at /var/lib/kubelet; set the chart's value kubeletDir to its path on the nodes" $at) }}
{{- end }}
{{- if and .agent.claims (not .agent.dra) }}
{{- fail (printf "%s.plugin.api: dra needs dra.enabled=true; that adds DeviceClasses, rights and mounts, see values.yaml" $at) }}
{{- end }}
{{- if .agent.dra }}
{{- if semverCompare "<1.34.0-0" .root.Capabilities.KubeVersion.Version }}
{{- fail (printf "dra.enabled: expected Kubernetes 1.34 or newer, which has the API resource.k8s.io/v1; found %s. With helm template, pass --kube-version" .root.Capabilities.KubeVersion.Version) }}
{{- end }}
{{- $driver := dig "plugin" "dra" "driverName" "gpu.nvidia.com" (default (dict) $values.config) }}
{{- if ne .agent.draDriver $driver }}
{{- fail (printf "%s.plugin.dra.driverName: expected %s, that of config, because the DeviceClasses are for one driver; got %s" $at $driver .agent.draDriver) }}
{{- end }}
{{- end }}
{{- if and (not $values.hostPID) (dig "metrics" "processes" "enabled" false $config) (eq (clean (dig "metrics" "processes" "proc" "" $config)) "/proc") }}
{{- fail (printf "%s.metrics.processes.proc: /proc in the pod has no processes of the node; leave it out, and the chart mounts the node's at /host/proc" $at) }}
{{- end }}
{{- if and .agent.mpsKey (not $values.mps.enabled) }}
{{- fail (printf "%s.%s: shares GPUs by MPS, which needs mps.enabled=true; that adds privileged pods of MPS control daemons, see values.yaml" $at .agent.mpsKey) }}
{{- end }}
{{- if and .agent.mps (has .agent.mpsRoot (list "/" "/run" "/var/run" "/var" "/dev" "/dev/shm")) }}
{{- fail (printf "%s.plugin.sharing.mps.root: the pods mount this directory of the nodes; expected one that nothing else uses, such as /run/nvidia/mps, got %s" $at .agent.mpsRoot) }}
{{- end }}
{{- if and .agent.labelsFile (ne "features.d" (base (dir (clean .agent.labelsFile)))) }}
{{- fail (printf "%s.node.labels.file: expected a path in a directory features.d, the one of Node Feature Discovery, because the pod mounts this directory of the node; got %s" $at .agent.labelsFile) }}
{{- end }}
{{- $taints := dict }}
{{- range .agent.startupTaints }}
{{- $_ := set $taints (regexReplaceAll "=[^:]*" . "") "node.startupTaint" }}
{{- end }}
{{- range $i, $taint := .agent.taints }}
{{- $id := printf "%s:%s" (toJson .key | trimAll "\"") .effect }}
{{- if hasKey $taints $id }}
{{- fail (printf "%s.node.taints[%d]: %s has the same key and effect; a node has each pair once" $at $i (get $taints $id)) }}
{{- end }}
{{- $_ := set $taints $id (printf "node.taints[%d]" $i) }}
{{- end }}
{{- range $id, $key := $taints }}
{{- if or (hasPrefix "node.kubernetes.io/" $id) (hasPrefix "node.cloudprovider.kubernetes.io/" $id) }}
{{- fail (printf "%s.%s: Kubernetes sets and removes the taints with this prefix; use another than that of %s" $at $key $id) }}
{{- end }}
{{- end }}
{{- $extra := list }}
{{- range $values.extraVolumeMounts }}
{{- $extra = append $extra .mountPath }}
{{- end }}
{{- $files := default (dict) $values.files }}
{{- if hasKey $files "config.yaml" }}
{{- fail "files: config.yaml is generated from `config`; write the configuration there" }}
{{- end }}
{{- range $key, $path := dict
  "health.kubernetes.kubeconfig" (dig "health" "kubernetes" "kubeconfig" "" $config)
  "metrics.fieldsFile" (dig "metrics" "fieldsFile" "" $config)
  "metrics.webConfigFile" (dig "metrics" "webConfigFile" "" $config)
  "plugin.nvidiaConfig" (dig "plugin" "nvidiaConfig" "" $config) }}
{{- $file := trimPrefix "/etc/gpu-node-agent/" (clean $path) }}
{{- if and (ne $file (clean $path)) (not (hasKey $files $file)) (not (include "gpu-node-agent.below" (dict "path" (printf "%s/" $path) "dirs" $extra))) }}
{{- fail (printf "%s.%s: file %s is missing; add it to files as %q, or pass --set-file 'files.%s=PATH'" $at $key $path $file (replace "." "\\." $file)) }}
{{- end }}
{{- end }}
{{- $writable := concat $extra (list "/var/lib/gpu-node-agent" "/run/gpu-node-agent") }}
{{- $sockets := dict "health.socket" (dig "health" "socket" "" $config) }}
{{- if $sim }}
{{- $_ := set $sockets "source.sim.control" (dig "source" "sim" "control" "" $config) }}
{{- end }}
{{- range $key, $path := $sockets }}
{{- if and $path (dig "readOnlyRootFilesystem" false (default (dict) $values.securityContext)) (not (include "gpu-node-agent.below" (dict "path" $path "dirs" $writable))) }}
{{- fail (printf "%s.%s: %s is not on a volume, and the container's root file system is read-only; use a path below /run/gpu-node-agent" $at $key $path) }}
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

{{/* Rejects invalid names before the API server does, which would create some of the objects first. */}}
{{- define "gpu-node-agent.checkNames" -}}
{{- $name := include "gpu-node-agent.name" . }}
{{- if not (regexMatch "^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$" $name) }}
{{- fail (printf "nameOverride: %q is not a valid label value; use letters, digits and -, such as gpu-node-agent" $name) }}
{{- end }}
{{- $full := include "gpu-node-agent.fullname" . }}
{{- $part := "[a-z0-9]([-a-z0-9]*[a-z0-9])?" }}
{{- /* The name of a Service contains no dots. */}}
{{- $names := ternary (printf "^%s$" $part) (printf "^%s([.]%s)*$" $part $part) (not (empty .Values.service.enabled)) }}
{{- if not (regexMatch $names $full) }}
{{- $key := ternary "nameOverride" "fullnameOverride" (and (empty .Values.fullnameOverride) (not (empty .Values.nameOverride))) }}
{{- fail (printf "%s: %q is not a valid object name; use lower-case letters, digits and -, such as gpu-node-agent" $key $full) }}
{{- end }}
{{- end }}
