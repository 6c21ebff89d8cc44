package metrics

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// idleResult is the part of idleTime that is exported.
type idleResult struct {
	measured         bool
	total, sinceBusy time.Duration // seconds
	processesKnown   bool
	withoutProcess   time.Duration // seconds
}

func resultOf(i idleTime) idleResult {
	return idleResult{i.measured, i.total / time.Second, i.sinceBusy / time.Second, i.processesKnown, i.withoutProcess / time.Second}
}

func TestIdleTime(t *testing.T) {
	idle := func(total, sinceBusy time.Duration) idleResult { return idleResult{true, total, sinceBusy, false, 0} }
	for name, c := range map[string]struct {
		steps []step
		pod   string
		want  idleResult
	}{
		"starts with the allocation": {[]step{{at: 0}, {at: 5, pod: "a"}, {at: 8, pod: "a"}}, "a", idle(3, 3)},
		"busy in between": {
			[]step{{at: 0, pod: "a"}, {at: 4, pod: "a"}, {at: 6, util: 5, pod: "a"}, {at: 7, util: 4.9, pod: "a"}, {at: 8, util: 0, pod: "a"}},
			"a",
			idle(6, 2),
		},
		"next pod":  {[]step{{at: 0, pod: "a"}, {at: 9, pod: "a"}, {at: 10, pod: "b"}, {at: 12, pod: "b"}}, "b", idle(2, 2)},
		"pod ended": {[]step{{at: 0, pod: "a"}, {at: 9, pod: "a"}, {at: 10}, {at: 11}}, "a", idleResult{}},
		"source down": {[]step{
			{at: 0, pod: "a"},
			{at: 2, pod: "a"},
			{at: 50, poll: 2, pod: "a", down: true},
			{at: 51, pod: "a"},
		}, "a", idle(3, 3)},
		"pod resources unreadable":      {[]step{{at: 0, pod: "a"}, {at: 2, pod: "a"}, {at: 50, pod: "?"}, {at: 51, pod: "a"}}, "a", idle(3, 3)},
		"utilization is never measured": {[]step{{at: 0, util: -1, pod: "a"}, {at: 2, util: -1, pod: "a"}}, "a", idleResult{}},
	} {
		if got := resultOf(accumulate(c.steps...).idle[container{"n", c.pod, "c"}]); got != c.want {
			t.Errorf("%s: got %+v, want %+v", name, got, c.want)
		}
	}
}

// usage of a container of pod n/<pod>; "" for no pod.
func usage(device health.DeviceID, pod, container string, sm float64) processes.Usage {
	u := processes.Usage{
		Device: device, Container: processes.Container{Namespace: "n", Pod: pod, Name: container}, Processes: 1,
		SM: max(0, sm), HasSM: sm >= 0,
	}
	if pod == "" {
		u.Container = processes.Container{Name: container}
	}
	return u
}

const noSM = -1

func measuredUsage(list ...processes.Usage) *processes.Snapshot {
	return &processes.Snapshot{ProcessReading: driver.ProcessReading{Measured: []health.DeviceID{"GPU-a", "MIG-a"}}, Usage: list}
}

// TestUse checks how container c of pod n/a uses a device, at a threshold of 5 %.
func TestUse(t *testing.T) {
	gpu := health.Device{ID: "GPU-a"}
	mig := health.Device{ID: "MIG-a", Parent: "GPU-a", Kind: health.KindMIG}
	utilization := func(percent float64) map[health.Field]float64 {
		return map[health.Field]float64{health.FieldGPUUtil: percent}
	}
	video := func(gpu, encoder, decoder float64) map[health.Field]float64 {
		return map[health.Field]float64{health.FieldGPUUtil: gpu, health.FieldEncUtil: encoder, health.FieldDecUtil: decoder}
	}
	engine := func(ratio float64) map[health.Field]float64 {
		return map[health.Field]float64{health.FieldEngineActive: ratio}
	}
	var (
		unknown     = use{}
		idle        = use{measured: true}
		busy        = use{measured: true, busy: true}
		idleWith    = use{measured: true, processesKnown: true, process: true}
		busyWith    = use{measured: true, busy: true, processesKnown: true, process: true}
		idleWithout = use{measured: true, processesKnown: true}
		busyWithout = use{measured: true, busy: true, processesKnown: true}
		unknownWith = use{processesKnown: true, process: true}
		notListed   *processes.Snapshot
		noProcess   = measuredUsage()
		byOther     = measuredUsage(usage("GPU-a", "b", "c", 1))
		own         = func(sm float64) *processes.Snapshot {
			return measuredUsage(usage("GPU-a", "a", "c", sm), usage("GPU-a", "b", "c", 1))
		}
		ofNoPod       = measuredUsage(usage("GPU-a", "", "", 1))
		ownAndOfNoPod = func(sm float64) *processes.Snapshot {
			return measuredUsage(usage("GPU-a", "", "", 1), usage("GPU-a", "a", "c", sm))
		}
		aboveTheLimit = measuredUsage(usage("GPU-a", "b", "c", 1), usage("GPU-a", "", processes.Other, 0))
	)
	ofAll := func(u use) use { u.ofAll = true; return u }
	for name, c := range map[string]struct {
		device    health.Device
		values    map[health.Field]float64
		down      bool
		shared    bool // with pod n/b
		processes *processes.Snapshot
		want      use
	}{
		"busy GPU": {gpu, utilization(5), false, false, notListed, busy},
		"idle GPU": {gpu, utilization(4.9), false, false, notListed, idle},
		"utilization counts before the engine": {
			gpu,
			map[health.Field]float64{health.FieldGPUUtil: 0, health.FieldEngineActive: 1},
			false, false,
			notListed, idle,
		},
		"encodes a video":                                  {gpu, video(0, 50, 0), false, false, notListed, busy},
		"decodes a video":                                  {gpu, video(0, 0, 5), false, false, notListed, busy},
		"idle video engines":                               {gpu, video(4.9, 4.9, 4.9), false, false, notListed, idle},
		"a sharer's process that may encode a video":       {gpu, video(0, 50, 0), false, true, own(0), ofAll(busyWith)},
		"a sharer without a process encodes no video":      {gpu, video(0, 50, 0), false, true, byOther, idleWithout},
		"a sharer works, and some process encodes a video": {gpu, video(0, 50, 0), false, true, own(.05), busyWith},
		"not measured":                                     {gpu, nil, false, false, notListed, unknown},
		"source down":                                      {gpu, utilization(0), true, false, notListed, unknown},
		"busy MIG device":                                  {mig, engine(.05), false, false, notListed, busy},
		"idle MIG device":                                  {mig, engine(.049), false, false, notListed, idle},
		"idle GPU without process":                         {gpu, utilization(0), false, false, noProcess, idleWithout},
		"a process ended just now":                         {gpu, utilization(50), false, false, noProcess, busyWithout},
		"idle GPU with process":                            {gpu, utilization(0), false, false, own(1), idleWith},
		"only the processes are measured: none":            {gpu, nil, false, false, noProcess, idleWithout},
		"only the processes are measured: idle":            {gpu, nil, false, false, own(.04), idleWith},
		"only the processes are measured: busy":            {gpu, utilization(0), true, false, own(.05), busyWith},
		"only the processes are measured, not their share": {gpu, nil, false, false, own(noSM), unknownWith},
		"processes of other devices": {
			gpu, nil, false, false,
			&processes.Snapshot{ProcessReading: driver.ProcessReading{Measured: []health.DeviceID{"GPU-b"}}}, unknown,
		},
		"another sharer is busy":                         {gpu, utilization(100), false, true, byOther, idleWithout},
		"another sharer is busy, no processes":           {gpu, utilization(100), false, true, notListed, ofAll(busy)},
		"another sharer is busy, process without work":   {gpu, utilization(100), false, true, own(.04), idleWith},
		"a sharer's own work":                            {gpu, utilization(100), false, true, own(.05), busyWith},
		"a sharer's own work of which nothing is known":  {gpu, utilization(100), false, true, own(noSM), ofAll(busyWith)},
		"the same of an idle device":                     {gpu, utilization(0), false, true, own(noSM), ofAll(idleWith)},
		"process of no pod":                              {gpu, utilization(100), false, true, ofNoPod, ofAll(busy)},
		"process of no pod on an idle GPU":               {gpu, utilization(0), false, false, ofNoPod, idle},
		"own process, and one of no pod that may be its": {gpu, utilization(100), false, true, ownAndOfNoPod(.04), ofAll(busyWith)},
		"own busy process, and one of no pod":            {gpu, utilization(0), false, true, ownAndOfNoPod(.05), busyWith},
		"process of a container above the limit":         {gpu, utilization(100), false, true, aboveTheLimit, ofAll(busy)},
		"process of a container of the pod without a name": {
			gpu, utilization(0), false, false, measuredUsage(usage("GPU-a", "a", "", 1)),
			idle,
		},
		"process of a container of the pod that holds none": {gpu, nil, false, false, measuredUsage(usage("GPU-a", "a", "d", 1)), unknown},
		"the same on an idle GPU": {
			gpu, utilization(0), false, false, measuredUsage(usage("GPU-a", "a", "d", 0)),
			idle,
		},
		"the same on a shared GPU": {
			gpu, utilization(100), false, true, measuredUsage(usage("GPU-a", "a", "d", 1)),
			ofAll(busy),
		},
		"process of another holder of the pod":               {gpu, nil, false, false, measuredUsage(usage("GPU-a", "a", "e", 1)), idleWithout},
		"MIG device without process":                         {mig, nil, false, false, noProcess, idleWithout},
		"process of the parent that may be the MIG device's": {mig, nil, false, false, ofNoPod, unknown},
		"own process that the driver lists on the parent":    {mig, nil, false, false, own(.05), busyWith},
		"process of another MIG device's pod on the parent":  {mig, nil, false, false, byOther, idleWithout},
	} {
		s := &health.Snapshot{Source: health.Source{Status: health.SourceUp}}
		if c.down {
			s.Source.Status = health.SourceStalled
		}
		holders := []podresources.Holder{{Namespace: "n", Pod: "a", Container: "c"}}
		if c.shared {
			holders = append(holders, podresources.Holder{Namespace: "n", Pod: "b", Container: "c"})
		}
		if name == "process of another holder of the pod" {
			holders = append(holders, podresources.Holder{Namespace: "n", Pod: "a", Container: "e"})
		}
		o := observation{
			snapshot: s, processes: c.processes, idleBelow: 5,
			holders: podresources.Holders{By: map[health.DeviceID][]podresources.Holder{c.device.ID: holders}},
		}
		d := &health.DeviceState{Device: c.device, Sample: health.Sample{Values: c.values}}
		if got := useOf(d, container{"n", "a", "c"}, o); got != c.want {
			t.Errorf("%s: got %+v, want %+v", name, got, c.want)
		}
	}
}

// idleNode observes a GPU that container c of pod n/a holds as a replica.
type idleNode struct {
	accumulator

	at        time.Time
	util      float64
	processes *processes.Snapshot
	uid       string
	replica   int
	allocated time.Time     // of the replica
	age       time.Duration // of the kubelet's answer
	noPlugin  bool
	ended     bool // the container
	shared    bool // with container c of pod n/b, as replica 9
	unknown   bool // the holders
	settling  bool // the kubelet
}

func (n *idleNode) observe(after time.Duration) idleResult {
	n.at = n.at.Add(after)
	id := fmt.Sprintf("GPU-a::%d", n.replica)
	o := observation{
		at: n.at, window: time.Minute, idleBelow: 5, processes: n.processes,
		snapshot: &health.Snapshot{At: n.at, Source: health.Source{Status: health.SourceUp}, Devices: []health.DeviceState{{
			Device: health.Device{ID: "GPU-a"}, Sample: health.Sample{Values: map[health.Field]float64{health.FieldGPUUtil: n.util}},
		}}},
		holders: podresources.Holders{At: n.at.Add(-n.age), By: map[health.DeviceID][]podresources.Holder{}},
		identity: Identity{
			PodLabels: func(string, string) []Label { return []Label{label("team", "x"), label(podUIDLabel, n.uid)} }, Allocates: !n.noPlugin,
			Allocated: func(held podresources.Holder) time.Time {
				if held.DeviceID == id {
					return n.allocated
				}
				return time.Time{}
			},
		},
	}
	if !n.ended {
		o.holders.By["GPU-a"] = []podresources.Holder{{Namespace: "n", Pod: "a", Container: "c", DeviceID: id}}
	}
	if n.shared {
		o.holders.By["GPU-a"] = append(o.holders.By["GPU-a"], podresources.Holder{Namespace: "n", Pod: "b", Container: "c", DeviceID: "GPU-a::9"})
	}
	if o.holders.Settling = n.settling; n.unknown {
		o.holders = podresources.Holders{Err: "connection refused"}
	}
	if n.util < 0 {
		o.snapshot.Devices[0].Sample.Values = nil
	}
	n.update(o)
	return resultOf(n.devices["GPU-a"].idle[container{"n", "a", "c"}])
}

func TestTimeWithoutProcess(t *testing.T) {
	n := &idleNode{at: now}
	for i, step := range []struct {
		processes *processes.Snapshot
		want      idleResult
	}{
		{nil, idleResult{true, 0, 0, false, 0}},
		{measuredUsage(), idleResult{true, 10, 10, true, 10}},
		{measuredUsage(), idleResult{true, 20, 20, true, 20}},
		{nil, idleResult{true, 30, 30, false, 20}}, // unknown time does not count
		{measuredUsage(usage("GPU-a", "", "", 1)), idleResult{true, 40, 40, false, 20}},
		{measuredUsage(), idleResult{true, 50, 50, true, 30}},
		{measuredUsage(usage("GPU-a", "a", "c", 1)), idleResult{true, 60, 60, true, 0}},
		{measuredUsage(), idleResult{true, 70, 70, true, 10}},
	} {
		n.processes = step.processes
		if got := n.observe(10 * time.Second); got != step.want {
			t.Errorf("step %d: got %+v, want %+v", i, got, step.want)
		}
	}
}

// What a container does while nothing tells of it is not idle time: after a long while it may have used the device.
func TestIdleTimeAfterUnknown(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*idleNode)
		gap    time.Duration
		want   string
	}{
		"nothing measured":                {func(n *idleNode) { n.util, n.processes = -1, nil }, continueWithin, "3610 3610 yes"},
		"nothing measured for longer":     {func(n *idleNode) { n.util, n.processes = -1, nil }, continueWithin + time.Second, "10 10 unknown"},
		"holders unknown for longer":      {func(n *idleNode) { n.unknown = true }, continueWithin + time.Second, "10 10 unknown"},
		"only the processes unknown":      {func(n *idleNode) { n.processes = nil }, continueWithin + time.Second, "4511 10 yes"},
		"utilization unknown, no process": {func(n *idleNode) { n.util = -1 }, continueWithin + time.Second, "4511 4511 yes"},
		"an unknown process for long": {
			func(n *idleNode) { n.util, n.processes = -1, measuredUsage(usage("GPU-a", "", "", 1)) },
			continueWithin + time.Second, "10 10 unknown",
		},
		"had a process before, and longer": {func(n *idleNode) {
			n.processes = measuredUsage(usage("GPU-a", "a", "c", 0))
			n.observe(0)
			n.util, n.processes = -1, nil
		}, continueWithin + time.Second, "10 10 no"},
	} {
		n := &idleNode{at: now, ended: true}
		n.observe(0)
		n.ended, n.processes = false, measuredUsage()
		n.observe(time.Second)
		for range 360 {
			n.observe(10 * time.Second)
		}
		c.change(n)
		last := n.at
		for n.at.Sub(last) < c.gap {
			n.observe(time.Second)
		}
		n.unknown, n.util, n.processes = false, 0, measuredUsage()
		n.observe(10 * time.Second)
		i := n.devices["GPU-a"].idle[container{"n", "a", "c"}]
		never, known := i.exported().NeverUsed()
		text := map[bool]string{false: "no", true: "yes"}[never]
		if !known {
			text = "unknown"
		}
		if got := fmt.Sprint(i.sinceBusy.Seconds(), " ", i.withoutProcess.Seconds(), " ", text); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// TestSharerWhileProcessesAreUnknown checks that the work of others ends the idle time of a sharer only if the processes stay unknown.
func TestSharerWhileProcessesAreUnknown(t *testing.T) {
	n := &idleNode{at: now, shared: true, util: 100, processes: measuredUsage(usage("GPU-a", "b", "c", 1))}
	n.observe(0)
	listed := n.processes
	for i, step := range []struct {
		processes *processes.Snapshot
		after     time.Duration
		want      time.Duration // idle, in seconds
	}{
		{listed, time.Hour, 3600},
		{nil, time.Minute, 3600},
		{&processes.Snapshot{Err: "the driver does not answer"}, time.Minute, 3600},
		{listed, time.Minute, 3660},
		{measuredUsage(usage("GPU-a", "", "", 1)), time.Minute, 3660},
		{nil, ownUseMemory - time.Minute, 0},
		{listed, time.Minute, 60},
	} {
		n.processes = step.processes
		if got := n.observe(step.after); got.sinceBusy != step.want {
			t.Errorf("step %d: idle for %d s, want %d", i, got.sinceBusy, step.want)
		}
	}

	text := saveIdle(t, &n.accumulator, n.at)
	n.accumulator, n.processes = restoreIdle(t, text, n.at), nil
	if got := n.observe(time.Second); got.sinceBusy != 60 {
		t.Errorf("before the first list of processes after a restart: idle for %d s, want 60", got.sinceBusy)
	}
}

// TestNextContainerWhileHoldersAreOld checks that a container's times end when the next one of the same name gets another replica, also if
// the kubelet's last answer, with the old container, is older than the allocation.
func TestNextContainerWhileHoldersAreOld(t *testing.T) {
	n := &idleNode{at: now}
	n.observe(0)
	n.observe(time.Hour)
	n.age = 2 * time.Second
	n.observe(2 * time.Second)
	n.replica, n.allocated, n.age = 1, n.at.Add(-time.Second), 0
	if got := n.observe(time.Second); got.sinceBusy != 0 {
		t.Errorf("idle for %d s, want 0", got.sinceBusy)
	}
}

// TestNextContainerOfTheName checks that a container's times end when another one of the same name holds the device, also between
// two observations.
func TestNextContainerOfTheName(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*idleNode)
		want   time.Duration // idle, in seconds
	}{
		"the same container":           {func(*idleNode) {}, 20},
		"the replica was allocated":    {func(n *idleNode) { n.allocated = n.at.Add(time.Second) }, 0},
		"it was allocated before":      {func(n *idleNode) { n.allocated = n.at.Add(-time.Second) }, 20},
		"another UID":                  {func(n *idleNode) { n.uid = "2" }, 0},
		"the UID is unknown meanwhile": {func(n *idleNode) { n.uid = "" }, 20},
	} {
		n := &idleNode{at: now, uid: "1"}
		n.observe(0)
		n.observe(10 * time.Second)
		c.change(n)
		if got := n.observe(10 * time.Second); got.sinceBusy != c.want {
			t.Errorf("%s: idle for %d s, want %d", name, got.sinceBusy, c.want)
		}
		n.uid = "1"
		want := c.want + 10
		if name == "another UID" {
			want = 0
		}
		if got := n.observe(10 * time.Second); got.sinceBusy != want {
			t.Errorf("%s, afterwards: idle for %d s, want %d", name, got.sinceBusy, want)
		}
	}
}

// TestNeverUsed checks when a container counts as one that has not used its device since it got it: "yes", "no" or "unknown". The agent
// observes nothing before step 0.
func TestNeverUsed(t *testing.T) {
	idle, unlisted := measuredUsage(), (*processes.Snapshot)(nil)
	using := measuredUsage(usage("GPU-a", "a", "c", 0))
	type node = idleNode
	for name, c := range map[string]struct {
		steps []func(*node)
		want  string
	}{
		"older than the agent":                {[]func(*node){func(n *node) { n.processes = idle }}, "unknown"},
		"older than the agent, has a process": {[]func(*node){func(n *node) { n.processes = using }}, "no"},
		"older than the agent, works":         {[]func(*node){func(n *node) { n.util = 50 }}, "no"},
		"appears while the agent runs": {[]func(*node){
			func(n *node) { n.ended = true },
			func(n *node) { n.ended, n.processes = false, idle },
		}, "yes"},
		"appears, processes unknown": {[]func(*node){
			func(n *node) { n.ended = true },
			func(n *node) { n.ended, n.processes = false, unlisted },
		}, "yes"},
		"appears, nothing measured": {[]func(*node){func(n *node) { n.ended = true }, func(n *node) { n.ended, n.util = false, -1 }}, "unknown"},
		"appears, then works": {[]func(*node){
			func(n *node) { n.ended = true }, func(n *node) { n.ended, n.util = false, 50 },
			func(n *node) { n.util = 0 },
		}, "no"},
		"appears, then had a process": {[]func(*node){
			func(n *node) { n.ended = true },
			func(n *node) { n.ended, n.processes = false, using }, func(n *node) { n.processes = idle },
		}, "no"},
		"appears after a new kubelet settled": {[]func(*node){
			func(n *node) { n.ended, n.settling = true, true },
			func(n *node) { n.ended, n.settling = false, false },
		}, "unknown"},
		"appears after the holders were known": {[]func(*node){
			func(n *node) { n.ended = true }, func(n *node) { n.unknown = true },
			func(n *node) { n.ended, n.unknown = false, false },
		}, "yes"},
		"appears long after they were known": {
			[]func(*node){
				func(n *node) { n.ended = true }, func(n *node) { n.unknown, n.at = true, n.at.Add(holdersGap) },
				func(n *node) { n.ended, n.unknown = false, false },
			},
			"unknown",
		},
		"works without a process of its own": {[]func(*node){
			func(n *node) { n.ended = true },
			func(n *node) { n.ended, n.processes, n.util = false, idle, 50 },
		}, "no"},
		"worked without a process of its own": {
			[]func(*node){
				func(n *node) { n.ended = true }, func(n *node) { n.ended, n.processes, n.util = false, idle, 50 },
				func(n *node) { n.util = 0 },
			}, "yes",
		},
		"allocated before the first answer": {[]func(*node){
			func(n *node) { n.unknown, n.allocated = true, n.at.Add(11*time.Second) },
			func(n *node) { n.unknown = false },
		}, "yes"},
		"another UID": {[]func(*node){func(n *node) { n.uid, n.util = "1", 50 }, func(n *node) { n.uid, n.util = "2", 0 }}, "yes"},
	} {
		n := &idleNode{at: now}
		for _, step := range c.steps {
			step(n)
			n.observe(10 * time.Second)
		}
		got := "unknown"
		if never, known := n.devices["GPU-a"].idle[container{"n", "a", "c"}].exported().NeverUsed(); known {
			got = map[bool]string{false: "no", true: "yes"}[never]
		}
		if got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// TestIdleTimes checks that what is unknown now is no idle time, and that nothing is while the source or the holders are unknown.
func TestIdleTimes(t *testing.T) {
	at := now
	holders := podresources.Holders{
		At: at,
		By: map[health.DeviceID][]podresources.Holder{"GPU-a": {{Namespace: "n", Pod: "a", Container: "c"}}},
	}
	var listed *processes.Snapshot
	s := &health.Snapshot{Source: health.Source{Status: health.SourceUp}, Devices: []health.DeviceState{{
		Device: health.Device{ID: "GPU-a"}, Sample: health.Sample{Values: map[health.Field]float64{health.FieldGPUUtil: 0}},
	}}}
	snapshots, configs := new(health.Latest[health.Snapshot]), new(health.Latest[Config])
	configs.Store(testConfig(fields.SetDefault))
	totals := NewTotals(TotalsInputs{
		Config: configs, Snapshots: snapshots, Holders: func() podresources.Holders { return holders },
		Processes: func() *processes.Snapshot { return listed },
	})
	totals.now = func() time.Time { return at }
	observe := func() {
		at = at.Add(10 * time.Second)
		next := *s
		next.At, holders.At = at, at
		snapshots.Store(&next)
		totals.update(&next)
	}
	of := func() string {
		i, ok := totals.IdleTimes().Of("GPU-a", podresources.Holder{Namespace: "n", Pod: "a", Container: "c", DeviceID: "GPU-a::3"})
		if !ok {
			return "none"
		}
		text := fmt.Sprintf("observed %v", i.Observed)
		if i.WorkKnown {
			text += fmt.Sprintf(", no work %v", i.NoWork)
		}
		if i.ProcessesKnown {
			text += fmt.Sprintf(", no process %v", i.NoProcess)
		}
		return text
	}
	check := func(step, want string) {
		t.Helper()
		if got := of(); got != want {
			t.Errorf("%s: %s, want %s", step, got, want)
		}
	}
	check("before the first snapshot", "none")
	observe()
	observe()
	check("processes not measured", "observed 10s, no work 10s")
	listed = measuredUsage()
	observe()
	check("no process", "observed 20s, no work 20s, no process 10s")
	s.Devices[0].Sample.Values = nil
	observe()
	check("utilization unknown, processes tell of no work", "observed 30s, no work 30s, no process 20s")
	listed = &processes.Snapshot{Err: "the driver does not answer"}
	observe()
	check("nothing measured", "observed 40s")
	holders.Err = "connection refused"
	check("the kubelet does not answer", "none")
	holders.Err = ""
	at = at.Add(podresources.MaxHoldersAge + time.Second)
	check("the kubelet's last answer is old", "none")
	observe()
	s.Source.Status = health.SourceDown
	observe()
	check("source down", "none")
	s.Source.Status = health.SourceUp
	s.Devices = nil
	observe()
	check("device removed", "none")
}

// An old idle time is not exported as a current one: GPU-hours would count it as idle or as used.
func TestIdleForIsAbsentWhileWorkIsNotMeasured(t *testing.T) {
	s := testNode()
	src := configuredSources(s, testConfig(fields.SetDefault))
	const idleFor, total = namespace + "device_idle_for_seconds", namespace + "device_idle_seconds_total"
	before := render(t, collectorOf(src))
	measured := len(series(before, idleFor))
	if measured == 0 {
		t.Fatal("no idle time is measured")
	}
	for i := range s.Devices {
		s.Devices[i].Sample.Values = nil
	}
	src.Totals.Processes = nil
	src.Totals.update(s)
	after := render(t, collectorOf(src))
	expectSeries(t, after, 0, idleFor)
	expectSeries(t, after, len(series(before, total)), total)
}
