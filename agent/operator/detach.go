package operator

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
)

// DetachRequest asks the agent to release the GPU driver.
type DetachRequest struct {
	For   string `json:"for,omitempty"`   // a Go duration such as 30m; "" is defaultDetach
	Force bool   `json:"force,omitempty"` // although pods hold devices
}

// DetachResponse is the result of a DetachRequest.
type DetachResponse struct {
	Since         time.Time `json:"since"`
	Until         time.Time `json:"until"`             // when the agent attaches by itself
	Already       bool      `json:"already"`           // the driver was detached before
	UnaskedEngine string    `json:"engine,omitempty"`  // address of a host engine that was not asked to detach, for lack of a connection
	OpenFiles     []string  `json:"open"`              // driver files that the agent's process still has open
	OpenFilesErr  string    `json:"unknown,omitempty"` // why OpenFiles is not known
}

// AttachResponse is the result of an attach.
type AttachResponse struct {
	Already    bool            `json:"already"` // the driver was not detached
	Source     string          `json:"source"`  // up, down, stalled; the agent retries unless it is up
	Error      string          `json:"error,omitempty"`
	NeedsReset []DeviceFinding `json:"standing"` // findings that only a reset clears, without a sign of a reset
	Unhealthy  []DeviceFinding `json:"broken"`   // other faults of unhealthy GPUs, such as one that did not come back
}

// DeviceFinding is a finding that a GPU still has.
type DeviceFinding struct {
	GPU    int             `json:"gpu"` // index; -1 if another GPU has it
	Device health.DeviceID `json:"device"`
	Cause  string          `json:"cause"`
}

func (f DeviceFinding) gpuName() string {
	return (&health.Device{ID: f.Device, Index: f.GPU}).GPUName()
}

const (
	// defaultDetach is the default of detach --for.
	defaultDetach = 30 * time.Minute
	minDetach     = time.Second
	maxDetach     = 24 * time.Hour

	// driverTimeout limits a detach or attach: DCGM gives up a call that hangs after about a minute.
	driverTimeout = 90 * time.Second

	// The limits of the lists in an error.
	maxHeldDevices = 8
	maxHolders     = 6 // of one device

	// holdersTimeout limits the wait for the kubelet: the plugin asks it within a second, and waits five for a response.
	holdersTimeout = 10 * time.Second

	// allocationDelay is how long after withholding the devices the agent asks the kubelet for holders. The kubelet
	// records an allocation that the plugin has just granted within milliseconds.
	allocationDelay = time.Second

	// saveTimeout limits the wait for the state file. Without the file, a restart would offer the GPUs to pods.
	saveTimeout = 2 * time.Second
)

var (
	errHeld           = errors.New("pods hold GPUs")
	errHoldersUnknown = errors.New("cannot tell whether pods hold GPUs")
)

func (d DetachRequest) duration() (time.Duration, error) {
	if d.For == "" {
		return defaultDetach, nil
	}
	t, err := time.ParseDuration(d.For)
	if err != nil || t < minDetach || t > maxDetach {
		return 0, fmt.Errorf("for: expected a duration from 1s to 24h, such as 30m, got %q", d.For)
	}
	return t, nil
}

// detach releases the driver and checks that the process has no file of it open.
func (s *Server) detach(ctx context.Context, d DetachRequest) (DetachResponse, error) {
	t, err := d.duration()
	if err != nil {
		return DetachResponse{}, unixsock.WithStatus(http.StatusBadRequest, err)
	}
	ctx, cancel := context.WithTimeout(ctx, driverTimeout)
	defer cancel()
	withheld, err := s.withhold(ctx, d, t)
	if err != nil {
		return DetachResponse{}, unixsock.WithStatus(http.StatusConflict, err)
	}
	s.awaitSaved(ctx)
	result, err := s.Monitor.Detach(ctx, t)
	withheld.End() // no effect after a detach
	if err != nil {
		return DetachResponse{}, err
	}
	res := DetachResponse{Since: result.Since.UTC(), Until: result.Until.UTC(), Already: result.Already}
	if result.EngineUnasked {
		res.UnaskedEngine = s.EngineAddress()
	}
	open, err := driverFiles("/proc/self")
	if err != nil {
		res.OpenFilesErr = err.Error()
	}
	res.OpenFiles = append([]string{}, open...)
	return res, nil
}

// withhold makes the devices Unhealthy for a detach. If pods hold them, it restores the devices and returns an error. It asks the kubelet
// before, so that a refused detach changes no device, and again when no pod can get a device.
func (s *Server) withhold(ctx context.Context, d DetachRequest, t time.Duration) (*monitor.Withholding, error) {
	snapshot := s.Snapshots.Load()
	checkHolders := !d.Force && snapshot != nil && len(snapshot.Devices) > 0 && snapshot.Source.Status != health.SourceDetached
	if checkHolders {
		if err := checkNotHeld(snapshot, s.currentFacts(ctx)); err != nil {
			return nil, err
		}
	}
	w, err := s.Monitor.Withhold(t)
	if err != nil || !checkHolders {
		return w, err
	}
	if wait.Sleep(ctx, allocationDelay) {
		err = checkNotHeld(s.Snapshots.Load(), s.currentFacts(ctx))
	} else {
		err = ctx.Err()
	}
	if err != nil {
		w.End()
		return nil, err
	}
	return w, nil
}

// awaitSaved waits until the state file shows that the devices are withheld. A disk that fails does not refuse the detach.
func (s *Server) awaitSaved(ctx context.Context) {
	snapshot := s.Snapshots.Load()
	if snapshot == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, saveTimeout)
	defer cancel()
	if err := s.AwaitSaved(ctx, snapshot); err != nil {
		s.Log.Warn("cannot save the detach in the state file; a restart of the agent would end it", zap.Error(err))
	}
}

// currentFacts returns the facts with an answer of the kubelet that is newer than the call: an older one may lack a pod that got a GPU
// since.
func (s *Server) currentFacts(ctx context.Context) offer.Facts {
	began := time.Now()
	f := s.Ask(ctx, holdersTimeout)
	if f.Holders.Err == "" && f.Holders.At.Before(began) {
		f.Holders.Err = fmt.Sprintf("no response of the kubelet within %v", holdersTimeout)
	}
	return f
}

// checkNotHeld returns errHeld with the holders of devices, errHoldersUnknown if they are not known, and nil if no pod
// holds a device.
func checkNotHeld(s *health.Snapshot, facts offer.Facts) error {
	if s == nil || len(s.Devices) == 0 {
		return nil
	}
	reasons := make(map[health.DeviceID]string) // why it cannot be taken
	for i := range s.Devices {
		d := &s.Devices[i].Device
		answer := facts.Decide(&offer.Request{Purpose: offer.Take, Device: d, MustKnow: true, Monitors: true})
		switch {
		case answer.Code() == offer.Unknown:
			return fmt.Errorf("%w: %s; pass --force to detach anyway", errHoldersUnknown, answer.Reason())
		case !answer.Allows(offer.Take):
			reasons[d.ID] = answer.Reason()
		}
	}
	var held []string
	for _, d := range status.Devices(s.Devices, facts.Holders, s.Source.Kind) {
		for _, d := range append([]status.Device{d}, d.MIG...) {
			reason, isHeld := reasons[d.UUID]
			if all := slices.Concat(d.Holders, d.AdminHolders); len(all) > 0 { // all that the kubelet lists, not one
				reason = "it is held by " + strings.Join(status.HolderNames(all, maxHolders), ", ")
			}
			if isHeld {
				held = append(held, fmt.Sprintf("%s (%s): %s", d.Name(), d.UUID, reason))
			}
		}
	}
	if len(held) == 0 {
		return nil
	}
	if more := len(held) - maxHeldDevices; more > 0 {
		held = append(held[:maxHeldDevices], fmt.Sprintf("and %d more devices", more))
	}
	return fmt.Errorf("%w: %s; end these pods first (kubectl drain), or pass --force: they keep their devices, which are not monitored "+
		"meanwhile",
		errHeld, strings.Join(held, "; "))
}

// attach uses the driver again and reports the GPUs that are still unhealthy.
func (s *Server) attach(ctx context.Context) (AttachResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, driverTimeout)
	defer cancel()
	result, err := s.Monitor.Attach(ctx)
	if err != nil {
		return AttachResponse{}, err
	}
	var devices []health.DeviceState
	if snapshot := s.Snapshots.Load(); snapshot != nil && !result.Already && result.Status == health.SourceUp {
		devices = snapshot.Devices
	}
	res := AttachResponse{Already: result.Already, Source: result.Status.String(), Error: result.Err}
	res.NeedsReset, res.Unhealthy = remainingFindings(devices)
	return res, nil
}

// remainingFindings returns the findings that a reset would have cleared, and the worst other finding of each unhealthy
// GPU.
func remainingFindings(devices []health.DeviceState) (needsReset, unhealthy []DeviceFinding) {
	needsReset, unhealthy = []DeviceFinding{}, []DeviceFinding{}
	for _, d := range devices {
		for i, f := range d.Verdict.Findings {
			finding := DeviceFinding{d.Device.Index, d.Device.ID, f.Cause}
			switch {
			case f.From != "":
			case f.Clears == health.ClearsGPUReset:
				needsReset = append(needsReset, finding)
			case i == 0 && f.State == health.Unhealthy && !d.Verdict.Decided():
				unhealthy = append(unhealthy, finding)
			}
		}
	}
	return needsReset, unhealthy
}

func (r DetachResponse) text() string {
	first := "detached since "
	if r.Already {
		first = "already detached since "
	}
	first += r.Since.Format(time.RFC3339)
	if len(r.OpenFiles) == 0 && r.OpenFilesErr == "" {
		first += "; the agent has no driver file open"
	}
	lines := []string{first, fmt.Sprintf("the agent attaches at %s, or when you run: gpu-node-agent attach", r.Until.Format(time.RFC3339))}
	if r.UnaskedEngine != "" {
		lines = append(lines, fmt.Sprintf(
			"the agent is not connected to the host engine at %s, so it may still use the driver: stop it if it runs", r.UnaskedEngine))
	}
	return strings.Join(lines, "\n")
}

// err returns why the driver is still in use, as far as the agent knows.
func (r DetachResponse) err() error {
	switch {
	case r.OpenFilesErr != "":
		return fmt.Errorf("cannot tell whether the agent has driver files open: %s", r.OpenFilesErr)
	case len(r.OpenFiles) > 0:
		return fmt.Errorf("the agent still has %s open, so a reset would fail; run gpu-node-agent attach, and delete the agent's pod instead",
			strings.Join(r.OpenFiles, ", "))
	}
	return nil
}

func (r AttachResponse) text() string {
	text := "attached: the GPUs are measured"
	switch {
	case r.Source != health.SourceUp.String():
		return ""
	case r.Already:
		text = "the agent was not detached; the GPUs are measured"
	}
	for _, f := range r.NeedsReset {
		text += fmt.Sprintf("\n%s still has %s, and the agent saw no reset; if you reset the GPU, run: gpu-node-agent clear --gpu %s --cause %s",
			f.gpuName(), f.Cause, f.Device, f.Cause)
	}
	for _, f := range r.Unhealthy {
		text += fmt.Sprintf("\n%s is unhealthy: %s; see gpu-node-agent status", f.gpuName(), f.Cause)
	}
	return text
}

func (r AttachResponse) err() error {
	if r.Source == health.SourceUp.String() {
		return nil
	}
	return fmt.Errorf("the source is %s: %s; the agent keeps trying, see gpu-node-agent status", r.Source, r.Error)
}
