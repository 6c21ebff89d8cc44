package health

import (
	"fmt"
	"slices"
	"testing"
)

func TestChanges(t *testing.T) {
	healthy := judge(nil, 0, nil, gpu0, gpu1)
	faulty := judge(healthy, 1, samples{"GPU-0": present(xids(31, 48, 31))}, gpu0, gpu1)
	hot := judge(faulty, 2, samples{"GPU-0": present(value(FieldGPUTemp, 99))}, gpu0, gpu1)
	cleared, _, err := Clear(DefaultConfig(), hot, false, "GPU-0", "xid-48", at(3))
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		before, after []DeviceState
		want          []string
	}{
		"new, healthy":          {nil, healthy, []string{"GPU-0 found", "GPU-1 found"}},
		"new, unhealthy":        {nil, faulty[:1], []string{"GPU-0 found", "GPU-0 XID 31 2/2", "GPU-0 XID 48 1/1", "GPU-0 unknown > unhealthy []"}},
		"nothing":               {faulty, slices.Clone(faulty), nil},
		"XIDs and a state":      {healthy, faulty, []string{"GPU-0 XID 31 2/2", "GPU-0 XID 48 1/1", "GPU-0 healthy > unhealthy []"}},
		"another finding":       {faulty, hot, []string{"GPU-0 unhealthy > unhealthy []"}},
		"a finding cleared":     {hot, cleared, []string{"GPU-0 unhealthy > degraded [xid-48]"}},
		"an XID that recurs":    {faulty, judge(faulty, 2, samples{"GPU-0": present(xids(31))}, gpu0, gpu1), []string{"GPU-0 XID 31 1/3"}},
		"one device is removed": {hot, hot[:1], []string{"GPU-1 removed"}},
	} {
		var got []string
		for _, d := range Changes(c.before, c.after) {
			text := map[ChangeKind]string{
				ChangeFound: "found", ChangeRemoved: "removed", ChangeXID: fmt.Sprintf("XID %d %d/%d", d.XID, d.New, d.Count),
				ChangeState: fmt.Sprintf("%v > %v %v", d.Was.State, d.Now.State, d.Cleared()),
			}[d.Kind]
			got = append(got, string(d.Device.ID)+" "+text)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}
