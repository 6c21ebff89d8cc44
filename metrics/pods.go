package metrics

import (
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// podName is a pod's name in full.
type podName struct{ namespace, name string }

// podLabels are the labels of the pod that a container is in, its UID among them. A pod is asked for once in a
// scrape. What cannot be a label is left out: one of no value, one with a name that is no name, and one with a name
// that means something else here, which metrics.fieldsFile may have brought after metrics.podLabels was checked.
func (s *scrape) podLabels(h plugin.Holder) []Label {
	if s.src.PodLabels == nil {
		return nil
	}
	name := podName{h.Namespace, h.Pod}
	labels, known := s.pods[name]
	if !known {
		// The list is the source's own, and what is left out is so seldom that a copy costs nothing.
		labels = slices.DeleteFunc(slices.Clone(s.src.PodLabels(h.Namespace, h.Pod)), func(l Label) bool {
			return l.Value == "" || !isLabelName(l.Name) || l.Name != podUIDLabel && s.cfg.podLabelTaken(l.Name) != ""
		})
		s.pods[name] = labels
	}
	return labels
}

// isLabelName tells what any Prometheus takes for the name of a label; two underscores are its own.
func isLabelName(name string) bool {
	if name == "" || len(name) > 1 && name[:2] == "__" {
		return false
	}
	for i, c := range []byte(name) {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return true
}

// podUID is the pod's UID alone, as a label; none if it is not shown or not known.
func (s *scrape) podUID(h plugin.Holder) []Label {
	labels := s.podLabels(h)
	if i := slices.IndexFunc(labels, func(l Label) bool { return l.Name == podUIDLabel }); i >= 0 {
		return labels[i : i+1]
	}
	return nil
}
