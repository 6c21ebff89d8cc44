package doctor

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strings"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm"
)

// probe is what became of one attempt to measure the GPUs where the agent would.
type probe struct {
	source      config.SourceConfig
	library     string // the file
	libraryErr  error
	engine      string // the address that was tried
	engineErr   error
	reading     *health.Reading // nil if there is none
	measureErr  error           // why
	tookTooLong bool            // more than dcgmLimit
}

// probe measures once, beside whoever uses the same engine and without a trace in it. Only dcgm.Survey may: a call
// before DCGM is opened ends the process.
func (d doctor) probe(ctx context.Context, c config.SourceConfig) probe {
	p := probe{source: c, engine: cmp.Or(c.Address, d.engine)}
	type loaded struct {
		path string
		err  error
	}
	l, ok := bounded(ctx, checkLimit, func(context.Context) loaded {
		path, err := d.library()
		return loaded{path, err}
	})
	if p.library, p.libraryErr = l.path, l.err; !ok {
		p.libraryErr = fmt.Errorf("libdcgm.so.4 does not load within %v; look for a hung disk or mount in the kernel log (dmesg)", checkLimit)
	}
	p.engineErr = dialEngine(ctx, p.engine)
	// Without the library there is nothing to try, and DCGM takes 5 s to say that nobody answers.
	if p.libraryErr != nil || c.Resolved() == config.ModeStandalone && p.engineErr != nil {
		return p
	}
	type measured struct {
		reading *health.Reading
		err     error
	}
	// Its own level: at the default, an engine in this process writes its log between our lines.
	dc := dcgm.Config{Address: c.Address, Interval: c.Interval, LogLevel: "NONE"}
	m, ok := bounded(ctx, dcgmLimit, func(ctx context.Context) measured {
		reading, _, err := d.survey(ctx, dc, zap.NewNop())
		return measured{reading, err}
	})
	p.reading, p.measureErr, p.tookTooLong = m.reading, m.err, !ok && ctx.Err() == nil
	return p
}

func dialEngine(ctx context.Context, address string) error {
	network := "tcp"
	if path, ok := strings.CutPrefix(address, "unix://"); ok {
		network, address = "unix", path
	}
	d := net.Dialer{Timeout: dialLimit}
	conn, err := d.DialContext(ctx, network, address)
	if err != nil {
		return err
	}
	return conn.Close()
}

// gpus and instances are the devices that DCGM lists.
func (p probe) gpus() []health.Device      { return p.devices(health.KindGPU) }
func (p probe) instances() []health.Device { return p.devices(health.KindMIG) }

func (p probe) devices(kind health.Kind) (all []health.Device) {
	if p.reading == nil {
		return nil
	}
	for _, d := range p.reading.Devices {
		if d.Kind == kind {
			all = append(all, d)
		}
	}
	return all
}

func (p probe) checks() []Check { return []Check{p.checkLibrary(), p.checkEngine(), p.checkDCGM()} }

func (p probe) checkLibrary() Check {
	if p.libraryErr != nil {
		return fault("libdcgm", p.libraryErr.Error(), "install DCGM 4, or set source.mode to sim")
	}
	version := ""
	if p.reading != nil {
		version = p.reading.Versions.DCGM
	}
	if real, err := filepath.EvalSymlinks(p.library); err == nil && version == "" {
		version = strings.TrimPrefix(strings.TrimPrefix(filepath.Base(real), "libdcgm.so"), ".")
	}
	return Check{Name: "libdcgm", Status: CheckOK, Found: cmp.Or(version, "unknown version") + " in " + p.library}
}

func (p probe) checkEngine() Check {
	c := Check{Name: "host engine", Status: CheckInfo}
	wanted := p.source.Resolved() == config.ModeStandalone
	switch {
	case wanted && p.engineErr != nil:
		c.Status, c.Found = CheckFail, "nobody answers: "+p.engineErr.Error()
		c.Fix = "start nv-hostengine (systemctl start nvidia-dcgm), correct source.address, or remove it to run DCGM inside the agent"
	case wanted:
		c.Status, c.Found = CheckOK, "answers at "+p.engine
		if p.reading != nil && p.reading.Versions.Engine != "" {
			c.Found += ", DCGM " + p.reading.Versions.Engine
		}
	case p.engineErr != nil:
		c.Found = "none at " + p.engine + ", and none is needed: DCGM runs inside the agent"
	default:
		c.Found = "one answers at " + p.engine + ", but is not used: source.address is empty"
	}
	return c
}

func (p probe) checkDCGM() Check {
	c := Check{Name: "DCGM", Status: CheckFail}
	switch {
	case p.libraryErr != nil:
		c.Status, c.Found = CheckInfo, "not tried without libdcgm"
	case p.source.Resolved() == config.ModeStandalone && p.engineErr != nil:
		c.Status, c.Found = CheckInfo, "not tried without the host engine"
	case p.tookTooLong:
		c.Found = fmt.Sprintf("does not answer within %v", dcgmLimit)
		c.Fix = "look for NVRM and Xid in the kernel log (dmesg); restart the host engine, or the node if nvidia-smi hangs too"
	case p.measureErr != nil:
		return fault(c.Name, p.measureErr.Error(), "make nvidia-smi work on this node; see the driver below")
	case p.reading == nil:
		c.Found, c.Fix = "interrupted", "run doctor again"
	case len(p.gpus()) == 0:
		c.Found = "works, but lists no GPU: it found no driver library (libnvidia-ml.so.1) or no device"
		c.Fix = "see the driver and the GPUs below; in a container, use the NVIDIA runtime and NVIDIA_VISIBLE_DEVICES=all"
	default:
		v := p.reading.Versions
		c.Status = CheckOK
		c.Found = plural(len(p.gpus()), "GPU") + ", " + p.gpus()[0].Model
		for _, part := range [][2]string{{"driver", v.Driver}, {"CUDA", v.CUDA}} {
			if part[1] != "" {
				c.Found += ", " + part[0] + " " + part[1]
			}
		}
	}
	return c
}

// lost are the GPUs that DCGM lists and cannot reach, by PCI bus id.
func (p probe) lost() (ids []string) {
	if p.reading == nil {
		return nil
	}
	for _, d := range p.gpus() {
		for _, s := range p.reading.Samples {
			if s.Device == d.ID && s.Presence != health.Present && s.Presence != health.PresenceUnknown {
				ids = append(ids, fmt.Sprintf("%s (%v)", busID(d.PCI), s.Presence))
			}
		}
	}
	return ids
}

func checkMIG(p probe) []Check {
	if p.reading == nil {
		return []Check{{Status: CheckInfo, Found: "not known without DCGM"}}
	}
	parts := map[health.DeviceID]int{}
	profiles := map[string]int{}
	for _, d := range p.instances() {
		parts[d.Parent]++
		profiles[d.Profile]++
	}
	on, empty := 0, []string(nil)
	for _, d := range p.gpus() {
		if !d.MIGMode {
			continue
		}
		if on++; parts[d.ID] == 0 {
			empty = append(empty, fmt.Sprint(d.Index))
		}
	}
	if on == 0 {
		return []Check{{Status: CheckInfo, Found: "off"}}
	}
	found := []string{fmt.Sprintf("on for %d of %s", on, plural(len(p.gpus()), "GPU"))}
	for _, profile := range slices.Sorted(maps.Keys(profiles)) {
		found = append(found, fmt.Sprintf("%d x %s", profiles[profile], profile))
	}
	checks := []Check{{Status: CheckOK, Found: strings.Join(found, ", ")}}
	if len(empty) > 0 {
		checks = append(checks, Check{
			Status: CheckWarn, Found: "no instance on GPU " + strings.Join(empty, ", ") + ": containers can use nothing of it",
			Fix: "make instances (nvidia-smi mig -cgi PROFILE -C), or turn MIG off (nvidia-smi -mig 0)",
		})
	}
	return checks
}
