package operator

import (
	"context"
	"encoding/json"
	"reflect"
	"slices"
	"testing"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// FuzzOperate says any line on the operator's socket. A line that is not understood, or names a device that is
// not there, is refused in words; one that is taken means the same when it is said again as Go writes it.
func FuzzOperate(f *testing.F) {
	for _, line := range []string{
		`{"clear":{"device":"GPU-1"}}`, `{"clear":{"device":"GPU-1","cause":"lost"}}`, `{"clear":{"device":"GPU-2","cause":"temperature"}}`,
		`{"clear":{"device":"MIG-2-7","cause":"temperature"}}`, `{"clear":{"device":"GPU-0","cause":""}}`, `{"clear":{"device":"","cause":""}}`,
		`{"clear":null}`, `{"clear":{}}`, `{}`, `null`, `[]`, `"clear"`, `{"clear":{"device":"GPU-1"},"clear":{"device":"GPU-2"}}`,
		`{"CLEAR":{"DEVICE":"GPU-1"}}`, `{"clear":{"device":"GPU-1","all":true}}`, `{"clear":{"device":"GPU-1"}} {"clear":{"device":"GPU-2"}}`, `{"clear":{"device":"GPU-\u0031"}}`,
		`{"detach":{}}`, `{"detach":{"for":"30m"}}`, `{"detach":{"for":"2h","force":true}}`, `{"detach":{"for":"-1s","force":true}}`, `{"detach":{"for":30}}`,
		`{"detach":{"until":"now"}}`, `{"detach":null}`, `{"attach":{}}`, `{"attach":{"force":true}}`, `{"detach":{"force":true},"attach":{}}`,
		`{"clear":{"device":"GPU-1","cause":"\u0000"}}`, `{"clear":{"device":["GPU-1"]}}`, `{"clear":{"device":"GPU-1"}}x`,
	} {
		f.Add(line)
	}
	node := agenttest.Node()
	ctx, cancel := context.WithCancel(f.Context())
	cancel() // nobody waits for the driver: no monitor runs that could let go of it
	f.Fuzz(func(t *testing.T, line string) {
		result, err := restored(node).answer(ctx, line)
		if err != nil {
			if err.Error() == "" {
				t.Error("refused without a word")
			}
			return
		}
		var q question
		if err := json.Unmarshal([]byte(line), &q); err != nil || q.Clear == nil {
			t.Fatalf("%q is no question, and the answer is %v", line, result)
		}
		at := slices.IndexFunc(node.Devices, func(d health.DeviceState) bool { return d.Device.ID == q.Clear.Device })
		cleared, ok := result.(Cleared)
		if at < 0 || !ok {
			t.Fatalf("%q has cleared %v of nobody", line, result)
		}
		for _, cause := range cleared.Cleared {
			stood := slices.ContainsFunc(node.Devices[at].Verdict.Findings, func(f health.Finding) bool { return f.Cause == cause && f.From == "" })
			if !stood || q.Clear.Cause != "" && q.Clear.Cause != cause {
				t.Errorf("%q has cleared %s", line, cause)
			}
		}
		said, err := json.Marshal(q)
		if err != nil {
			t.Fatal(err)
		}
		if second, err := restored(node).answer(ctx, string(said)); err != nil || !reflect.DeepEqual(second, result) {
			t.Errorf("%q gives %v, and %s gives %v, %v", line, result, said, second, err)
		}
	})
}

// restored returns a server whose monitor has a node's devices and does not run.
func restored(node *health.Snapshot) *Server {
	var config health.Latest[health.Config]
	c := health.DefaultConfig()
	config.Store(&c)
	s := &Server{Config: &config, Snapshots: new(health.Latest[health.Snapshot]), Log: zap.NewNop()}
	s.Monitor = monitor.New(&config, new(health.Latest[monitor.Source]), s.Snapshots, s.Log)
	s.Monitor.Restore(statefile.Restored{Devices: node.Devices, Missed: true})
	s.Holders = func() plugin.Holders { return plugin.Holders{Err: "no kubelet"} }
	s.RefreshHolders = func() {}
	s.AwaitSaved = func(context.Context, *health.Snapshot) error { return nil }
	s.EngineAddress = func() string { return "" }
	return s
}
