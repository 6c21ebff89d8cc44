package metrics

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// maxPodLabels bounds metrics.podLabels: each label is on every series of a device that a pod holds, and some
// storages refuse series with more than 30 labels, of which we have up to 20 ourselves.
const maxPodLabels = 10

// PodLabel is a label of pods that is shown.
type PodLabel struct {
	Key  string // Kubernetes' name: app.kubernetes.io/name
	Name string // Prometheus' name: app_kubernetes_io_name
}

// ShownPodLabels returns the labels of metrics.podLabels in order.
func (c Config) ShownPodLabels() []PodLabel {
	labels := make([]PodLabel, 0, len(c.PodLabels))
	for _, key := range c.PodLabels {
		labels = append(labels, PodLabel{key, podLabelName(key)})
	}
	return labels
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
	switch {
	case slices.Contains([]string{"job", "instance", "le", "quantile"}, name):
		return "Prometheus's own"
	case slices.Contains([]string{
		"gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "hostname", "Hostname",
		"container", "namespace", "pod", "pod_uid", "vgpu", "hpc_job", "resource",
		"err_code", "err_msg", "window_size_in_ms", "xid", "clock_event", "health_watch", "health_error_code", "peer_gpu", "link_status",
	}, name), slices.ContainsFunc(c.Chosen.Labels, func(f Field) bool { return f.Name == name }):
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
	by := make(map[string]string)
	for _, l := range c.ShownPodLabels() {
		prefix, name, has := strings.Cut(l.Key, "/")
		if !has {
			prefix, name = "", l.Key
		}
		taken := c.podLabelTaken(l.Name)
		switch other, twice := by[l.Name]; {
		case strings.Contains(l.Key, "*"):
			bad("%q is a pattern; name each key, so that it is known which labels the series have", l.Key)
		case !labelKey.MatchString(l.Key) || len(prefix) > 253 || len(name) > 63:
			bad("%q is no key of a Kubernetes label; use one such as team or app.kubernetes.io/name", l.Key)
		case taken != "":
			bad("%q would be the label %s, which is %s; leave it out", l.Key, l.Name, taken)
		case twice && other == l.Key:
			bad("%q is there twice; leave one out", l.Key)
		case twice:
			bad("%q and %q would both be the label %s; leave one out", other, l.Key, l.Name)
		default:
			by[l.Name] = l.Key
		}
	}
	return errors.Join(errs...)
}
