package health

import (
	"encoding/json"
	"slices"
	"testing"
)

// balanced is a GPU with three MIG devices whose order in a reading is not that of nvidia-smi -L.
func balanced() []Device {
	part := func(id DeviceID, gi, ci int, profile string) Device {
		return Device{ID: id, Parent: "GPU-1", Kind: KindMIG, Index: 1, GI: gi, CI: ci, Profile: profile}
	}
	return []Device{
		gpu0, gpu1, part("MIG-b", 5, 1, "1c.2g.10gb"), part("MIG-c", 5, 0, "1c.2g.10gb"), part("MIG-a", 1, 0, "3g.20gb"),
		{ID: "MIG-0", Parent: "GPU-0", Kind: KindMIG, Index: 0, GI: 9},
	}
}

func indexes(devices []DeviceState) map[DeviceID]int {
	all := make(map[DeviceID]int)
	for _, d := range devices {
		all[d.Device.ID] = d.Device.MIGIndex
	}
	return all
}

func wantIndexes(t *testing.T, devices []DeviceState, want map[DeviceID]int) {
	t.Helper()
	for id, index := range indexes(devices) {
		if index != want[id] {
			t.Errorf("%s has the MIG index %d, want %d", id, index, want[id])
		}
	}
}

func TestMIGIndex(t *testing.T) {
	known := judgeAll(DefaultConfig(), nil, 0, nil, nil, balanced()...)
	wantIndexes(t, known, map[DeviceID]int{"GPU-0": -1, "GPU-1": -1, "MIG-0": 0, "MIG-a": 0, "MIG-c": 1, "MIG-b": 2})

	// A partition that is gone is not counted, so the ones behind it move up.
	fewer := slices.DeleteFunc(balanced(), func(d Device) bool { return d.ID == "MIG-c" })
	known = judgeAll(DefaultConfig(), known, 1, nil, nil, fewer...)
	wantIndexes(t, known, map[DeviceID]int{"GPU-0": -1, "GPU-1": -1, "MIG-0": 0, "MIG-a": 0, "MIG-b": 1})

	// The partitions of a GPU that has left the driver's list are missing with it.
	known = judgeAll(DefaultConfig(), known, 2, nil, nil, gpu0, fewer[len(fewer)-1])
	wantIndexes(t, known, map[DeviceID]int{"GPU-0": -1, "GPU-1": -1, "MIG-0": 0, "MIG-a": -1, "MIG-b": -1})
	if match, _ := known[len(known)-1].Device.Matches("1:0"); match {
		t.Errorf("%s is not listed and matches 1:0", known[len(known)-1].Device.ID)
	}
}

// A restored device is not counted until a reading lists its siblings.
func TestMIGIndexOfRestoredDevice(t *testing.T) {
	known := judgeAll(DefaultConfig(), nil, 0, nil, map[DeviceID]Sample{"MIG-b": present(xids(48))}, balanced()...)
	text, err := json.Marshal(Remember(&Snapshot{Source: Source{Kind: "dcgm"}, Devices: known}, "boot"))
	if err != nil {
		t.Fatal(err)
	}
	var m Memory
	if err := json.Unmarshal(text, &m); err != nil {
		t.Fatal(err)
	}
	restored := m.Recall("boot", MonitorSource{Kind: "dcgm"}, at(1)).Devices
	if len(restored) == 0 {
		t.Fatal("nothing was restored")
	}
	for id, index := range indexes(restored) {
		if index != -1 {
			t.Errorf("%s has the MIG index %d before the first reading", id, index)
		}
	}
	known = judgeAll(DefaultConfig(), restored, 2, nil, nil, balanced()...)
	wantIndexes(t, known, map[DeviceID]int{"GPU-0": -1, "GPU-1": -1, "MIG-0": 0, "MIG-a": 0, "MIG-c": 1, "MIG-b": 2})
}
