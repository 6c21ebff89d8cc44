package operator

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/deviceref"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

// ClearRequest asks the agent to clear findings of a device, or to bind an entry of the configuration anew. Device or Binding is set.
type ClearRequest struct {
	Device string `json:"device,omitempty"` // a device reference: a UUID, an index, a MIG index or a PCI bus ID
	Cause  string `json:"cause,omitempty"`  // "" for all
	// an entry that names a GPU by its index, as 3 or 3:0: it then means the GPU that has the index now
	Binding string `json:"binding,omitempty"`
}

// ClearResponse is the result of a ClearRequest.
type ClearResponse struct {
	Cleared   []string         `json:"cleared"` // causes
	Remaining []status.Finding `json:"stands"`  // findings that the device still has, the worst first
	Bound     []status.Binding `json:"bound,omitempty"`
}

// validate returns what is wrong with the request. dash is before the names of its fields.
func (r ClearRequest) validate(dash, device string) error {
	switch {
	case r.Binding != "" && (r.Device != "" || r.Cause != ""):
		return fmt.Errorf("%sbinding excludes %s%s and %scause", dash, dash, device, dash)
	case r.Binding == "" && r.Device == "":
		return fmt.Errorf("%s%s is not set; expected a UUID, an index such as 3, a MIG index such as 3:0 or a PCI bus ID, as gpu-node-agent "+
			"status shows", dash, device)
	}
	return nil
}

func (s *Server) clear(req ClearRequest) (ClearResponse, error) {
	if err := req.validate("", "device"); err != nil {
		return ClearResponse{}, unixsock.WithStatus(http.StatusBadRequest, err)
	}
	if req.Binding != "" {
		bound, err := s.Monitor.Rebind(req.Binding)
		if err != nil {
			return ClearResponse{}, unixsock.WithStatus(http.StatusConflict, err)
		}
		return ClearResponse{Cleared: []string{}, Remaining: []status.Finding{}, Bound: status.Bindings(bound)}, nil
	}
	id, err := resolveDevice(s.Snapshots.Load(), req.Device)
	if err != nil {
		return ClearResponse{}, err
	}
	causes, err := s.Monitor.Clear(id, req.Cause)
	if err != nil {
		return ClearResponse{}, unixsock.WithStatus(http.StatusConflict, err)
	}
	res := ClearResponse{Cleared: append([]string{}, causes...), Remaining: []status.Finding{}}
	for _, d := range s.Snapshots.Load().Devices {
		if d.Device.ID == id {
			res.Remaining = status.Findings(d.Verdict.Findings)
		}
	}
	return res, nil
}

// resolveDevice returns the device that a reference names. If a GPU and its MIG devices match, it returns the GPU.
func resolveDevice(s *health.Snapshot, ref string) (health.DeviceID, error) {
	var matches []*health.Device
	if s != nil {
		for i := range s.Devices {
			d := &s.Devices[i].Device
			if match, _ := d.Matches(ref); match && (len(matches) == 0 || matches[0].ID != d.Parent) {
				matches = append(matches, d)
			}
		}
	}
	switch len(matches) {
	case 0:
		return "", unixsock.WithStatus(http.StatusNotFound, unknownDeviceError(s, ref))
	case 1:
		return matches[0].ID, nil
	}
	return "", unixsock.WithStatus(http.StatusBadRequest, fmt.Errorf("%q matches %s and %s; use the UUID", ref, matches[0].ID, matches[1].ID))
}

// unknownDeviceError returns the error about a reference that matches no device. It lists the MIG devices of the GPU in the
// reference, else the GPUs.
func unknownDeviceError(s *health.Snapshot, ref string) error {
	if s == nil || len(s.Devices) == 0 {
		return fmt.Errorf("%w %q: the agent has not measured a device; see gpu-node-agent status", judge.ErrUnknownDevice, ref)
	}
	gpu, mig, _ := deviceref.ParseIndex(ref)
	var gpus, parts []string
	for _, d := range s.Devices {
		switch d := d.Device; {
		case d.Index < 0:
		case d.Kind == health.KindGPU:
			gpus = append(gpus, strconv.Itoa(d.Index))
		case mig >= 0 && d.Index == gpu:
			parts = append(parts, fmt.Sprintf("%d:%d", d.Index, d.MIGIndex))
		}
	}
	if len(parts) > 0 {
		gpus = parts
	}
	return fmt.Errorf("%w %q; expected one of %s, or the UUID or PCI bus ID that gpu-node-agent status -o wide shows",
		judge.ErrUnknownDevice, ref, strings.Join(gpus, ", "))
}

func (r ClearResponse) err() error { return nil }

func (r ClearResponse) text() string {
	if len(r.Bound) > 0 {
		var lines []string
		for _, b := range r.Bound {
			lines = append(lines, fmt.Sprintf("%s %q means %s", b.Key, b.Entry, b.GPU))
		}
		return strings.Join(lines, "\n")
	}
	first := "cleared " + strings.Join(r.Cleared, ", ")
	switch {
	case len(r.Cleared) > 0:
	case len(r.Remaining) == 0:
		first = "nothing to clear: the device has no findings"
	default:
		first = "nothing to clear: the remaining findings end only with their cause"
	}
	lines := []string{first}
	for _, f := range r.Remaining {
		line := fmt.Sprintf("remaining: %s: %s; %s", f.Cause, f.Reason, f.Advice)
		if f.From != "" {
			line += fmt.Sprintf(" (of %s)", f.From)
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}
