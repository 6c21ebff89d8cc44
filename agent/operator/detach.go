package operator

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// Detach is an operator's word that the agent is to let go of the GPUs' driver.
type Detach struct {
	For   string `json:"for,omitempty"`   // as Go writes a duration, such as 30m; "" is DefaultDetach
	Force bool   `json:"force,omitempty"` // although pods hold devices
}

// Attach is an operator's word that it is to take the driver back.
type Attach struct{}

// Detached is the answer to a Detach.
type Detached struct {
	Since   time.Time `json:"since"`
	Until   time.Time `json:"until"`             // when the agent takes the driver back by itself
	Already bool      `json:"already"`           // it was let go of before
	Engine  string    `json:"engine,omitempty"`  // the host engine's address if it was not asked to let go: there was no connection
	Open    []string  `json:"open"`              // files of the driver that the agent's process still has open
	Unknown string    `json:"unknown,omitempty"` // why that is not known
}

// Attached is the answer to an Attach.
type Attached struct {
	Already  bool       `json:"already"` // the driver was not let go of
	Source   string     `json:"source"`  // up, down, stalled: one that is not up is tried again
	Error    string     `json:"error,omitempty"`
	Standing []Standing `json:"standing"` // what only a reset ends, and of which none was seen
	Broken   []Standing `json:"broken"`   // other faults for which the kubelet gives a GPU to no pod: one that did not come back
}

// Standing is a finding that a GPU still has.
type Standing struct {
	GPU    int             `json:"gpu"` // index
	Device health.DeviceID `json:"device"`
	Cause  string          `json:"cause"`
}

const (
	// DefaultDetach is for how long the driver is let go of if nobody says.
	DefaultDetach = 30 * time.Minute
	minDetach     = time.Second
	maxDetach     = 24 * time.Hour

	// driverWithin is how long an operator waits for the driver to be let go of or taken back: DCGM gives up a call that
	// hangs after about a minute.
	driverWithin = 90 * time.Second

	// What an error lists at most.
	maxHeldDevices = 8
	maxHolders     = 6 // of one device

	// holdersWithin is how long the kubelet has for its answer: it is asked within a second, and given five.
	holdersWithin = 10 * time.Second

	// MaxHoldersAge is how old the kubelet's last response about holders may be. It is asked every two seconds.
	MaxHoldersAge = 30 * time.Second

	// allocationSettle is how long after the devices were withheld the kubelet is asked who holds them. An allocation that our plugin
	// has just granted is booked by the kubelet within milliseconds.
	allocationSettle = time.Second

	// savedWithin is how long detach waits for the state file. Without it a restart would give the GPUs out.
	savedWithin = 2 * time.Second
)

func (d Detach) duration() (time.Duration, error) {
	if d.For == "" {
		return DefaultDetach, nil
	}
	t, err := time.ParseDuration(d.For)
	if err != nil || t < minDetach || t > maxDetach {
		return 0, fmt.Errorf("for: %q is not a time of 1s to 24h; use such as 30m", d.For)
	}
	return t, nil
}

// detach lets go of the driver and looks whether that is so.
func (s *Server) detach(ctx context.Context, d Detach) (any, error) {
	t, err := d.duration()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, driverWithin)
	defer cancel()
	withheld, err := s.withhold(ctx, d, t)
	if err != nil {
		return nil, err
	}
	s.awaitSaved(ctx)
	let, err := s.Monitor.Detach(ctx, t)
	withheld.End() // if it was refused, else nothing
	if err != nil {
		return nil, err
	}
	answer := Detached{Since: let.Since.UTC(), Until: let.Until.UTC(), Already: let.Already}
	if let.Unasked {
		answer.Engine = s.EngineAddress()
	}
	open, err := driverFiles("/proc/self")
	if err != nil {
		answer.Unknown = err.Error()
	}
	answer.Open = append([]string{}, open...)
	return answer, nil
}

// withhold makes the devices Unhealthy for a detach, and gives them back with an error if pods hold them. The kubelet is asked
// before, so that a detach that has no chance withholds nothing, and again when no pod can get a device any more.
func (s *Server) withhold(ctx context.Context, d Detach, t time.Duration) (*monitor.Withholding, error) {
	snapshot := s.Snapshots.Load()
	ask := !d.Force && snapshot != nil && len(snapshot.Devices) > 0 && snapshot.Source.Status != health.SourceDetached
	if ask {
		if err := heldError(snapshot, holdersNow(ctx, s.Holders, s.RefreshHolders), time.Now()); err != nil {
			return nil, err
		}
	}
	w, err := s.Monitor.Withhold(t)
	if err != nil || !ask {
		return w, err
	}
	select {
	case <-time.After(allocationSettle):
		err = heldError(s.Snapshots.Load(), holdersNow(ctx, s.Holders, s.RefreshHolders), time.Now())
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		w.End()
		return nil, err
	}
	return w, nil
}

// awaitSaved waits until the state file says that the devices are withheld. Nobody is refused for a disk.
func (s *Server) awaitSaved(ctx context.Context) {
	snapshot := s.Snapshots.Load()
	if snapshot == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, savedWithin)
	defer cancel()
	if err := s.AwaitSaved(ctx, snapshot); err != nil {
		s.Log.Warn("a restart of the agent would end the detach: it is not in the state file", zap.Error(err))
	}
}

// holdersNow returns who holds devices, as the kubelet says when it is asked from now on: what it said last is up to two
// seconds old, and a pod may have got a GPU since.
func holdersNow(ctx context.Context, holders func() plugin.Holders, hurry func()) plugin.Holders {
	now := time.Now()
	ctx, cancel := context.WithTimeout(ctx, holdersWithin)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	hurry()
	for {
		h := holders()
		if h.Err != "" || h.At.After(now) {
			return h
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			h.Err = fmt.Sprintf("the kubelet has not answered within %v", holdersWithin)
			return h
		}
	}
}

// heldError says who holds devices, or why that is not known; nil if nobody does.
func heldError(s *health.Snapshot, h plugin.Holders, now time.Time) error {
	if s == nil || len(s.Devices) == 0 {
		return nil
	}
	switch {
	case h.Err != "" || h.By == nil:
		return fmt.Errorf("whether pods hold GPUs is not known: %s; with --force the driver is let go of all the same", h.Err)
	case now.Sub(h.At) > MaxHoldersAge:
		return fmt.Errorf("whether pods hold GPUs is not known: the kubelet has said nothing for %v; with --force the driver is let go of all the same",
			now.Sub(h.At).Round(time.Second))
	}
	var held []string
	for _, d := range status.Devices(s.Devices, h) {
		for _, d := range append([]status.Device{d}, d.MIG...) {
			if len(d.Holders) > 0 {
				held = append(held, fmt.Sprintf("%s (%s) is held by %s", d.Name(), d.UUID, strings.Join(status.HolderNames(d.Holders, maxHolders), ", ")))
			}
		}
	}
	if len(held) == 0 {
		return nil
	}
	if more := len(held) - maxHeldDevices; more > 0 {
		held = append(held[:maxHeldDevices], fmt.Sprintf("and %d devices more", more))
	}
	return errors.New(strings.Join(held, "; ") + "; end these pods first (kubectl drain), or use --force: they keep their devices and are not watched meanwhile")
}

// attach takes the driver back.
func (s *Server) attach(ctx context.Context) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, driverWithin)
	defer cancel()
	back, err := s.Monitor.Attach(ctx)
	if err != nil {
		return nil, err
	}
	answer := Attached{Already: back.Already, Source: back.Status.String(), Error: back.Err, Standing: []Standing{}, Broken: []Standing{}}
	if snapshot := s.Snapshots.Load(); snapshot != nil && !back.Already && back.Status == health.SourceUp {
		answer.Standing, answer.Broken = standing(snapshot.Devices)
	}
	return answer, nil
}

// standing returns what a reset would have ended, and the worst of what else makes a GPU unhealthy.
func standing(devices []health.DeviceState) (all, broken []Standing) {
	all, broken = []Standing{}, []Standing{}
	for _, d := range devices {
		for i, f := range d.Verdict.Findings {
			is := Standing{d.Device.Index, d.Device.ID, f.Cause}
			switch {
			case f.From != "":
			case f.Clears == health.ClearsGPUReset:
				all = append(all, is)
			case i == 0 && f.State == health.Unhealthy && !d.Verdict.Decided():
				broken = append(broken, is)
			}
		}
	}
	return all, broken
}
