package operator

import (
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// cordon, include, exclude and clear take the MIG index that the status table shows.
func TestMIGIndexIsTheSameEverywhere(t *testing.T) {
	judge := func(c health.Config) *health.Snapshot {
		devices := agenttest.Judge(c, nil, agenttest.MIGReading(), agenttest.Now())
		return &health.Snapshot{At: agenttest.Now(), Source: health.Source{Status: health.SourceUp}, Devices: devices}
	}
	snapshot := judge(health.DefaultConfig())
	shown := make(map[string]string) // by profile
	for line := range strings.Lines(status.New(status.Inputs{Now: agenttest.Now(), Snapshot: snapshot}).Table(false, false)) {
		if f := strings.Fields(line); len(f) > 2 && f[1] == "MIG" {
			shown[f[2]] = f[0]
		}
	}
	if len(shown) != 2 || shown["3g.20gb"] != "1:0" || shown["2g.10gb"] != "1:1" {
		t.Fatalf("the table shows %v", shown)
	}
	for i, profile := range []string{"3g.20gb", "2g.10gb"} {
		index, id := shown[profile], agenttest.MIGReading().Devices[2+i].ID

		c := health.DefaultConfig()
		c.Cordon = []string{index}
		for _, d := range judge(c).Devices {
			if cordoned := d.Verdict.State == health.Unhealthy; cordoned != (d.Device.ID == id) {
				t.Errorf("cordon %s: %s (%s) is cordoned: %v", index, d.Device.ID, d.Device.Profile, cordoned)
			}
		}
		for exclude := range 2 {
			p := plugin.DefaultConfig()
			p.MIGStrategy, p.Include = plugin.MIGMixed, []string{index}
			if exclude == 1 {
				p.Include, p.Exclude = []string{"1"}, []string{index}
			}
			for _, r := range plugin.Layout(p, snapshot) {
				for _, d := range r.Devices {
					if (d.ID == string(id)) != (exclude == 0) {
						t.Errorf("include %q, exclude %q: %s (%s) is offered", p.Include, p.Exclude, d.ID, d.State.Device.Profile)
					}
				}
			}
		}
		if got, err := resolveDevice(snapshot, index); err != nil || got != id {
			t.Errorf("%s is %s, %v; want %s", index, got, err, id)
		}
	}

	gpus := status.New(status.Inputs{Now: agenttest.Now(), Snapshot: snapshot}).GPUs
	if gpus[0].MIGIndex != nil || gpus[1].MIGIndex != nil {
		t.Error("a GPU has a MIG index")
	}
	for i, m := range gpus[1].MIG {
		if m.MIGIndex == nil || *m.MIGIndex != i || m.GI == nil || *m.GI != []int{1, 5}[i] || m.CI == nil || *m.CI != 0 {
			t.Errorf("%s: migIndex %v, gi %v, ci %v", m.UUID, m.MIGIndex, m.GI, m.CI)
		}
	}
}

func TestClearByReference(t *testing.T) {
	t.Parallel()
	r := agenttest.MIGReading()
	for i := range r.Samples {
		r.Samples[i].XIDs = []health.XID{{Code: 48, At: agenttest.Now()}}
	}
	devices := agenttest.Judge(health.DefaultConfig(), nil, r, agenttest.Now())
	s := restored(&health.Snapshot{Devices: devices})
	s.Snapshots.Store(&health.Snapshot{Devices: devices})
	for _, c := range []struct {
		ref  string
		want health.DeviceID
	}{{"1:1", "MIG-2g"}, {"1:0", "MIG-3g"}, {"1", "GPU-1"}, {"GPU-0", "GPU-0"}} {
		res, err := s.handleLine(t.Context(), `{"clear":{"device":"`+c.ref+`","cause":"xid-48"}}`)
		if err != nil {
			t.Errorf("clear %s: %v", c.ref, err)
			continue
		}
		if cleared, ok := res.(ClearResponse); !ok || !slices.Equal(cleared.Cleared, []string{"xid-48"}) {
			t.Errorf("clear %s: %+v", c.ref, res)
		}
		for _, d := range s.Snapshots.Load().Devices {
			if d.Device.ID == c.want && slices.ContainsFunc(d.Verdict.Findings, func(f health.Finding) bool { return f.From == "" && f.Cause == "xid-48" }) {
				t.Errorf("clear %s left xid-48 on %s", c.ref, c.want)
			}
		}
	}
	for ref, want := range map[string]string{"1:2": `"1:2"`, "1b:00.0": "GPU-0 and GPU-1"} {
		if _, err := s.handleLine(t.Context(), `{"clear":{"device":"`+ref+`"}}`); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("clear %s: %v, want %s", ref, err, want)
		}
	}
}
