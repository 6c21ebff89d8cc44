package podresources_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// follow runs a client of a kubelet's directory that queries rarely.
func follow(t *testing.T, dir string, timing podresources.Timing) *podresources.Client {
	t.Helper()
	settings := func() *podresources.Settings { return &podresources.Settings{KubeletDir: dir} }
	resolvers := func() podresources.Resolvers {
		return podresources.Resolvers{Resource: func(_, id string) (health.DeviceID, bool) { return health.DeviceID(id), true }}
	}
	c := podresources.New(settings, resolvers, timing, zap.NewNop())
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { c.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return c
}

func rarely() podresources.Timing {
	return podresources.Timing{
		Poll: 5 * time.Millisecond, Refresh: time.Hour, QuickRefresh: time.Hour, Settle: time.Hour, Call: 5 * time.Second,
		MaxAge: time.Hour, LogAfter: time.Hour,
	}
}

// await waits for holders that satisfy ok.
func await(t *testing.T, c *podresources.Client, ok func(*podresources.Holders) bool) *podresources.Holders {
	t.Helper()
	for deadline := time.After(time.Minute); ; {
		h, changed := c.Holders.Watch()
		if ok(h) {
			return h
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("still %+v", h)
		}
	}
}

func startKubelet(t *testing.T) (k *kubelettest.Kubelet, dir string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "gna")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	k, err = kubelettest.Start(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Stop)
	return k, dir
}

// Ask returns an answer to a question since the call, also for callers at once; without an answer in time, the last one.
func TestAsk(t *testing.T) {
	k, dir := startKubelet(t)
	c := follow(t, dir, rarely())
	await(t, c, func(h *podresources.Holders) bool { return h.By != nil })
	var calls sync.WaitGroup
	for range 10 {
		calls.Go(func() {
			begin := time.Now()
			if h := c.Ask(t.Context(), time.Minute); !h.At.After(begin) || h.Err != "" {
				t.Errorf("asked at %v, got %+v", begin, h)
			}
		})
	}
	calls.Wait()
	k.SetFault(kubelettest.Fault{ListError: "denied"})
	begin := time.Now()
	if h := c.Ask(t.Context(), time.Minute); !strings.Contains(h.Err, "denied") || !h.Asked.After(begin) || h.Silent {
		t.Errorf("got %+v", h)
	}
	k.SetFault(kubelettest.Fault{})
	if h := c.Ask(t.Context(), time.Minute); h.Err != "" {
		t.Errorf("got %+v", h)
	}
	stopped := podresources.New(func() *podresources.Settings { return nil }, nil, rarely(), zap.NewNop())
	if h := stopped.Ask(t.Context(), 10*time.Millisecond); !h.Pending || h.Unknown(time.Now()) == "" {
		t.Errorf("nobody asks, but got %+v", h)
	}
}

// The first answers of a new kubelet count as unsettled. Answers of an old one do not, also at the start of the client. A kubelet whose
// socket has a time in the future is new: the clock was set back.
func TestSettling(t *testing.T) {
	_, dir := startKubelet(t)
	for name, c := range map[string]struct {
		age      time.Duration
		settling bool
	}{
		"new":         {0, true},
		"old":         {6 * time.Hour, false},
		"future time": {-time.Hour, true},
	} {
		at := time.Now().Add(-c.age)
		if err := os.Chtimes(filepath.Join(dir, "pod-resources", "kubelet.sock"), at, at); err != nil {
			t.Fatal(err)
		}
		h := await(t, follow(t, dir, rarely()), func(h *podresources.Holders) bool { return h.By != nil })
		if h.Settling != c.settling || (h.Unknown(time.Now()) != "") != c.settling || h.Stale(time.Now()) != "" {
			t.Errorf("%s: %+v", name, h)
		}
	}
}

// A kubelet without the API, or that refuses longer than a new one reads its pods, does not tell. One that is down is about to start.
func TestSilent(t *testing.T) {
	dir := t.TempDir()
	timing := rarely()
	timing.Settle = time.Millisecond
	c := follow(t, dir, timing)
	await(t, c, func(h *podresources.Holders) bool { return h.Silent && h.Err != "" })
	if err := os.Mkdir(filepath.Join(dir, "pod-resources"), 0o750); err != nil {
		t.Fatal(err)
	}
	ask := func() podresources.Holders { return c.Ask(t.Context(), time.Minute) }
	for range 2 {
		if h := ask(); h.Silent || h.Err == "" {
			t.Errorf("down: %+v", h)
		}
	}
	k, err := kubelettest.Start(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Stop)
	k.SetFault(kubelettest.Fault{ListError: "denied"})
	await(t, c, func(h *podresources.Holders) bool { return strings.Contains(h.Err, "denied") })
	for h := ask(); !h.Silent; h = ask() {
		if h.Err == "" {
			t.Fatalf("refuses: %+v", h)
		}
	}
	if err := k.Restart(); err != nil {
		t.Fatal(err)
	}
	await(t, c, func(h *podresources.Holders) bool { return !h.Silent })
	k.SetFault(kubelettest.Fault{})
	if h := ask(); h.Silent || h.Err != "" {
		t.Errorf("answers: %+v", h)
	}
}
