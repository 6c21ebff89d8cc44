package operator

import (
	"context"
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"testing"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	agentnode "github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
)

// FuzzRequests sends any body to each route. An invalid body or an unknown device is an error with a text. A valid one has the same result
// when Go encodes it again.
func FuzzRequests(f *testing.F) {
	for _, body := range []string{
		`{"device":"GPU-1"}`, `{"device":"GPU-1","cause":"lost"}`, `{"device":"GPU-2","cause":"temperature"}`,
		`{"device":"MIG-2-7","cause":"temperature"}`, `{"device":"GPU-0","cause":""}`, `{"device":"","cause":""}`,
		`{"binding":"3"}`, `null`, `{}`, ``, `[]`, `"clear"`, `{"device":"GPU-1","device":"GPU-2"}`, `{"DEVICE":"GPU-1"}`,
		`{"device":"GPU-1","all":true}`, `{"device":"GPU-1"} {"device":"GPU-2"}`, `{"device":"GPU-\u0031"}`,
		`{"device":"9"}`, `{"device":"GPU-1","cause":"\u0000"}`, `{"device":["GPU-1"]}`, `{"device":"GPU-1"}x`,
	} {
		f.Add(clearRoute, body)
	}
	for _, body := range []string{
		`{}`, `{"for":"30m"}`, `{"for":"2h","force":true}`, `{"for":"-1s","force":true}`, `{"for":30}`, `{"until":"now"}`,
	} {
		f.Add(detachRoute, body)
	}
	f.Add(attachRoute, `{"force":true}`)
	f.Add(terminateRoute, `{"device":"0","client":4711}`)
	for _, route := range []string{attachRoute, mpsRoute, terminateRoute, slicesRoute, labelsRoute} {
		f.Add(route, `{}`)
	}
	node := agenttest.Node()
	ctx, cancel := context.WithCancel(f.Context())
	cancel() // no monitor runs that could detach, so detach must not wait
	f.Fuzz(func(t *testing.T, route, body string) {
		answer := restored(node).routes()[route]
		if answer == nil {
			return
		}
		result, err := answer(ctx, []byte(body))
		if err != nil {
			if err.Error() == "" {
				t.Error("error without a text")
			}
			return
		}
		if list, ok := result.(MPSResponse); ok && route == mpsRoute && len(list.Daemons) == 0 {
			return // the node has no daemons, so nothing can be terminated
		}
		if route != clearRoute {
			t.Fatalf("%s %q succeeds without a monitor: %v", route, body, result)
		}
		checkCleared(ctx, t, node, body, result)
	})
}

// checkCleared checks the result of a clear request, which is the same when Go encodes the request again.
func checkCleared(ctx context.Context, t *testing.T, node *health.Snapshot, body string, result any) {
	t.Helper()
	var req ClearRequest
	if err := json.Unmarshal([]byte(body), &req); err != nil {
		t.Fatalf("%q is not a valid clear request, and the result is %v", body, result)
	}
	id, err := resolveDevice(node, req.Device)
	cleared, ok := result.(ClearResponse)
	if err != nil || !ok {
		t.Fatalf("%q names no device and cleared %v", body, result)
	}
	at := slices.IndexFunc(node.Devices, func(d health.DeviceState) bool { return d.Device.ID == id })
	for _, cause := range cleared.Cleared {
		present := slices.ContainsFunc(node.Devices[at].Verdict.Findings,
			func(f health.Finding) bool { return f.Cause == cause && f.From == "" })
		if !present || req.Cause != "" && req.Cause != cause {
			t.Errorf("%q cleared %s", body, cause)
		}
	}
	encoded, err := json.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	if second, err := restored(node).routes()[clearRoute](ctx, encoded); err != nil || !reflect.DeepEqual(second, result) {
		t.Errorf("%q: %v; %s: %v, %v", body, result, encoded, second, err)
	}
}

var errNone = errors.New("none")

// restored returns a server whose monitor has restored the devices of a node and does not run.
func restored(node *health.Snapshot) *Server {
	s := newServer(judge.DefaultConfig(), zap.NewNop())
	s.Monitor.Restore(statefile.Restored{Devices: node.Devices, Missed: true})
	s.Snapshots.Store(&health.Snapshot{Devices: node.Devices})
	s.Slices = func(context.Context) (dra.PublishedSlices, error) { return dra.PublishedSlices{}, errNone }
	s.Labels = func(context.Context) (agentnode.Labels, error) { return agentnode.Labels{}, errNone }
	return s
}
