package node

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

func TestConfigValidate(t *testing.T) {
	taint := TaintConfig{When: WhenCordoned, Key: "a/b", Effect: "NoSchedule"}
	taints := func(all ...func(*TaintConfig)) func(*Config) {
		return func(c *Config) {
			for _, change := range all {
				next := taint
				change(&next)
				c.Taints = append(c.Taints, next)
			}
		}
	}
	same := func(*TaintConfig) {}
	for name, c := range map[string]struct {
		change func(*Config)
		want   []string // what each line of the error contains
	}{
		"default":           {func(*Config) {}, nil},
		"output to a file":  {func(c *Config) { c.Labels.Output = LabelsFile }, nil},
		"output to the API": {func(c *Config) { c.Labels.Output = LabelsAPI }, nil},
		"output to NFD":     {func(c *Config) { c.Labels.Output = LabelsNodeFeature }, nil},
		"unknown output": {
			func(c *Config) { c.Labels.Output = "nfd" },
			[]string{`labels.output: expected one of off, file, api, nodeFeature, got "nfd"`},
		},
		"relative file":     {func(c *Config) { c.Labels.File = "labels" }, []string{`labels.file: expected an absolute path, got "labels"`}},
		"startup taint":     {func(c *Config) { c.StartupTaint = "a=b:NoExecute" }, nil},
		"bad startup taint": {func(c *Config) { c.StartupTaint = "a" }, []string{`startupTaint: expected KEY[=VALUE]:EFFECT`}},
		"startup taint of Kubernetes": {
			func(c *Config) { c.StartupTaint = "node.kubernetes.io/not-ready:NoSchedule" },
			[]string{"startupTaint: key: expected another prefix than node.kubernetes.io"},
		},
		"startup taint of a cloud provider": {
			func(c *Config) { c.StartupTaint = "node.cloudprovider.kubernetes.io/x:NoSchedule" },
			[]string{"startupTaint: key: expected another prefix than node.cloudprovider.kubernetes.io"},
		},
		"any unhealthy": {taints(func(t *TaintConfig) { t.When = WhenAnyUnhealthy }), nil},
		"all unhealthy": {taints(func(t *TaintConfig) { t.When = WhenAllUnhealthy }), nil},
		"unknown condition of the second taint": {
			taints(same, func(t *TaintConfig) { t.When, t.Key = "lost", "c" }),
			[]string{`taints[1].when: expected one of anyUnhealthy, allUnhealthy, cordoned, got "lost"`},
		},
		"each effect": {
			taints(same, func(t *TaintConfig) { t.Effect = "PreferNoSchedule" }, func(t *TaintConfig) { t.Effect = "NoExecute" }),
			nil,
		},
		"bad key":   {taints(func(t *TaintConfig) { t.Key = "-" }), []string{`taints[0].key: got "-"`}},
		"bad value": {taints(func(t *TaintConfig) { t.Value = "!" }), []string{`taints[0].value: got "!"`}},
		"bad effect": {
			taints(func(t *TaintConfig) { t.Effect = "No" }),
			[]string{`taints[0].effect: expected NoSchedule, PreferNoSchedule or NoExecute, got "No"`},
		},
		"taint of Kubernetes": {
			taints(func(t *TaintConfig) { t.Key = "node.kubernetes.io/unschedulable" }),
			[]string{"taints[0].key: expected another prefix than node.kubernetes.io"},
		},
		"key and effect of another taint": {
			taints(func(t *TaintConfig) { t.Key = "c" }, same, func(t *TaintConfig) { t.Value = "x" }),
			[]string{"taints[2]: the same key and effect as taints[1]"},
		},
		"key and effect of the startup taint": {
			func(c *Config) {
				taints(func(t *TaintConfig) { t.Key = "c" }, same)(c)
				c.StartupTaint = "a/b=c:NoSchedule"
			}, []string{"taints[1]: the same key and effect as startupTaint"},
		},
		"key of the startup taint": {
			func(c *Config) {
				taints(same)(c)
				c.StartupTaint = "a/b:NoExecute"
			}, nil,
		},
		"shortest idle time":  {func(c *Config) { c.Idle.After = time.Second }, nil},
		"idle time too short": {func(c *Config) { c.Idle.After = time.Second - 1 }, []string{"idle.after: expected 1s or more"}},
		"negative idle time":  {func(c *Config) { c.Idle.After = -time.Hour }, []string{"idle.after: expected 1s or more"}},
		"evidence of work":    {func(c *Config) { c.Idle.Evidence = EvidenceNoWork }, nil},
		"unknown evidence": {
			func(c *Config) { c.Idle.Evidence = "none" },
			[]string{`idle.evidence: expected one of auto, noProcess, noWork, got "none"`},
		},
		"several": {
			func(c *Config) {
				c.Labels.Output, c.Idle.Evidence = "x", "y"
				taints(same, func(t *TaintConfig) { t.When, t.Effect = "z", "No" })(c)
			}, []string{"labels.output", "taints[1].when", "taints[1].effect", "idle.evidence"},
		},
	} {
		config := DefaultConfig()
		c.change(&config)
		var got []string
		if err := config.Validate(); err != nil {
			got = strings.Split(err.Error(), "\n")
		}
		ok := len(got) == len(c.want)
		for i := range min(len(got), len(c.want)) {
			ok = ok && strings.Contains(got[i], c.want[i])
		}
		if !ok {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}

func TestParseTaint(t *testing.T) {
	for text, want := range map[string]*corev1.Taint{
		"a/b:NoSchedule":      {Key: "a/b", Effect: corev1.TaintEffectNoSchedule},
		"a=b:NoExecute":       {Key: "a", Value: "b", Effect: corev1.TaintEffectNoExecute},
		"a=:PreferNoSchedule": {Key: "a", Effect: corev1.TaintEffectPreferNoSchedule},
		"":                    nil,
		"a":                   nil,
		":NoSchedule":         nil,
		"a:":                  nil,
		"a:No":                nil,
		"a=!:NoSchedule":      nil,
		"a/b/c:NoSchedule":    nil,
	} {
		switch got, err := ParseTaint(text); {
		case want == nil:
			if err == nil || !strings.Contains(err.Error(), "KEY[=VALUE]:EFFECT") {
				t.Errorf("%q: %+v, %v", text, got, err)
			}
		case err != nil || got != *want:
			t.Errorf("%q: %+v, %v, want %+v", text, got, err, *want)
		}
	}
}
