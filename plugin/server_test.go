package plugin

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// fakeStream is a ListAndWatch stream without a network, so that a test knows when nothing more will come.
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

type watching struct {
	fakeStream
	cancel func()
	ended  chan error
}

// watch opens a stream that takes so many messages before its reader is slow.
func watch(t *testing.T, s *server, messages int) *watching {
	ctx, cancel := context.WithCancel(t.Context())
	w := &watching{fakeStream{ctx: ctx, sent: make(chan []*pluginapi.Device, messages)}, cancel, make(chan error, 1)}
	go func() { w.ended <- s.ListAndWatch(&pluginapi.Empty{}, w) }()
	return w
}

func (w *watching) received() (lists [][]*pluginapi.Device) {
	for len(w.sent) > 0 {
		lists = append(lists, <-w.sent)
	}
	return lists
}

func newTestServer(snap *health.Snapshot) *server {
	s := serverOf(gpu, &health.Latest[Config]{}, &health.Latest[health.Snapshot]{})
	cfg := DefaultConfig()
	s.layouts.cfg.Store(&cfg)
	s.layouts.snapshots.Store(snap)
	return s
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
		snap := snapshot(8)
		s := newTestServer(snap)
		w := watch(t, s, 10)
		synctest.Wait()
		if got := w.received(); len(got) != 1 || len(got[0]) != 8 || unhealthy(got[0]) != nil {
			t.Fatalf("at first: %v", got)
		}
		for range 5 {
			snap = with(snap, 2, health.Healthy)
			snap.Devices[2].Sample.Values = map[health.Field]float64{health.FieldGPUTemp: float64(snap.Seq)}
			s.layouts.snapshots.Store(snap)
			synctest.Wait()
		}
		snap = with(snap, 2, health.Degraded)
		s.layouts.snapshots.Store(snap)
		same := DefaultConfig()
		s.layouts.cfg.Store(&same)
		synctest.Wait()
		if got := w.received(); got != nil {
			t.Fatalf("values changed, and the kubelet was told: %v", got)
		}
		snap = with(snap, 2, health.Unhealthy)
		s.layouts.snapshots.Store(snap)
		synctest.Wait()
		if got := w.received(); len(got) != 1 || !slices.Equal(unhealthy(got[0]), []string{"GPU-2"}) {
			t.Fatalf("after the GPU became unhealthy: %v", got)
		}
		s.layouts.snapshots.Store(with(snap, 2, health.Healthy))
		synctest.Wait()
		if got := w.received(); len(got) != 1 || unhealthy(got[0]) != nil {
			t.Fatalf("after it came back: %v", got)
		}
		// A resource that is no longer laid out has no devices.
		s.layouts.cfg.Store(&Config{Enabled: true, Resource: "nvidia.com/other", KubeletDir: "/k"})
		synctest.Wait()
		if got := w.received(); len(got) != 1 || len(got[0]) != 0 {
			t.Fatalf("after the resource was renamed: %v", got)
		}
		w.cancel()
		if err := <-w.ended; status.Code(err) != codes.Canceled {
			t.Errorf("the stream ended with %v", err)
		}
	})
}

func TestStreamsAreIndependent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		snap := snapshot(2)
		s := newTestServer(snap)
		slow, fast, gone := watch(t, s, 1), watch(t, s, 100), watch(t, s, 100)
		synctest.Wait()
		gone.cancel()
		if err := <-gone.ended; status.Code(err) != codes.Canceled {
			t.Errorf("the stream ended with %v", err)
		}
		if c := s.streams.count(); c.open != 2 || c.openNow != 2 {
			t.Errorf("%+v, want two open streams", c)
		}
		// The slow stream's reader has one message and takes no other.
		for i := range 9 {
			snap = with(snap, 0, []health.State{health.Unhealthy, health.Healthy}[i%2])
			s.layouts.snapshots.Store(snap)
			synctest.Wait()
		}
		if got := fast.received(); len(got) != 10 || unhealthy(got[9]) == nil {
			t.Errorf("the fast stream got %d lists, want 10", len(got))
		}
		// When it reads again it skips what is past: the list it is stuck in, and then the newest.
		var got [][]*pluginapi.Device
		for range 3 {
			got = append(got, slow.received()...)
			synctest.Wait()
		}
		if len(got) != 2 || unhealthy(got[1]) == nil {
			t.Errorf("the slow stream got %v", got)
		}
		if got := gone.received(); len(got) != 1 {
			t.Errorf("the stream that ended got %d lists", len(got))
		}
		s.stop(false)
		for _, w := range []*watching{slow, fast} {
			if err := <-w.ended; status.Code(err) != codes.Unavailable {
				t.Errorf("a stream ended with %v when the server stopped", err)
			}
			w.cancel()
		}
		if c := s.streams.count(); c.open != 0 || c.openNow != 0 || !c.everNow {
			t.Errorf("%+v, want none open", c)
		}
	})
}

func TestStreamsOfAnEarlierRegistration(t *testing.T) {
	s := newTestServer(snapshot(1))
	oldLeaves, _ := s.streams.enter()
	s.streams.next()
	if c := s.streams.count(); c.open != 1 || c.openNow != 0 || c.everNow {
		t.Errorf("%+v, want one open stream, but none of this registration", c)
	}
	newLeaves, _ := s.streams.enter()
	newLeaves()
	if c := s.streams.count(); c.open != 1 || c.openNow != 0 || !c.everNow {
		t.Errorf("%+v, want the old stream only", c)
	}
	oldLeaves()
	if c := s.streams.count(); c.open != 0 || c.openNow != 0 {
		t.Errorf("%+v, want none", c)
	}
}

func TestSmallCalls(t *testing.T) {
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
	if r := serverOf(gpu, &health.Latest[Config]{}, &health.Latest[health.Snapshot]{}).resource(); r.Name != gpu || r.Devices != nil {
		t.Errorf("without anything stored: %+v", r)
	}
}

// One GPU of eight, each in ten replicas, becomes unhealthy and healthy again: from the snapshot to the
// message on each of two streams.
func BenchmarkHealthFlip8x10(b *testing.B) {
	cfg := DefaultConfig()
	cfg.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu, Replicas: 10}}
	s := newTestServer(snapshot(8))
	s.layouts.cfg.Store(&cfg)
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
