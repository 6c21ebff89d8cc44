package metrics

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// maxPodLabels limits metrics.podLabels and the labels of a pod. Each of them is on every series of a device that the pod holds. Some
// storages reject series with more than 30 labels, and the agent itself uses up to 20.
const maxPodLabels = 10

// podUIDLabel is dcgm-exporter's label of a pod's UID (uidAttribute in its internal/pkg/transformation).
const podUIDLabel = "pod_uid"

// PodLabel is an exported pod label.
type PodLabel struct {
	Key  string // in Kubernetes: app.kubernetes.io/name
	Name string // in Prometheus: app_kubernetes_io_name
}

// PodLabels selects the exported pod labels. It contains no compiled patterns, so that values can be compared.
type PodLabels struct {
	Named    []PodLabel // in the order of the configuration
	Patterns []string   // regular expressions of keys
	UID      bool
}

// Any reports whether anything is selected.
func (p PodLabels) Any() bool { return p.UID || len(p.Named) > 0 || len(p.Patterns) > 0 }

// SelectedPodLabels returns the selection of a valid configuration.
func (c Config) SelectedPodLabels() PodLabels {
	labels := PodLabels{UID: c.PodUID}
	for _, entry := range c.PodLabels {
		switch pattern, err := podLabelPattern(entry); {
		case err != nil: // Validate has rejected it
		case pattern != "":
			labels.Patterns = append(labels.Patterns, pattern)
		default:
			labels.Named = append(labels.Named, PodLabel{entry, podLabelName(entry)})
		}
	}
	return labels
}

// podLabelName returns dcgm-exporter's label name for a key (SanitizeLabelName in its internal/pkg/utils). A leading
// digit, which is invalid in Prometheus, gets the prefix _.
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

// labelKey matches the keys of Kubernetes labels, without their limits on length:
// https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set
var labelKey = regexp.MustCompile(`^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`)

// labelReservedBy returns what reserves a label name: the agent or Prometheus; "" if nothing does.
func (c Config) labelReservedBy(name string) string {
	for _, f := range c.Chosen.Labels {
		if f.Name == name {
			return "the agent"
		}
	}
	return reservedBy(name)
}

// reservedBy is labelReservedBy regardless of the selected fields.
func reservedBy(name string) string {
	switch {
	// With honor_labels a pod label replaces a target label. The rules join the series of a device by cluster, and drop the others.
	case slices.Contains([]string{"job", "instance", "cluster", "service", "endpoint", "le", "quantile"}, name):
		return "Prometheus"
	case slices.Contains([]string{
		"gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "hostname", "Hostname",
		"container", "namespace", "pod", podUIDLabel, "vgpu", "hpc_job", "resource",
		"err_code", "err_msg", "window_size_in_ms", "xid", "clock_event", "health_watch", "health_error_code", "peer_gpu", "link_status",
	}, name), slices.Contains(claimLabelNames(), name):
		return "the agent"
	}
	return ""
}

// Reasons why an entry of metrics.podLabels is invalid.
var (
	errTooManyPodLabels = errors.New("too many labels")
	errDuplicateEntry   = errors.New("duplicate entry")
	errInvalidLabelKey  = errors.New(
		"expected the key of a Kubernetes label such as team or app.kubernetes.io/name, or a regular expression such as /^team-/")
	errLabelInUse     = errors.New("label name in use")
	errLabelCollision = errors.New("keys with the same label name")
	errInvalidPattern = errors.New("invalid pattern")
)

// validatePodLabels returns every invalid entry of metrics.podLabels.
func (c Config) validatePodLabels() error {
	var errs []error
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf("podLabels: "+format, args...)) }
	if n := len(c.PodLabels); n > maxPodLabels {
		fail("%w: got %d, at most %d are allowed, because each is on every series of a device in use", errTooManyPodLabels, n, maxPodLabels)
	}
	entryOf, seen := make(map[string]string), make(map[string]bool)
	for _, entry := range c.PodLabels {
		pattern, err := podLabelPattern(entry)
		prefix, name, hasPrefix := strings.Cut(entry, "/")
		if !hasPrefix {
			prefix, name = "", entry
		}
		label := podLabelName(entry)
		reserver, other := c.labelReservedBy(label), entryOf[label]
		switch {
		case err != nil:
			fail("%q: %w", entry, err)
		case seen[entry]:
			fail("%q: %w", entry, errDuplicateEntry)
		case pattern != "":
		case !labelKey.MatchString(entry) || len(prefix) > 253 || len(name) > 63:
			fail("%q: %w", entry, errInvalidLabelKey)
		case reserver != "":
			fail("%q: %w: %s uses %s", entry, errLabelInUse, reserver, label)
		case other != "":
			fail("%q and %q: %w: %s", other, entry, errLabelCollision, label)
		default:
			entryOf[label] = entry
		}
		seen[entry] = true
	}
	return errors.Join(errs...)
}
