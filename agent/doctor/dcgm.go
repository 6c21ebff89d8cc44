package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strings"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/pci"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm"
)

// survey is the result of one attempt to poll the GPUs as the agent would.
type survey struct {
	source     config.SourceConfig
	library    string // path of libdcgm
	libraryErr error
	engine     string // its address
	engineErr  error
	reading    *health.Reading // nil without a poll
	pollErr    error
}

// surveyDCGM polls once, without an effect on other clients of the engine. Only dcgm.MeasureOnce may call DCGM: a call before
// DCGM is opened ends the process.
func (d doctor) surveyDCGM(ctx context.Context, c config.SourceConfig) survey {
	s := survey{source: c, engine: cmp.Or(c.Address, d.engine)}
	s.library, s.libraryErr = callWithTimeout(ctx, checkTimeout, func(context.Context) (string, error) { return d.library() })
	if errors.Is(s.libraryErr, errTimeout) {
		s.libraryErr = fmt.Errorf("libdcgm.so.4 did not load within %v; look for a hung disk or mount in the kernel log (dmesg)", checkTimeout)
	}
	if path, ok := strings.CutPrefix(s.engine, "unix://"); ok {
		s.engineErr = dial(ctx, "unix", path)
	} else {
		s.engineErr = dial(ctx, "tcp", s.engine)
	}
	// Without the library or the engine a poll fails, the latter after 5 s.
	if s.libraryErr != nil || c.Resolved() == config.ModeStandalone && s.engineErr != nil {
		return s
	}
	// At the default log level, an embedded engine would write between the lines of the report.
	dc := dcgm.Config{Address: c.Address, Interval: c.Interval, HealthSystems: c.HealthSystems, LogLevel: "NONE"}
	s.reading, s.pollErr = callWithTimeout(ctx, dcgmTimeout, func(ctx context.Context) (*health.Reading, error) {
		reading, _, err := d.survey(ctx, dc, zap.NewNop())
		return reading, err
	})
	return s
}

// dial reports whether a process listens at an address.
func dial(ctx context.Context, network, address string) error {
	d := net.Dialer{Timeout: dialTimeout}
	conn, err := d.DialContext(ctx, network, address)
	if err != nil {
		return err
	}
	return conn.Close()
}

func (s survey) gpus() []health.Device { return s.devices(health.KindGPU) }

// devices returns the devices of a kind that DCGM lists.
func (s survey) devices(kind health.Kind) (all []health.Device) {
	if s.reading == nil {
		return nil
	}
	for _, d := range s.reading.Devices {
		if d.Kind == kind {
			all = append(all, d)
		}
	}
	return all
}

func (s survey) checks() []Check {
	return append([]Check{s.checkLibrary(), s.checkEngine(), s.checkDCGM()}, s.checkHealthChecks()...)
}

// failedEngine returns the failed check of a host engine that agent and doctor share, nil if none failed.
func (s survey) failedEngine() *Check {
	if s.source.Resolved() != config.ModeStandalone || s.libraryErr != nil {
		return nil
	}
	for _, c := range []Check{s.checkEngine(), s.checkDCGM()} {
		if c.Status == CheckFail {
			return &c
		}
	}
	return nil
}

func (s survey) checkLibrary() Check {
	if s.libraryErr != nil {
		return failure("libdcgm", s.libraryErr.Error(), "install DCGM 4, or set source.mode to sim")
	}
	version := ""
	if s.reading != nil {
		version = s.reading.Versions.DCGM
	}
	if real, err := filepath.EvalSymlinks(s.library); err == nil && version == "" {
		version = strings.TrimPrefix(strings.TrimPrefix(filepath.Base(real), "libdcgm.so"), ".")
	}
	return Check{Name: "libdcgm", Status: CheckOK, Found: cmp.Or(version, "unknown version") + " in " + s.library}
}

func (s survey) checkEngine() Check {
	c := Check{Name: "host engine", Status: CheckInfo}
	wanted := s.source.Resolved() == config.ModeStandalone
	switch {
	case wanted && s.engineErr != nil:
		c.Status, c.Found = CheckFail, "no connection: "+s.engineErr.Error()
		c.Fix = "start nv-hostengine (systemctl start nvidia-dcgm), correct source.address, or remove it to run DCGM inside the agent"
	case wanted:
		c.Status, c.Found = CheckOK, "reachable at "+s.engine
		if s.reading != nil && s.reading.Versions.Engine != "" {
			c.Found += ", DCGM " + s.reading.Versions.Engine
			if pair := checkPair(s.reading.Versions.DCGM, s.reading.Versions.Engine); pair.Status != CheckOK {
				c.Status, c.Found, c.Fix = pair.Status, c.Found+"; "+pair.Found, pair.Fix
			}
		}
	case s.engineErr != nil:
		c.Found = "none at " + s.engine + "; not needed: the agent embeds DCGM"
	default:
		c.Found = "running at " + s.engine + ", but not used: source.address is empty"
	}
	return c
}

func (s survey) checkDCGM() Check {
	c := Check{Name: "DCGM", Status: CheckFail}
	switch {
	case s.libraryErr != nil:
		c.Status, c.Found = CheckInfo, "not checked without libdcgm"
	case s.source.Resolved() == config.ModeStandalone && s.engineErr != nil:
		c.Status, c.Found = CheckInfo, "not checked without the host engine"
	case errors.Is(s.pollErr, errTimeout):
		c.Found = fmt.Sprintf("no response within %v", dcgmTimeout)
		c.Fix = "look for NVRM and Xid in the kernel log (dmesg); restart the host engine, or the node if nvidia-smi hangs too"
	case errors.Is(s.pollErr, context.Canceled):
		c.Found, c.Fix = "interrupted", "run doctor again"
	case s.pollErr != nil:
		return failure(c.Name, s.pollErr.Error(), "make nvidia-smi work on this node; see the driver below")
	case len(s.gpus()) == 0:
		c.Found = "lists no GPU: it found no driver library (libnvidia-ml.so.1) or no device"
		c.Fix = "see the driver and the GPUs below; in a container, use the NVIDIA runtime and NVIDIA_VISIBLE_DEVICES=all"
	default:
		v := s.reading.Versions
		c.Status = CheckOK
		c.Found = status.Plural(len(s.gpus()), "GPU") + ", " + s.gpus()[0].Model
		for _, part := range [][2]string{{"driver", v.Driver}, {"CUDA", v.CUDA}} {
			if part[1] != "" {
				c.Found += ", " + part[0] + " " + part[1]
			}
		}
	}
	return c
}

// checkHealthChecks reports whether DCGM's health checks can be set and read. Without a result there is no line.
func (s survey) checkHealthChecks() []Check {
	c := Check{Name: "health checks"}
	if s.reading == nil {
		return nil
	}
	switch checks := s.reading.Checks; checks.Status {
	case health.ChecksUnknown:
		return nil
	case health.ChecksOff:
		c.Status, c.Found = CheckInfo, "off: source.healthSystems is none"
	case health.ChecksUp:
		c.Status, c.Found = CheckOK, "DCGM's health checks work"
	case health.ChecksDown:
		c = failure(c.Name, checks.Err,
			"install the same version of DCGM's library, modules and host engine; see GPUHealthChecksDown in docs/alerts.md")
		c.Status = CheckWarn
	}
	return []Check{c}
}

// unreachable returns the PCI bus IDs of the GPUs that DCGM lists but cannot reach.
func (s survey) unreachable() (ids []string) {
	for _, d := range s.gpus() {
		for _, sample := range s.reading.Samples {
			if sample.Device == d.ID && sample.Presence != health.Present && sample.Presence != health.PresenceUnknown {
				ids = append(ids, fmt.Sprintf("%s (%v)", pci.ID(d.PCI), sample.Presence))
			}
		}
	}
	return ids
}

func checkMIG(s survey) []Check {
	if s.reading == nil {
		return info("unknown without DCGM")
	}
	migDevices := map[health.DeviceID]int{}
	profiles := map[string]int{}
	for _, d := range s.devices(health.KindMIG) {
		migDevices[d.Parent]++
		profiles[d.Profile]++
	}
	on, empty := 0, []string(nil)
	for _, d := range s.gpus() {
		if !d.MIGMode {
			continue
		}
		if on++; migDevices[d.ID] == 0 {
			empty = append(empty, fmt.Sprint(d.Index))
		}
	}
	if on == 0 {
		return info("off")
	}
	found := []string{fmt.Sprintf("on for %d of %s", on, status.Plural(len(s.gpus()), "GPU"))}
	for _, profile := range slices.Sorted(maps.Keys(profiles)) {
		found = append(found, fmt.Sprintf("%d x %s", profiles[profile], profile))
	}
	checks := pass(strings.Join(found, ", "))
	if len(empty) > 0 {
		checks = append(checks, warn("no MIG device on GPU "+strings.Join(empty, ", ")+": containers cannot use it",
			"create MIG devices (nvidia-smi mig -cgi PROFILE -C), or turn MIG off (nvidia-smi -mig 0)")...)
	}
	return checks
}
