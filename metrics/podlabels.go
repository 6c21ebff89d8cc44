package metrics

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// maxPodLabels bounds metrics.podLabels, and how many labels a pod is shown with: each is on every series of a
// device that the pod holds, and some storages refuse series with more than 30 labels, of which we have up to 20
// ourselves.
const maxPodLabels = 10

// podUIDLabel is dcgm-exporter's label of a pod's UID (uidAttribute in its internal/pkg/transformation).
const podUIDLabel = "pod_uid"

// PodLabel is a label of pods that is shown.
type PodLabel struct {
	Key  string // Kubernetes' name: app.kubernetes.io/name
	Name string // Prometheus' name: app_kubernetes_io_name
}

// PodLabels is what of pods is shown. It has no compiled patterns, so that two can be compared.
type PodLabels struct {
	Named    []PodLabel // in the order of the configuration
	Patterns []string   // regular expressions of keys
	UID      bool
}

// Any tells whether there is anything to show.
func (p PodLabels) Any() bool { return p.UID || len(p.Named) > 0 || len(p.Patterns) > 0 }

// ShownPodLabels returns what metrics.podLabels and metrics.podUID say.
func (c Config) ShownPodLabels() PodLabels {
	shown := PodLabels{UID: c.PodUID}
	for _, entry := range c.PodLabels {
		switch pattern, err := podLabelPattern(entry); {
		case err != nil: // it was validated
		case pattern != "":
			shown.Patterns = append(shown.Patterns, pattern)
		default:
			shown.Named = append(shown.Named, PodLabel{entry, podLabelName(entry)})
		}
	}
	return shown
}

// podLabelName is the name that dcgm-exporter gives to a pod's label (SanitizeLabelName in its
// internal/pkg/utils), but for a first digit, which Prometheus does not take.
func podLabelName(key string) string {
	name := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, key)
	if name != "" && name[0] >= '0' && name[0] <= '9' {
		name = "_" + name
	}
	return name
}

// labelKey is what Kubernetes takes as the key of a label, but for the length:
// https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set
var labelKey = regexp.MustCompile(`^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`)

// podLabelTaken says what else has a label's name, "" if nothing has.
func (c Config) podLabelTaken(name string) string {
	if slices.ContainsFunc(c.Chosen.Labels, func(f Field) bool { return f.Name == name }) {
		return "a label of ours"
	}
	return ownLabel(name)
}

// ownLabel is podLabelTaken for any choice of fields.
func ownLabel(name string) string {
	switch {
	case slices.Contains([]string{"job", "instance", "le", "quantile"}, name):
		return "Prometheus's own"
	case slices.Contains([]string{
		"gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "hostname", "Hostname",
		"container", "namespace", "pod", podUIDLabel, "vgpu", "hpc_job", "resource",
		"err_code", "err_msg", "window_size_in_ms", "xid", "clock_event", "health_watch", "health_error_code", "peer_gpu", "link_status",
	}, name):
		return "a label of ours"
	}
	return ""
}

// validatePodLabels returns what is wrong with the list, each with its key.
func (c Config) validatePodLabels() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("podLabels: "+format, args...)) }
	if n := len(c.PodLabels); n > maxPodLabels {
		bad("%d labels are too many; use at most %d: each is on every series of a device in use", n, maxPodLabels)
	}
	by, seen := make(map[string]string), make(map[string]bool)
	for _, entry := range c.PodLabels {
		pattern, err := podLabelPattern(entry)
		prefix, name, has := strings.Cut(entry, "/")
		if !has {
			prefix, name = "", entry
		}
		label := podLabelName(entry)
		taken, other := c.podLabelTaken(label), by[label]
		switch {
		case err != nil:
			bad("%q %w", entry, err)
		case seen[entry]:
			bad("%q is there twice; leave one out", entry)
		case pattern != "":
		case !labelKey.MatchString(entry) || len(prefix) > 253 || len(name) > 63:
			bad("%q is no key of a Kubernetes label; use one such as team or app.kubernetes.io/name, or a pattern such as app.kubernetes.io/*", entry)
		case taken != "":
			bad("%q would be the label %s, which is %s; leave it out", entry, label, taken)
		case other != "":
			bad("%q and %q would both be the label %s; leave one out", other, entry, label)
		default:
			by[label] = entry
		}
		seen[entry] = true
	}
	return errors.Join(errs...)
}
