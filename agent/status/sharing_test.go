package status

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/golden"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// sharingInputs returns a node whose GPU 0 MPS serves, whose GPU 1 is shared by memory, and whose MIG device 2:1 has a daemon that is
// down.
func sharingInputs() inputs {
	k := testInputs()
	k.Snapshot.Devices[0].MPS = &health.MPSDaemon{
		Ready: true, PID: 41, Started: agenttest.Ago(0), Restarts: 2, ThreadPercentage: 25, PinnedMemory: 20 << 30,
		Servers: []health.MPSServer{{PID: 50, Status: "ACTIVE", Clients: []int{61, 62}}, {PID: 51, Clients: []int{63}}},
	}
	k.Snapshot.Devices[4].MPS = &health.MPSDaemon{Cause: health.CauseMPSDown, Reason: "exit status 1", MultiUser: true}
	const memory = "nvidia.com/gpu-memory"
	k.Shares = []plugin.ShareUnits{
		{Resource: "nvidia.com/gpu", Device: "GPU-0", Sharing: plugin.SharingMPS, Total: 4, Free: 1, Largest: 1},
		{
			Resource: memory, Device: "GPU-1", Sharing: plugin.SharingMemory, Unit: 1 << 30, Total: 78, Free: 38, Largest: 0,
			Enforcement: memlimits.None, Reason: "driver 580.95.05; 615 or newer is needed",
		},
		{Resource: "nvidia.com/gpu", Device: "MIG-2-8", Sharing: plugin.SharingMPS, Total: 2, Free: -1, Largest: -1},
		{Resource: "nvidia.com/gpu", Device: "GPU-removed", Sharing: plugin.SharingTimeSlicing, Total: 2},
	}
	c := memlimits.Container{
		Namespace: "web", Pod: "chat-0", Name: "llm", Device: "GPU-1", Resource: memory, Units: 10, Limit: 10 << 30,
		Enforcement: memlimits.None, Reason: "not started",
	}
	limited := c
	limited.Pod, limited.Units, limited.Limit, limited.Enforcement, limited.Reason, limited.Used, limited.HasUsed = "chat-1", 30, 30<<30,
		memlimits.Driver, "", 5<<30+512<<20, true
	old := c
	old.Pod, old.Reason = "chat-2", k.Shares[1].Reason
	k.Memory = &memlimits.Snapshot{
		Containers: []memlimits.Container{c, limited, old, {Device: "GPU-removed", Pod: "removed"}},
		Err:        "no control groups",
	}
	return k
}

func TestSharingIsShown(t *testing.T) {
	s := newNode(sharingInputs())
	for _, d := range allDevices(s) {
		for i := range d.Findings {
			d.Findings[i].Advice = "advice" // independent of health's texts
		}
	}
	document, err := json.MarshalIndent([]any{
		s.GPUs[0].Shares, s.GPUs[0].MPS, s.GPUs[1].Shares, s.GPUs[1].MemoryLimits,
		s.GPUs[2].MIG[1].Shares, s.GPUs[2].MIG[1].MPS,
	}, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	golden.Check(t, "testdata/sharing.txt", s.Table(false, terminal.Output{})+"\n--- wide\n\n"+s.Table(true, terminal.Output{})+
		"\n--- JSON\n\n"+string(document)+"\n")
	if s.MemoryLimitsError != "no control groups" {
		t.Errorf("%q", s.MemoryLimitsError)
	}

	page := pageOf(t, sharingInputs())
	agenttest.MustContain(
		t,
		page,
		`<dt>memory</dt><dd class="degraded"><span class="badge">warning</span> limits unknown: no control groups`,
	)
	agenttest.MustContain(t, section(t, page, 0), "1 of 4 free, mps, largest request 1", `<span class="badge healthy">ready</span>`,
		"pid 41, 3 clients, 2 restarts, 25 % of the SMs and 20 GiB per client, single-user")
	agenttest.MustContain(t, section(t, page, 1), "38 of 78 free, memory, 1 GiB each, largest request 0, enforcement none: driver 580",
		"web/chat-0 (llm): 10 GiB, enforcement none (not started)", "web/chat-1 (llm): 30 GiB, enforcement driver, 5.5 GiB used")
	agenttest.MustContain(t, section(t, page, 2), "– of 2 free, mps", `<span class="badge unhealthy">not ready</span> exit status 1`)
}

// The status of a node that shares no device does not mention sharing.
func TestSharingIsNotShownWithoutIt(t *testing.T) {
	s := newNode(testInputs())
	document, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	for form, text := range map[string]string{
		"table": s.Table(false, terminal.Output{}), "wide table": s.Table(true, terminal.Output{}),
		"page": pageOf(t, testInputs()), "JSON": string(document),
	} {
		for _, unwanted := range []string{"shares", "mps", "limits"} {
			if strings.Contains(strings.ToLower(text), unwanted) {
				t.Errorf("%s has %s:\n%s", form, unwanted, text)
			}
		}
	}
}

// Equal MIG devices share a row, with the sums of their shares and clients.
func TestSharedMIGDevicesShareRow(t *testing.T) {
	device := func(index, free, clients int, ready bool) Device {
		return Device{
			Index: 0, MIGIndex: &index, GI: &index, State: "healthy", Shares: &Shares{Sharing: "mps", Total: 4, Free: &free},
			MPS: &MPS{Ready: ready, Clients: clients},
		}
	}
	gpu := Device{State: "healthy", MIG: []Device{
		device(0, 1, 2, true), device(1, 3, 1, true), device(2, 0, 0, false),
		{MIGIndex: new(3), GI: new(3), State: "healthy"},
	}}
	rows := deviceRows(Node{GPUs: []Device{gpu}}, true)
	var got []string
	for _, r := range rows[1:] {
		got = append(got, sharesText(r.Device, false)+"; "+mpsCell(r.Device, false).Text)
	}
	if want := []string{"4 of 8 free; ready, 3 clients", "0 of 4 free; not ready", "; "}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if *gpu.MIG[0].Shares.Free != 1 || gpu.MIG[0].MPS.Clients != 2 {
		t.Error("the sums changed the first device")
	}
}

// Pods of a daemon that serves one user at a time are told so when there are two of them, whatever their users are.
func TestSingleUserMPS(t *testing.T) {
	pod := func(namespace, name, container string) podresources.Holder {
		return podresources.Holder{Namespace: namespace, Pod: name, Container: container}
	}
	one, two := []podresources.Holder{pod("a", "x", "1"), pod("a", "x", "2")}, []podresources.Holder{pod("a", "x", "1"), pod("a", "y", "1")}
	daemon := &health.MPSDaemon{PID: 41}
	for name, test := range map[string]struct {
		daemon  *health.MPSDaemon
		holders podresources.Holders
		named   bool
	}{
		"two pods":           {daemon, holdersOf(two...), true},
		"of two namespaces":  {daemon, holdersOf(pod("a", "x", "1"), pod("b", "x", "1")), true},
		"not ready":          {&health.MPSDaemon{PID: 41, Cause: health.CauseMPSFault}, holdersOf(two...), true},
		"leaving":            {&health.MPSDaemon{PID: 41, Leaving: true}, holdersOf(two...), true},
		"two containers":     {daemon, holdersOf(one...), false},
		"no pod":             {daemon, holdersOf(), false},
		"unknown":            {daemon, podresources.Holders{Err: "the kubelet does not answer"}, false},
		"serves all users":   {&health.MPSDaemon{PID: 41, MultiUser: true}, holdersOf(two...), false},
		"does not run":       {&health.MPSDaemon{}, holdersOf(two...), false}, // whether it serves all users is unknown
		"not shared by MPS":  {nil, holdersOf(two...), false},
		"monitors take none": {daemon, podresources.Holders{By: holdersOf(one...).By, Admin: holdersOf(two...).By}, false},
	} {
		t.Run(name, func(t *testing.T) {
			k := testInputs()
			k.Snapshot.Devices[0].MPS, k.Holders = test.daemon, test.holders
			s, want := newNode(k), ""
			if test.named {
				want = "GPU 0 (GPU-0): this driver serves one user at a time; pods of other users wait: give them one runAsUser"
			}
			table := s.Table(false, terminal.Output{})
			if s.MPSWarning != want || strings.Contains(table, "mps       GPU 0 (GPU-0): this driver serves one") != test.named {
				t.Errorf("%q\n%s", s.MPSWarning, table)
			}
			if strings.Contains(
				pageOf(t, k),
				`<dt>mps</dt><dd class="degraded"><span class="badge">warning</span> GPU 0 (GPU-0): this driver serves one user`,
			) != test.named {
				t.Error("the page differs")
			}
		})
	}
}

// holdersOf returns the holders of GPU 0.
func holdersOf(all ...podresources.Holder) podresources.Holders {
	return podresources.Holders{At: agenttest.Now(), By: map[health.DeviceID][]podresources.Holder{"GPU-0": all}}
}
