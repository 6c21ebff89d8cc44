package doctor

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
)

// serveStatus serves a node's status as an agent does, and returns a configuration with its address.
func serveStatus(t *testing.T, node status.Node) config.Config {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == status.SnapshotPath {
			if err := json.NewEncoder(w).Encode(node); err != nil {
				t.Error(err)
			}
		}
	}))
	t.Cleanup(s.Close)
	c := config.DefaultConfig()
	c.Metrics.Listen = strings.TrimPrefix(s.URL, "http://")
	return c
}

func TestCheckMPS(t *testing.T) {
	running := mps.DaemonStatus{Device: "GPU-0", PID: 41, MultiUser: true}
	stopped := mps.DaemonStatus{Device: "GPU-1", Error: "exit status 1: no such device"}
	single := mps.DaemonStatus{Device: "GPU-2", PID: 43}
	waiting := status.Node{Problems: []view.Problem{
		{Part: view.PartDRA, Level: view.Warning, Text: "of another part"},
		{
			Part:  view.PartMPS,
			Level: view.Warning,
			Text:  "GPU 2: this driver serves one user at a time",
			Fix:   "give the pods of a device one runAsUser",
		},
	}}
	ready := func(d ...status.Device) status.Node { return status.Node{GPUs: d} }
	served := func(index int, m status.MPS) status.Device { return status.Device{Index: index, MPS: &m} }
	for name, test := range map[string]struct {
		status mps.Status
		err    error
		node   status.Node
		sim    bool
		want   []want
	}{
		"all well": {
			mps.Status{Version: "1.2.3", Daemons: []mps.DaemonStatus{running}},
			nil, ready(served(0, status.MPS{Ready: true, PID: 41})),
			false,
			[]want{{CheckOK, "1 daemon", ""}},
		},
		"not running": {
			mps.Status{},
			&os.SyscallError{Syscall: "connect", Err: syscall.ECONNREFUSED}, ready(), false,
			[]want{{CheckFail, "mps-daemon.sock: connection refused", "mps-daemon"}},
		},
		"other version": {
			mps.Status{Version: "1.2.2"},
			nil, ready(), false,
			[]want{{CheckWarn, "1.2.2, this program 1.2.3", "while no container uses MPS"}},
		},
		"shm": {
			mps.Status{Version: "1.2.3", Shm: "not mounted"},
			nil, ready(), false,
			[]want{{CheckFail, "not mounted", "--mount-shm"}},
		},
		"shm, simulated": {mps.Status{Version: "1.2.3", Shm: "not mounted"}, nil, ready(), true, []want{{CheckOK, "0 daemons", ""}}},
		"daemons": {
			mps.Status{Version: "1.2.3", Daemons: []mps.DaemonStatus{running, stopped, single, {Device: "GPU-3", Stopping: true}}},
			nil, ready(), false,
			[]want{{CheckWarn, "GPU-1: no MPS daemon runs: exit status 1", "log"}},
		},
		"pods of several users": {
			mps.Status{Version: "1.2.3", Daemons: []mps.DaemonStatus{single}},
			nil, waiting, false,
			[]want{{CheckWarn, "GPU 2: this driver serves one user at a time", "runAsUser"}},
		},
		"not ready": {
			mps.Status{Version: "1.2.3", Daemons: []mps.DaemonStatus{running}},
			nil,
			ready(served(0, status.MPS{PID: 41, Reason: "no limits"}), served(1, status.MPS{PID: 42, Leaving: true}),
				served(2, status.MPS{PID: 43, Ready: true})), false,
			[]want{{CheckWarn, "GPU 0: the MPS daemon is not ready: no limits", "mps"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := serveStatus(t, test.node)
			c.Plugin.Sharing.MPS.Root = t.TempDir()
			if c.Source.Mode = config.ModeEmbedded; test.sim {
				c.Source.Mode = config.ModeSim
			}
			d := doctor{version: "1.2.3", mpsStatus: func(_ context.Context, r mps.Root) (mps.Status, error) {
				if string(r) != c.Plugin.Sharing.MPS.Root {
					t.Errorf("asked at %s", r)
				}
				return test.status, test.err
			}}
			expect(t, d.checkMPS(t.Context(), c), test.want...)
		})
	}
}

func TestCheckMPSRoot(t *testing.T) {
	c := config.DefaultConfig()
	c.Plugin.Sharing.MPS.Root = filepath.Join(t.TempDir(), "missing")
	expect(t, doctor{}.checkMPS(t.Context(), c), want{
		CheckFail, "plugin.sharing.mps.root: no directory " + c.Plugin.Sharing.MPS.Root,
		"mps-daemon",
	})
}

func TestCheckMemoryLimits(t *testing.T) {
	shared := func(index int, enforcement, reason string) status.Device {
		return status.Device{Index: index, Shares: &status.Shares{
			Sharing: string(plugin.SharingMemory), Enforcement: enforcement,
			EnforcementReason: reason,
		}}
	}
	for name, test := range map[string]struct {
		node status.Node
		want []want
	}{
		"driver": {
			status.Node{GPUs: []status.Device{shared(0, "driver", ""), shared(1, "driver", ""), {Index: 2}}},
			[]want{{CheckOK, "enforcement driver on GPU 0, GPU 1", ""}},
		},
		"none": {status.Node{GPUs: []status.Device{shared(0, "none", "")}}, []want{{CheckInfo, "enforcement is none", ""}}},
		"mixed": {
			status.Node{
				GPUs:              []status.Device{shared(0, "none", "old driver"), shared(1, "driver", ""), shared(2, "none", "old driver")},
				MemoryLimitsError: "no cgroups",
			},
			[]want{{CheckWarn, "on GPU 0, GPU 2: old driver", "mps"}, {CheckOK, "on GPU 1", ""}, {CheckWarn, "no cgroups", "log"}},
		},
		"not shared": {
			status.Node{GPUs: []status.Device{{Shares: &status.Shares{Sharing: string(plugin.SharingMPS)}}}},
			[]want{{CheckInfo, "shares no device", ""}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := serveStatus(t, test.node)
			c.Source.Mode = config.ModeEmbedded
			expect(t, checkMemoryLimits(t.Context(), c), test.want...)
		})
	}
	c := config.DefaultConfig()
	c.Source.Mode = config.ModeEmbedded
	c.Metrics.Listen = "127.0.0.1:1" // refused
	expect(t, checkMemoryLimits(t.Context(), c), want{CheckInfo, "running agent", ""})
	c = serveStatus(t, status.Node{GPUs: []status.Device{shared(0, "none", "cgroup v1")}})
	c.Source.Mode = config.ModeSim
	expect(t, checkMemoryLimits(t.Context(), c), want{CheckInfo, "simulated", ""})
}

// The checks run only where they are needed.
func TestSharingStepsFollowConfig(t *testing.T) {
	for want, change := range map[string]func(*plugin.Config){
		"":              func(*plugin.Config) {},
		"MPS":           func(c *plugin.Config) { c.Sharing.MPS.Resources = []plugin.MPSResource{{}} },
		"memory limits": func(c *plugin.Config) { c.Sharing.Memory.Resource = "x" },
		"MPS memory limits": func(c *plugin.Config) {
			c.Sharing.Memory.Resource, c.Sharing.Memory.Enforcement = "x", plugin.EnforceMPS
		},
	} {
		c := config.DefaultConfig()
		change(&c.Plugin)
		var names []string
		for _, s := range (doctor{}).sharingSteps(c) {
			names = append(names, s.name)
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("%q, want %q", got, want)
		}
		if c.Plugin.Enabled = false; len(doctor{}.sharingSteps(c)) > 0 {
			t.Errorf("%q: checks although plugin.enabled is false", want)
		}
	}
}
