package helm

import (
	"strings"
	"testing"
)

// TestRefused checks that invalid values are refused with an error about them.
func TestRefused(t *testing.T) {
	const sharing, mps = "config.plugin.sharing.timeSlicing.resources[0].", "config.plugin.sharing.mps.resources[0]."
	const taint = "config.node.taints[0]."
	for set, want := range map[string]string{
		"config.plugin.migStratgy=mixed":                                    "migStratgy",
		"config.pugin.migStrategy=mixed":                                    "pugin",
		"config.health.temperature=hot":                                     "temperature",
		"nodeConfigs.a.plugin.deviceLists={envvar}":                         "deviceLists",
		"nodeConfigs.A_b.log.level=debug":                                   "A_b",
		"config.plugin.kubeletDir=/x":                                       "config.plugin.kubeletDir: ",
		"kubeletDir=var/lib/kubelet":                                        "kubeletDir",
		"kubeletDir=null":                                                   "kubeletDir: ",
		"affinity=all":                                                      "affinity",
		"extraVolumeMounts[0].name=a":                                       "mountPath",
		"image.tags=x":                                                      "tags",
		"image.tag=20260101123456789":                                       "tag", // YAML and JSON would round it
		"sysAdmin=yes":                                                      "sysAdmin",
		"serviceMonitor.enabled=true,podMonitor.enabled=true":               "serviceMonitor.enabled and podMonitor.enabled: ",
		"serviceMonitor.enabled=true,service.enabled=false":                 "serviceMonitor.enabled",
		"image.digest=sha256:abc":                                           "digest",
		"goMemLimit=96Mi":                                                   "goMemLimit",
		"config.metrics.listen=127.0.0.1:9400":                              "config.metrics.listen",
		"nodeConfigs.a.metrics.listen=:http":                                "nodeConfigs.a.metrics.listen",
		"config.metrics.webConfigFile=/w.yaml":                              "web.secretName",
		"updateStrategy.rollingUpdate.maxSurge=1":                           "maxSurge",
		"nodeConfigs.dashboard-node.log.level=debug":                        "nodeConfigs.dashboard-node",
		`files.config\.yaml=x`:                                              "files: config.yaml",
		"serviceAccount.create=false,config.health.kubernetes.enabled=true": "serviceAccount.name",
		"goMemLimit=100M":                                                   "goMemLimit",
		"hostPID=yes":                                                       "hostPID",
		"prometheusRule.prices.H100=-1":                                     "/prometheusRule/prices/H100",
		"prometheusRule.prices.H100=cheap":                                  "/prometheusRule/prices/H100",
		"web.probes=https":                                                  "probes",
		"config.plugin.sharing.timeSlicing.renameByDefault=maybe":           "renameByDefault",
		"config.metrics.podUID=maybe":                                       "podUID",
		"serviceAccount.create=false,config.metrics.podUID=true":            "serviceAccount.name",

		// The processes of the pod instead of the node's.
		"config.metrics.processes.enabled=true,config.metrics.processes.proc=/proc/": "config.metrics.processes.proc: ",

		// Values that the agent refuses.
		"config.source.mode=foo":                 "/config/source/mode",
		"config.source.mode=Sim":                 "'auto', 'embedded', 'standalone', 'sim'",
		"config.source.mode=":                    "/config/source/mode",
		"nodeConfigs.a.source.mode=foo":          "/nodeConfigs/a/source/mode",
		"config.plugin.deviceList={envvar,cdi}":  "/config/plugin/deviceList/1",
		"config.source.healthSystems={pci}":      "/config/source/healthSystems/0",
		"config.health.temperature=1000":         "/config/health/temperature",
		"config.health.temperature=0":            "/config/health/temperature",
		"config.health.confirm=1.5":              "/config/health/confirm",
		"config.health.flap.trips=-1":            "/config/health/flap/trips",
		"config.health.flap.within=1d":           "/config/health/flap/within",
		"config.source.interval=":                "/config/source/interval",
		"config.metrics.fieldsFile=counters.csv": "/config/metrics/fieldsFile",
		"config.plugin.driverRoot=":              "/config/plugin/driverRoot",

		// Entries of lists that the agent refuses.
		"config.health.cordon={all}":                              "/config/health/cordon/0",
		"config.health.cordon={-1}":                               "/config/health/cordon/0",
		"config.health.cordon=7":                                  "at '/config/health/cordon': got number",
		"nodeConfigs.a.plugin.include={0-3}":                      "/nodeConfigs/a/plugin/include/0",
		"config.health.xid.unhealthy={0}":                         "/config/health/xid/unhealthy/0",
		sharing + "name=nvidia.com/gpu":                           "missing property 'replicas'",
		sharing + "name=nvidia.com/gpu," + sharing + "replica=4":  "'replica' not allowed",
		sharing + "name=nvidia.com/gpu," + sharing + "replicas=0": "minimum: got 0, want 2",

		// Sharing by MPS.
		mps + "name=nvidia.com/gpu," + mps +
			"replicas=4": "config.plugin.sharing.mps.resources: ",
		"nodeConfigs.a.plugin.sharing.memory.resource=a.b/c," +
			"nodeConfigs.a.plugin.sharing.memory.enforcement=mps": "nodeConfigs.a.plugin.sharing.memory.enforcement: ",
		"config.plugin.nvidiaConfig=/etc/gpu-node-agent/n," +
			`files.n=sharing: {mps: {resources: [{name: nvidia.com/gpu\, replicas: 2}]}}`: "config.plugin.nvidiaConfig: ",
		"mps.enabled=true": "mps.enabled: ",
		// limited by the driver
		"mps.enabled=true,config.plugin.sharing.memory.resource=a.b/c": "mps.enabled: ",
		"mps.enabled=true,config.plugin.sharing.mps.root=/run/," + mps + "name=a.b/c," + mps +
			"replicas=2": "config.plugin.sharing.mps.root: ",
		"config.plugin.sharing.memory.resource=gpu-memory": "/config/plugin/sharing/memory/resource",
		"config.plugin.sharing.memory.unit=1GB":            "/config/plugin/sharing/memory/unit",
		"config.plugin.sharing.memory.reserve=much":        "/config/plugin/sharing/memory/reserve",
		"config.plugin.sharing.mps.root=run/mps":           "/config/plugin/sharing/mps/root",
		"mps.enable=true":                                  "enable",
		"mps.terminationGracePeriodSeconds=5":              "/mps/terminationGracePeriodSeconds",
		"nodeConfigs.a-mps-daemon.log.level=debug":         "nodeConfigs.a-mps-daemon: ",
		"config.plugin.sharing.memory.enforcement=hope":    "/config/plugin/sharing/memory/enforcement",

		// DRA.
		"config.plugin.api=dra":                                           "config.plugin.api: ",
		"nodeConfigs.a.plugin.api=dra":                                    "nodeConfigs.a.plugin.api: ",
		"dra.enabled=false,config.plugin.api=dra":                         "dra.enabled=true",
		"dra.enabled=true,config.plugin.api=DRA":                          "/config/plugin/api",
		"dra.enabled=true,nodeConfigs.a.plugin.dra.driverName=a.b":        "nodeConfigs.a.plugin.dra.driverName: ",
		"dra.enabled=true,config.plugin.kubeletDir=/x":                    "config.plugin.kubeletDir: ",
		"dra.enabled=true,serviceAccount.create=false":                    "serviceAccount.name: ",
		"dra.enabled=true,dra.deviceClasses.mig={mig-1g.10gb}":            "/dra/deviceClasses/mig/0",
		"dra.enabled=true,dra.deviceClasses.mig={1g.10gb+me,1g.10gb+me}":  "/dra/deviceClasses/mig",
		"dra.enabled=true,dra.deviceClasses.extra[0].name=gpu.nvidia.com": "dra.deviceClasses: ",
		"dra.enabled=true,dra.deviceClasses.extra[0].name=a," +
			"dra.deviceClasses.extra[0].extendedResourceName=nvidia.com/gpu": "nvidia.com/gpu",
		"dra.enabled=true,dra.deviceClasses.extra[0].name=A":           "/dra/deviceClasses/extra/0/name",
		"dra.enabled=true,dra.deviceClasses.extra[0].selectors={true}": "missing property 'name'",
		"dra.enabled=true,dra.deviceClasses.extra[0].name=a," +
			"dra.deviceClasses.extra[0].extendedResourceName=gpu": "/dra/deviceClasses/extra/0/extendedResourceName",
		"config.plugin.dra.driverName=GPU": "/config/plugin/dra/driverName",
		"config.plugin.dra.driverName=":    "/config/plugin/dra/driverName",
		"dra.enable=true":                  "enable",

		// Labels and taints.
		"config.node.labels.output=file,config.node.labels.file=/etc/kubernetes/x": "config.node.labels.file: ",
		"nodeConfigs.a.node.labels.output=nfd":                                     "/nodeConfigs/a/node/labels/output",
		"config.node.startupTaint=gpu-node-agent/not-ready":                        "/config/node/startupTaint",
		"config.node.startupTaint=a=b:NoExecute," + taint + "key=a," + taint + "when=cordoned," + taint +
			"effect=NoExecute": "config.node.taints[0]: node.startupTaint ",
		"config.node.startupTaint=node.cloudprovider.kubernetes.io/uninitialized:NoSchedule":        "config.node.startupTaint: ",
		taint + "key=node.kubernetes.io/a," + taint + "when=cordoned," + taint + "effect=NoExecute": "config.node.taints[0]: ",
		taint + "key=a," + taint + "when=cordoned," + taint + "effect=None":                         "/config/node/taints/0/effect",
		strings.ReplaceAll(taint+"key=a,"+taint+"when=cordoned,"+taint+"effect=NoExecute", "[0]", "[1]") + "," + taint + "key=a," + taint +
			"when=allUnhealthy," + taint + "effect=NoExecute": "config.node.taints[1]: node.taints[0] ",
		"serviceAccount.create=false,config.node.labels.output=api": "serviceAccount.name",

		// Reclaim.
		"reclaim.enabled=true":                                            "reclaim.policy.namespaces: ",
		"reclaim.enabled=true,reclaim.policy.namespaces={a}":              "reclaim.policy.idle.after: ",
		"reclaim.enabled=true,reclaim.policy.idle.after=2h":               "reclaim.policy.namespaces: ",
		withReclaim + ",reclaim.policy.idle.evidence=noLoad":              "/reclaim/policy/idle/evidence",
		withReclaim + ",reclaim.policy.namespaces={team-*}":               "/reclaim/policy/namespaces/0",
		withReclaim + ",reclaim.policy.podSelector.matchLabels.tier=null": "reclaim.policy.podSelector: ",
		withReclaim + ",reclaim.policy.minAge=1h":                         "minAge",
		withReclaim + ",rbac.create=false":                                "reclaim.serviceAccount.name: ",
		withReclaim + ",reclaim.serviceAccount.create=false":              "reclaim.serviceAccount.name: ",
		withReclaim + ",reclaim.schedule=":                                "reclaim.schedule: ",
		withReclaim + ",reclaim.web.user=u":                               "reclaim.web.secretName: ",
		withReclaim + ",reclaim.web.secretName=s,reclaim.web.certFile=a":  "reclaim.web: ",
		withReclaim + ",nodeConfigs.reclaim.log.level=debug":              "nodeConfigs.reclaim: ",
		"reclaim.dryrun=false":                                            "dryrun",

		// GPUs with an image without DCGM.
		"image.tag=0.1.0-sim":                                                       "config.source.mode=sim",
		"image.tag=0.1.0-sim,nodeConfigs.a.source.mode=sim":                         "config.source.mode=sim",
		"image.tag=0.1.0-sim,config.source.mode=sim,nodeConfigs.a.source.mode=auto": "nodeConfigs.a.source.mode=sim",
		"image.tag=0.1.0-sim,config.source.mode=sim,nodeConfigs.a.source.mode=null": "nodeConfigs.a.source.mode=sim",

		// Missing files.
		"config.metrics.fieldsFile=/etc/gpu-node-agent/a.csv": "config.metrics.fieldsFile: " +
			"file /etc/gpu-node-agent/a.csv",
		`config.metrics.fieldsFile=/etc/gpu-node-agent/a.csv,files.b\.csv=x`:            `--set-file 'files.a\.csv=PATH'`,
		`config.metrics.fieldsFile=/etc/../etc//gpu-node-agent/a.csv,files.a\.csv=null`: "config.metrics.fieldsFile",
		"config.plugin.nvidiaConfig=/etc/gpu-node-agent/n.yaml":                         "config.plugin.nvidiaConfig",
		"nodeConfigs.a.plugin.nvidiaConfig=/etc/gpu-node-agent/n.yaml":                  "nodeConfigs.a.plugin.nvidiaConfig",
		"config.metrics.webConfigFile=/etc/gpu-node-agent/w.yaml,web.secretName=w":      "config.metrics.webConfigFile",
		"config.health.kubernetes.kubeconfig=/etc/gpu-node-agent/k":                     "config.health.kubernetes.kubeconfig",
		"files.a/b=x": "a/b",

		// Files that would be lost with the pod, or cannot be created.
		"config.health.stateFile=/var/lib/gpu-node-agent/x":              "stateFile",
		"config.health.socket=/bar/a.sock":                               "config.health.socket: /bar/a.sock",
		"config.source.mode=sim,config.source.sim.control=/bar/sim.sock": "config.source.sim.control",

		// Invalid names of objects.
		"fullnameOverride=UPPER":              "fullnameOverride: ",
		"fullnameOverride=a.b":                "fullnameOverride: ",
		"fullnameOverride=a--,nameOverride=b": "fullnameOverride: ",
		"nameOverride=Upper":                  "nameOverride: ",
		"nameOverride=a/b,fullnameOverride=a": "nameOverride: ",
	} {
		t.Run(set, func(t *testing.T) {
			_, err := helm(t, "template", "gna", chart, "--set", set)
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want one about %q", err, want)
			}
		})
	}
}

// TestAccepted checks that the chart and the agent accept valid values that resemble invalid ones.
func TestAccepted(t *testing.T) {
	const sharing = "config.plugin.sharing.timeSlicing.resources[0]."
	const extra = "extraVolumes[0].name=x,extraVolumeMounts[0].name=x,extraVolumeMounts[0].mountPath="
	for _, set := range []string{
		"config.source.mode=null",
		"config.source.healthSystems={none}",
		"config.plugin.deviceList={envvar,cdi-cri}",
		"config.metrics.compat.hostnameLabel=Hostname",
		"config.health.temperature=0.5,config.metrics.idleBelow=0,config.health.flap.trips=0,config.health.confirm=100",
		"config.source.sim.seed=-9007199254740991",
		"config.health.cordon={7,3:0,1b:00.0,GPU-5a},config.plugin.exclude={7},config.plugin.include={all}",
		"config.health.xid.unhealthy={48,79},config.health.incidents.warn={14,DCGM_FR_NVLINK_DOWN}",
		sharing + "name=nvidia.com/gpu," + sharing + "replicas=4," + sharing + "devices={0,1}",
		"config.source.sim.scenario[0].at=5s,config.source.sim.scenario[0].gpu=3,config.source.sim.scenario[0].xid=79",
		"config.health.recoverAfter=0s,config.health.flap.within=1h30m,config.source.interval=1.5s,config.metrics.window=+.5h",
		"config.metrics.fieldsFile=,config.metrics.hpcJobDir=,config.plugin.devRoot=,config.plugin.cdi.hookPath=",

		"image.tag=sim-1",
		"image.tag=0.1.0-sim,config.source.mode=sim,nodeConfigs.a.log.level=debug",
		"image.tag=0.1.0-sim,image.digest=sha256:" + strings.Repeat("0", 64), // which takes precedence over the tag

		`config.metrics.fieldsFile=/etc//gpu-node-agent/a.csv,files.a\.csv=DCGM_FI_DEV_GPU_TEMP\,gauge\,x`,
		"config.metrics.fieldsFile=/etc/gpu-node-agent/more/a.csv," + extra + "/etc/gpu-node-agent/more/",
		"config.metrics.fieldsFile=/etc/gpu-node-agent/a.csv," + extra + "/etc/gpu-node-agent/a.csv",
		"config.plugin.nvidiaConfig=/etc/nvidia/config.yaml", // an image may contain it
		"config.metrics.webConfigFile=/etc/gpu-node-agent-web/other.yaml,web.secretName=w",

		"config.health.socket=,stateDir=",
		"config.health.socket=/var/lib/gpu-node-agent/a.sock",
		"config.health.socket=/foo/x/a.sock," + extra + "/foo",
		"config.health.socket=/tmp/a.sock,securityContext.readOnlyRootFilesystem=false",
		"config.health.socket=/tmp/a.sock,securityContext=null",
		"config.source.sim.control=/bar/sim.sock", // only a simulation creates it

		// Nothing to share by MPS.
		"config.plugin.enabled=false,config.plugin.sharing.mps.resources[0].name=nvidia.com/gpu," +
			"config.plugin.sharing.mps.resources[0].replicas=4",
		"config.plugin.sharing.memory.enforcement=mps",
		`config.plugin.nvidiaConfig=/etc/gpu-node-agent/n,files.n=flags: {mpsRoot: ~\, plugin: ~}`,

		"fullnameOverride=a-",
		"fullnameOverride=a.b,service.enabled=false",
		"nameOverride=A_b.c,fullnameOverride=a",
		"nameOverride=null,fullnameOverride=null",
	} {
		t.Run(set, func(t *testing.T) {
			for _, m := range template(t, "--set", set).configMaps {
				if found := faults(t, m.Data["config.yaml"]); len(found) > 0 {
					t.Errorf("%s: the agent reports %v", m.Name, found)
				}
			}
		})
	}
}
