package statefile

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// largestState returns a state that no node with so many GPUs exceeds: 7 MIG devices on each GPU, every code and every cause as a finding
// with a long reason, a full history of XIDs, texts of 30 fields, and the idle times of 64 containers on each device.
func largestState(t *testing.T, gpus int) (Saved, Node) {
	t.Helper()
	causes := []string{health.CauseLost, health.CauseRecoveryAction, health.CauseRemapFailed, health.CauseTemperature, health.CauseFlapping}
	for code := 1; code < 200; code++ {
		causes = append(causes, fmt.Sprintf("xid-%d", code))
		if info := catalog.LookupIncident(code); info.Name != "" {
			causes = append(causes, "dcgm-"+strings.ToLower(info.Name))
		}
	}
	at := time.Date(2026, 1, 2, 3, 4, 5, 123456789, time.UTC)
	texts := make(map[health.Field]string)
	for field := range 30 {
		texts[health.Field(field)] = strings.Repeat("s", 64)
	}
	s := &health.Snapshot{At: at, Source: health.Source{Kind: "dcgm", Inventory: "dcgm unix:///run/nvidia/engine.sock", Polls: 1}}
	var idle []map[string]any
	for gpu := range gpus {
		for mig := range 8 { // the first is the GPU
			id := health.DeviceID(fmt.Sprintf("MIG-%08d-0000-0000-0000-%012d", gpu, mig))
			d := health.DeviceState{Device: health.Device{
				ID: id, Index: gpu, Model: "NVIDIA RTX PRO 6000 Blackwell Server Edition", PCI: "00000000:1B:00.0", Memory: 1 << 38,
				Profile: "1g.24gb+gfx.all", Texts: texts,
			}}
			if mig > 0 {
				d.Device.Kind, d.Device.Parent = health.KindMIG, health.DeviceID(fmt.Sprintf("MIG-%08d-0000-0000-0000-%012d", gpu, 0))
			}
			for _, cause := range causes {
				d.Memory.Findings = append(d.Memory.Findings, health.Finding{
					Cause: cause, State: health.Unhealthy, Reason: strings.Repeat("reason ", 20), Action: health.ActionCheckFabricManager, Since: at,
					Last: at, Reset: at,
				})
			}
			for code := range 50 { // more than the XIDs in the table that the recovery action decides
				d.Memory.PendingXIDs = append(d.Memory.PendingXIDs, health.XID{Code: code, At: at})
				d.Memory.Trips = append(d.Memory.Trips, at)
			}
			for range 1024 { // maxLedgerRows
				d.XIDs.Rows = append(d.XIDs.Rows, health.LedgerRow{XIDRow: health.XIDRow{Code: 199, At: at.UnixMicro()}})
			}
			s.Devices = append(s.Devices, d)
			for c := range 64 {
				idle = append(idle, map[string]any{
					"device": id, "namespace": strings.Repeat("n", 63), "pod": strings.Repeat("p", 63), "container": fmt.Sprintf("%063d", c),
					"uid":     strings.Repeat("u", 36),
					"updated": at, "measured": true, "sinceBusyNanoseconds": 1 << 60, "withoutProcessNanoseconds": 1 << 60, "observedNanoseconds": 1 << 60,
					"used": true,
				})
			}
		}
	}
	section, err := json.Marshal(idle)
	must(t, err)
	const boot = "f81d4fae-7dec-11d0-a765-00a0c91e6bf6"
	return FromSnapshot(s, boot), Node{BootID: boot, Sections: map[string]json.RawMessage{"idle": section}}
}

// The largest state, of 16 GPUs, takes less than a quarter of what Read reads, so that the file, which is twice as large, has room. It has
// eight times the rows of the state that the test writes and reads.
func TestLargestState(t *testing.T) {
	saved, node := largestState(t, 2)
	dir := t.TempDir()
	for name, c := range map[string]content{"state.json": &saved, "node.json": &node} {
		text, err := json.Marshal(c)
		must(t, err)
		size := 8 * len(text)
		t.Logf("%s: %d bytes", name, size)
		if size > durable.Limit/4 {
			t.Errorf("%s: %d bytes, the limit is %d", name, size, durable.Limit)
		}
		_, err = fileOptions().Replace(filepath.Join(dir, name), text)
		must(t, err)
	}
	c, err := Read(dir)
	must(t, err)
	read := c.States["dcgm"]
	if len(read.Devices) != 16 || len(read.Devices[15].XIDs.Rows) != 1024 || len(c.Node.Sections["idle"]) != len(node.Sections["idle"]) {
		t.Errorf("%d devices, %d bytes of idle times", len(read.Devices), len(c.Node.Sections["idle"]))
	}
}

// The reserve holds what 8 GPUs have after a flood of XIDs.
func TestReserveHoldsUsualState(t *testing.T) {
	saved, _ := largestState(t, 8)
	var devices []health.DeviceState
	for _, d := range saved.Devices {
		if d.Device.Kind == health.KindGPU {
			m := &d.Memory
			m.Findings, m.PendingXIDs, m.Trips = m.Findings[:20], m.PendingXIDs[:20], m.Trips[:20]
			devices = append(devices, d)
		}
	}
	text, err := json.Marshal(Saved{Source: "dcgm", Devices: devices, Polled: healthtest.Epoch})
	must(t, err)
	if len(devices) != 8 || len(text) >= reserve {
		t.Errorf("%d devices, %d bytes, the reserve is %d", len(devices), len(text), reserve)
	}
}
