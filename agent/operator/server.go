// Package operator implements the commands that talk to a running agent, and the server of the operator's socket.
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
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
)

// request is a line on the operator's socket. Exactly one field is set.
type request struct {
	Clear  *ClearRequest  `json:"clear,omitempty"`
	Detach *DetachRequest `json:"detach,omitempty"`
	Attach *struct{}      `json:"attach,omitempty"`
	MPS    *MPSRequest    `json:"mps,omitempty"`
	Slices *struct{}      `json:"slices,omitempty"`
	Labels *struct{}      `json:"labels,omitempty"`
}

// Server answers the operator's requests on the agent's socket.
type Server struct {
	Config    *health.Latest[health.Config] // for the socket's path
	Snapshots *health.Latest[health.Snapshot]
	Monitor   *monitor.Monitor
	MPS       MPS
	Processes func() *processes.Snapshot // nil while they are not measured

	Ask           func(context.Context, time.Duration) offer.Facts // asks the kubelet, or returns its last answer after a timeout
	AwaitSaved    func(context.Context, *health.Snapshot) error    // waits until the state file has a snapshot
	EngineAddress func() string                                    // of the host engine, "" without one
	Slices        func(context.Context) (dra.PublishedSlices, error)
	Labels        func(context.Context) (node.Labels, error)
	Log           *zap.Logger
}

// Run serves the socket at health.socket until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		path, same, cancel := health.WatchPart(ctx, s.Config, func(c *health.Config) string { return c.Socket })
		if path == "" {
			<-same.Done()
		} else {
			_ = os.MkdirAll(filepath.Dir(path), 0o750)          // if it fails, Serve logs that it cannot listen, and retries
			_ = unixsock.Serve(same, path, s.Log, s.handleLine) // returns nil when same ends
		}
		cancel()
	}
	return nil
}

func (s *Server) handleLine(ctx context.Context, line string) (any, error) {
	req, err := parseRequest(line)
	switch {
	case err != nil:
		return nil, err
	case req.Detach != nil:
		return s.detach(ctx, *req.Detach)
	case req.Attach != nil:
		return s.attach(ctx)
	case req.MPS != nil:
		return s.mps(ctx, *req.MPS)
	case req.Slices != nil:
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		return s.Slices(ctx)
	case req.Labels != nil:
		ctx, cancel := context.WithTimeout(ctx, requestTimeout/2) // then without what NVML has
		defer cancel()
		return s.Labels(ctx)
	}
	return s.clear(*req.Clear)
}

func parseRequest(line string) (request, error) {
	var req request
	dec := json.NewDecoder(strings.NewReader(line))
	dec.DisallowUnknownFields()
	err := dec.Decode(&req)
	set := slices.DeleteFunc([]bool{
		req.Clear != nil, req.Detach != nil, req.Attach != nil, req.MPS != nil, req.Slices != nil,
		req.Labels != nil,
	}, func(set bool) bool { return !set })
	if err != nil || len(set) != 1 || strings.TrimSpace(line[dec.InputOffset():]) != "" {
		return request{}, fmt.Errorf(
			`expected {"clear":{"device":"GPU-…","cause":"xid-79"}}, {"detach":{"for":"30m"}}, {"attach":{}}, {"mps":{}}, `+
				`{"mps":{"terminate":{"device":"GPU-…","client":4711}}}, {"slices":{}} or {"labels":{}}, got %s`, line)
	}
	return req, nil
}

// call sends a request to the agent that listens on a socket, and decodes the result of its response.
func call[T any](ctx context.Context, socket string, req request) (T, error) {
	var response struct {
		Result T `json:"result"`
	}
	text, err := unixsock.Call(ctx, socket, req)
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		if errors.Is(err, fs.ErrPermission) {
			return response.Result, fmt.Errorf("only root may use the agent's socket: %w", err)
		}
		return response.Result, fmt.Errorf(
			"no agent listens on the socket (is it running, and is this its health.socket?): %w; see gpu-node-agent doctor", err)
	}
	if err != nil {
		return response.Result, err
	}
	err = json.Unmarshal([]byte(text), &response)
	return response.Result, err
}
