package operator

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap/zaptest"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// cordon, include, exclude and clear take the MIG index that the status has.
func TestMIGIndexIsTheSameEverywhere(t *testing.T) {
	snapshotOf := func(c judge.Config) *health.Snapshot {
		devices := agenttest.Judge(c, nil, agenttest.MIGReading(), agenttest.Now())
		return &health.Snapshot{At: agenttest.Now(), Source: health.Source{Status: health.SourceUp}, Devices: devices}
	}
	snapshot := snapshotOf(judge.DefaultConfig())
	gpus := status.New(&view.View{At: agenttest.Now(), Snapshot: snapshot}, nil, node.IdleConfig{}, nil).GPUs
	if gpus[0].MIGIndex != nil || gpus[1].MIGIndex != nil || len(gpus[1].MIG) != 2 {
		t.Fatalf("%+v", gpus)
	}
	for i, m := range gpus[1].MIG {
		index := fmt.Sprintf("1:%d", i)
		if !strings.Contains(m.Name(), " "+index+" ") || m.MIGIndex == nil || *m.MIGIndex != i || m.GI == nil || *m.GI != []int{1, 5}[i] ||
			m.CI == nil || *m.CI != 0 {
			t.Errorf("%s: migIndex %v, gi %v, ci %v", m.Name(), m.MIGIndex, m.GI, m.CI)
		}
		c := judge.DefaultConfig()
		c.Cordon = []string{index}
		for _, d := range snapshotOf(c).Devices {
			if cordoned := d.Verdict.State == health.Unhealthy; cordoned != (d.Device.ID == m.UUID) {
				t.Errorf("cordon %s: %s is cordoned: %v", index, d.Device.ID, cordoned)
			}
		}
		offered := func(include, exclude string) (ids []string) {
			p := plugin.DefaultConfig()
			p.MIGStrategy, p.Include = plugin.MIGMixed, []string{include}
			if exclude != "" {
				p.Exclude = []string{exclude}
			}
			for _, r := range plugin.Layout(p, snapshot) {
				for _, d := range r.Devices {
					ids = append(ids, string(d.State.Device.ID))
				}
			}
			return ids
		}
		if got := offered(index, ""); !slices.Equal(got, []string{string(m.UUID)}) {
			t.Errorf("include %s: %q are offered", index, got)
		}
		if got := offered("1", index); slices.Contains(got, string(m.UUID)) || len(got) != 1 {
			t.Errorf("include 1, exclude %s: %q are offered", index, got)
		}
		if got, err := resolveDevice(snapshot, index); err != nil || got != m.UUID {
			t.Errorf("%s is %s, %v; want %s", index, got, err, m.UUID)
		}
	}
}

// A request clears the findings of the device that a reference names, and the response has the remaining ones.
func TestClear(t *testing.T) {
	c := judge.DefaultConfig()
	c.Cordon = []string{"GPU-0"}
	r := agenttest.MIGReading()
	for i := range r.Samples {
		r.Samples[i].XIDs = []health.XID{{Code: 48, At: agenttest.Now()}}
	}
	s := newServer(c, zaptest.NewLogger(t))
	devices := agenttest.Judge(c, nil, r, agenttest.Now())
	s.Snapshots.Store(&health.Snapshot{Devices: devices})
	s.Monitor.Restore(statefile.Restored{Devices: devices, Missed: true})
	for _, c := range []struct {
		ref, cause         string
		device             health.DeviceID
		cleared, remaining []string
	}{
		{"1:1", "xid-48", "MIG-2g", []string{"xid-48"}, []string{"xid-48"}}, // of the GPU
		{"1:0", "xid-48", "MIG-3g", []string{"xid-48"}, []string{"xid-48"}},
		{"1", "xid-48", "GPU-1", []string{"xid-48"}, nil},
		{"1", "", "GPU-1", nil, nil},
		{"GPU-0", "", "GPU-0", []string{"xid-48"}, []string{"cordoned"}},
		{"0", "", "GPU-0", nil, []string{"cordoned"}},
	} {
		res, err := s.clear(ClearRequest{Device: c.ref, Cause: c.cause})
		if err != nil {
			t.Errorf("clear %s: %v", c.ref, err)
			continue
		}
		var remaining []string
		for _, f := range res.Remaining {
			remaining = append(remaining, f.Cause)
		}
		if !slices.Equal(res.Cleared, c.cleared) || !slices.Equal(remaining, c.remaining) {
			t.Errorf("clear %s %s: %+v", c.ref, c.cause, res)
		}
		for _, d := range s.Snapshots.Load().Devices {
			if d.Device.ID == c.device && slices.ContainsFunc(d.Verdict.Findings,
				func(f health.Finding) bool { return f.From == "" && f.Cause == "xid-48" }) {
				t.Errorf("clear %s left xid-48 on %s", c.ref, c.device)
			}
		}
	}
	for req, want := range map[ClearRequest]error{
		{Device: "1:2"}:                  refusal(http.StatusNotFound, `"1:2"; expected one of 1:0, 1:1, or`),
		{Device: "9"}:                    refusal(http.StatusNotFound, `"9"; expected one of 0, 1, or`),
		{Device: "0:0"}:                  refusal(http.StatusNotFound, "one of 0, 1, or"),
		{Device: "foo"}:                  refusal(http.StatusNotFound, "one of 0, 1, or"),
		{Device: "1b:00.0"}:              refusal(http.StatusBadRequest, "GPU-0 and GPU-1"),
		{Device: "0", Cause: "cordoned"}: refusal(http.StatusConflict, `"cordoned"`),
	} {
		_, err := s.clear(req)
		wantRefusal(t, fmt.Sprintf("%+v", req), err, want)
	}
}

// A binding is cleared while the GPUs are measured; the entry then means the GPU that has the index.
func TestClearBinding(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	for req, want := range map[ClearRequest]error{
		{Binding: "3", Device: "GPU-1"}: refusal(http.StatusBadRequest, "binding excludes device"),
		{Binding: "3", Cause: "lost"}:   refusal(http.StatusBadRequest, "binding excludes device"),
		{Binding: "4"}:                  refusal(http.StatusConflict, `has the entry "4"`),
		{}:                              refusal(http.StatusBadRequest, "device is not set"),
	} {
		_, err := send[ClearResponse](t, s, clearRoute, req)
		wantRefusal(t, fmt.Sprintf("%+v", req), err, want)
	}
	res, err := send[ClearResponse](t, s, clearRoute, ClearRequest{Binding: "3"})
	if err != nil || len(res.Bound) != 1 || res.Bound[0].GPU != s.Snapshots.Load().Devices[3].Device.ID {
		t.Fatalf("%+v, %v", res, err)
	}
	if want := `health.cordon "3" means ` + string(res.Bound[0].GPU); res.text() != want {
		t.Errorf("got %q, want %q", res.text(), want)
	}
}

// Before the first measurement there is no device to name.
func TestClearWithoutDevices(t *testing.T) {
	s := newServer(judge.DefaultConfig(), zaptest.NewLogger(t))
	if _, err := s.clear(ClearRequest{Device: "0"}); !errors.Is(err, judge.ErrUnknownDevice) || !strings.Contains(err.Error(), "status") {
		t.Error(err)
	}
}

func TestClearResponseText(t *testing.T) {
	c := ClearResponse{
		Cleared:   []string{"xid-48", "xid-95"},
		Remaining: []status.Finding{{Cause: "lost", Reason: "not reachable", Advice: "reboot", From: "GPU-1"}},
	}
	agenttest.MustContain(t, c.text(), "xid-48, xid-95\n", "lost", "not reachable", "reboot", "GPU-1")
	c.Cleared = nil
	if text := c.text(); strings.Contains(text, "xid") || !strings.Contains(text, "lost") {
		t.Error(text)
	}
	if text := (ClearResponse{}).text(); text == "" || strings.Contains(text, "\n") {
		t.Errorf("no findings: %q", text)
	}
}
