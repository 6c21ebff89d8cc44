package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
)

// SourceConfig is the `source` section: what measures the GPUs.
type SourceConfig struct {
	Mode       string        `yaml:"mode"`       // auto, embedded, standalone, sim
	Address    string        `yaml:"address"`    // of the DCGM host engine: host[:port] or unix:///path
	Interval   time.Duration `yaml:"interval"`   // between two measurements of the metric fields
	StallAfter time.Duration `yaml:"stallAfter"` // a call that takes longer is a stall

	HealthSystems []string `yaml:"healthSystems"` // of DCGM's own checks: all, none, or names

	Sim sim.Config `yaml:"sim"`
}

// The modes of a source.
const (
	ModeAuto       = "auto"
	ModeEmbedded   = "embedded"
	ModeStandalone = "standalone"
	ModeSim        = "sim"
)

// Resolved is the mode with auto decided: the host engine at the address if there is one, else our own.
func (c SourceConfig) Resolved() string {
	switch {
	case c.Mode != ModeAuto:
		return c.Mode
	case c.Address != "":
		return ModeStandalone
	default:
		return ModeEmbedded
	}
}

func (c SourceConfig) validate() error {
	var errs []error
	switch c.Mode {
	case ModeAuto, ModeSim:
	case ModeEmbedded:
		if c.Address != "" {
			errs = append(errs, errors.New("address: mode embedded connects to nothing; remove the address or use mode standalone"))
		}
	case ModeStandalone:
		if c.Address == "" {
			errs = append(errs, errors.New("address: mode standalone needs the address of the DCGM host engine, such as localhost:5555"))
		}
	default:
		errs = append(errs, fmt.Errorf("mode: %q is not known; use one of auto, embedded, standalone, sim", c.Mode))
	}
	if c.Address != "" {
		errs = append(errs, validateAddress(c.Address))
	}
	if c.Interval < time.Second || c.Interval > 10*time.Minute {
		errs = append(errs, fmt.Errorf("interval: %v is out of range; use 1s to 10m", c.Interval))
	}
	if c.StallAfter < time.Second || c.StallAfter > 10*time.Minute {
		errs = append(errs, fmt.Errorf("stallAfter: %v is out of range; use 1s to 10m", c.StallAfter))
	}
	errs = append(errs, prefixed("healthSystems: ", dcgm.ValidateHealthSystems(c.HealthSystems)), within("sim", c.Sim.Validate()))
	return errors.Join(errs...)
}

// enginePort is where a host engine listens unless it is told (nv-hostengine --help).
const enginePort = "5555"

// plainAddress returns the address of a host engine in one form: DCGM's users write a URL too, and leave the port out.
func plainAddress(address string) string {
	address = strings.TrimPrefix(address, "tcp://")
	if address != "" && !strings.ContainsAny(address, ":/[") {
		address = net.JoinHostPort(address, enginePort)
	}
	return address
}

func validateAddress(address string) error {
	if path, ok := strings.CutPrefix(address, "unix://"); ok {
		if !filepath.IsAbs(path) {
			return fmt.Errorf("address: %q has no absolute path; use unix:///path/of/the.socket", address)
		}
		return nil
	}
	host, port, err := net.SplitHostPort(address)
	if n, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || n == 0 || host == "" {
		return fmt.Errorf("address: %q is not an address; use HOST, HOST:PORT or unix:///PATH", address)
	}
	return nil
}

// sourceWanted is what a source is opened for: what it is, and what it must measure for the metrics.
type sourceWanted struct {
	SourceConfig
	fields []health.Field
}

// sourceOf returns what the configuration wants. A simulation measures what it can, whatever is asked for, so
// another list of fields does not begin it anew.
func sourceOf(c Config) sourceWanted {
	w := sourceWanted{SourceConfig: c.Source}
	if c.Source.Resolved() != ModeSim {
		w.fields = c.Metrics.Chosen.IDs()
	}
	return w
}

// runSource keeps the monitor's source as the configuration wants it.
func (a *Agent) runSource(ctx context.Context) error {
	for ctx.Err() == nil {
		w, same, cancel := health.While(ctx, &a.source, func(w *sourceWanted) *sourceWanted { return w })
		c := &w.SourceConfig
		open, attach, run, err := newSource(*w, a.level, a.log)
		if err == nil {
			src := monitorSourceOf(*c)
			src.Open, src.Attach = open, attach
			a.monitored.Store(&src)
			err = run(same)
		}
		cancel()
		if err != nil {
			return err // not even tried again: the configuration was validated
		}
	}
	return nil
}

// monitorSourceOf returns what a source shows, without what opens it.
func monitorSourceOf(c SourceConfig) monitor.Source {
	return monitor.Source{
		SourceID:   health.SourceID{Kind: sourceKind(c), Inventory: inventoryOf(c), Simulated: c.Resolved() == ModeSim},
		StallAfter: c.StallAfter, DriverLoad: driverLoadOf(c),
	}
}

// sourceKind is what the source's devices belong to: those of a simulation are no others'.
func sourceKind(c SourceConfig) string {
	if c.Resolved() == ModeSim {
		return ModeSim
	}
	return "dcgm"
}

// driverLoadOf returns what identifies the load of the driver. A simulation has no driver, and that of another machine's engine
// is not to be seen here.
func driverLoadOf(c SourceConfig) func() string {
	host, _, _ := net.SplitHostPort(c.Address)
	ip := net.ParseIP(host)
	here := c.Address == "" || strings.HasPrefix(c.Address, "unix://") || host == "localhost" || ip.IsLoopback()
	if c.Resolved() == ModeSim || !here {
		return nil
	}
	return monitor.DriverLoad
}

// inventoryOf names the machine whose devices a source shows: a reload that only changes how it is asked
// forgets none of them.
func inventoryOf(c SourceConfig) string {
	if c.Resolved() == ModeSim {
		return fmt.Sprintf("sim %s %d", c.Sim.Profile, c.Sim.Seed)
	}
	return "dcgm " + c.Address
}

// newSource returns how to open the configured source and how to have a host engine take the driver back at that, nil
// if there is none, and what must run beside it.
func newSource(c sourceWanted, level zap.AtomicLevel, log *zap.Logger) (open, attach health.Opener, run func(context.Context) error, err error) {
	if c.Resolved() == ModeSim {
		s, err := sim.New(c.Sim, log.Named("sim"))
		if err != nil {
			return nil, nil, nil, err
		}
		return s.Open, nil, s.Run, nil
	}
	log = log.Named("dcgm")
	opener := func(attach bool) health.Opener {
		return func(ctx context.Context) (health.Session, error) {
			return dcgm.Open(ctx, dcgm.Config{
				Address: c.Address, Interval: c.Interval, Fields: c.fields,
				HealthSystems: c.HealthSystems, LogLevel: dcgmLogLevel(level.Level()), Attach: attach,
			}, log)
		}
	}
	open = opener(false)
	if c.Address != "" {
		attach = opener(true)
	}
	run = func(ctx context.Context) error {
		<-ctx.Done()
		return nil
	}
	return open, attach, run, nil
}

// dcgmLogLevel is what an engine in this process writes to standard output, which keeps our own log on standard
// error clean. Short of debugging that is next to nothing: DCGM has written an ERROR for every read of a field
// without a sample, and what fails is told to us as an error too.
func dcgmLogLevel(l zapcore.Level) string {
	if l <= zapcore.DebugLevel {
		return "DEBUG"
	}
	return "FATAL"
}
