package operator

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
)

// fakeMPS records the client that it was asked to terminate.
type fakeMPS struct {
	err        error  // of TerminateClient
	reason     string // of Err
	terminated []any
	clients    map[health.DeviceID]map[int][]int // now; nil: the daemon does not answer
}

func (f *fakeMPS) Err() string { return f.reason }

func (f *fakeMPS) Clients(_ context.Context, id health.DeviceID) (map[int][]int, error) {
	if f.clients[id] == nil {
		return nil, context.DeadlineExceeded
	}
	return f.clients[id], nil
}

func (f *fakeMPS) TerminateClient(_ context.Context, id health.DeviceID, client int) error {
	f.terminated = append(f.terminated, id, client)
	return f.err
}

// mpsNode is agenttest.Node with a daemon of GPU 0, one of GPU 1 that does not run, and one of the MIG device 2:1.
func mpsNode() *health.Snapshot {
	s := agenttest.Node()
	s.Devices[0].MPS = &health.MPSDaemon{
		Ready: true, PID: 41, Started: agenttest.Ago(0), MultiUser: true,
		Servers: []health.MPSServer{{PID: 50, Status: "ACTIVE", Clients: []int{61, 62}}, {PID: 51}},
	}
	s.Devices[1].MPS = &health.MPSDaemon{Cause: health.CauseMPSDown, Reason: "exit status 1"}
	s.Devices[4].MPS = &health.MPSDaemon{PID: 42, Ready: true, MultiUser: true}
	return s
}

// mpsServer returns a server on mpsNode, whose process 61 belongs to a container.
func mpsServer(s *health.Snapshot, fake *fakeMPS, log *zap.Logger) *Server {
	server := newServer(judge.DefaultConfig(), log)
	if s != nil {
		server.Snapshots.Store(s)
	}
	server.MPS = fake
	server.Processes = func() *processes.Snapshot {
		return &processes.Snapshot{
			ProcessReading: driver.ProcessReading{Processes: []driver.Process{{Device: "GPU-0", PID: 60}, {Device: "GPU-0", PID: 61}}},
			Containers:     []processes.Container{{}, {Namespace: "web", Pod: "chat-0", Name: "llm"}},
		}
	}
	return server
}

func TestMPSLists(t *testing.T) {
	result, err := mpsServer(mpsNode(), &fakeMPS{reason: "no socket"}, zaptest.NewLogger(t)).routes()[mpsRoute](t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	document, err := json.Marshal(result)
	if err != nil {
		t.Fatal(err)
	}
	agenttest.MustContain(t, string(document),
		`{"error":"no socket","daemons":[{"device":"GPU-0","index":"0","ready":true,"pid":41,"started":"2026-03-02T12:00:00Z","restarts":0,`,
		`{"pid":50,"status":"ACTIVE","clients":[{"pid":61,"namespace":"web","pod":"chat-0","container":"llm"},{"pid":62}]},`+
			`{"pid":51,"clients":[]}`,
		`{"device":"GPU-1","index":"1","ready":false,"cause":"mps-down","reason":"exit status 1",`, `"device":"MIG-2-8","index":"2:1"`)
	var res MPSResponse
	if err := json.Unmarshal(document, &res); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(res.text(), "\n")
	for _, want := range [][]string{
		{"error:", "no", "socket"},
		{"0", "ready"},
		{"1", "not", "ready", "-", "GPU-1", "exit", "status", "1"},
		{"2:1", "ready"},
		{"0", "50", "ACTIVE", "61", "web/chat-0", "(llm)"},
		{"0", "50", "ACTIVE", "62", "-"},
		{"0", "51", "-", "-", "-"},
	} {
		found := false
		for _, line := range lines {
			f := strings.Fields(line)
			found = found || len(f) >= len(want) && strings.Join(f[:len(want)], " ") == strings.Join(want, " ")
		}
		if !found {
			t.Errorf("no line %q in\n%s", want, res.text())
		}
	}
}

// The response has the current clients, not the ones that were listed last.
func TestMPSListsClientsOfNow(t *testing.T) {
	fake := &fakeMPS{clients: map[health.DeviceID]map[int][]int{
		"GPU-0": {50: {61, 64}, 52: {65}}, "GPU-1": {1: {2}}, // the daemon of GPU 1 is not ready, and is not asked
	}}
	res, err := mpsServer(mpsNode(), fake, zaptest.NewLogger(t)).mps(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	document, err := json.Marshal(res.Daemons[0])
	if err != nil {
		t.Fatal(err)
	}
	agenttest.MustContain(t, string(document),
		`"clients":3,"servers":[{"pid":50,"status":"ACTIVE","clients":[{"pid":61,"namespace":"web","pod":"chat-0","container":"llm"},`+
			`{"pid":64}]},{"pid":52,"clients":[{"pid":65}]}]`)
	if len(res.Daemons[1].Servers) != 0 || res.Daemons[2].Device != "MIG-2-8" {
		t.Errorf("%+v", res.Daemons)
	}
}

func TestMPSListsNone(t *testing.T) {
	for name, s := range map[string]*health.Snapshot{"no snapshot": nil, "no daemons": agenttest.Node()} {
		res, err := mpsServer(s, &fakeMPS{}, zaptest.NewLogger(t)).mps(t.Context())
		if err != nil || res.Daemons == nil || len(res.Daemons) > 0 || res.text() != mpsUnused {
			t.Errorf("%s: %+v, %v", name, res, err)
		}
	}
}

// Without an agent the command prints an error only: no list, which would be empty.
func TestMPSCommandWithoutAgent(t *testing.T) {
	for _, args := range [][]string{{"mps"}, {"mps", "-o", "json"}, {"mps", "terminate", "--gpu", "0", "--client", "7"}} {
		root := &cobra.Command{SilenceErrors: true, SilenceUsage: true}
		root.AddCommand(Commands(new(config.Loader), nil)...)
		var out bytes.Buffer
		root.SetOut(&out)
		root.SetArgs(append(args, "--socket", filepath.Join(t.TempDir(), "none.sock")))
		if err := root.Execute(); err == nil || !strings.Contains(err.Error(), "none.sock") || out.Len() > 0 {
			t.Errorf("%v: %v, and prints %q", args, err, &out)
		}
	}
}

func TestMPSTerminate(t *testing.T) {
	for name, test := range map[string]struct {
		snapshot *health.Snapshot
		ref      string
		client   int
		err      error  // of the daemon
		code     int    // of the refusal; 0: none
		want     string // in it
	}{
		"client":            {mpsNode(), "0", 61, nil, 0, ""},
		"client of MIG":     {mpsNode(), "2:1", 61, nil, 0, ""},
		"unknown client":    {mpsNode(), "0", 7, fmt.Errorf("%w 7", mps.ErrNoClient), http.StatusNotFound, "no such MPS client 7"},
		"no client":         {mpsNode(), "0", 0, nil, http.StatusBadRequest, "client: expected the PID of an MPS client"},
		"unknown device":    {mpsNode(), "9", 61, nil, http.StatusNotFound, `"9"; expected one of 0, 1, 2`},
		"without MPS":       {mpsNode(), "2", 61, nil, http.StatusConflict, "GPU-2: MPS does not serve this device; expected one of 0, 1, 2:1"},
		"daemon down":       {mpsNode(), "1", 61, nil, http.StatusConflict, "GPU-1: the MPS daemon does not run"},
		"node without MPS":  {agenttest.Node(), "0", 61, nil, http.StatusConflict, "plugin.sharing.mps.resources"},
		"not yet measured":  {nil, "0", 61, nil, http.StatusNotFound, "not measured"},
		"daemon is hanging": {mpsNode(), "0", 61, context.DeadlineExceeded, http.StatusInternalServerError, context.DeadlineExceeded.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			fake := &fakeMPS{err: test.err}
			s := mpsServer(test.snapshot, fake, zaptest.NewLogger(t))
			res, err := s.terminate(t.Context(), TerminateRequest{test.ref, test.client})
			if test.code == 0 {
				if err != nil || res.Client != test.client || len(fake.terminated) != 2 || fake.terminated[0] != res.Device {
					t.Errorf("%+v, %v; terminated %v", res, err, fake.terminated)
				}
				return
			}
			wantRefusal(t, name, err, refusal(test.code, test.want))
			if test.err == nil && len(fake.terminated) > 0 {
				t.Errorf("the daemon was asked: %v", fake.terminated)
			}
		})
	}
}
