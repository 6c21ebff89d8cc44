package apiservertest

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// prepareSlice changes a slice as the API server does before it validates it: it drops the fields of features that are off, and sets the
// time of taints without one.
func prepareSlice(s *resourceapi.ResourceSlice, lacks []string, now time.Time) {
	for i := range s.Spec.Devices {
		d := &s.Spec.Devices[i]
		if slices.Contains(lacks, TaintsGate) {
			d.Taints = nil
		}
		if slices.Contains(lacks, SharesGate) {
			d.AllowMultipleAllocations = nil
			for name, c := range d.Capacity {
				c.RequestPolicy = nil
				d.Capacity[name] = c
			}
		}
		for j := range d.Taints {
			if d.Taints[j].TimeAdded == nil {
				d.Taints[j].TimeAdded = &metav1.Time{Time: now.Truncate(time.Second)}
			}
		}
	}
}

// validateSlice returns what the API server refuses of a slice without counters. old is nil for a new one.
func validateSlice(s, old *resourceapi.ResourceSlice) (errs field.ErrorList) {
	spec := field.NewPath("spec")
	check := func(path *field.Path, value any, messages []string) {
		for _, m := range messages {
			errs = append(errs, field.Invalid(path, value, m))
		}
	}
	check(field.NewPath("metadata", "name"), s.Name, validation.IsDNS1123Subdomain(s.Name))
	check(spec.Child("driver"), s.Spec.Driver, validation.IsDNS1123Subdomain(s.Spec.Driver))
	check(spec.Child("pool", "name"), s.Spec.Pool.Name, validation.IsDNS1123Subdomain(s.Spec.Pool.Name))
	if s.Spec.Pool.ResourceSliceCount <= 0 {
		errs = append(errs, field.Invalid(spec.Child("pool", "resourceSliceCount"), s.Spec.Pool.ResourceSliceCount, "must be greater than zero"))
	}
	if s.Spec.NodeName == nil || *s.Spec.NodeName == "" {
		errs = append(errs, field.Required(spec, "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required"))
	}
	if old != nil && (s.Spec.Pool.Name != old.Spec.Pool.Name || s.Spec.Driver != old.Spec.Driver ||
		!equality.Semantic.DeepEqual(s.Spec.NodeName, old.Spec.NodeName)) {
		errs = append(errs, field.Invalid(spec, "", "field is immutable"))
	}
	most := resourceapi.ResourceSliceMaxDevices
	if slices.ContainsFunc(s.Spec.Devices, func(d resourceapi.Device) bool { return len(d.Taints) > 0 }) {
		most = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
	}
	if len(s.Spec.Devices) > most {
		return append(errs, field.TooMany(spec.Child("devices"), len(s.Spec.Devices), most))
	}
	names := make(map[string]bool)
	for i, d := range s.Spec.Devices {
		path := spec.Child("devices").Index(i)
		check(path.Child("name"), d.Name, validation.IsDNS1123Label(d.Name))
		if names[d.Name] {
			errs = append(errs, field.Duplicate(path, d.Name))
		}
		names[d.Name] = true
		errs = append(errs, validateDevice(d, path)...)
	}
	return errs
}

func validateDevice(d resourceapi.Device, path *field.Path) (errs field.ErrorList) {
	if n := len(d.Attributes) + len(d.Capacity); n > resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
		errs = append(errs, field.Invalid(path, n, "too many attributes and capacities"))
	}
	for name, a := range d.Attributes {
		errs = append(errs, validateAttribute(name, a, path.Child("attributes").Key(string(name)))...)
	}
	multiple := d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations
	for name, c := range d.Capacity {
		at := path.Child("capacity").Key(string(name))
		errs = append(errs, validateName(name, at)...)
		if c.RequestPolicy != nil {
			if !multiple {
				errs = append(errs, field.Forbidden(at.Child("requestPolicy"), "allowMultipleAllocations must be true"))
			}
			errs = append(errs, validatePolicy(c, at.Child("requestPolicy"))...)
		}
	}
	if len(d.Taints) > resourceapi.DeviceTaintsMaxLength {
		errs = append(errs, field.TooMany(path.Child("taints"), len(d.Taints), resourceapi.DeviceTaintsMaxLength))
	}
	for i, t := range d.Taints {
		at := path.Child("taints").Index(i)
		for _, m := range validation.IsQualifiedName(t.Key) {
			errs = append(errs, field.Invalid(at.Child("key"), t.Key, m))
		}
		for _, m := range validation.IsValidLabelValue(t.Value) {
			errs = append(errs, field.Invalid(at.Child("value"), t.Value, m))
		}
		effects := []resourceapi.DeviceTaintEffect{
			resourceapi.DeviceTaintEffectNone, resourceapi.DeviceTaintEffectNoSchedule,
			resourceapi.DeviceTaintEffectNoExecute,
		}
		if !slices.Contains(effects, t.Effect) {
			errs = append(errs, field.NotSupported(at.Child("effect"), t.Effect, effects))
		}
	}
	return errs
}

// version is a semantic version, as semver.org defines it.
var version = regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?$`)

func validateAttribute(name resourceapi.QualifiedName, a resourceapi.DeviceAttribute, path *field.Path) field.ErrorList {
	errs := validateName(name, path)
	values := 0
	if a.BoolValue != nil {
		values++
	}
	if a.IntValue != nil {
		values++
	}
	for _, s := range []*string{a.StringValue, a.VersionValue} {
		if s == nil {
			continue
		}
		values++
		if len(*s) > resourceapi.DeviceAttributeMaxValueLength {
			errs = append(errs, field.TooLong(path, "", resourceapi.DeviceAttributeMaxValueLength))
		}
	}
	if a.VersionValue != nil && !version.MatchString(*a.VersionValue) {
		errs = append(errs, field.Invalid(path.Child("version"), *a.VersionValue, "must be a string compatible with semver.org spec 2.0.0"))
	}
	if values != 1 {
		errs = append(errs, field.Invalid(path, "", "exactly one value must be specified"))
	}
	return errs
}

func validateName(name resourceapi.QualifiedName, path *field.Path) (errs field.ErrorList) {
	domain, id, qualified := strings.Cut(string(name), "/")
	if !qualified {
		domain, id = "", domain
	} else {
		for _, m := range validation.IsDNS1123Subdomain(domain) {
			errs = append(errs, field.Invalid(path, domain, m))
		}
	}
	for _, m := range validation.IsCIdentifier(id) {
		errs = append(errs, field.Invalid(path, id, m))
	}
	if len(domain) > resourceapi.DeviceMaxDomainLength || len(id) > resourceapi.DeviceMaxIDLength {
		errs = append(errs, field.TooLong(path, "", resourceapi.DeviceMaxIDLength))
	}
	return errs
}

// validatePolicy checks the default, the range and the step of a capacity that several claims share.
func validatePolicy(c resourceapi.DeviceCapacity, path *field.Path) (errs field.ErrorList) {
	p := c.RequestPolicy
	if p.ValidRange == nil {
		return nil
	}
	if p.Default == nil || p.ValidRange.Min == nil {
		return append(errs, field.Required(path, "default and validRange.min"))
	}
	low, high := p.ValidRange.Min, p.ValidRange.Max
	if p.Default.Cmp(*low) < 0 || low.Cmp(c.Value) > 0 || high != nil && (high.Cmp(c.Value) > 0 || p.Default.Cmp(*high) > 0) {
		errs = append(errs, field.Invalid(path, p.Default.String(), "outside of the valid range"))
	}
	if step := p.ValidRange.Step; step != nil {
		for _, q := range []int64{p.Default.Value(), low.Value()} {
			if step.Value() <= 0 || (q-low.Value())%step.Value() != 0 {
				errs = append(errs, field.Invalid(path.Child("step"), q,
					fmt.Sprintf("value is not a multiple of a given step (%s) from (%s)", step, low)))
			}
		}
	}
	return errs
}
