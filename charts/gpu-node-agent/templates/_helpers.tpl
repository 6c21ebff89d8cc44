{{/*
values normalizes .Values; every template calls it first. Helm removes a null, with its default, only if the chart has a
default for the key. This removes every other null and replaces missing sections by empty ones. A null within an entry of
nodeConfigs stays until it has removed the key of `config`.
*/}}
{{- define "gpu-node-agent.values" -}}
{{- $nodes := deepCopy (default (dict) .Values.nodeConfigs) }}
{{- include "gpu-node-agent.prune" .Values }}
{{- range $name, $config := $nodes }}
{{- if $config }}
{{- $_ := set $.Values.nodeConfigs $name $config }}
{{- end }}
{{- end }}
{{- range list "image" "dra" "gpuOperator" "kernelLog" "mps" "probes" "web" "service" "serviceMonitor" "podMonitor" "prometheusRule" "dashboards" "networkPolicy" "serviceAccount" "rbac" "reclaim" }}
{{- if not (hasKey $.Values .) }}
{{- $_ := set $.Values . (dict) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Removes null keys from a map and its nested maps. */}}
{{- define "gpu-node-agent.prune" -}}
{{- range $key, $value := . }}
{{- if kindIs "invalid" $value }}
{{- $_ := unset $ $key }}
{{- else if kindIs "map" $value }}
{{- include "gpu-node-agent.prune" $value }}
{{- end }}
{{- end }}
{{- end }}

{{- define "gpu-node-agent.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "gpu-node-agent.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else if contains (include "gpu-node-agent.name" .) .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "gpu-node-agent.name" .) | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* The labels that select all agents of the release; they must never change. */}}
{{- define "gpu-node-agent.selector" -}}
app.kubernetes.io/name: {{ include "gpu-node-agent.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/*
The labels that select the pods of mps-daemon. Their name differs, so that nothing that selects agents selects these: a Service, a
monitor or a policy, the chart's or the user's.
*/}}
{{- define "gpu-node-agent.mpsSelector" -}}
app.kubernetes.io/name: {{ include "gpu-node-agent.mpsName" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gpu-node-agent.mpsName" -}}
{{ include "gpu-node-agent.name" . | trunc 59 }}-mps
{{- end }}

{{/* The labels that select the pods of reclaim; their name differs from the agents', as mps-daemon's does. */}}
{{- define "gpu-node-agent.reclaimSelector" -}}
app.kubernetes.io/name: {{ include "gpu-node-agent.name" . | trunc 55 }}-reclaim
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gpu-node-agent.reclaimLabels" -}}
{{- $labels := include "gpu-node-agent.labels" . | fromYaml }}
{{- mustMergeOverwrite $labels (include "gpu-node-agent.reclaimSelector" . | fromYaml) | toYaml }}
{{- end }}

{{/* The labels of the hook's pod; their name differs from the agents', as mps-daemon's does. */}}
{{- define "gpu-node-agent.cleanupLabels" -}}
{{- $name := printf "%s-cleanup" (include "gpu-node-agent.name" . | trunc 55) }}
{{- mustMergeOverwrite (include "gpu-node-agent.labels" . | fromYaml) (dict "app.kubernetes.io/name" $name) | toYaml }}
{{- end }}

{{/* "true" if the hook that removes what agents have left of labels, taints and conditions is rendered. */}}
{{- define "gpu-node-agent.cleanupHook" -}}
{{- if and .Values.rbac.create .Values.rbac.cleanupHook }}true{{ end }}
{{- end }}

{{/* The name of a CronJob has at most 52 characters. */}}
{{- define "gpu-node-agent.reclaimName" -}}
{{ include "gpu-node-agent.fullname" . | trunc 44 | trimSuffix "-" }}-reclaim
{{- end }}

{{- define "gpu-node-agent.reclaimAccount" -}}
{{- $account := default (dict) .Values.reclaim.serviceAccount }}
{{- default (include "gpu-node-agent.reclaimName" .) $account.name }}
{{- end }}

{{/* "true" if reclaim makes changes. Without a value it does not. */}}
{{- define "gpu-node-agent.reclaimApplies" -}}
{{- $r := .Values.reclaim }}
{{- if and $r.enabled (hasKey $r "dryRun") (not $r.dryRun) }}true{{ end }}
{{- end }}

{{/* The binding of a role to the account of reclaim: (dict "root" $ "namespace" NAMESPACE "role" ROLE) */}}
{{- define "gpu-node-agent.reclaimBinding" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ .role }}
  namespace: {{ .namespace }}
  labels: {{- include "gpu-node-agent.reclaimLabels" .root | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ .role }}
subjects:
  - kind: ServiceAccount
    name: {{ include "gpu-node-agent.reclaimAccount" .root }}
    namespace: {{ .root.Release.Namespace }}
{{- end }}

{{- define "gpu-node-agent.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "gpu-node-agent.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "gpu-node-agent.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "gpu-node-agent.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "gpu-node-agent.image" -}}
{{- $repository := required "image.repository: expected the repository of the agent's image, such as ghcr.io/gpu-node-agent/gpu-node-agent" .Values.image.repository }}
{{- if .Values.image.digest -}}
{{ $repository }}@{{ .Values.image.digest }}
{{- else -}}
{{- /* As JSON, because a numeric tag stored with the release would otherwise render as 2.026e+07. */ -}}
{{ $repository }}:{{ .Values.image.tag | default .Chart.AppVersion | toJson | trimAll "\"" }}
{{- end }}
{{- end }}

{{/* The kubelet's directory on the nodes. */}}
{{- define "gpu-node-agent.kubeletDir" -}}
{{- required "kubeletDir: expected the kubelet's directory on the nodes, such as /var/lib/kubelet" .Values.kubeletDir | clean }}
{{- end }}

{{/* "true" on OpenShift. A cluster reports both versions; --api-versions may name either one. */}}
{{- define "gpu-node-agent.openshift" -}}
{{- $apis := .Capabilities.APIVersions }}
{{- if or ($apis.Has "security.openshift.io/v1") ($apis.Has "security.openshift.io/v1/SecurityContextConstraints") }}true{{ end }}
{{- end }}

{{/*
agent fills the dict "agent" with the properties of one DaemonSet: for the nodeConfigs entry NAME, or for all other
nodes if NAME is "". It is called with (dict "root" $ "name" NAME "agent" (dict)), because a template can return only text.
*/}}
{{- define "gpu-node-agent.agent" -}}
{{- $values := .root.Values }}
{{- $config := deepCopy (default (dict) $values.config) }}
{{- with get (default (dict) $values.nodeConfigs) .name }}
{{- $config = mustMergeOverwrite $config (deepCopy .) }}
{{- include "gpu-node-agent.prune" $config }}
{{- end }}
{{- $sim := eq (dig "source" "mode" "auto" $config) "sim" }}
{{- if and $sim (not (hasKey (dig "source" "sim" (dict) $config) "control")) }}
{{- /* Allows fault injection: kubectl exec … -- gpu-node-agent sim '{gpu: 3, xid: 79}' */}}
{{- $config = mustMergeOverwrite $config (dict "source" (dict "sim" (dict "control" "/run/gpu-node-agent/sim.sock"))) }}
{{- end }}
{{- if and $values.kernelLog.enabled (not $sim) }}
{{- $config = mustMergeOverwrite (dict "source" (dict "kernelLog" true)) $config }}
{{- end }}
{{- if $values.web.secretName }}
{{- $config = mustMergeOverwrite (dict "metrics" (dict "webConfigFile" "/etc/gpu-node-agent-web/web-config.yaml")) $config }}
{{- end }}
{{- /* Every agent has the mounts and rights of DRA with dra.enabled, so that it can release what an agent with plugin.api dra left. */}}
{{- $dra := eq true $values.dra.enabled }}
{{- if $dra }}
{{- $config = mustMergeOverwrite (dict "plugin" (dict "api" "dra")) $config }}
{{- end }}
{{- $claims := and (dig "plugin" "enabled" true $config) (eq (dig "plugin" "api" "devicePlugin" $config) "dra") }}
{{- $_ := set .agent "dra" $dra }}
{{- $_ := set .agent "claims" $claims }}
{{- $_ := set .agent "draDriver" (dig "plugin" "dra" "driverName" "gpu.nvidia.com" $config) }}
{{- /* An agent without the plugin writes no CDI spec and needs no files of the node. */}}
{{- $generate := and (dig "plugin" "enabled" true $config) (dig "plugin" "cdi" "generate" false $config) }}
{{- if and $generate (not $sim) }}
{{- $config = mustMergeOverwrite (dict "plugin" (dict "containerDriverRoot" "/driver-root")) $config }}
{{- end }}
{{- $processes := dig "metrics" "processes" "enabled" false $config }}
{{- $_ := set .agent "processes" $processes }}
{{- /* With hostPID the container's own /proc is the node's. */}}
{{- if and $processes (not $values.hostPID) }}
{{- $config = mustMergeOverwrite (dict "metrics" (dict "processes" (dict "proc" "/host/proc"))) $config }}
{{- end }}
{{- /* MPS, as the configuration or NVIDIA's file in `files` has it. The chart cannot read a file of another volume. */}}
{{- $imported := dict }}
{{- with dig "plugin" "nvidiaConfig" "" $config }}
{{- $imported = get (default (dict) $values.files) (trimPrefix "/etc/gpu-node-agent/" (clean .)) | fromYaml }}
{{- include "gpu-node-agent.prune" $imported }}
{{- end }}
{{- $sharing := dig "plugin" "sharing" (dict) $config }}
{{- $mpsResources := concat (dig "mps" "resources" (list) $sharing) (dig "sharing" "mps" "resources" (list) $imported) }}
{{- $units := and (dig "plugin" "enabled" true $config) (dig "memory" "resource" "" $sharing | empty | not) }}
{{- $enforcement := dig "memory" "enforcement" "auto" $sharing }}
{{- $mpsKey := "" }}
{{- if and (dig "plugin" "enabled" true $config) $mpsResources }}
{{- $mpsKey = ternary "plugin.sharing.mps.resources" "plugin.nvidiaConfig" (dig "mps" "resources" (list) $sharing | empty | not) }}
{{- else if and $units (eq $enforcement "mps") }}
{{- $mpsKey = "plugin.sharing.memory.enforcement" }}
{{- end }}
{{- $_ := set .agent "mpsKey" $mpsKey }}
{{- /* An empty list keeps the daemons' pods until the last client has ended. */}}
{{- $_ := set .agent "mps" (and (eq true $values.mps.enabled) (or $mpsKey $claims (hasKey (dig "mps" (dict) $sharing) "resources"))) }}
{{- $_ := set .agent "mpsRoot" (dig "flags" "mpsRoot" (dig "mps" "root" "/run/nvidia/mps" $sharing) $imported | clean) }}
{{- $_ := set .agent "mpsControl" (dig "mps" "control" "" $sharing) }}
{{- /* What the cluster learns of the node. An explicit off or [] keeps the rights with which the agent removes what it wrote. */}}
{{- $node := dig "node" (dict) $config }}
{{- $output := dig "labels" "output" "" $node | toString }}
{{- $off := has $output (list "off" "false") }}
{{- $_ := set .agent "labelsFile" (ternary (dig "labels" "file" "/etc/kubernetes/node-feature-discovery/features.d/gpu-node-agent" $node) "" (or $off (eq $output "file"))) }}
{{- $_ := set .agent "labelsAPI" (or $off (eq $output "api")) }}
{{- $_ := set .agent "nodeFeature" (or $off (eq $output "nodeFeature")) }}
{{- $_ := set .agent "taints" (dig "taints" (list) $node) }}
{{- $_ := set .agent "startupTaints" (dig "startupTaint" "" $node | list | compact) }}
{{- $_ := set .agent "setsTaints" (hasKey $node "taints") }}
{{- $_ := set .agent "writesNode" (or .agent.labelsAPI .agent.setsTaints (not (empty .agent.startupTaints))) }}
{{- $_ := set .agent "idleEvents" (dig "idle" "after" "0s" $node | regexMatch "[1-9]") }}
{{- include "gpu-node-agent.check" (dict "root" .root "name" .name "config" $config "agent" .agent) }}
{{- $mig := has (dig "plugin" "migStrategy" "none" $config) (list "single" "mixed") }}
{{- $lists := dig "plugin" "deviceList" (list) $config | toStrings }}
{{- /* Pods get their devices by CDI names alone: the agent reads the version of the container runtime from its Node. */}}
{{- $_ := set .agent "needsCDI" (and (dig "plugin" "enabled" true $config) (not (empty $lists)) (empty (without $lists "cdi-cri" "cdi-annotations"))) }}
{{- if $claims }}
{{- $lists = list "cdi-cri" }}
{{- end }}
{{- if $dra }}
{{- /* After the check, which refuses it in the values. The kubelet connects to the driver's socket at the path that the agent has. */}}
{{- $config = mustMergeOverwrite $config (dict "plugin" (dict "kubeletDir" (include "gpu-node-agent.kubeletDir" .root))) }}
{{- end }}
{{- $profiling := regexMatch "(?i)\"profiling\"|DCGM_FI_PROF_" (toJson (dig "metrics" "fields" (list) $config)) }}
{{- with dig "metrics" "fieldsFile" "" $config }}
{{- /* The name starts the line, so comments do not match. */}}
{{- $profiling = regexMatch "(?im)^[ \\t]*\"?DCGM_FI_PROF_" (get (default (dict) $values.files) (trimPrefix "/etc/gpu-node-agent/" (clean .))) }}
{{- end }}
{{- /* The driver lets only an administrator limit memory. A hook in the CDI spec does it without the agent. */}}
{{- $limits := and $units (has $enforcement (list "auto" "driver")) (not $sim) }}
{{- $needs := or $mig (has "volume-mounts" $lists) $profiling (and $limits (not (has "cdi-cri" $lists)) (not (has "cdi-annotations" $lists))) }}
{{- $_ := set .agent "config" $config }}
{{- $_ := set .agent "name" (ternary (printf "%s-%s" (include "gpu-node-agent.fullname" .root) .name) (include "gpu-node-agent.fullname" .root) (ne .name "")) }}
{{- $_ := set .agent "component" (ternary (printf "agent-%s" .name) "agent" (ne .name "")) }}
{{- $_ := set .agent "mpsComponent" (ternary (printf "mps-daemon-%s" .name) "mps-daemon" (ne .name "")) }}
{{- $_ := set .agent "sim" $sim }}
{{- $_ := set .agent "mig" $mig }}
{{- $_ := set .agent "generate" $generate }}
{{- $_ := set .agent "cdi" (or $generate $dra (has "cdi-cri" $lists) (has "cdi-annotations" $lists)) }}
{{- $_ := set .agent "cdiWrite" (or $generate $dra) }}
{{- $_ := set .agent "cdiDir" (dig "plugin" "cdi" "dir" "/var/run/cdi" $config | default "/var/run/cdi" | clean) }}
{{- $_ := set .agent "driverRoot" (dig "plugin" "driverRoot" "/" $config) }}
{{- $_ := set .agent "port" (regexFind "[0-9]+$" (dig "metrics" "listen" ":9400" $config) | int) }}
{{- $_ := set .agent "conditions" (dig "health" "kubernetes" "enabled" false $config) }}
{{- /* What the agent writes to the API server about its node. The pod's template names it, so that a pod of the newest revision writes
nothing that the values no longer have: cleanup relies on it. */}}
{{- $writes := list }}
{{- range $part, $key := dict "condition" "conditions" "labels" "labelsAPI" "nodefeature" "nodeFeature" "taints" "setsTaints" }}
{{- if get $.agent $key }}
{{- $writes = append $writes $part }}
{{- end }}
{{- end }}
{{- $_ := set .agent "writes" (sortAlpha $writes | join ",") }}
{{- $_ := set .agent "podLabels" (or (dig "metrics" "podUID" false $config) (dig "metrics" "podLabels" (list) $config | empty | not)) }}
{{- $_ := set .agent "token" (or .agent.conditions .agent.podLabels .agent.dra .agent.writesNode .agent.nodeFeature .agent.idleEvents .agent.needsCDI) }}
{{- $_ := set .agent "needsSysAdmin" (and $needs (not $sim)) }}
{{- $kernelLog := dig "source" "kernelLog" false $config }}
{{- $kernelLogPath := dig "source" "kernelLogPath" "/dev/kmsg" $config | clean }}
{{- /* The path at which the container gets the node's /dev/kmsg, and whether it reads the path in vain. */}}
{{- $_ := set .agent "kernelLog" (ternary $kernelLogPath "" (and $kernelLog (eq true $values.kernelLog.enabled) (not $sim))) }}
{{- $mounted := list }}
{{- range $values.extraVolumeMounts }}
{{- $mounted = append $mounted .mountPath }}
{{- end }}
{{- $_ := set .agent "needsKernelLog" (and $kernelLog (not .agent.kernelLog) (not $sim) (not (include "gpu-node-agent.below" (dict "path" (printf "%s/" $kernelLogPath) "dirs" $mounted)))) }}
{{- $proc := dig "metrics" "processes" "proc" "/proc" $config }}
{{- /* Directories of the node, unless extraVolumeMounts has them. Memory limits need the control groups and their names. */}}
{{- $dirs := dict "hpcJobDir" (dig "metrics" "hpcJobDir" "" $config)
  "hostProc" (ternary $proc "" (and $processes (ne (clean $proc) "/proc")))
  "podLogs" (ternary (dig "metrics" "processes" "podLogs" "/var/log/pods" $config) "" (or $processes $limits))
  "cgroup" (ternary "/sys/fs/cgroup" "" $limits)
  "featuresDir" (ternary "" (dir (clean .agent.labelsFile)) (empty .agent.labelsFile)) }}
{{- range $key, $dir := $dirs }}
{{- range $values.extraVolumeMounts }}
{{- if eq (clean .mountPath) (clean $dir) }}
{{- $_ := set $dirs $key "" }}
{{- end }}
{{- end }}
{{- end }}
{{- $_ := mustMergeOverwrite .agent $dirs }}
{{- $sysAdmin := default "auto" $values.sysAdmin }}
{{- $_ := set .agent "sysAdmin" (and (not $sim) (or (eq $sysAdmin "always") (and (eq $sysAdmin "auto") $needs))) }}
{{- $affinity := deepCopy (default (dict) $values.affinity) }}
{{- $_ := set .agent "affinity" $affinity }}
{{- $_ := set .agent "terms" (dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" "nodeSelectorTerms" (list) $affinity) }}
{{- /* {} is the chart's default; null and "" request no terms. */}}
{{- $_ := set .agent "gpuNodes" (and (kindIs "map" $values.affinity) (not .agent.terms) (not $sim)) }}
{{- end }}

{{/* The names of the nodeConfigs entries, and "" for all other nodes, as JSON. */}}
{{- define "gpu-node-agent.names" -}}
{{- $names := keys (default (dict) .Values.nodeConfigs) | sortAlpha }}
{{- range $names }}
{{- if hasPrefix "dashboard-" . }}
{{- fail (printf "nodeConfigs.%s: names with the prefix dashboard- are reserved for the dashboards' ConfigMaps; choose another name" .) }}
{{- end }}
{{- if or (eq "mps-daemon" .) (hasSuffix "-mps-daemon" .) }}
{{- fail (printf "nodeConfigs.%s: names that end in mps-daemon are reserved for the DaemonSets of MPS; choose another name" .) }}
{{- end }}
{{- if and $.Values.reclaim.enabled (eq "reclaim" .) }}
{{- fail "nodeConfigs.reclaim: the name is reserved for the objects of reclaim; choose another name" }}
{{- end }}
{{- end }}
{{- prepend $names "" | toJson }}
{{- end }}

{{/*
any fills the dict "any" with the properties that the agents of any DaemonSet have, and with the entries of all lists. It is called
with (dict "root" $ "any" (dict)).
*/}}
{{- define "gpu-node-agent.any" -}}
{{- range $name := include "gpu-node-agent.names" .root | fromJsonArray }}
{{- $agent := dict }}
{{- include "gpu-node-agent.agent" (dict "root" $.root "name" $name "agent" $agent) }}
{{- range list "conditions" "podLabels" "labelsAPI" "nodeFeature" "setsTaints" "writesNode" "idleEvents" "needsCDI" "processes" "token" }}
{{- $_ := set $.any . (or (get $.any .) (get $agent .)) }}
{{- end }}
{{- range list "taints" "startupTaints" }}
{{- $_ := set $.any . (concat (default (list) (get $.any .)) (get $agent .) | uniq) }}
{{- end }}
{{- end }}
{{- end }}

{{/*
The affinity of one DaemonSet: the user's or the one for GPU nodes, and the chart's own terms. "apart" keeps it from nodes that
have an agent.
*/}}
{{- define "gpu-node-agent.affinity" -}}
{{- $root := .root }}
{{- $affinity := .agent.affinity }}
{{- $terms := .agent.terms }}
{{- if .agent.gpuNodes }}
{{- range list
  (dict "key" "feature.node.kubernetes.io/pci-10de.present" "operator" "In" "values" (list "true"))
  (dict "key" "feature.node.kubernetes.io/cpu-model.vendor_id" "operator" "In" "values" (list "NVIDIA"))
  (dict "key" "nvidia.com/gpu.present" "operator" "In" "values" (list "true")) }}
{{- $terms = append $terms (dict "matchExpressions" (list .)) }}
{{- end }}
{{- end }}
{{- if $root.Values.nodeConfigs }}
{{- $chosen := dict "key" "gpu-node-agent/config" "operator" "NotIn" "values" (keys $root.Values.nodeConfigs | sortAlpha) }}
{{- if .name }}
{{- $chosen = dict "key" "gpu-node-agent/config" "operator" "In" "values" (list .name) }}
{{- end }}
{{- $with := list }}
{{- range default (list (dict)) $terms }}
{{- $with = append $with (set (deepCopy .) "matchExpressions" (append (default (list) .matchExpressions) $chosen)) }}
{{- end }}
{{- $terms = $with }}
{{- end }}
{{- if $terms }}
{{- $affinity = mustMergeOverwrite $affinity (dict "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms))) }}
{{- end }}
{{- if .apart }}
{{- $other := dig "podAntiAffinity" "requiredDuringSchedulingIgnoredDuringExecution" (list) $affinity }}
{{- $other = append $other (dict "topologyKey" "kubernetes.io/hostname" "namespaceSelector" (dict) "labelSelector" (dict "matchLabels" (dict "gpu-node-agent/serves" "node"))) }}
{{- $affinity = mustMergeOverwrite $affinity (dict "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" $other)) }}
{{- end }}
{{- if $affinity }}
{{- dict "affinity" $affinity | toYaml }}
{{- end }}
{{- end }}

{{/* "true" if the web server uses TLS. */}}
{{- define "gpu-node-agent.tls" -}}
{{- if and .Values.web.secretName (ne .Values.web.probes "HTTP") }}true{{ end }}
{{- end }}

{{/* A probe of a path: (dict "root" $ "path" PATH "timing" TIMING) */}}
{{- define "gpu-node-agent.probe" -}}
{{- $scheme := ternary (default "HTTPS" .root.Values.web.probes) "HTTP" (not (empty .root.Values.web.secretName)) -}}
{{- if eq $scheme "TCP" -}}
tcpSocket: {port: metrics}
{{- else -}}
httpGet: {path: {{ .path }}, port: metrics, scheme: {{ $scheme }}}
{{- end }}
{{- with .timing }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What all pods of one DaemonSet have in common: (dict "root" $ "name" NAME "agent" AGENT "apart" BOOL), see affinity */}}
{{- define "gpu-node-agent.pod" -}}
{{- $v := .root.Values -}}
serviceAccountName: {{ include "gpu-node-agent.serviceAccountName" .root }}
enableServiceLinks: false
{{- with $v.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $v.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $v.podSecurityContext }}
securityContext: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $selector := deepCopy (default (dict) $v.nodeSelector) }}
{{- if $v.gpuOperator.enabled }}
{{- $_ := set $selector "nvidia.com/gpu.deploy.device-plugin" "true" }}
{{- end }}
{{- with $selector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "gpu-node-agent.affinity" . }}
{{ . }}
{{- end }}
{{- with include "gpu-node-agent.tolerations" .root | fromJsonArray }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $v.gpuOperator.enabled }}
initContainers:
  - name: wait-for-toolkit
    {{- include "gpu-node-agent.containerImage" .root | nindent 4 }}
    # The toolkit gives the container that follows its GPUs.
    command: [sh, -c, 'until test -f /validations/toolkit-ready; do echo "waiting for the toolkit of the GPU Operator"; sleep 5; done']
    # Requests no GPUs: NVIDIA's hook would not start this container before the driver is installed.
    env:
      - {name: NVIDIA_VISIBLE_DEVICES, value: void}
    securityContext: {{- include "gpu-node-agent.securityContext" .root | nindent 6 }}
    resources: {{- toYaml (default (dict) $v.resources) | nindent 6 }}
    volumeMounts:
      - {name: validations, mountPath: /validations, readOnly: true}
{{- end }}
{{- end }}

{{/*
A CEL expression: an agent writes a label with the key k. Other labels of nvidia.com steer NVIDIA's GPU Operator, and
gpu-node-agent/config selects a configuration.
*/}}
{{- define "gpu-node-agent.isLabel" -}}
{{- $device := "count|product|replicas|sharing-strategy|memory|multiprocessors|slices[.](gi|ci)|engines[.](copy|decoder|encoder|jpeg|ofa)" -}}
k.matches('^(nvidia[.]com/(cuda[.](driver|runtime)(-version)?[.](major|minor|rev|revision|full)|gpu[.](machine|family|compute[.](major|minor)|mode|clique|{{ $device }})|mig-[0-9][-0-9a-z.]*[.]({{ $device }})|mig[.](capable|strategy)|mps[.]capable|vgpu[.](present|host-driver-(version|branch)))|gpu-node-agent/gpus-(healthy|degraded|unhealthy))$')
{{- end }}

{{/*
The tolerations of all pods on the nodes, as JSON: the user's, and one for each taint of all agents, because a node that changes its
configuration still has the taints of the old one. The keys of the documents are always tolerated, so that agents can start on a node that
still has one of them after an upgrade or a rollback to values without it.
*/}}
{{- define "gpu-node-agent.tolerations" -}}
{{- $any := dict }}
{{- include "gpu-node-agent.any" (dict "root" . "any" $any) }}
{{- $keys := list "gpu-node-agent/unhealthy" "gpu-node-agent/cordoned" }}
{{- range $any.taints }}
{{- $keys = append $keys (toJson .key | trimAll "\"") }}
{{- end }}
{{- range $any.startupTaints }}
{{- $keys = append $keys (regexFind "^[^=:]+" .) }}
{{- end }}
{{- $tolerations := default (list) .Values.tolerations }}
{{- range uniq $keys }}
{{- $tolerations = append $tolerations (dict "key" . "operator" "Exists") }}
{{- end }}
{{- $tolerations | uniq | toJson }}
{{- end }}

{{- define "gpu-node-agent.containerImage" -}}
image: {{ include "gpu-node-agent.image" . }}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{/* The security context of a container without privileges. */}}
{{- define "gpu-node-agent.securityContext" -}}
{{- $security := deepCopy (default (dict) .Values.securityContext) }}
{{- $selinux := dig "seLinuxOptions" (dict) (default (dict) .Values.podSecurityContext) }}
{{- if and (include "gpu-node-agent.openshift" .) (not $selinux.type) }}
{{- /* SELinux always enforces there. A container's options replace all options of the pod. */}}
{{- $security = merge $security (dict "seLinuxOptions" (merge (dict "type" "spc_t") $selinux)) }}
{{- end }}
{{- toYaml $security }}
{{- end }}

{{/* The volumes that init containers of gpu-node-agent.pod need, and the user's. */}}
{{- define "gpu-node-agent.volumes" -}}
{{- $volumes := list }}
{{- if .Values.gpuOperator.enabled }}
{{- $dir := required "gpuOperator.validationsDir: expected the directory of the operator's validations on the nodes, such as /run/nvidia/validations" .Values.gpuOperator.validationsDir }}
{{- $volumes = list (dict "name" "validations" "hostPath" (dict "path" $dir "type" "DirectoryOrCreate")) }}
{{- end }}
{{- with concat $volumes (default (list) .Values.extraVolumes) }}
{{- toYaml . }}
{{- end }}
{{- end }}
