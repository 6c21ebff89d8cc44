package plugin

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
)

// fakeStream is a ListAndWatch stream without a network, so that synctest.Wait shows all messages.
type fakeStream struct {
	grpc.ServerStream
	ctx  context.Context //nolint:containedctx // a gRPC stream has one
	sent chan []*pluginapi.Device
}

func (f *fakeStream) Context() context.Context { return f.ctx }

func (f *fakeStream) Send(r *pluginapi.ListAndWatchResponse) error {
	select {
	case f.sent <- r.Devices:
		return nil
	case <-f.ctx.Done():
		return f.ctx.Err()
	}
}

type watcher struct {
	fakeStream
	cancel func()
	ended  chan error
}

// watch opens a stream that buffers messages and then blocks.
func watch(t *testing.T, s *server, messages int) *watcher {
	ctx, cancel := context.WithCancel(t.Context())
	w := &watcher{fakeStream{ctx: ctx, sent: make(chan []*pluginapi.Device, messages)}, cancel, make(chan error, 1)}
	go func() { w.ended <- s.ListAndWatch(&pluginapi.Empty{}, w) }()
	return w
}

func (w *watcher) received() (lists [][]*pluginapi.Device) {
	for len(w.sent) > 0 {
		lists = append(lists, <-w.sent)
	}
	return lists
}

func unhealthy(list []*pluginapi.Device) (ids []string) {
	for _, d := range list {
		if d.Health != pluginapi.Healthy {
			ids = append(ids, d.ID)
		}
	}
	return ids
}

func TestListAndWatchSendsOnlyChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTestServer(snapshot(8))
		w := watch(t, s, 10)
		snap := func(change func(*health.Snapshot)) func() {
			return func() {
				next := with(s.layouts.snapshots.Load(), 2, health.Healthy)
				change(next)
				s.layouts.snapshots.Store(next)
			}
		}
		state := func(state health.State) func() {
			return snap(func(s *health.Snapshot) { *s = *with(s, 2, state) })
		}
		for _, c := range []struct {
			name      string
			change    func()
			messages  int
			devices   int
			unhealthy []string
		}{
			{"at first", func() {}, 1, 8, nil},
			{"value", snap(func(s *health.Snapshot) {
				s.Devices[2].Sample.Values = map[health.Field]float64{health.FieldGPUTemp: 40}
			}), 0, 0, nil},
			{"degraded", state(health.Degraded), 0, 0, nil},
			{"equal configuration", func() { s.layouts.cfg.Store(&Config{Enabled: true, Resource: gpu, KubeletDir: "/k"}) }, 0, 0, nil},
			{"unhealthy", state(health.Unhealthy), 1, 8, []string{"GPU-2"}},
			{"healthy", state(health.Healthy), 1, 8, nil},
			{"other NUMA node", snap(func(s *health.Snapshot) { s.Devices[2].Device.NUMA = []int{1} }), 1, 8, nil},
			{"device removed", snap(func(s *health.Snapshot) { s.Devices = s.Devices[:7] }), 1, 7, nil},
			{
				"resource outside the layout", func() { s.layouts.cfg.Store(&Config{Enabled: true, Resource: "a.com/b", KubeletDir: "/k"}) }, 1, 0,
				nil,
			},
		} {
			c.change()
			synctest.Wait()
			got := w.received()
			if len(got) != c.messages || c.messages == 1 && (len(got[0]) != c.devices || !slices.Equal(unhealthy(got[0]), c.unhealthy)) {
				t.Errorf("%s: %v, want %d messages with %d devices, of which %q are unhealthy", c.name, got, c.messages, c.devices, c.unhealthy)
			}
		}
		w.cancel()
		if err := <-w.ended; status.Code(err) != codes.Canceled {
			t.Errorf("the stream ended with %v", err)
		}
	})
}

// A stream sends the devices again when any input of the layout changes, whatever the kubelet answers about holders.
func TestListAndWatchFollowsInputs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := configured(memoryShared("40Gi"), func(c *Config) { // one unit for each GPU
			c.Sharing.Memory.Enforcement, c.Sharing.Memory.RequireEnforcement = EnforceAuto, true
			c.DeviceList = []string{ListCDICRI}
		})
		s := newServerOf(memoryResource, &cfg, withReserved(2))
		capabilities, runtime := &health.Latest[memlimits.Capabilities]{}, &health.Latest[cdi.Runtime]{}
		turns, claims := &health.Latest[turn]{}, &health.Latest[offer.Claims]{}
		s.layouts.capabilities, s.layouts.runtime, s.layouts.turn, s.layouts.claims = capabilities, runtime, turns, claims
		examined := func(reason string) func() {
			return func() {
				capabilities.Store(&memlimits.Capabilities{Driver: map[health.DeviceID]string{"GPU-0": reason, "GPU-1": reason}})
			}
		}
		run := func(version string) func() {
			return func() { runtime.Store(&cdi.Runtime{Version: version, Kubelet: "v1.37.0"}) }
		}
		both, none := []string{"GPU-0::40960Mi::0", "GPU-1::40960Mi::0"}, []string{}
		w := watch(t, s, 10)
		for _, c := range []struct {
			name   string
			change func()
			want   []string // unhealthy; nil: no message
		}{
			{"at first", func() {}, both},
			{"enforced", examined(""), nil},
			{"CDI", run("containerd://2.1.4"), none},
			{"not enforced", examined("too old"), both},
			{"enforced again", examined(""), none},
			{"the other API's turn", func() { turns.Store(&turn{releasing: "plugin.api has changed"}) }, both},
			{"our turn", func() { turns.Store(&turn{}) }, none},
			{"claim", func() {
				claims.Store(&offer.Claims{List: []offer.Claim{{UID: "c", Parts: []offer.Part{{Name: "gpu-1", Device: "GPU-1"}}}}})
			}, both[1:]},
			{"no claim", func() { claims.Store(&offer.Claims{}) }, none},
			{"no CDI", run("containerd://1.6.36"), both},
		} {
			c.change()
			synctest.Wait()
			got := w.received()
			if len(got) > 1 || (len(got) == 1) != (c.want != nil) || len(got) == 1 && !slices.Equal(unhealthy(got[0]), c.want) {
				t.Errorf("%s: %v, want %q unhealthy", c.name, got, c.want)
			}
		}
		w.cancel()
		if err := <-w.ended; status.Code(err) != codes.Canceled {
			t.Error(err)
		}
	})
}

func TestStreamsAreIndependent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		snap := snapshot(2)
		s := newTestServer(snap)
		slow, fast, closed := watch(t, s, 1), watch(t, s, 100), watch(t, s, 100)
		synctest.Wait()
		closed.cancel()
		if err := <-closed.ended; status.Code(err) != codes.Canceled {
			t.Errorf("the stream ended with %v", err)
		}
		if c := s.streams.counts(); c.open != 2 || c.openCurrent != 2 {
			t.Errorf("%+v, want two open streams", c)
		}
		// The slow reader has one message and does not read.
		for i := range 9 {
			snap = with(snap, 0, []health.State{health.Unhealthy, health.Healthy}[i%2])
			s.layouts.snapshots.Store(snap)
			synctest.Wait()
		}
		if got := fast.received(); len(got) != 10 || unhealthy(got[9]) == nil {
			t.Errorf("the fast stream got %d lists, want 10", len(got))
		}
		// Then it reads the blocked list and the newest one, and misses those in between.
		var got [][]*pluginapi.Device
		for range 3 {
			got = append(got, slow.received()...)
			synctest.Wait()
		}
		if len(got) != 2 || unhealthy(got[1]) == nil {
			t.Errorf("the slow stream got %v", got)
		}
		if got := closed.received(); len(got) != 1 {
			t.Errorf("the closed stream got %d lists", len(got))
		}
		s.stop(false)
		for _, w := range []*watcher{slow, fast} {
			if err := <-w.ended; status.Code(err) != codes.Unavailable {
				t.Errorf("a stream ended with %v when the server stopped", err)
			}
			w.cancel()
		}
		if c := s.streams.counts(); c.open != 0 || c.openCurrent != 0 || !c.openedCurrent {
			t.Errorf("%+v, want none open", c)
		}
	})
}

func TestStreamsOfEarlierRegistration(t *testing.T) {
	s := newTestServer(snapshot(1))
	oldLeaves, _ := s.streams.enter()
	s.streams.beginRegistration()
	if c := s.streams.counts(); c.open != 1 || c.openCurrent != 0 || c.openedCurrent {
		t.Errorf("%+v, want one open stream, and none of this registration", c)
	}
	newLeaves, _ := s.streams.enter()
	newLeaves()
	if c := s.streams.counts(); c.open != 1 || c.openCurrent != 0 || !c.openedCurrent {
		t.Errorf("%+v, want the old stream only", c)
	}
	oldLeaves()
	if c := s.streams.counts(); c.open != 0 || c.openCurrent != 0 {
		t.Errorf("%+v, want none", c)
	}
}

func TestServerOptionsAndPreferences(t *testing.T) {
	s := newTestServer(snapshot(4))
	opts, err := s.GetDevicePluginOptions(t.Context(), nil)
	if err != nil || !opts.GetPreferredAllocationAvailable || opts.PreStartRequired {
		t.Errorf("options: %v, %v", opts, err)
	}
	if _, err := s.PreStartContainer(t.Context(), nil); err != nil {
		t.Error(err)
	}
	resp, err := s.GetPreferredAllocation(t.Context(), &pluginapi.PreferredAllocationRequest{
		ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
			nil, {AvailableDeviceIDs: []string{"GPU-3", "GPU-1"}, AllocationSize: 1}, {AllocationSize: -1},
		},
	})
	if err != nil || len(resp.ContainerResponses) != 3 || !slices.Equal(resp.ContainerResponses[1].DeviceIDs, []string{"GPU-1"}) {
		t.Errorf("preferred: %v, %v", resp, err)
	}
	if r := newServerOf(gpu, nil, nil).resource(); r.Name != gpu || r.Devices != nil {
		t.Errorf("without anything stored: %+v", r)
	}
}

// BenchmarkHealthFlip8x10 measures from the snapshot to the message on each of two streams: one of eight GPUs with ten
// replicas each becomes unhealthy and healthy again.
func BenchmarkHealthFlip8x10(b *testing.B) {
	cfg := configured(sharedBy(10))
	s := newServerOf(gpu, &cfg, snapshot(8))
	snaps := []*health.Snapshot{with(snapshot(8), 3, health.Unhealthy), snapshot(8)}
	sent := make(chan []*pluginapi.Device)
	ended := make(chan error, 2)
	for range 2 {
		go func() { ended <- s.ListAndWatch(&pluginapi.Empty{}, &fakeStream{ctx: b.Context(), sent: sent}) }()
		if got := <-sent; len(got) != 80 {
			b.Fatalf("%d devices, want 80", len(got))
		}
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		s.layouts.snapshots.Store(snaps[i%2])
		<-sent
		<-sent
	}
	s.stop(false)
	for range 2 {
		if err := <-ended; status.Code(err) != codes.Unavailable {
			b.Errorf("a stream ended with %v", err)
		}
	}
}

// BenchmarkGetPreferredAllocation measures the first call after a snapshot, which builds the layout if no stream has done
// so, and later calls. The kubelet sends the IDs in random order.
func BenchmarkGetPreferredAllocation(b *testing.B) {
	for _, c := range []struct {
		replicas int
		first    bool
	}{{0, true}, {10, true}, {1000, true}, {10, false}, {1000, false}} {
		b.Run(fmt.Sprintf("8x%d-first=%t", c.replicas, c.first), func(b *testing.B) {
			cfg := DefaultConfig()
			if c.replicas > 0 {
				sharedBy(c.replicas)(&cfg)
			}
			snap := snapshot(8)
			s := newServerOf(gpu, &cfg, snap)
			ids := all(s.resource())
			for i, id := range ids {
				ids[i] = strings.Clone(id)
			}
			rand.New(rand.NewPCG(7, 8)).Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
			req := &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
				{AvailableDeviceIDs: ids, AllocationSize: 4},
			}}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if c.first {
					s.layouts.snapshots.Store(with(snap, 0, []health.State{health.Healthy, health.Degraded}[i%2]))
				}
				if _, err := s.GetPreferredAllocation(b.Context(), req); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
