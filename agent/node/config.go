// Package node derives what the cluster learns of a node from the snapshot: the labels of its GPUs, its taints, and when its startup taint
// can be removed. It writes the file with labels; agent/kube writes to the API server.
//
// The labels equal the ones of NVIDIA's GPU feature discovery (GFD) 0.20, by which schedulers and tools already select.
package node

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
)

// Config is the `node` section of config.yaml.
type Config struct {
	Labels       LabelsConfig  `yaml:"labels"`
	StartupTaint string        `yaml:"startupTaint"` // KEY[=VALUE]:EFFECT of the taint to remove once all devices are offered; "" for none
	Taints       []TaintConfig `yaml:"taints"`
	Idle         IdleConfig    `yaml:"idle"`
}

// LabelsConfig configures where the labels are written.
type LabelsConfig struct {
	Output       string `yaml:"output"` // LabelsOff, LabelsFile, LabelsAPI, LabelsNodeFeature
	File         string `yaml:"file"`
	RemoveOnExit bool   `yaml:"removeOnExit"`
}

// The values of LabelsConfig.Output.
const (
	LabelsOff         = "off"
	LabelsFile        = "file"        // a file of Node Feature Discovery's local source
	LabelsAPI         = "api"         // the labels of the node
	LabelsNodeFeature = "nodeFeature" // a NodeFeature of Node Feature Discovery
)

// TaintConfig is a taint that the node has while a condition holds.
type TaintConfig struct {
	When   string `yaml:"when"` // WhenAnyUnhealthy, WhenAllUnhealthy, WhenCordoned
	Key    string `yaml:"key"`
	Value  string `yaml:"value"`
	Effect string `yaml:"effect"` // of corev1.TaintEffect
}

// The values of TaintConfig.When.
const (
	WhenAnyUnhealthy = "anyUnhealthy" // at least one GPU or MIG device is unhealthy
	WhenAllUnhealthy = "allUnhealthy" // every GPU is
	WhenCordoned     = "cordoned"     // at least one GPU or MIG device is cordoned
)

// IdleConfig configures when the agent reports that a pod does not use its GPUs.
type IdleConfig struct {
	After    time.Duration `yaml:"after"`    // 0: it reports nothing
	Evidence string        `yaml:"evidence"` // EvidenceAuto, EvidenceNoProcess, EvidenceNoWork

	Processes bool `yaml:"-"` // whether the processes of devices are measured: metrics.processes.enabled
}

// The values of IdleConfig.Evidence.
const (
	EvidenceAuto      = "auto"      // EvidenceNoProcess where processes are measured, else EvidenceNoWork
	EvidenceNoProcess = "noProcess" // the container has no process on its devices
	EvidenceNoWork    = "noWork"    // its devices are below metrics.idleBelow, or its processes do nothing
)

// Resolved returns the evidence that counts: EvidenceNoProcess or EvidenceNoWork.
func (c IdleConfig) Resolved() string {
	switch {
	case c.Evidence != EvidenceAuto:
		return c.Evidence
	case c.Processes:
		return EvidenceNoProcess
	}
	return EvidenceNoWork
}

// DefaultConfig returns the defaults.
func DefaultConfig() Config {
	return Config{
		Labels: LabelsConfig{Output: LabelsOff, File: "/etc/kubernetes/node-feature-discovery/features.d/gpu-node-agent"},
		Idle:   IdleConfig{Evidence: EvidenceAuto},
	}
}

// minIdle is the least node.idle.after: idle times are updated every few seconds.
const minIdle = time.Second

// Validate returns every error, each with its key below `node`.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if outputs := []string{LabelsOff, LabelsFile, LabelsAPI, LabelsNodeFeature}; !slices.Contains(outputs, c.Labels.Output) {
		bad("labels.output: expected one of %s, got %q", strings.Join(outputs, ", "), c.Labels.Output)
	}
	if !filepath.IsAbs(c.Labels.File) {
		bad("labels.file: expected an absolute path, got %q", c.Labels.File)
	}
	if c.StartupTaint != "" {
		t, err := ParseTaint(c.StartupTaint)
		if err = cmp.Or(err, checkPrefix(t)); err != nil {
			bad("startupTaint: %w", err)
		}
	}
	seen := make(map[string]int)
	for i, t := range c.Taints {
		if whens := []string{WhenAnyUnhealthy, WhenAllUnhealthy, WhenCordoned}; !slices.Contains(whens, t.When) {
			bad("taints[%d].when: expected one of %s, got %q", i, strings.Join(whens, ", "), t.When)
		}
		if err := cmp.Or(validateTaint(t.Taint()), checkPrefix(t.Taint())); err != nil {
			bad("taints[%d].%w", i, err)
		}
		id := kube.TaintID(t.Taint())
		if other, exists := seen[id]; exists {
			bad("taints[%d]: the same key and effect as taints[%d]; a node has each pair once", i, other)
		}
		seen[id] = i
	}
	if startup, err := ParseTaint(c.StartupTaint); err == nil {
		if i, exists := seen[kube.TaintID(startup)]; exists {
			bad("taints[%d]: the same key and effect as startupTaint; use another key", i)
		}
	}
	if c.Idle.After != 0 && c.Idle.After < minIdle {
		bad("idle.after: expected %v or more, or 0s to report nothing, got %v", minIdle, c.Idle.After)
	}
	if all := []string{EvidenceAuto, EvidenceNoProcess, EvidenceNoWork}; !slices.Contains(all, c.Idle.Evidence) {
		bad("idle.evidence: expected one of %s, got %q", strings.Join(all, ", "), c.Idle.Evidence)
	}
	return errors.Join(errs...)
}

// Taint returns the taint.
func (t TaintConfig) Taint() corev1.Taint {
	return corev1.Taint{Key: t.Key, Value: t.Value, Effect: corev1.TaintEffect(t.Effect)}
}

// ParseTaint reads a taint as kubectl taint writes it: KEY[=VALUE]:EFFECT.
func ParseTaint(text string) (corev1.Taint, error) {
	id, effect, _ := strings.Cut(text, ":")
	key, value, _ := strings.Cut(id, "=")
	t := corev1.Taint{Key: key, Value: value, Effect: corev1.TaintEffect(effect)}
	if validateTaint(t) != nil {
		return corev1.Taint{}, fmt.Errorf("expected KEY[=VALUE]:EFFECT, such as gpu-node-agent/not-ready:NoSchedule, got %q", text)
	}
	return t, nil
}

func validateTaint(t corev1.Taint) error {
	if reasons := content.IsLabelKey(t.Key); len(reasons) > 0 {
		return fmt.Errorf("key: got %q: %s", t.Key, strings.Join(reasons, "; "))
	}
	if reasons := content.IsLabelValue(t.Value); len(reasons) > 0 {
		return fmt.Errorf("value: got %q: %s", t.Value, strings.Join(reasons, "; "))
	}
	switch t.Effect {
	case corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute:
		return nil
	}
	return fmt.Errorf("effect: expected NoSchedule, PreferNoSchedule or NoExecute, got %q", t.Effect)
}

// checkPrefix refuses the taints of Kubernetes' own controllers: the agent and a controller would set and remove one in turn. Besides,
// without the taint of a cloud provider, pods would start on a node that has no network yet.
func checkPrefix(t corev1.Taint) error {
	switch prefix, _, _ := strings.Cut(t.Key, "/"); prefix {
	case "node.kubernetes.io", "node.cloudprovider.kubernetes.io":
		return fmt.Errorf("key: expected another prefix than %s, whose taints Kubernetes sets and removes, got %q", prefix, t.Key)
	}
	return nil
}
