package reclaim

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
)

// Policy is what may be taken from whom, and when: the policy file.
type Policy struct {
	Namespaces  []string              `json:"namespaces"`            // that take part; required
	PodSelector *metav1.LabelSelector `json:"podSelector,omitempty"` // of the pods that take part; all without it
	// OptOut is the annotation with which a pod, its owner or its namespace does not take part. Every value but "false" counts.
	OptOut     string          `json:"optOutAnnotation"`
	MinimumAge metav1.Duration `json:"minimumAge"` // of a pod, since it is Ready
	Idle       IdlePolicy      `json:"idle"`
	MaxPerRun  int             `json:"maxPerRun"` // actions and notices
	Notice     metav1.Duration `json:"notice"`    // between the notice and the action; 0: without a notice
	// LeaveFor is how long an owner is left alone after somebody, such as an autoscaler, has undone an action.
	LeaveFor metav1.Duration `json:"leaveFor"`
}

// IdlePolicy is when a device counts as idle.
type IdlePolicy struct {
	After    metav1.Duration `json:"after"`    // required
	Evidence string          `json:"evidence"` // node.EvidenceNoProcess, node.EvidenceNoWork
}

// DefaultPolicy returns the defaults of a policy. The required keys have none.
func DefaultPolicy() Policy {
	return Policy{
		OptOut:     kube.OptOutAnnotation,
		MinimumAge: metav1.Duration{Duration: time.Hour},
		Idle:       IdlePolicy{Evidence: node.EvidenceNoProcess},
		MaxPerRun:  10,
		Notice:     metav1.Duration{Duration: 30 * time.Minute},
		LeaveFor:   metav1.Duration{Duration: 7 * 24 * time.Hour},
	}
}

// policyFile is a Policy with durations as text, so that an error names their key.
type policyFile struct {
	Namespaces  []string              `json:"namespaces"`
	PodSelector *metav1.LabelSelector `json:"podSelector"`
	OptOut      string                `json:"optOutAnnotation"`
	MinimumAge  string                `json:"minimumAge"`
	Idle        idleFile              `json:"idle"`
	MaxPerRun   int                   `json:"maxPerRun"`
	Notice      string                `json:"notice"`
	LeaveFor    string                `json:"leaveFor"`
}

type idleFile struct {
	After    string `json:"after"`
	Evidence string `json:"evidence"`
}

// policyKeys are the keys of a policy, for advice.
//
//nolint:gochecknoglobals // constant
var policyKeys = []string{
	"namespaces", "podSelector", "podSelector.matchLabels", "podSelector.matchExpressions", "optOutAnnotation", "minimumAge", "idle",
	"idle.after", "idle.evidence", "maxPerRun", "notice", "leaveFor",
}

// LoadPolicy reads the policy of a file. Each line of an error names the file.
func LoadPolicy(file string) (Policy, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return Policy{}, fmt.Errorf("--policy: %w", err)
	}
	p, err := ParsePolicy(text)
	if err != nil {
		return Policy{}, errors.New(file + ": " + strings.ReplaceAll(err.Error(), "\n", "\n"+file+": "))
	}
	return p, nil
}

// ParsePolicy returns the policy of a YAML document, with the defaults for the keys that it does not have. It returns every error, each
// with its key.
func ParsePolicy(text []byte) (Policy, error) {
	switch n, err := countDocuments(text); {
	case err != nil:
		return Policy{}, err
	case n != 1:
		return Policy{}, fmt.Errorf("expected one YAML document with a policy, got %d", n)
	}
	p := DefaultPolicy()
	f := policyFile{
		OptOut: p.OptOut, MinimumAge: p.MinimumAge.Duration.String(), Idle: idleFile{Evidence: p.Idle.Evidence},
		MaxPerRun: p.MaxPerRun, Notice: p.Notice.Duration.String(), LeaveFor: p.LeaveFor.Duration.String(),
	}
	if err := yaml.UnmarshalStrict(text, &f); err != nil {
		return Policy{}, explainYAML(err)
	}
	var errs []error
	duration := func(key, text string, least time.Duration) metav1.Duration {
		d, err := time.ParseDuration(text)
		if err != nil || d < least {
			errs = append(errs, fmt.Errorf("%s: expected a duration of at least %v such as 90s, 30m or 168h, got %q", key, least, text))
		}
		return metav1.Duration{Duration: d}
	}
	p = Policy{
		Namespaces: slices.Compact(slices.Sorted(slices.Values(f.Namespaces))), PodSelector: f.PodSelector, OptOut: f.OptOut,
		MinimumAge: duration("minimumAge", f.MinimumAge, 0), Idle: IdlePolicy{Evidence: f.Idle.Evidence},
		MaxPerRun: f.MaxPerRun, Notice: duration("notice", f.Notice, 0), LeaveFor: duration("leaveFor", f.LeaveFor, 0),
	}
	if f.Idle.After == "" {
		errs = append(errs, errors.New(
			"idle.after: required; expected a duration such as 2h, for which all GPUs of an owner must have been idle"))
	} else {
		p.Idle.After = duration("idle.after", f.Idle.After, time.Second) // the agent measures every few seconds
	}
	if err := errors.Join(append(errs, p.validate())...); err != nil {
		return Policy{}, err
	}
	return p, nil
}

// validate returns every error in a policy but those in its durations.
func (p Policy) validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if len(p.Namespaces) == 0 {
		bad("namespaces: required; expected the names of the namespaces that take part")
	}
	for _, n := range p.Namespaces {
		if problems := validation.IsDNS1123Label(n); len(problems) > 0 {
			bad("namespaces: expected names of namespaces, without patterns, got %q", n)
		}
	}
	if _, err := metav1.LabelSelectorAsSelector(p.PodSelector); err != nil {
		bad("podSelector: %w", err)
	}
	// such as a label without a value in Helm's values
	if s := p.PodSelector; s != nil && len(s.MatchLabels) == 0 && len(s.MatchExpressions) == 0 {
		bad("podSelector: expected matchLabels or matchExpressions, got none; leave it out for all pods")
	}
	if problems := validation.IsQualifiedName(p.OptOut); len(problems) > 0 {
		bad("optOutAnnotation: expected the key of an annotation such as %s, got %q", DefaultPolicy().OptOut, p.OptOut)
	}
	if e := p.Idle.Evidence; e != node.EvidenceNoProcess && e != node.EvidenceNoWork {
		bad("idle.evidence: expected %s or %s, got %q", node.EvidenceNoProcess, node.EvidenceNoWork, e)
	}
	if p.MaxPerRun < 1 {
		bad("maxPerRun: expected 1 or more, got %d", p.MaxPerRun)
	}
	return errors.Join(errs...)
}

// countDocuments returns the number of YAML documents of a text that are not empty.
func countDocuments(text []byte) (n int, err error) {
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for i := 1; ; i++ {
		part, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return 0, fmt.Errorf("document %d: %w", i, err)
		}
		d, err := yaml.YAMLToJSONStrict(part)
		if err != nil {
			return 0, fmt.Errorf("document %d: %w", i, err)
		}
		if string(d) != "null" {
			n++
		}
	}
}

// unknownField finds the key in an error of encoding/json.
var unknownField = regexp.MustCompile(`unknown field "([^"]*)"`)

// explainYAML returns an error of yaml.UnmarshalStrict with the key, what is expected and advice.
func explainYAML(err error) error {
	if mismatch, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		expected := map[reflect.Kind]string{
			reflect.Slice: "a list", reflect.Struct: "a mapping of keys", reflect.Int: "a whole number",
			reflect.Map: "a mapping",
		}[mismatch.Type.Kind()]
		return fmt.Errorf("%s: expected %s, got %s", cmp.Or(mismatch.Field, "the policy"), cmp.Or(expected, "a text"), mismatch.Value)
	}
	if m := unknownField.FindStringSubmatch(err.Error()); m != nil {
		if m[1] == "hours" {
			return errors.New("unknown key \"hours\"; set schedule and timeZone of the CronJob instead, such as \"*/15 20-23,0-6 * * *\" and " +
				"Europe/Berlin")
		}
		if nearest := config.Nearest(m[1], policyKeys); nearest != "" {
			return fmt.Errorf("unknown key %q; did you mean %s?", m[1], nearest)
		}
		return fmt.Errorf("unknown key %q; the keys are %s", m[1], strings.Join(policyKeys, ", "))
	}
	return err
}
