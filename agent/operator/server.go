// Package operator implements the commands that talk to a running agent, and the server of the operator's socket.
package operator

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
)

// The requests on the operator's socket, with what their bodies and responses have.
const (
	clearRoute     = "POST /clear"         // ClearRequest, ClearResponse
	detachRoute    = "POST /detach"        // DetachRequest, DetachResponse
	attachRoute    = "POST /attach"        // AttachResponse
	mpsRoute       = "GET /mps"            // MPSResponse
	terminateRoute = "POST /mps/terminate" // TerminateRequest, TerminateResponse
	slicesRoute    = "GET /slices"         // dra.PublishedSlices
	labelsRoute    = "GET /labels"         // node.Labels
)

// Server answers the operator's requests on the agent's socket.
type Server struct {
	Config    *health.Latest[judge.Config] // for the socket's path
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
		path, same, cancel := health.WatchPart(ctx, s.Config, func(c *judge.Config) string { return c.Socket })
		if path == "" {
			<-same.Done()
		} else {
			_ = os.MkdirAll(filepath.Dir(path), 0o750)        // if it fails, Serve logs that it cannot listen, and retries
			_ = unixsock.Serve(same, path, s.Log, s.routes()) // returns nil when same ends
		}
		cancel()
	}
	return nil
}

func (s *Server) routes() unixsock.Routes {
	return unixsock.Routes{
		clearRoute:     unixsock.JSON(func(_ context.Context, req ClearRequest) (ClearResponse, error) { return s.clear(req) }),
		detachRoute:    unixsock.JSON(s.detach),
		attachRoute:    unixsock.JSON(func(ctx context.Context, _ struct{}) (AttachResponse, error) { return s.attach(ctx) }),
		mpsRoute:       get(requestTimeout, s.mps),
		terminateRoute: unixsock.JSON(s.terminate),
		slicesRoute:    get(requestTimeout, s.Slices),
		labelsRoute:    get(requestTimeout/2, s.Labels), // then without what NVML has
	}
}

// get returns a route for what the agent knows. An error is that it does not know it now.
func get[T any](timeout time.Duration, answer func(context.Context) (T, error)) unixsock.Route {
	return func(ctx context.Context, _ []byte) (any, error) {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		result, err := answer(ctx)
		if err != nil {
			return nil, unixsock.WithStatus(http.StatusServiceUnavailable, err)
		}
		return result, nil
	}
}

// call sends a request to the agent that listens on a socket, and returns its response.
func call[T any](ctx context.Context, socket, route string, body any) (res T, err error) {
	err = unixsock.Call(ctx, socket, route, body, &res)
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		if errors.Is(err, fs.ErrPermission) {
			return res, fmt.Errorf("only root may use the agent's socket: %w", err)
		}
		return res, fmt.Errorf(
			"no agent listens on the socket (is it running, and is this its health.socket?): %w; see gpu-node-agent doctor", err)
	}
	return res, err
}
