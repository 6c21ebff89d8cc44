package helm

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"sigs.k8s.io/yaml"
)

// Patterns of texts in lists.
const (
	deviceReference = `([gG][pP][uU]|MIG)-.+|[0-9]{1,9}(:[0-9]{1,9})?|([0-9A-Fa-f]{1,8}:)?[0-9A-Fa-f]{1,2}:[0-9A-Fa-f]{1,2}[.][0-9A-Fa-f]`

	// A model or a MIG profile has no colon or comma, and begins like an index only if it has a wildcard.
	devicePattern = `[^-+.0-9\s:,]([^:,]*[^\s:,])?|([^\s:,*?][^:,*?]*)?[*?]([^:,]*[^\s:,])?`

	resourceName = `^[a-z0-9][-a-z0-9.]*/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`
	domain       = `^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`
	size         = `^[0-9]+([.][0-9]+)?([KMGTPE]i?|k|[eE][0-9]+)?$`
	labelKey     = `([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?`
	labelValue   = `([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?`
)

// addEntrySchemas adds the schemas of the entries of lists whose default is empty. TestEntries compares them with the agent.
func addEntrySchemas(constraints map[string]map[string]any) {
	// A whole number may stand for its digits: YAML and helm --set make a number of an index or a code.
	number := func(minimum, maximum int, pattern string) map[string]any {
		return map[string]any{"type": []any{"integer", "string"}, "minimum": minimum, "maximum": maximum, "pattern": pattern}
	}
	text := func(pattern string) map[string]any { return map[string]any{"type": "string", "pattern": pattern} }
	optional := func(schema map[string]any) map[string]any {
		types, several := schema["type"].([]any)
		if !several {
			types = []any{schema["type"]}
		}
		schema["type"] = append(types, "null")
		return schema
	}
	object := func(properties map[string]any, required ...string) map[string]any {
		for name, schema := range properties {
			if !slices.Contains(required, name) {
				properties[name] = optional(schema.(map[string]any))
			}
		}
		schema := map[string]any{"type": "object", "additionalProperties": false, "properties": properties}
		if len(required) > 0 {
			schema["required"] = required
		}
		return schema
	}
	list := func(items map[string]any) map[string]any { return map[string]any{"type": "array", "items": items} }
	boolean := func() map[string]any { return map[string]any{"type": "boolean"} }
	enum := func(words ...any) map[string]any {
		return map[string]any{"type": "string", "enum": append(words, nil)}
	}
	const maxIndex, maxInt32 = 999_999_999, 1<<31 - 1
	count := func(minimum, maximum int) map[string]any { return number(minimum, maximum, "^[0-9]+$") }
	selector := func() map[string]any { return number(0, maxIndex, "^("+deviceReference+"|"+devicePattern+")$") }
	xid := func() map[string]any { return count(1, 999) }
	incident := func() map[string]any { return number(1, maxInt32, `^([A-Za-z][A-Za-z0-9_]*|[1-9][0-9]*)$`) }
	duration := func() map[string]any { return text("^" + durationPattern + "$") }
	code := func() map[string]any { return number(1, 1<<53, "^[1-9][0-9]*$") }

	entries := map[string]map[string]any{
		"health.cordon":              number(0, maxIndex, "^("+deviceReference+")$"),
		"health.xid.unhealthy":       code(),
		"health.xid.warn":            code(),
		"health.xid.ignore":          code(),
		"health.incidents.unhealthy": incident(),
		"health.incidents.warn":      incident(),
		"health.incidents.ignore":    incident(),
		"plugin.include":             selector(),
		"plugin.exclude":             selector(),
		"plugin.resources": object(map[string]any{"pattern": text("."), "resource": text(resourceName)},
			"pattern", "resource"),
		"plugin.sharing.timeSlicing.resources": object(map[string]any{
			"name": text(resourceName), "replicas": number(2, 1000, "^[0-9]+$"),
			"devices": list(selector()), "rename": text("^$|" + resourceName),
		}, "name", "replicas"),
		"plugin.sharing.mps.resources": object(map[string]any{
			"name": text(resourceName), "replicas": number(2, 48, "^[0-9]+$"),
			"devices": list(selector()), "rename": text("^$|" + resourceName),
			"activeThreadPercentage": count(0, 100), "pinnedMemory": text("^$|" + size),
		}, "name", "replicas"),
		"plugin.sharing.memory.devices": selector(),
		"plugin.dra.evictOn":            text("^(xid=[1-9][0-9]*|[a-z]+(-[a-z0-9]+)*)$"),
		"metrics.podLabels":             number(0, maxIndex, "^("+labelKey+"|/.+/)$"),
		"source.sim.past":               object(map[string]any{"ago": duration(), "gpu": count(0, maxIndex), "xid": xid()}, "ago", "gpu", "xid"),
		"source.sim.scenario": object(map[string]any{
			"at": duration(), "gpu": count(0, maxIndex), "xid": xid(), "times": count(1, 1_000_000),
			"lost": boolean(), "stale": boolean(), "rowRemapPending": boolean(), "rowRemapFailed": boolean(), "clocksSlowed": boolean(),
			"recoveryAction":  number(0, maxInt32, "^([0-9]+|none|reset|reboot|drainP2P|drainAndReset|recoverIMEX|pcieBusReset|systemReboot)$"),
			"doubleBitErrors": count(0, 1_000_000), "retiredPages": count(0, 64),
			"temperature": map[string]any{"type": "number", "minimum": 0, "maximum": 200},
			"incident":    incident(), "severity": enum("fail", "warn", "none"), "mig": enum("off", "sevenths", "balanced"),
			"processes": list(object(map[string]any{
				"pid": count(1, 1<<22), "memory": count(0, 1<<50), "sm": map[string]any{"type": "number", "minimum": 0, "maximum": 1},
				"kind": enum("compute", "graphics", "mps"), "mig": count(0, 6),
			}, "pid")),
			"source": enum("up", "down", "stalled", "blind", "empty", "lost", "checksDown"), "events": enum("up", "down", "lossy"),
		}),
	}
	value := number(0, maxIndex, "^"+labelValue+"$")
	value["type"] = append(value["type"].([]any), "boolean") // a taint KEY=true, without quotes
	entries["node.taints"] = object(map[string]any{
		"when": enum("anyUnhealthy", "allUnhealthy", "cordoned"), "effect": enum("NoSchedule", "PreferNoSchedule", "NoExecute"),
		"key": number(0, maxIndex, "^"+labelKey+"$"), "value": value,
	}, "when", "key", "effect")
	const fieldOrSet = "^([dD][cC][gG][mM]_.*|default|profiling|optional)$"
	fields := object(map[string]any{"name": text(fieldOrSet), "type": enum("gauge", "counter", "label", ""), "help": text("")}, "name")
	fields["type"], fields["pattern"] = []any{"string", "object"}, fieldOrSet
	entries["metrics.fields"] = fields

	for key, items := range entries {
		constraints[key] = map[string]any{"items": items}
	}
	for _, key := range []string{"plugin.deviceList", "source.healthSystems", "metrics.names"} {
		constraints[key]["minItems"] = 1
	}
	for _, key := range []string{"plugin.deviceList", "plugin.dra.evictOn", "metrics.podLabels", "metrics.names"} {
		constraints[key]["uniqueItems"] = true
	}
	constraints["metrics.podLabels"]["maxItems"] = 10
}

// TestEntries compares the schema of each list with the agent: both must accept a value, or both must refuse it. The agent
// gets the values as Helm writes them into the ConfigMap.
func TestEntries(t *testing.T) {
	t.Parallel()
	const (
		shared   = "plugin.sharing.timeSlicing.resources"
		mps      = "plugin.sharing.mps.resources"
		scenario = "source.sim.scenario"
	)
	references := []string{
		"0", "7", `"7"`, "3:0", `"3:0"`, "12:10", "1b:00.0", "00:1e.0", "0000:10:00.0", "0000:1b:00.0", "00000000:1B:00.0", "GPU-5a", "gpu-5A",
		"MIG-09", "999999999", "010", "08",
	}
	noReferences := []string{
		"-1", `"-1"`, "3.5", `"3.0"`, `"0x1b"`, "0-3", `"3,4"`, `""`, `" "`, `" 3"`, "~", "[0]", "{a: b}", "1000000000", "1:2:3", "a:b",
		"zz:00.0",
	}
	selectors := append(slices.Clone(references), `"*H100*"`, `"*"`, "NVIDIA L4", "mig-1g.*", "mig-1g.10gb", `"3*"`, "A100", "all", "ALL")
	noSelectors := append(slices.Clone(noReferences), `"*,*"`, `"*H100* "`)
	codes, noCodes := []string{"1", "79", `"79"`, "999"}, []string{"0", "-1", "4.5", `"4.5"`, "xid-79", `""`, "~", "true", "[79]", "{a: b}"}
	incidents := []string{"DCGM_FR_NVLINK_DOWN", "nvlink_down", "14", `"14"`}
	noIncidents := []string{"0", `"0"`, "-3", "1.5", "~", `""`, "NVLINK-DOWN", "true", "[14]", "{a: b}", "2147483648"}
	// in returns entries with the values in a mapping.
	in := func(before string, values []string, after string) []string {
		entries := make([]string, len(values))
		for i, value := range values {
			entries[i] = before + value + after
		}
		return entries
	}
	durations, noDurations := []string{"5s", "1h30m", "1.5s"}, []string{"5", "x", "5 s", "[5s]", "{a: b}", "true"}
	tests := map[string][]struct{ accepted, refused []string }{ // entries by the key of the list
		"health.cordon":              {{references, noReferences}, {nil, []string{`"*"`, "NVIDIA L4", "GPU-", "MIG-", "all", "true"}}},
		"health.xid.unhealthy":       {{codes, noCodes}},
		"health.xid.warn":            {{codes, noCodes}},
		"health.xid.ignore":          {{codes, noCodes}},
		"health.incidents.unhealthy": {{incidents, noIncidents}},
		"health.incidents.warn":      {{incidents, noIncidents}},
		"health.incidents.ignore":    {{incidents, noIncidents}},
		"plugin.include":             {{selectors, noSelectors}},
		"plugin.exclude":             {{selectors, noSelectors}},
		"plugin.deviceList":          {{[]string{"envvar", "envvar, cdi-cri"}, []string{"", "env", "7", "~", "[envvar]", "envvar, envvar"}}},
		"metrics.names": {{
			[]string{"dcgm-exporter-4.8", "dcgm-exporter-4.9", "dcgm-exporter-4.9, dcgm-exporter-4.8"},
			[]string{"", "dcgm-exporter", "4.9", "~", "[dcgm-exporter-4.9]", "dcgm-exporter-4.9, dcgm-exporter-4.9"},
		}},
		"source.healthSystems": {{[]string{"all", "none", "pcie, nvlink"}, []string{"", "gpu", "7", "~", "[all]"}}},
		"plugin.resources": {{
			[]string{`{pattern: "*H100*", resource: nvidia.com/h100}`, "{pattern: mig-1g.*, resource: a.b/c}"},
			[]string{
				"{}", "7", "a.b/c", "~", "[]", `{pattern: "*"}`, "{resource: a.b/c}", `{pattern: "", resource: a.b/c}`, `{pattern: "*", resource: gpu}`,
				`{pattern: "*", resource: a.b/}`,
				`{pattern: "*", resource: a/b/c}`, `{pattern: "*", resource: A.b/c}`, `{pattern: "*", resource: a.b/c, x: y}`,
				`{pattern: ~, resource: a.b/c}`, `{pattern: [a], resource: a.b/c}`,
			},
		}},
		shared: {
			{
				[]string{
					"{name: nvidia.com/gpu, replicas: 2}", `{name: nvidia.com/gpu, replicas: "4"}`, "{name: nvidia.com/gpu, replicas: 1000}",
					"{name: nvidia.com/mig-1g.10gb, replicas: 4}",
					"{name: nvidia.com/gpu, replicas: 4, devices: ~, rename: ~}", `{name: nvidia.com/gpu, replicas: 4, devices: [], rename: ""}`,
					"{name: nvidia.com/gpu, replicas: 4, rename: a.b/c}",
				},
				[]string{
					"{}", "7", "nvidia.com/gpu", "~", "[]", "{replicas: 4}", "{name: nvidia.com/gpu}", "{name: nvidia.com/gpu, replica: 4}",
					"{name: nvidia.com/gpu, replicas: 4, x: y}",
					"{name: gpu, replicas: 4}", "{name: ~, replicas: 4}", "{name: [nvidia.com/gpu], replicas: 4}",
					"{name: nvidia.com/gpu, replicas: 4, rename: gpu}",
					"{name: nvidia.com/gpu, replicas: 4, devices: all}", "{name: nvidia.com/gpu, replicas: 4, devices: 0}",
					"{name: nvidia.com/gpu, replicas: 4, devices: {a: b}}",
				},
			},
			{nil, in("{name: nvidia.com/gpu, replicas: ", []string{"0", "1", "-4", "1001", "2.5", "four", `""`, "~", "true", "[4]", "{a: b}"}, "}")},
			{
				in("{name: nvidia.com/gpu, replicas: 4, devices: [", selectors, "]}"),
				in("{name: nvidia.com/gpu, replicas: 4, devices: [", noSelectors, "]}"),
			},
		},
		mps: {
			{
				[]string{
					"{name: nvidia.com/gpu, replicas: 2}", `{name: nvidia.com/gpu, replicas: "48"}`, "{name: nvidia.com/mig-1g.10gb, replicas: 4}",
					"{name: nvidia.com/gpu, replicas: 4, devices: [0], rename: a.b/c, activeThreadPercentage: 30, pinnedMemory: 16Gi}",
					`{name: nvidia.com/gpu, replicas: 4, devices: ~, rename: ~, activeThreadPercentage: ~, pinnedMemory: ~}`,
					`{name: nvidia.com/gpu, replicas: 4, pinnedMemory: ""}`,
				},
				[]string{
					"{}", "7", "nvidia.com/gpu", "~", "[]", "{replicas: 4}", "{name: nvidia.com/gpu}", "{name: gpu, replicas: 4}",
					"{name: nvidia.com/gpu, replicas: 4, x: y}",
				},
			},
			{nil, in("{name: nvidia.com/gpu, replicas: ", []string{"1", "49", "2.5", "four", "~"}, "}")},
			{
				in("{name: nvidia.com/gpu, replicas: 4, activeThreadPercentage: ", []string{"0", "1", "100", `"50"`}, "}"),
				in("{name: nvidia.com/gpu, replicas: 4, activeThreadPercentage: ", []string{"-1", "101", "2.5", "half", "[5]"}, "}"),
			},
			{
				in("{name: nvidia.com/gpu, replicas: 4, pinnedMemory: ", []string{"512Mi", "1.5Gi", `"8589934592"`, "1048576k"}, "}"),
				in("{name: nvidia.com/gpu, replicas: 4, pinnedMemory: ", []string{"-1Gi", "8GB", "much", "[8Gi]", "8 Gi"}, "}"),
			},
			{nil, in("{name: nvidia.com/gpu, replicas: 4, devices: [", noSelectors, "]}")},
		},
		"plugin.sharing.memory.devices": {{selectors, noSelectors}},
		"metrics.fields": {{
			[]string{
				"default", "DCGM_FI_DEV_GPU_TEMP", "default, dcgm_fi_newer", "{name: DCGM_FI_DEV_GPU_TEMP}",
				"{name: DCGM_FI_DEV_GPU_TEMP, type: gauge, help: warm}", "{name: default, type: ~, help: ~}",
			},
			[]string{
				`""`, "150", `"150"`, "~", "[default]", "{}", `{name: ""}`, "{name: 150}", `{name: "150"}`, "{name: ~}", "{help: x}",
				"{name: default, typ: gauge}", "{name: default, help: [x]}", "defaults", "Default", "{name: optionl}",
				"{name: DCGM_FI_DEV_GPU_TEMP, type: gaugee}",
			},
		}},
		"plugin.dra.evictOn": {{
			[]string{"xid=79", "lost", "dcgm-nvlink-down"},
			[]string{"79", `"79"`, "Xid=79", "xid 79", "xid_79", `""`, "~", "[lost]", "{a: b}", "lost, lost"},
		}},
		"metrics.podLabels": {{
			[]string{"team", "app.kubernetes.io/name", "/.*/", "/^team-/", "7"},
			[]string{
				`""`, "a b", "-a", "/a", "//", "^a", "a*", `"*"`, "-1", "~", "[team]", "{a: b}", "team, team",
				"a, b, c, d, e, f, g, h, i, j, k",
			},
		}},
		"node.taints": {
			{
				[]string{
					"{when: anyUnhealthy, key: gpu-node-agent/unhealthy, effect: NoSchedule}",
					"{when: cordoned, key: a, effect: PreferNoSchedule, value: ~}",
					`{when: allUnhealthy, key: a.b/c_d, effect: NoExecute, value: ""}`, "{when: cordoned, key: 7, effect: NoExecute}",
				},
				[]string{
					"{}", "7", "a:NoExecute", "~", "[]", "{when: cordoned, key: a}", "{when: cordoned, effect: NoExecute}", "{key: a, effect: NoExecute}",
					"{when: cordoned, key: a, effect: NoExecute, x: y}",
					"{when: Cordoned, key: a, effect: NoExecute}", "{when: ~, key: a, effect: NoExecute}", "{when: [cordoned], key: a, effect: NoExecute}",
					"{when: cordoned, key: a, effect: ~}",
				},
			},
			{nil, in("{when: cordoned, effect: NoExecute, key: ", []string{
				`""`, "~", "-1", "a/b/c", "A/b", "/b", "a/", "a b", "_a", "[a]",
				"{a: b}",
			}, "}")},
			{nil, in("{when: cordoned, key: a, effect: ", []string{`""`, "noExecute", "None", "7", "[NoExecute]"}, "}")},
			{
				in("{when: cordoned, key: a, effect: NoExecute, value: ", []string{"true", "7", "a.b_c-D"}, "}"),
				in("{when: cordoned, key: a, effect: NoExecute, value: ", []string{"-1", "a/b", "a b", "_a", "[a]", "{a: b}"}, "}"),
			},
		},
		"source.sim.past": {
			{
				[]string{"{ago: 10s, gpu: 5, xid: 95}", `{ago: 10s, gpu: "5", xid: "95"}`},
				[]string{
					"{}", "7", "~", "[]", "{gpu: 5, xid: 95}", "{ago: 10s, xid: 95}", "{ago: 10s, gpu: 5}", "{ago: 10s, gpu: 5, xid: 95, x: y}",
					"{ago: ~, gpu: 5, xid: 95}",
				},
			},
			{in("{gpu: 5, xid: 95, ago: ", durations, "}"), in("{gpu: 5, xid: 95, ago: ", noDurations, "}")},
			{in("{ago: 10s, gpu: 5, xid: ", codes, "}"), in("{ago: 10s, gpu: 5, xid: ", append(noCodes, "1000"), "}")},
			{
				in("{ago: 10s, xid: 95, gpu: ", []string{"0", "7", `"7"`}, "}"),
				in("{ago: 10s, xid: 95, gpu: ", []string{"-1", "3.5", "GPU-5a", "~", "true", "[0]"}, "}"),
			},
		},
		scenario: {
			{
				[]string{
					"{at: 5s, gpu: 3, xid: 79, times: 2, lost: true, stale: false, rowRemapPending: true, rowRemapFailed: true, clocksSlowed: true, " +
						"doubleBitErrors: 0}",
					"{gpu: 3, incident: DCGM_FR_NVLINK_DOWN, severity: warn}", "{source: stalled}", "{gpu: 3, lost: true, xid: ~, at: ~}",
					"{gpu: 3, mig: sevenths}",
				},
				[]string{"7", "~", "[]", "lost", "{gpu: 3, lost: true, x: y}", "{gpu: 3, los: true}"},
			},
			{in("{gpu: 3, xid: 79, at: ", durations, "}"), in("{gpu: 3, xid: 79, at: ", noDurations, "}")},
			{in("{gpu: 3, xid: ", codes, "}"), in("{gpu: 3, lost: true, xid: ", append(noCodes[:4:4], "1000", "true", "[79]"), "}")},
			{
				in("{lost: true, gpu: ", []string{"0", "7", `"7"`}, "}"),
				in("{lost: true, gpu: ", []string{"-1", "3.5", "GPU-5a", "true", "[0]"}, "}"),
			},
			{in("{gpu: 3, incident: ", incidents, "}"), in("{gpu: 3, lost: true, incident: ",
				slices.DeleteFunc(slices.Clone(noIncidents), func(s string) bool { return s == "~" }), "}")},
			{
				in("{gpu: 3, recoveryAction: ", []string{"reset", "7", `"7"`, "512"}, "}"),
				in("{gpu: 3, recoveryAction: ", []string{"explode", "-1", "1.5", "2147483648", "[reset]"}, "}"),
			},
			{in("{gpu: 3, retiredPages: ", nil, "}"), in("{gpu: 3, retiredPages: ", []string{"-1", "65", "6.3", "many"}, "}")},
			{in("{gpu: 3, doubleBitErrors: ", []string{"1000000"}, "}"), in("{gpu: 3, doubleBitErrors: ", []string{"-1", "1000001", "some"}, "}")},
			{in("{gpu: 3, xid: 79, times: ", []string{"1", "1000000"}, "}"), in("{gpu: 3, xid: 79, times: ", []string{"0", "1000001", "1.5"}, "}")},
			{
				in("{gpu: 3, temperature: ", []string{"0", "36.6", "200"}, "}"),
				in("{gpu: 3, temperature: ", []string{"-1", "201", "hot", "true"}, "}"),
			},
			{nil, in("{gpu: 3, ", []string{
				"lost: 1", "lost: maybe", "stale: 1", "rowRemapPending: x", "rowRemapFailed: x", "clocksSlowed: hw",
				"mig: halves", "incident: NVLINK_DOWN, severity: bad",
			}, "}")},
			{
				in("{gpu: 3, processes: ", []string{
					"[]", "[{pid: 4242, memory: 1073741824, sm: 0.5, kind: mps, mig: 6}]",
					`[{pid: "7", sm: ~}, {pid: 8}]`,
				}, "}"),
				in("{gpu: 3, lost: true, processes: ", []string{
					"7", "{pid: 7}", "[7]", "[{}]", "[{memory: 7}]", "[{pid: 0}]", "[{pid: 4194305}]",
					"[{pid: 7, mem: 1}]", "[{pid: 7, memory: -1}]", "[{pid: 7, sm: 2}]", "[{pid: 7, kind: cuda}]", "[{pid: 7, mig: 7}]", "[{pid: ~}]",
				},
					"}"),
			},
			{
				[]string{"{source: up}", "{source: down}", "{source: blind}", "{source: empty}"},
				[]string{"{source: sideways}", "{source: 7}", "{source: [up]}"},
			},
		},
	}
	schema, err := os.ReadFile(filepath.Join(chart, "values.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	defaults := read(t, filepath.Join("..", "..", "config.yaml"))
	for _, path := range paths(defaults) {
		key := strings.Join(path, ".")
		if _, isList := at(defaults, path).([]any); isList && tests[key] == nil {
			t.Errorf("%s is a list without a test", key)
		}
	}
	for key, tests := range tests {
		t.Run(key, func(t *testing.T) {
			t.Parallel()
			for _, test := range tests {
				for i, entries := range slices.Concat(test.accepted, test.refused) {
					checkEntries(t, schema, key, "["+entries+"]", i < len(test.accepted))
				}
			}
		})
	}
}

// checkEntries checks whether both the schema and the agent accept a list, and that the agent's faults name its key.
func checkEntries(t *testing.T, schema []byte, key, list string, accepted bool) {
	t.Helper()
	var value any
	if err := yaml.Unmarshal([]byte(list), &value); err != nil {
		t.Fatalf("%s: %v", list, err)
	}
	for _, name := range slices.Backward(strings.Split(key, ".")) {
		value = map[string]any{name: value}
	}
	config := value.(map[string]any)
	fromHelm := util.ValidateAgainstSingleSchema(common.Values{"config": config}, schema)
	fromAgent := faults(t, asYAML(t, config))
	about := slices.Collect(maps.Keys(fromAgent))
	if accepted != (fromHelm == nil) || accepted != (len(fromAgent) == 0) || len(about) > 0 && !strings.HasPrefix(about[0], key) {
		t.Errorf("%s: %s: accepted must be %v; Helm: %v; agent: %v", key, list, accepted, fromHelm, fromAgent)
	}
}
