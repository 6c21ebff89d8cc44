package metrics

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// keyOrStar is what may be in the key of a label, and the star of a pattern.
const keyOrStar = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./*"

// podLabelPattern returns the regular expression that an entry of metrics.podLabels stands for, "" if the entry is
// the key of one label. Neither kind can be a key: none begins with a slash, and none has a *.
func podLabelPattern(entry string) (string, error) {
	expr, isExpr := strings.CutPrefix(entry, "/")
	switch {
	case isExpr:
		expr, ended := strings.CutSuffix(expr, "/")
		if !ended {
			return "", errors.New("begins with a slash and does not end with one; a regular expression is between two: /^team-/")
		}
		if expr == "" {
			return "", errors.New(`is an empty regular expression; write "*" for all labels`)
		}
		if _, err := regexp.Compile(expr); err != nil {
			return "", fmt.Errorf("is no regular expression: %s; use one such as /^team-/, in RE2's syntax",
				strings.TrimPrefix(err.Error(), "error parsing regexp: "))
		}
		return expr, nil
	case strings.ContainsAny(entry, `^$\()[]{}|+?`):
		return "", fmt.Errorf("is no key of a Kubernetes label; if it is a regular expression, write /%s/", entry)
	case strings.Contains(entry, ".*"): // dcgm-exporter's users have such, without slashes
		begin, _, _ := strings.Cut(entry, ".*")
		return "", fmt.Errorf("may be a regular expression or not; write /%s/ if it is, and else %s*, where the * stands for any text", entry, begin)
	case strings.Contains(entry, "*"):
		if strings.ContainsFunc(entry, func(r rune) bool { return !strings.ContainsRune(keyOrStar, r) }) {
			return "", errors.New("is like no key of a Kubernetes label; use a pattern such as app.kubernetes.io/*")
		}
		return "^" + strings.ReplaceAll(regexp.QuoteMeta(entry), `\*`, ".*") + "$", nil
	}
	return "", nil
}

// PodPicker picks what of pods is shown.
type PodPicker struct {
	PodLabels
	patterns []*regexp.Regexp
}

// NewPodPicker returns a picker of what a valid configuration shows.
func NewPodPicker(labels PodLabels) *PodPicker {
	p := &PodPicker{PodLabels: labels}
	for _, expr := range labels.Patterns {
		if pattern, err := regexp.Compile(expr); err == nil { // it was validated
			p.patterns = append(p.patterns, pattern)
		}
	}
	return p
}

// Of returns the labels that a pod is shown with. Those that are named come first; then those that are like a
// pattern, in the order of their keys, so that each time the same ones are shown. Of two with one name the first
// is shown, and what has the name of a label that means something else here is not. Those that are too many are
// left out; their keys are returned.
func (p *PodPicker) Of(uid string, labels map[string]string) (shown []Label, left []string) {
	taken := make(map[string]bool, len(p.Named))
	for _, l := range p.Named {
		taken[l.Name] = true // also on pods that lack it: a name means one thing
		if value := labels[l.Key]; value != "" {
			shown = append(shown, Label{l.Name, value})
		}
	}
	for _, key := range p.like(labels) {
		name := podLabelName(key)
		switch {
		case taken[name] || ownLabel(name) != "":
			continue
		case len(shown) >= maxPodLabels:
			left = append(left, key)
		default:
			shown = append(shown, Label{name, labels[key]})
		}
		taken[name] = true
	}
	if p.UID && uid != "" {
		shown = append(shown, Label{podUIDLabel, uid})
	}
	return shown, left
}

// like returns the keys that are like a pattern, in order. A label without a value is none.
func (p *PodPicker) like(labels map[string]string) []string {
	if len(p.patterns) == 0 {
		return nil
	}
	return slices.DeleteFunc(slices.Sorted(maps.Keys(labels)), func(key string) bool {
		return labels[key] == "" || !slices.ContainsFunc(p.patterns, func(r *regexp.Regexp) bool { return r.MatchString(key) })
	})
}
