// Package operator has the commands that talk to a running agent, and the agent's side of the operator's socket.
package operator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// Clear is an operator's word that a device is well again.
type Clear struct {
	Device health.DeviceID `json:"device"`          // a UUID, an index such as 3 or 3:0, or a PCI bus id
	Cause  string          `json:"cause,omitempty"` // "" for all
}

// question is a line on the operator's socket: one of them.
type question struct {
	Clear  *Clear  `json:"clear,omitempty"`
	Detach *Detach `json:"detach,omitempty"`
	Attach *Attach `json:"attach,omitempty"`
}

// Cleared is the answer to a Clear.
type Cleared struct {
	Cleared []string         `json:"cleared"` // causes
	Stands  []status.Finding `json:"stands"`  // what is wrong with the device all the same, the worst first
}

// Server answers the operator's requests on the agent's socket.
type Server struct {
	Config    *health.Latest[health.Config] // for the socket's path
	Snapshots *health.Latest[health.Snapshot]
	Monitor   *monitor.Monitor

	Holders        func() plugin.Holders
	RefreshHolders func()                                        // makes the plugin ask the kubelet soon
	AwaitSaved     func(context.Context, *health.Snapshot) error // waits until the state file has a snapshot
	EngineAddress  func() string                                 // of the host engine, "" without one
	Log            *zap.Logger
}

// Run serves the socket at health.socket until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		path, same, cancel := health.While(ctx, s.Config, func(c *health.Config) string { return c.Socket })
		if path == "" {
			<-same.Done()
		} else {
			// Where nothing can be made, listening fails, says so and is tried again.
			_ = os.MkdirAll(filepath.Dir(path), 0o750)
			_ = unixsock.Serve(same, path, s.Log, s.answer) // it ends with same only, and well
		}
		cancel()
	}
	return nil
}

func (s *Server) answer(ctx context.Context, line string) (any, error) {
	q, err := parseQuestion(line)
	switch {
	case err != nil:
		return nil, err
	case q.Detach != nil:
		return s.detach(ctx, *q.Detach)
	case q.Attach != nil:
		return s.attach(ctx)
	}
	id, err := deviceNamed(s.Snapshots.Load(), string(q.Clear.Device))
	if err != nil {
		return nil, err
	}
	causes, err := s.Monitor.Clear(id, q.Clear.Cause)
	if err != nil {
		return nil, err
	}
	answer := Cleared{append([]string{}, causes...), []status.Finding{}}
	for _, d := range s.Snapshots.Load().Devices {
		if d.Device.ID == id {
			answer.Stands = status.Findings(d.Verdict.Findings)
		}
	}
	return answer, nil
}

// deviceNamed returns the device that a word names, such as 3 or 3:0: of a GPU and its MIG devices the GPU. A word that
// names none is returned as it is; Monitor.Clear says which devices there are.
func deviceNamed(s *health.Snapshot, word string) (health.DeviceID, error) {
	var found []*health.Device
	if s != nil {
		for i := range s.Devices {
			d := &s.Devices[i].Device
			if match, _ := d.Matches(word); match && (len(found) == 0 || found[0].ID != d.Parent) {
				found = append(found, d)
			}
		}
	}
	switch len(found) {
	case 0:
		return health.DeviceID(word), nil
	case 1:
		return found[0].ID, nil
	}
	return "", fmt.Errorf("%q names %s and %s; use the UUID", word, found[0].ID, found[1].ID)
}

func (c Cleared) text() string {
	first := "cleared " + strings.Join(c.Cleared, ", ")
	switch {
	case len(c.Cleared) > 0:
	case len(c.Stands) == 0:
		first += "nothing: no findings stand"
	default:
		first += "nothing: what stands ends with its reason only"
	}
	lines := []string{first}
	for _, f := range c.Stands {
		line := fmt.Sprintf("%s stands: %s; %s", f.Cause, f.Reason, f.Advice)
		if f.From != "" {
			line += fmt.Sprintf(" (it is of %s)", f.From)
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

func parseQuestion(line string) (question, error) {
	var q question
	dec := json.NewDecoder(strings.NewReader(line))
	dec.DisallowUnknownFields()
	err := dec.Decode(&q)
	asked := 0
	for _, is := range []bool{q.Clear != nil, q.Detach != nil, q.Attach != nil} {
		if is {
			asked++
		}
	}
	if err != nil || asked != 1 || strings.TrimSpace(line[dec.InputOffset():]) != "" {
		return question{}, fmt.Errorf(`%s is not understood; say {"clear":{"device":"GPU-…","cause":"xid-79"}}, {"detach":{"for":"30m"}} or {"attach":{}}`, line)
	}
	return q, nil
}

// ask puts a question to the agent that listens on the socket, and reads the answer into result.
func ask[T any](ctx context.Context, socket string, q question) (T, error) {
	var answer struct {
		Result T `json:"result"`
	}
	if socket == "" {
		return answer.Result, errors.New("health.socket: not set, so the agent cannot be spoken to; set it, or use --socket")
	}
	text, err := unixsock.Call(ctx, socket, q)
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		if errors.Is(err, fs.ErrPermission) {
			return answer.Result, fmt.Errorf("an operator's word is for root only: %w", err)
		}
		return answer.Result, fmt.Errorf("no agent listens there (is it running, and is that its health.socket?): %w; see gpu-node-agent doctor", err)
	}
	if err != nil {
		return answer.Result, err
	}
	err = json.Unmarshal([]byte(text), &answer)
	return answer.Result, err
}
