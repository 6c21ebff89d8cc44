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
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
)

// FuzzHandleLine sends any line to the operator's socket. An invalid line or an unknown device is an error with a text. A
// valid line has the same result when Go encodes it again.
func FuzzHandleLine(f *testing.F) {
	for _, line := range []string{
		`{"clear":{"device":"GPU-1"}}`, `{"clear":{"device":"GPU-1","cause":"lost"}}`, `{"clear":{"device":"GPU-2","cause":"temperature"}}`,
		`{"clear":{"device":"MIG-2-7","cause":"temperature"}}`, `{"clear":{"device":"GPU-0","cause":""}}`, `{"clear":{"device":"","cause":""}}`,
		`{"clear":{"binding":"3"}}`, `{"clear":null}`, `{"clear":{}}`, `{}`, `null`, `[]`, `"clear"`,
		`{"clear":{"device":"GPU-1"},"clear":{"device":"GPU-2"}}`,
		`{"CLEAR":{"DEVICE":"GPU-1"}}`, `{"clear":{"device":"GPU-1","all":true}}`, `{"clear":{"device":"GPU-1"}} {"clear":{"device":"GPU-2"}}`,
		`{"clear":{"device":"GPU-\u0031"}}`,
		`{"detach":{}}`, `{"detach":{"for":"30m"}}`, `{"detach":{"for":"2h","force":true}}`, `{"detach":{"for":"-1s","force":true}}`,
		`{"detach":{"for":30}}`,
		`{"detach":{"until":"now"}}`, `{"detach":null}`, `{"attach":{}}`, `{"attach":{"force":true}}`, `{"detach":{"force":true},"attach":{}}`,
		`{"clear":{"device":"GPU-1","cause":"\u0000"}}`, `{"clear":{"device":["GPU-1"]}}`, `{"clear":{"device":"GPU-1"}}x`,
		`{"slices":{}}`, `{"labels":{}}`, `{"labels":{"all":true}}`, `{"labels":{},"slices":{}}`,
	} {
		f.Add(line)
	}
	node := agenttest.Node()
	ctx, cancel := context.WithCancel(f.Context())
	cancel() // no monitor runs that could detach, so detach must not wait
	f.Fuzz(func(t *testing.T, line string) {
		result, err := restored(node).handleLine(ctx, line)
		if err != nil {
			if err.Error() == "" {
				t.Error("error without a text")
			}
			return
		}
		var req request
		err = json.Unmarshal([]byte(line), &req)
		if list, ok := result.(MPSResponse); ok && err == nil && req.MPS != nil && req.MPS.Terminate == nil && len(list.Daemons) == 0 {
			return // the node has no daemons, so nothing can be terminated
		}
		if err != nil || req.Clear == nil {
			t.Fatalf("%q is not a valid clear request, and the result is %v", line, result)
		}
		at := slices.IndexFunc(node.Devices, func(d health.DeviceState) bool { return string(d.Device.ID) == req.Clear.Device })
		cleared, ok := result.(ClearResponse)
		if at < 0 || !ok {
			t.Fatalf("%q names no device and cleared %v", line, result)
		}
		for _, cause := range cleared.Cleared {
			present := slices.ContainsFunc(node.Devices[at].Verdict.Findings,
				func(f health.Finding) bool { return f.Cause == cause && f.From == "" })
			if !present || req.Clear.Cause != "" && req.Clear.Cause != cause {
				t.Errorf("%q cleared %s", line, cause)
			}
		}
		encoded, err := json.Marshal(req)
		if err != nil {
			t.Fatal(err)
		}
		if second, err := restored(node).handleLine(ctx, string(encoded)); err != nil || !reflect.DeepEqual(second, result) {
			t.Errorf("%q: %v; %s: %v, %v", line, result, encoded, second, err)
		}
	})
}

var errNone = errors.New("none")

// restored returns a server whose monitor has restored the devices of a node and does not run.
func restored(node *health.Snapshot) *Server {
	s := newServer(health.DefaultConfig(), zap.NewNop())
	s.Monitor.Restore(statefile.Restored{Devices: node.Devices, Missed: true})
	s.Slices = func(context.Context) (dra.PublishedSlices, error) { return dra.PublishedSlices{}, errNone }
	s.Labels = func(context.Context) (agentnode.Labels, error) { return agentnode.Labels{}, errNone }
	return s
}
