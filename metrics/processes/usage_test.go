package processes

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/containers"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

var testDevices = []health.Device{
	{ID: "GPU-a"},
	{ID: "GPU-b"},
	{ID: "GPU-m", MIGMode: true},
	{ID: "MIG-1", Parent: "GPU-m", Kind: health.KindMIG},
	{ID: "MIG-2", Parent: "GPU-m", Kind: health.KindMIG},
}

func holder(pod, container string) podresources.Holder {
	return podresources.Holder{Namespace: "team", Pod: pod, Container: container}
}

// process is a process with memory.
func process(device health.DeviceID, pid int, memory float64) driver.Process {
	return driver.Process{Device: device, PID: pid, Memory: memory, HasMemory: true}
}

// cgroupsOf returns a function that reads the control group of each process; a control group "" cannot be read.
func cgroupsOf(byPID map[int]string) func(int) (string, error) {
	return func(pid int) (string, error) {
		if path := byPID[pid]; path != "" {
			return "0::" + path + "\n", nil
		}
		return "", errors.New("no such process")
	}
}

// An attribution of pods 1 to 3 in the namespace team, with the UIDs uid(1) to uid(3). Process 10 is of pod-1's container main.
func testAttribution() *attribution {
	uid := func(n int) string { return fmt.Sprintf("%08d-0000-0000-0000-000000000000", n) }
	pod := func(name string) containers.Pod { return containers.Pod{Namespace: "team", Name: name} }
	container := func(pod, name string) containers.Container {
		return containers.Container{Namespace: "team", Pod: pod, Name: name}
	}
	containerID := func(n int) string { return fmt.Sprintf("%064d", n) }
	path := func(pod, container int) string { return "/kubepods/pod" + uid(pod) + "/" + containerID(container) }
	return &attribution{
		cgroup: cgroupsOf(map[int]string{
			10: path(1, 11), 11: path(1, 11), 12: path(1, 12), 20: path(2, 21), 21: path(2, 22), 30: path(3, 31), 40: path(4, 41),
			100: "/system.slice/x.service",
		}),
		names: containers.Names{
			Pods: map[string]containers.Pod{uid(1): pod("pod-1"), uid(2): pod("pod-2"), uid(3): pod("pod-3")},
			Containers: map[string]containers.Container{
				containerID(11): container("pod-1", "main"), containerID(12): container("pod-1", "aux"),
				containerID(31): container("pod-9", "other"),
			},
		},
		holders: podresources.Holders{By: map[health.DeviceID][]podresources.Holder{
			"GPU-a": {holder("pod-1", "main"), holder("pod-1", "aux"), holder("pod-2", "one"), holder("pod-2", "two")},
			"GPU-b": {holder("pod-2", "one"), holder("pod-3", "main")},
			"GPU-m": {holder("pod-3", "main")},
			"MIG-1": {holder("pod-1", "main")},
		}},
		related: relatedDevices(testDevices),
	}
}

func TestContainerOf(t *testing.T) {
	for name, test := range map[string]struct {
		device health.DeviceID
		pid    int
		change func(*attribution)
		want   Container
		reason Reason
	}{
		"by the container's link":         {"GPU-a", 10, nil, Container{"team", "pod-1", "main"}, ""},
		"second container":                {"GPU-a", 12, nil, Container{"team", "pod-1", "aux"}, ""},
		"two holding containers, no link": {"GPU-a", 20, nil, Container{"team", "pod-2", ""}, ""},
		"one holding container, no link":  {"GPU-b", 20, nil, Container{"team", "pod-2", "one"}, ""},
		"link of another pod":             {"GPU-b", 30, nil, Container{"team", "pod-3", "main"}, ""},
		"MIG device":                      {"MIG-1", 10, nil, Container{"team", "pod-1", "main"}, ""},
		"parent of a held MIG device":     {"GPU-m", 10, nil, Container{"team", "pod-1", "main"}, ""},
		"MIG device of a held GPU":        {"MIG-2", 30, nil, Container{"team", "pod-3", "main"}, ""},
		"MIG device beside a held one":    {"MIG-2", 10, nil, Container{}, ReasonNotHolder},
		"not a holder":                    {"GPU-b", 10, nil, Container{}, ReasonNotHolder},
		"host":                            {"GPU-a", 100, nil, Container{}, ReasonHost},
		"exited":                          {"GPU-a", 99, nil, Container{}, ReasonUnreadable},
		"pod without a name":              {"GPU-a", 40, nil, Container{}, ReasonUnknownPod},
		"holders unknown":                 {"GPU-a", 10, func(a *attribution) { a.holders.By = nil }, Container{}, ReasonHoldersUnknown},
		"nobody holds a device": {
			"GPU-a", 10, func(a *attribution) { a.holders.By = map[health.DeviceID][]podresources.Holder{} },
			Container{},
			ReasonNotHolder,
		},
		"holder of that name in another namespace": {"GPU-a", 10, func(a *attribution) {
			a.holders.By = map[health.DeviceID][]podresources.Holder{"GPU-a": {{Namespace: "other", Pod: "pod-1", Container: "main"}}}
		}, Container{}, ReasonNotHolder},
		"pod named by the API server": {"GPU-a", 40, func(a *attribution) {
			a.podByUID = func(uid string) (string, string, bool) {
				return "team", "pod-2", uid == "00000004-0000-0000-0000-000000000000"
			}
		}, Container{"team", "pod-2", ""}, ""},
		"pod that the API server lacks": {"GPU-a", 10, func(a *attribution) {
			a.podByUID = func(string) (string, string, bool) { return "", "", false }
		}, Container{"team", "pod-1", "main"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			a := testAttribution()
			if test.change != nil {
				test.change(a)
			}
			if got, reason := a.containerOf(process(test.device, test.pid, 1)); got != test.want || reason != test.reason {
				t.Errorf("%+v, %q, want %+v, %q", got, reason, test.want, test.reason)
			}
			if test.reason != "" && !slices.Contains(Reasons(), test.reason) {
				t.Errorf("Reasons lacks %q", test.reason)
			}
			if (a.intruder != "") != (test.reason == ReasonNotHolder) {
				t.Errorf("intruder %q", a.intruder)
			}
		})
	}
}

// A process counts once per device, whatever lists it is in.
func TestMergeProcesses(t *testing.T) {
	kind := func(p driver.Process, k driver.ProcessKind) driver.Process { p.Kind = k; return p }
	r := &driver.ProcessReading{
		Measured: []health.DeviceID{"GPU-a", "GPU-m", "MIG-1"},
		Processes: []driver.Process{
			kind(process("GPU-a", 2, 500), driver.ProcessMPS), process("GPU-a", 2, 500), // an MPS client
			process("GPU-a", 1, 30), // the MPS server
			kind(process("GPU-a", 3, 7), driver.ProcessGraphics), process("GPU-a", 3, 7),
			{Device: "GPU-a", PID: 4, SM: .5, HasSM: true},
			process("GPU-a", 4, 9),
			process("GPU-b", 1, 1), // not measured
			process("GPU-m", 5, 100), process("MIG-1", 5, 100), process("GPU-m", 6, 1),
		},
	}
	want := []driver.Process{
		process("GPU-a", 1, 30), kind(process("GPU-a", 2, 500), driver.ProcessMPS), process("GPU-a", 3, 7),
		{Device: "GPU-a", PID: 4, Memory: 9, HasMemory: true, SM: .5, HasSM: true},
		process("GPU-m", 6, 1), process("MIG-1", 5, 100),
	}
	for range 5 {
		if got := mergeProcesses(r, testDevices); !reflect.DeepEqual(got, want) {
			t.Errorf("got  %v\nwant %v", got, want)
		}
		slices.Reverse(r.Processes)
	}
}

func TestUsageAddsUp(t *testing.T) {
	a := testAttribution()
	busy := func(p driver.Process, sm float64) driver.Process { p.SM, p.HasSM = sm, true; return p }
	got, without := a.usage([]driver.Process{
		busy(process("GPU-a", 10, 100), .75), busy(process("GPU-a", 11, 50), .5), // main of pod-1
		process("GPU-a", 12, 7),                             // aux of pod-1
		process("GPU-a", 20, 1), {Device: "GPU-a", PID: 21}, // pod-2; the memory of 21 is unknown
		process("GPU-a", 99, 5), process("GPU-a", 100, 6), // exited, and of the host
		process("GPU-b", 10, 8), process("MIG-1", 10, 9),
	})
	want := []Usage{
		{Device: "GPU-a", Processes: 2, Memory: 11, HasMemory: true},
		{Device: "GPU-a", Container: Container{"team", "pod-1", "aux"}, Processes: 1, Memory: 7, HasMemory: true},
		{Device: "GPU-a", Container: Container{"team", "pod-1", "main"}, Processes: 2, Memory: 150, HasMemory: true, SM: 1, HasSM: true},
		{Device: "GPU-a", Container: Container{"team", "pod-2", ""}, Processes: 2, Memory: 1},
		{Device: "GPU-b", Processes: 1, Memory: 8, HasMemory: true},
		{Device: "MIG-1", Container: Container{"team", "pod-1", "main"}, Processes: 1, Memory: 9, HasMemory: true},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	if want := map[Reason]int{ReasonUnreadable: 1, ReasonHost: 1, ReasonNotHolder: 1}; !maps.Equal(without, want) {
		t.Errorf("without a pod: %v, want %v", without, want)
	}
	if a.intruder != "team/pod-1 on GPU-b" {
		t.Errorf("intruder %q", a.intruder)
	}
}

// The containers above the limit are added up. The processes of no pod stay apart, and no process is lost.
func TestUsageLimitsContainers(t *testing.T) {
	var list []Usage
	for _, device := range []health.DeviceID{"GPU-a", "GPU-b"} {
		list = append(list, Usage{Device: device, Processes: 1, Memory: 1, HasMemory: true})
		for i := range maxContainers + 2 {
			list = append(list, Usage{
				Device: device, Container: Container{"team", fmt.Sprintf("pod-%03d", i), "main"}, Processes: 1, Memory: 1,
				HasMemory: true,
			})
		}
	}
	got := limitContainers(list)
	for _, device := range []health.DeviceID{"GPU-a", "GPU-b"} {
		s := Snapshot{ProcessReading: driver.ProcessReading{Measured: []health.DeviceID{"GPU-a", "GPU-b"}}, Usage: got}
		usage, _ := s.Of(device)
		last := usage[len(usage)-1]
		if len(usage) != maxContainers+1 || usage[0].Container != (Container{}) || last.Container != (Container{Name: Other}) ||
			last.Processes != 3 || last.Memory != 3 {
			t.Errorf("%s: %d containers, first %+v, last %+v", device, len(usage), usage[0], last)
		}
	}
}

func TestSnapshotOf(t *testing.T) {
	s := &Snapshot{
		ProcessReading: driver.ProcessReading{Measured: []health.DeviceID{"a", "c"}},
		Usage:          []Usage{{Device: "c", Processes: 1}, {Device: "c", Processes: 2}},
	}
	for id, want := range map[health.DeviceID]int{"a": 0, "b": -1, "c": 2, "d": -1} {
		if usage, measured := s.Of(id); measured != (want >= 0) || measured && len(usage) != want {
			t.Errorf("%s: %v, %v", id, usage, measured)
		}
	}
	if _, measured := (*Snapshot)(nil).Of("a"); measured || (*Snapshot)(nil).ContainerOf(1) != (Container{}) {
		t.Error("no snapshot measures a device")
	}
	// A process of two devices belongs to a pod, also if the pod does not hold the first.
	s = &Snapshot{
		ProcessReading: driver.ProcessReading{Processes: []driver.Process{
			process("a", 1, 0), process("a", 2, 0), process("b", 1, 0),
			process("b", 3, 0),
		}},
		Containers: []Container{{}, {"n", "p", "c"}, {"n", "q", "d"}},
	}
	for pid, want := range map[int]Container{1: {"n", "q", "d"}, 2: {"n", "p", "c"}, 3: {}, 4: {}} {
		if got := s.ContainerOf(pid); got != want {
			t.Errorf("process %d: %+v, want %+v", pid, got, want)
		}
	}
}
