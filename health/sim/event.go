package sim

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"
)

// Event is something that happens to a GPU or to the source. It may have several effects at once; an
// effect that is not set leaves things as they are. The effects other than XID are conditions: they stay
// until another event changes them.
type Event struct {
	At              time.Duration `yaml:"at,omitempty" json:"-"`                                      // since the start of the scenario; not for the control socket
	GPU             *int          `yaml:"gpu,omitempty" json:"gpu,omitempty"`                         // index; needed by all effects but Source
	XID             *int          `yaml:"xid,omitempty" json:"xid,omitempty"`                         // the driver reports this XID, once
	Lost            *bool         `yaml:"lost,omitempty" json:"lost,omitempty"`                       // off the bus, with its MIG devices; false: back
	Stale           *bool         `yaml:"stale,omitempty" json:"stale,omitempty"`                     // not measured, with its MIG devices, while others are
	RecoveryAction  *Recovery     `yaml:"recoveryAction,omitempty" json:"recoveryAction,omitempty"`   // a name such as reset, or a number
	RowRemapPending *bool         `yaml:"rowRemapPending,omitempty" json:"rowRemapPending,omitempty"` // rows wait for a reset to be remapped
	RowRemapFailed  *bool         `yaml:"rowRemapFailed,omitempty" json:"rowRemapFailed,omitempty"`   // a bad row could not be remapped
	DoubleBitErrors *int          `yaml:"doubleBitErrors,omitempty" json:"doubleBitErrors,omitempty"` // ECC errors since the last reset; 0: none again
	RetiredPages    *int          `yaml:"retiredPages,omitempty" json:"retiredPages,omitempty"`       // of a GPU that retires pages (v100-16)
	ClocksSlowed    *bool         `yaml:"clocksSlowed,omitempty" json:"clocksSlowed,omitempty"`       // by the hardware
	Temperature     *float64      `yaml:"temperature,omitempty" json:"temperature,omitempty"`         // °C, held; 0: the simulated one again
	Incident        *string       `yaml:"incident,omitempty" json:"incident,omitempty"`               // DCGM's own checks find this: DCGM_FR_NVLINK_DOWN
	Severity        *string       `yaml:"severity,omitempty" json:"severity,omitempty"`               // with incident: fail, which is the default, warn, none
	MIG             *string       `yaml:"mig,omitempty" json:"mig,omitempty"`                         // off, sevenths, balanced: partitioned anew
	Times           *int          `yaml:"times,omitempty" json:"times,omitempty"`                     // with xid: so often at once
	Source          *string       `yaml:"source,omitempty" json:"source,omitempty"`                   // up, down, stalled, blind, empty
}

// The bounds of what an event may say.
const (
	maxXID         = 999 // NVIDIA's catalogue ends at 173 (Xid Errors, r580); this leaves it room
	maxTemperature = 200 // °C; a GPU shuts down long before
	maxTimes       = 1_000_000
	maxDoubleBits  = 1_000_000
	maxRetired     = 64 // pages, as many as a GPU can retire (NVIDIA, Dynamic Page Retirement)
)

// The words of Event.Source.
const (
	sourceUp      = "up"
	sourceDown    = "down"    // calls fail at once, as with a dead host engine
	sourceStalled = "stalled" // calls do not return, as with a hung driver
	sourceBlind   = "blind"   // calls return and tell nothing, as with DCGM after an XID 119, until that is given up after blindAfter
	sourceEmpty   = "empty"   // calls return and list no GPU, as with an engine that was started without a driver; XIDs of that time are lost
)

func sourceWords() []string {
	return []string{sourceUp, sourceDown, sourceStalled, sourceBlind, sourceEmpty}
}

// Recovery is a recovery action of the driver (nvml.h: nvmlDeviceGpuRecoveryAction_t), by name or by number. Any number
// is allowed, because a driver may be newer than the names.
type Recovery string

// recoveryWords are the names of the recovery actions, by number.
func recoveryWords() []string {
	return []string{"none", "reset", "reboot", "drainP2P", "drainAndReset", "recoverIMEX", "pcieBusReset", "systemReboot"}
}

// UnmarshalText takes a name and a number alike. Validation tells which of them exist.
func (r *Recovery) UnmarshalText(text []byte) error {
	*r = Recovery(text)
	return nil
}

// number returns the driver's number of the action, and false if there is none.
func (r Recovery) number() (int, bool) {
	if i := slices.Index(recoveryWords(), string(r)); i >= 0 {
		return i, true
	}
	n, err := strconv.ParseUint(string(r), 0, 31) // base 0: numbers as YAML writes them
	return int(n), err == nil
}

// fault is what is wrong with an event. The key is empty if it is the event as a whole.
type fault struct{ key, text string }

func (f fault) Error() string {
	if f.key == "" {
		return f.text
	}
	return f.key + ": " + f.text
}

// touchesGPU reports whether the event has an effect on a GPU.
func (e Event) touchesGPU() bool {
	return e.XID != nil || e.Lost != nil || e.Stale != nil || e.RecoveryAction != nil || e.RowRemapPending != nil || e.RowRemapFailed != nil ||
		e.DoubleBitErrors != nil || e.RetiredPages != nil || e.ClocksSlowed != nil || e.Temperature != nil ||
		e.Incident != nil || e.Severity != nil || e.MIG != nil || e.Times != nil
}

// faults are those that need no knowledge of the machine; e.misses has the others.
func (e Event) faults() []fault {
	var out []fault
	add := func(key, format string, args ...any) { out = append(out, fault{key, fmt.Sprintf(format, args...)}) }

	switch {
	case !e.touchesGPU() && e.Source == nil:
		add("", "nothing would happen; say at least one of %s", strings.Join(effectKeys(), ", "))
	case e.touchesGPU() && e.GPU == nil:
		add("gpu", "is missing; say which GPU this happens to")
	case !e.touchesGPU() && e.GPU != nil:
		add("gpu", "nothing happens to GPU %d; leave it out, or say what does", *e.GPU)
	}
	if e.XID != nil && (*e.XID < 1 || *e.XID > maxXID) {
		add("xid", "%d is not an XID; use 1 to %d", *e.XID, maxXID)
	}
	switch {
	case e.Times != nil && e.XID == nil:
		add("times", "is for xid; say which")
	case e.Times != nil && (*e.Times < 1 || *e.Times > maxTimes):
		add("times", "%d is not how often; use 1 to %d", *e.Times, maxTimes)
	}
	if e.MIG != nil && !slices.Contains(migWords(), *e.MIG) {
		add("mig", "%q is not known; use one of %s", *e.MIG, strings.Join(migWords(), ", "))
	}
	if e.RecoveryAction != nil {
		if _, known := e.RecoveryAction.number(); !known {
			add("recoveryAction", "%s is not known; use a number from 0 to %d or one of %s", quote(string(*e.RecoveryAction)), math.MaxInt32, strings.Join(recoveryWords(), ", "))
		}
	}
	if n := e.DoubleBitErrors; n != nil && (*n < 0 || *n > maxDoubleBits) {
		add("doubleBitErrors", "%d is not how many; use 0 to %d", *n, maxDoubleBits)
	}
	if n := e.RetiredPages; n != nil && (*n < 0 || *n > maxRetired) {
		add("retiredPages", "%d is not how many; use 0 to %d, of which 63 are too many", *n, maxRetired)
	}
	out = append(out, e.incidentFaults()...)
	// Negated, so that it also catches NaN.
	if t := e.Temperature; t != nil && !(*t >= 0 && *t <= maxTemperature) {
		add("temperature", "%v °C is not believable; use 1 to %d, or 0 for the simulated one", *t, maxTemperature)
	}
	if e.Source != nil && !slices.Contains(sourceWords(), *e.Source) {
		add("source", "%q is not known; use one of %s", *e.Source, strings.Join(sourceWords(), ", "))
	}
	return out
}

// misses are the faults of an event that no GPU of the machine can have.
func (e Event) misses(p profile) []fault {
	n := len(p.pci)
	switch {
	case e.GPU != nil && *e.GPU >= 0 && *e.GPU < n && e.MIG != nil && !p.layouts:
		return []fault{{"mig", fmt.Sprintf("the GPUs of profile %s are not partitioned here; use h100-8 or h100-8-mig", p.name)}}
	case e.GPU != nil && *e.GPU >= 0 && *e.GPU < n && e.RetiredPages != nil && !p.model.retires:
		return []fault{{"retiredPages", fmt.Sprintf("the GPUs of profile %s remap rows and retire no pages; use rowRemapFailed, or profile v100-16", p.name)}}
	case e.GPU == nil || (*e.GPU >= 0 && *e.GPU < n):
		return nil
	case n == 0:
		return []fault{{"gpu", fmt.Sprintf("%d is not a GPU of profile %s, which has none", *e.GPU, p.name)}}
	case n == 1:
		return []fault{{"gpu", fmt.Sprintf("%d is not a GPU of profile %s, which has only 0", *e.GPU, p.name)}}
	}
	return []fault{{"gpu", fmt.Sprintf("%d is not a GPU of profile %s, which has 0 to %d", *e.GPU, p.name, n-1)}}
}

// joinFaults makes one error of them, nil of none.
func joinFaults(faults []fault) error {
	errs := make([]error, len(faults))
	for i, f := range faults {
		errs[i] = f
	}
	return errors.Join(errs...)
}

// logFields names the event's effects as its keys do.
func (e Event) logFields() []zap.Field {
	var out []zap.Field
	if e.XID != nil {
		out = append(out, zap.Int("xid", *e.XID))
	}
	if e.Lost != nil {
		out = append(out, zap.Bool("lost", *e.Lost))
	}
	if e.Stale != nil {
		out = append(out, zap.Bool("stale", *e.Stale))
	}
	if e.RecoveryAction != nil {
		out = append(out, zap.String("recoveryAction", string(*e.RecoveryAction)))
	}
	if e.RowRemapPending != nil {
		out = append(out, zap.Bool("rowRemapPending", *e.RowRemapPending))
	}
	if e.RowRemapFailed != nil {
		out = append(out, zap.Bool("rowRemapFailed", *e.RowRemapFailed))
	}
	if e.DoubleBitErrors != nil {
		out = append(out, zap.Int("doubleBitErrors", *e.DoubleBitErrors))
	}
	if e.RetiredPages != nil {
		out = append(out, zap.Int("retiredPages", *e.RetiredPages))
	}
	if e.ClocksSlowed != nil {
		out = append(out, zap.Bool("clocksSlowed", *e.ClocksSlowed))
	}
	if e.Temperature != nil {
		out = append(out, zap.Float64("temperature", *e.Temperature))
	}
	if e.Incident != nil {
		out = append(out, zap.String("incident", *e.Incident), zap.String("severity", e.severity()))
	}
	if e.MIG != nil {
		out = append(out, zap.String("mig", *e.MIG))
	}
	if e.Times != nil {
		out = append(out, zap.Int("times", *e.Times))
	}
	if e.Source != nil {
		out = append(out, zap.String("source", *e.Source))
	}
	return out
}

func effectKeys() []string {
	return []string{
		"xid", "lost", "stale", "recoveryAction", "rowRemapPending", "rowRemapFailed", "doubleBitErrors", "retiredPages", "clocksSlowed", "temperature",
		"incident", "severity", "mig", "times", "source",
	}
}

func quote(s string) string {
	const most = 40 // enough to recognize it
	if len(s) > most {
		s = s[:most] + "…"
	}
	return strconv.Quote(s)
}
