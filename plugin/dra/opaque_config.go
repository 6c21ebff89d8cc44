package dra

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// The configuration of NVIDIA's driver in DeviceClasses and claims.
const (
	opaqueVersion = "resource.nvidia.com/v1beta1"
	kindGPUConfig = "GpuConfig"
	kindMIGConfig = "MigDeviceConfig"

	strategyTimeSlicing = "TimeSlicing"
	strategyMPS         = "MPS"
	intervalDefault     = "Default"
)

// opaqueConfig is a GpuConfig or a MigDeviceConfig.
type opaqueConfig struct {
	metav1.TypeMeta `json:",inline"`
	Sharing         *opaqueSharing `json:"sharing,omitempty"`
}

type opaqueSharing struct {
	Strategy          string `json:"strategy"`
	TimeSlicingConfig *struct {
		Interval *string `json:"interval,omitempty"`
	} `json:"timeSlicingConfig,omitempty"`
	MPSConfig *opaqueMPS `json:"mpsConfig,omitempty"`
}

type opaqueMPS struct {
	ActiveThreadPercentage *int                         `json:"defaultActiveThreadPercentage,omitempty"`
	PinnedMemory           *resource.Quantity           `json:"defaultPinnedDeviceMemoryLimit,omitempty"`
	PerDevicePinnedMemory  map[string]resource.Quantity `json:"defaultPerDevicePinnedMemoryLimit,omitempty"`
	MultiUser              *bool                        `json:"multiUser,omitempty"`
}

// parseOpaque decodes the parameters of a configuration, and refuses what the agent does not do.
func parseOpaque(text []byte) (*opaqueConfig, error) {
	var meta metav1.TypeMeta
	if err := json.Unmarshal(text, &meta); err != nil {
		return nil, fmt.Errorf("expected JSON: %w", err)
	}
	if meta.APIVersion != opaqueVersion || meta.Kind != kindGPUConfig && meta.Kind != kindMIGConfig {
		return nil, fmt.Errorf("expected %s or %s of %s, found %q of %q", kindGPUConfig, kindMIGConfig, opaqueVersion, meta.Kind, meta.APIVersion)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	c := &opaqueConfig{}
	if err := d.Decode(c); err != nil {
		return nil, fmt.Errorf("%s: %s", meta.Kind, strings.TrimPrefix(err.Error(), "json: "))
	}
	if c.Sharing == nil {
		return c, nil
	}
	if err := c.Sharing.validate(meta.Kind); err != nil {
		return nil, fmt.Errorf("%s: sharing.%w", meta.Kind, err)
	}
	return c, nil
}

func (s *opaqueSharing) validate(kind string) error {
	ts, m := s.TimeSlicingConfig, s.MPSConfig
	switch {
	case s.Strategy != strategyTimeSlicing && s.Strategy != strategyMPS:
		return fmt.Errorf("strategy: expected %s or %s, found %q", strategyTimeSlicing, strategyMPS, s.Strategy)
	case s.Strategy == strategyTimeSlicing && m != nil:
		return fmt.Errorf("mpsConfig: expected none with strategy %s", s.Strategy)
	case s.Strategy == strategyMPS && ts != nil:
		return fmt.Errorf("timeSlicingConfig: expected none with strategy %s", s.Strategy)
	case ts != nil && kind == kindMIGConfig:
		return errors.New("timeSlicingConfig: MIG devices have no time slices")
	case ts != nil && ts.Interval != nil && *ts.Interval != intervalDefault:
		return fmt.Errorf("timeSlicingConfig.interval: expected %s, found %q: the agent does not set time slices", intervalDefault, *ts.Interval)
	case m == nil:
		return nil
	case m.ActiveThreadPercentage != nil && (*m.ActiveThreadPercentage < 1 || *m.ActiveThreadPercentage > 100):
		return fmt.Errorf("mpsConfig.defaultActiveThreadPercentage: expected 1 to 100, found %d", *m.ActiveThreadPercentage)
	case m.MultiUser != nil && *m.MultiUser:
		return errors.New("mpsConfig.multiUser: expected false: gpu-node-agent mps-daemon decides whether clients of several users run at the " +
			"same time")
	}
	if m.PinnedMemory != nil {
		if _, err := mebibytes(*m.PinnedMemory); err != nil {
			return fmt.Errorf("mpsConfig.defaultPinnedDeviceMemoryLimit: %w", err)
		}
	}
	for key, q := range m.PerDevicePinnedMemory {
		if _, err := mebibytes(q); err != nil {
			return fmt.Errorf("mpsConfig.defaultPerDevicePinnedMemoryLimit[%s]: %w", key, err)
		}
	}
	return nil
}

// mebibytes returns a size in bytes, rounded down to MiB, in which MPS counts.
func mebibytes(q resource.Quantity) (uint64, error) {
	n := q.Value()
	if n < 1<<20 {
		return 0, fmt.Errorf("expected at least 1Mi, found %s", q.String())
	}
	return uint64(n) &^ (1<<20 - 1), nil
}

// limits returns the limits of each client on a device. index is the number of the device among the devices of the request.
func (m *opaqueMPS) limits(device health.DeviceID, index int) (threads int, pinned uint64, err error) {
	threads = 100
	if m == nil {
		return threads, 0, nil
	}
	if m.ActiveThreadPercentage != nil {
		threads = *m.ActiveThreadPercentage
	}
	if m.PinnedMemory != nil {
		pinned, _ = mebibytes(*m.PinnedMemory) // validated
	}
	for key := range m.PerDevicePinnedMemory {
		if n, err := strconv.Atoi(key); key != string(device) && (err != nil || n != index) {
			return 0, 0, fmt.Errorf("mpsConfig.defaultPerDevicePinnedMemoryLimit: expected %s or index %d, found %q", device, index, key)
		}
	}
	for _, key := range []string{strconv.Itoa(index), string(device)} { // the UUID is preferred
		if q, exists := m.PerDevicePinnedMemory[key]; exists {
			pinned, _ = mebibytes(q)
		}
	}
	return threads, pinned, nil
}

// configFor returns the configuration of a result, nil for none. The configurations of the class come first, and the last one that fits the
// kind of the device applies. All configurations for the driver must be valid: a claim must not depend on the device that it got.
func configFor(all []resourceapi.DeviceAllocationConfiguration, driver string, result *resourceapi.DeviceRequestAllocationResult,
	kind health.Kind,
) (*opaqueConfig, error) {
	all = slices.Clone(all)
	slices.SortStableFunc(all, func(a, b resourceapi.DeviceAllocationConfiguration) int {
		return cmp.Compare(b.Source, a.Source) // FromClass before FromClaim
	})
	want := kindGPUConfig
	if kind == health.KindMIG {
		want = kindMIGConfig
	}
	var chosen *opaqueConfig
	for _, c := range resourceclaim.ConfigForResult(all, *result) {
		if c.Opaque.Driver != driver {
			continue
		}
		config, err := parseOpaque(c.Opaque.Parameters.Raw)
		switch {
		case err != nil:
			return nil, fmt.Errorf("request %s: configuration (%s): %w", result.Request, c.Source, err)
		case config.Kind == want:
			chosen = config
		case len(c.Requests) > 0:
			return nil, fmt.Errorf("request %s: configuration (%s): expected %s for device %s, found %s", result.Request, c.Source, want,
				result.Device, config.Kind)
		}
	}
	return chosen, nil
}
