package metrics

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// podLabelPattern returns the regular expression between slashes of an entry of metrics.podLabels, "" if the entry is the key of one label.
// The two cannot be confused: no key begins with a slash. dcgm-exporter's list has expressions without slashes.
func podLabelPattern(entry string) (string, error) {
	expr, isExpr := strings.CutPrefix(entry, "/")
	if !isExpr {
		switch {
		case strings.ContainsAny(entry, `^$\()[]{}|+?`), strings.Contains(entry, ".*"):
			return "", fmt.Errorf("%w: write a regular expression between slashes: /%s/", errInvalidPattern, entry)
		case strings.Contains(entry, "*"):
			return "", fmt.Errorf("%w: * is no part of a key; write a regular expression: /^%s$/", errInvalidPattern,
				strings.ReplaceAll(regexp.QuoteMeta(entry), `\*`, ".*"))
		}
		return "", nil
	}
	expr, closed := strings.CutSuffix(expr, "/")
	if !closed {
		return "", fmt.Errorf("%w: missing / at the end of a regular expression such as /^team-/", errInvalidPattern)
	}
	if expr == "" {
		return "", fmt.Errorf("%w: empty regular expression; use /.*/ for all labels", errInvalidPattern)
	}
	if _, err := regexp.Compile(expr); err != nil {
		return "", fmt.Errorf("%w: expected a regular expression in RE2 syntax such as /^team-/: %s", errInvalidPattern,
			strings.TrimPrefix(err.Error(), "error parsing regexp: "))
	}
	return expr, nil
}

// PodPicker selects the exported labels of pods.
type PodPicker struct {
	PodLabels
	patterns []*regexp.Regexp
}

// NewPodPicker returns a picker for the selection of a valid configuration.
func NewPodPicker(labels PodLabels) *PodPicker {
	p := &PodPicker{PodLabels: labels}
	for _, expr := range labels.Patterns {
		if pattern, err := regexp.Compile(expr); err == nil { // Validate has compiled it
			p.patterns = append(p.patterns, pattern)
		}
	}
	return p
}

// Of returns the exported labels of a pod, and the keys of labels that exceed the limit. Named labels come first, then labels that match a
// pattern, ordered by key so that the result is stable. On a name collision the first label wins. Names that the agent or Prometheus uses
// are omitted.
func (p *PodPicker) Of(uid string, labels map[string]string) (exported []Label, omitted []string) {
	taken := make(map[string]bool, len(p.Named))
	for _, l := range p.Named {
		taken[l.Name] = true // even if the pod lacks the label: a name has one meaning
		if value := labels[l.Key]; value != "" {
			exported = append(exported, label(l.Name, value))
		}
	}
	for _, key := range p.matchingKeys(labels) {
		name := podLabelName(key)
		switch {
		case taken[name] || reservedBy(name) != "":
			continue
		case len(exported) >= maxPodLabels:
			omitted = append(omitted, key)
		default:
			exported = append(exported, label(name, labels[key]))
		}
		taken[name] = true
	}
	if p.UID && uid != "" {
		exported = append(exported, label(podUIDLabel, uid))
	}
	return exported, omitted
}

// matchingKeys returns the sorted keys of nonempty labels that match a pattern.
func (p *PodPicker) matchingKeys(labels map[string]string) []string {
	if len(p.patterns) == 0 {
		return nil
	}
	return slices.DeleteFunc(slices.Sorted(maps.Keys(labels)), func(key string) bool {
		return labels[key] == "" || !slices.ContainsFunc(p.patterns, func(r *regexp.Regexp) bool { return r.MatchString(key) })
	})
}
