package health_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

func TestChanges(t *testing.T) {
	healthy := judged(nil, 0, nil, gpu0, gpu1)
	faulty := judged(healthy, 1, samples{"GPU-0": healthtest.Present(healthtest.XIDs(31, 48, 31))}, gpu0, gpu1)
	hot := judged(faulty, 2, samples{"GPU-0": healthtest.Present(healthtest.Value(health.FieldGPUTemp, 99))}, gpu0, gpu1)
	cleared, _, err := judge.Clear(judge.DefaultConfig(), hot, false, "GPU-0", "xid-48")
	if err != nil {
		t.Fatal(err)
	}
	cleared = judge.View(judge.DefaultConfig(), cleared, judge.ViewContext{}, healthtest.At(3))
	detailed := slices.Clone(faulty)
	detailed[0].XIDs = detailed[0].XIDs.AddDetail(health.XID{Code: 31, Detail: health.XIDDetail{Process: "python3", PID: 7194}})
	for name, c := range map[string]struct {
		before, after []health.DeviceState
		want          []string
	}{
		"new, healthy": {nil, healthy, []string{"GPU-0 found", "GPU-1 found"}},
		"new, unhealthy": {nil, faulty[:1], []string{
			"GPU-0 found", "GPU-0 XID 31 2/2", "GPU-0 XID 48 1/1",
			"GPU-0 unknown > unhealthy []",
		}},
		"nothing":           {faulty, slices.Clone(faulty), nil},
		"a late detail":     {faulty, detailed, []string{"GPU-0 XID 31 0/2"}},
		"an old detail":     {detailed, slices.Clone(detailed), nil},
		"XIDs and a state":  {healthy, faulty, []string{"GPU-0 XID 31 2/2", "GPU-0 XID 48 1/1", "GPU-0 healthy > unhealthy []"}},
		"another finding":   {faulty, hot, []string{"GPU-0 unhealthy > unhealthy []"}},
		"a finding cleared": {hot, cleared, []string{"GPU-0 unhealthy > degraded [xid-48]"}},
		"an XID that recurs": {
			faulty, judged(faulty, 2, samples{"GPU-0": healthtest.Present(healthtest.XIDs(31))}, gpu0, gpu1),
			[]string{"GPU-0 XID 31 1/3"},
		},
		"one device is removed": {hot, hot[:1], []string{"GPU-1 removed"}},
	} {
		var got []string
		for _, d := range health.Changes(c.before, c.after) {
			text := map[health.ChangeKind]string{
				health.ChangeFound: "found", health.ChangeRemoved: "removed", health.ChangeXID: fmt.Sprintf("XID %d %d/%d", d.XID, d.New, d.Count),
				health.ChangeState: fmt.Sprintf("%v > %v %v", d.Was.State, d.Now.State, d.Cleared()),
			}[d.Kind]
			got = append(got, string(d.Device.ID)+" "+text)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}

// Each group is "DEVICE kind", or with MIG devices "DEVICE kind +n".
func TestGroupChanges(t *testing.T) {
	all := []health.Device{gpu0, mig0, mig1, gpu1}
	healthy := judged(nil, 0, nil, all...)
	lost := judged(
		healthy, 1,
		samples{"GPU-0": healthtest.Blank(health.Lost), "MIG-0": healthtest.Blank(health.Lost), "MIG-1": healthtest.Blank(health.Lost)},
		all...)
	reset := judged(healthy, 1, samples{"GPU-0": healthtest.Present(healthtest.XIDs(48))}, all...)
	own := judged(healthy, 1, samples{"MIG-0": migXIDs(48)}, all...)
	both := judged(own, 2, samples{"GPU-0": healthtest.Blank(health.Lost)}, all...)
	for name, c := range map[string]struct {
		before, after []health.DeviceState
		want          []string
	}{
		"all found":            {nil, healthy, []string{"GPU-0 found +2", "GPU-1 found"}},
		"all removed":          {healthy, healthy[:0], []string{"GPU-0 removed +2", "GPU-1 removed"}},
		"repartitioned":        {healthy, judged(healthy, 1, nil, gpu0, gpu1), []string{"MIG-0 removed +2"}},
		"one MIG device found": {judged(nil, 0, nil, gpu0, mig0, gpu1), healthy, []string{"MIG-1 found +1"}},
		"GPU lost":             {healthy, lost, []string{"GPU-0 unhealthy +2"}},
		"GPU back":             {lost, judged(lost, 2, nil, all...), []string{"GPU-0 healthy +2"}},
		"XID of the GPU":       {healthy, reset, []string{"GPU-0 XID 48 1/1", "GPU-0 unhealthy +2"}},
		"XID of a MIG device":  {healthy, own, []string{"MIG-0 XID 48 1/1 +1", "MIG-0 unhealthy +1"}},
		"MIG device of an unhealthy GPU": {
			judged(reset, 2, nil, gpu0, gpu1), judged(reset, 2, nil, all...),
			[]string{"MIG-0 found +2", "MIG-0 unhealthy +2 inherited"},
		},
		"GPU of an unhealthy MIG device": {own, both, []string{"GPU-0 unhealthy +2"}},
		"XIDs of MIG devices": {
			healthy, judged(healthy, 1, samples{"MIG-0": migXIDs(48, 13), "MIG-1": migXIDs(48, 48)}, all...),
			[]string{"MIG-0 XID 13 1/1 +1", "MIG-0 XID 48 3/3 +2", "MIG-0 unhealthy +2"},
		},
		"different causes": {
			healthy, judged(healthy, 1, samples{"MIG-0": migXIDs(48), "MIG-1": migXIDs(13)}, all...),
			[]string{"MIG-0 XID 48 1/1 +1", "MIG-0 unhealthy +1", "MIG-1 XID 13 1/1 +1"},
		},
		"XID of a MIG device, whole GPU": {
			healthy, judged(healthy, 1, samples{"MIG-1": migXIDs(95)}, all...),
			[]string{"GPU-0 unhealthy +2", "MIG-1 XID 95 1/1 +1"},
		},
		"nothing": {lost, slices.Clone(lost), nil},
	} {
		var got []string
		members := make(map[string]int)
		for _, g := range health.GroupChanges(c.before, c.after) {
			text := map[health.ChangeKind]string{
				health.ChangeFound: "found", health.ChangeRemoved: "removed", health.ChangeXID: fmt.Sprintf("XID %d %d/%d", g.XID, g.New, g.Count),
				health.ChangeState: g.Now.State.String(),
			}[g.Kind]
			if len(g.MIGDevices) > 0 {
				text += fmt.Sprintf(" +%d", len(g.MIGDevices))
			}
			if g.Inherited {
				text += " inherited"
			}
			got = append(got, string(g.Device.ID)+" "+text)
			if g.Device.Kind == health.KindGPU {
				members[fmt.Sprint(g.Device.ID, g.Kind, g.XID)]++
			}
			for _, m := range g.MIGDevices {
				members[fmt.Sprint(m.Device.ID, m.Kind, m.XID)]++
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
		// No change is lost or duplicated.
		for _, change := range health.Changes(c.before, c.after) {
			members[fmt.Sprint(change.Device.ID, change.Kind, change.XID)]--
		}
		for key, n := range members {
			if n != 0 {
				t.Errorf("%s: %s is %+d times too often in the groups", name, key, n)
			}
		}
	}
}

// A reader that missed the snapshot of a poll with two XIDs has the detail of both.
func TestChangesKeepDetails(t *testing.T) {
	healthy := judged(nil, 0, samples{"GPU-0": healthtest.Present()}, gpu0)
	reported := healthtest.Present(healthtest.XIDs(31, 149))
	detail := health.XIDDetail{Process: "python3", PID: 7194}
	reported.XIDs[0].Detail = detail
	devices := judged(healthy, 1, samples{"GPU-0": reported}, gpu0)
	devices = judged(devices, 2, samples{"GPU-0": healthtest.Present()}, gpu0)
	if changes := health.Changes(healthy, devices); len(changes) == 0 || changes[0].XID != 31 || changes[0].Detail != detail {
		t.Errorf("%+v", changes)
	}
	devices = judged(devices, 3, samples{"GPU-0": healthtest.Present(healthtest.XIDs(31))}, gpu0)
	if d := devices[0].XIDs.Codes[31].Newest.Detail; d != (health.XIDDetail{}) {
		t.Errorf("the detail %+v of an earlier XID", d)
	}
}

// The news of a change is its worst new finding, else the worst that remains.
func TestChangeNews(t *testing.T) {
	healthy := judged(nil, 0, nil, gpu0)
	hot := judged(healthy, 1, samples{gpu0.ID: healthtest.Present(healthtest.Value(health.FieldGPUTemp, 99))}, gpu0)
	worse := judged(
		hot, 2,
		samples{
			gpu0.ID: healthtest.Present(
				healthtest.Value(health.FieldGPUTemp, 99), healthtest.Value(health.FieldRecoveryAction, 1), healthtest.XIDs(48, 95),
			),
		},
		gpu0,
	)
	reboot := judged(
		worse, 3,
		samples{gpu0.ID: healthtest.Present(healthtest.Value(health.FieldGPUTemp, 99), healthtest.Value(health.FieldRecoveryAction, 2))}, gpu0,
	)
	for name, c := range map[string]struct {
		before, after []health.DeviceState
		news          string
		added         []string
		cleared       []string
	}{
		"new":     {healthy, hot, health.CauseTemperature, []string{health.CauseTemperature}, nil},
		"more":    {hot, worse, "xid-48", []string{"xid-48", "xid-95", health.CauseRecoveryAction}, nil},
		"worse":   {worse, reboot, health.CauseRecoveryAction, []string{health.CauseRecoveryAction}, nil},
		"better":  {reboot, worse, "xid-48", nil, nil},
		"fewer":   {worse, hot, health.CauseTemperature, nil, []string{"xid-48", "xid-95", health.CauseRecoveryAction}},
		"nothing": {hot, healthy, "", nil, []string{health.CauseTemperature}},
	} {
		change := health.Change{Was: c.before[0].Verdict, Now: c.after[0].Verdict}
		var added []string
		for _, f := range change.Added() {
			added = append(added, f.Cause)
		}
		news := ""
		if f := change.News(); f != nil {
			news = f.Cause
		}
		if cleared := change.Cleared(); news != c.news || !slices.Equal(added, c.added) || !slices.Equal(cleared, c.cleared) {
			t.Errorf("%s: news %q, added %q, cleared %q", name, news, added, cleared)
		}
	}
	described := health.Change{XID: 48, Detail: health.XIDDetail{Process: "python3"}}
	if got, want := catalog.Describe(described.Reported()), catalog.LookupXID(48).Name+", process python3"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestChangeGroupSingle(t *testing.T) {
	change := func(d health.Device) health.Change { return health.Change{Device: d} }
	for name, c := range map[string]struct {
		group health.ChangeGroup
		want  bool
	}{
		"GPU":                   {health.ChangeGroup{Change: change(gpu0)}, true},
		"GPU with a MIG device": {health.ChangeGroup{Change: change(gpu0), MIGDevices: []health.Change{change(mig0)}}, false},
		"MIG device":            {health.ChangeGroup{Change: change(mig0), MIGDevices: []health.Change{change(mig0)}}, true},
		"MIG devices":           {health.ChangeGroup{Change: change(mig0), MIGDevices: []health.Change{change(mig0), change(mig1)}}, false},
	} {
		if got := c.group.Single(); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
