package agent

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// partitioned is a reading of two GPUs. The MIG devices' GPU instances are numbered as the driver does: the 3g.20gb is
// 1:0, and its GPU instance is 1.
func partitioned() *health.Reading {
	r := &health.Reading{}
	add := func(d health.Device) {
		r.Devices = append(r.Devices, d)
		r.Samples = append(r.Samples, health.Sample{Device: d.ID, At: statusNow(), Presence: health.Present})
	}
	for i := range 2 {
		d := aGPU(i).Device
		d.MIGMode = i == 1
		add(d)
	}
	for i, m := range []struct {
		id      health.DeviceID
		gi      int
		profile string
	}{{"MIG-3g", 1, "3g.20gb"}, {"MIG-2g", 5, "2g.10gb"}} {
		d := aMIG(1, m.gi).Device
		d.ID, d.Profile, d.MIGIndex = m.id, m.profile, i
		add(d)
	}
	return r
}

// judgeReading judges a reading and adds the decisions.
func judgeReading(c health.Config, before []health.DeviceState, r *health.Reading, now time.Time) []health.DeviceState {
	return health.Decide(c, before, health.Judge(c, before, r, health.Basis{}, now), nil, health.Detachment{}, now)
}

// The number that the status table shows is the one that cordon, include, exclude and clear take.
func TestMIGDeviceHasOneNumber(t *testing.T) {
	judge := func(c health.Config) *health.Snapshot {
		devices := judgeReading(c, nil, partitioned(), statusNow())
		return &health.Snapshot{At: statusNow(), Source: health.Source{Status: health.SourceUp}, Devices: devices}
	}
	snapshot := judge(health.DefaultConfig())
	shown := make(map[string]string) // by profile
	for line := range strings.Lines(statusOf(known{now: statusNow(), snapshot: snapshot}).Table(false, false)) {
		if f := strings.Fields(line); len(f) > 2 && f[1] == "MIG" {
			shown[f[2]] = f[0]
		}
	}
	if len(shown) != 2 || shown["3g.20gb"] != "1:0" || shown["2g.10gb"] != "1:1" {
		t.Fatalf("the table shows %v", shown)
	}
	for i, profile := range []string{"3g.20gb", "2g.10gb"} {
		number, id := shown[profile], partitioned().Devices[2+i].ID

		c := health.DefaultConfig()
		c.Cordon = []string{number}
		for _, d := range judge(c).Devices {
			if cordoned := d.Verdict.State == health.Unhealthy; cordoned != (d.Device.ID == id) {
				t.Errorf("cordon %s: %s (%s) is cordoned: %v", number, d.Device.ID, d.Device.Profile, cordoned)
			}
		}
		for exclude := range 2 {
			p := plugin.DefaultConfig()
			p.MIGStrategy, p.Include = plugin.MIGMixed, []string{number}
			if exclude == 1 {
				p.Include, p.Exclude = []string{"1"}, []string{number}
			}
			for _, r := range plugin.Layout(p, snapshot) {
				for _, d := range r.Devices {
					if (d.ID == string(id)) != (exclude == 0) {
						t.Errorf("include %q, exclude %q: %s (%s) is handed out", p.Include, p.Exclude, d.ID, d.State.Device.Profile)
					}
				}
			}
		}
		if got, err := deviceNamed(snapshot, number); err != nil || got != id {
			t.Errorf("%s is %s, %v; want %s", number, got, err, id)
		}
	}

	text, err := json.Marshal(statusOf(known{now: statusNow(), snapshot: snapshot}))
	if err != nil {
		t.Fatal(err)
	}
	var tree struct {
		GPUs []struct {
			MIGIndex *int
			MIG      []struct {
				UUID             string
				MIGIndex, GI, CI *int
			}
		}
	}
	if err := json.Unmarshal(text, &tree); err != nil {
		t.Fatal(err)
	}
	if tree.GPUs[0].MIGIndex != nil || tree.GPUs[1].MIGIndex != nil {
		t.Error("a GPU has a MIG index")
	}
	for i, m := range tree.GPUs[1].MIG {
		if m.MIGIndex == nil || *m.MIGIndex != i || m.GI == nil || *m.GI != []int{1, 5}[i] || m.CI == nil || *m.CI != 0 {
			t.Errorf("%s: migIndex %v, gi %v, ci %v", m.UUID, m.MIGIndex, m.GI, m.CI)
		}
	}
}

// A MIG device whose GPU is gone keeps its number, so that a cordon of it stands. One whose number is not known has none.
func TestNumberOfAMissingMIGDevice(t *testing.T) {
	c := health.DefaultConfig()
	before := judgeReading(c, nil, partitioned(), statusNow())
	gone := &health.Reading{Devices: partitioned().Devices[:1], Samples: partitioned().Samples[:1]}
	snapshot := &health.Snapshot{At: statusNow(), Devices: judgeReading(c, before, gone, statusNow().Add(time.Second))}
	s := statusOf(known{now: statusNow(), snapshot: snapshot})
	if table := s.Table(false, false); !strings.Contains(table, "1:0") || !strings.Contains(table, "1:1") || strings.Contains(table, "1:-") {
		t.Error(table)
	}
	for i := range snapshot.Devices { // as restored from an older state file
		snapshot.Devices[i].Device.MIGIndex = -1
	}
	s = statusOf(known{now: statusNow(), snapshot: snapshot})
	if n := strings.Count(s.Table(false, false), "1:-"); n != 2 {
		t.Errorf("%d MIG devices without a number:\n%s", n, s.Table(false, false))
	}
	text, err := json.Marshal(s)
	if err != nil || strings.Contains(string(text), "migIndex") {
		t.Errorf("%v, %s", err, text)
	}
	if page := pageOf(t, known{now: statusNow(), snapshot: snapshot}); strings.Count(page, `<span class="dim">1:-</span>`) != 2 {
		t.Error(page)
	}
}

func TestClearByNumber(t *testing.T) {
	t.Parallel()
	var out health.Latest[health.Snapshot]
	m := monitor.New(&health.Latest[health.Config]{}, &health.Latest[monitor.Source]{}, &out, zap.NewNop())
	r := partitioned()
	for i := range r.Samples {
		r.Samples[i].XIDs = []health.XID{{Code: 48, At: statusNow()}}
	}
	devices := judgeReading(health.DefaultConfig(), nil, r, statusNow())
	m.Restore(statefile.Restored{Devices: devices, Missed: true})
	out.Store(&health.Snapshot{Devices: devices})
	a := &Agent{monitor: m}
	a.snapshots.Store(out.Load())
	for _, c := range []struct {
		word string
		want health.DeviceID
	}{{"1:1", "MIG-2g"}, {"1:0", "MIG-3g"}, {"1", "GPU-1"}, {"GPU-0", "GPU-0"}} {
		answer, err := a.operate(t.Context(), `{"clear":{"device":"`+c.word+`","cause":"xid-48"}}`)
		if err != nil {
			t.Errorf("clear %s: %v", c.word, err)
			continue
		}
		if cleared, ok := answer.(Cleared); !ok || !slices.Equal(cleared.Cleared, []string{"xid-48"}) {
			t.Errorf("clear %s: %+v", c.word, answer)
		}
		for _, d := range out.Load().Devices {
			if d.Device.ID == c.want && slices.ContainsFunc(d.Verdict.Findings, func(f health.Finding) bool { return f.From == "" && f.Cause == "xid-48" }) {
				t.Errorf("clear %s has left xid-79 on %s", c.word, c.want)
			}
		}
	}
	for word, want := range map[string]string{"1:2": `device "1:2" is not known`, "1b:00.0": `"1b:00.0" names GPU-0 and GPU-1; use the UUID`} {
		if _, err := a.operate(t.Context(), `{"clear":{"device":"`+word+`"}}`); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("clear %s: %v, want %s", word, err, want)
		}
	}
}
