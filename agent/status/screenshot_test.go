package status

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

var screenshots = flag.String("screenshots", "", "directory of the pictures of TestScreenshots")

// TestScreenshots takes pictures of the status page (make screenshots). The README uses h100-8-light.png.
func TestScreenshots(t *testing.T) {
	if *screenshots == "" {
		t.Skip("needs -screenshots=DIR; see make screenshots")
	}
	browser, err := exec.LookPath("chromium")
	if err != nil {
		t.Fatal(err)
	}
	torch := podresources.Holder{Namespace: "training", Pod: "llm-70b-worker-0", Container: "torch"}
	vllm := podresources.Holder{Namespace: "inference", Pod: "chat-7d9f8c6b5-x2x4q", Container: "vllm"}
	notebook := podresources.Holder{Namespace: "notebooks", Pod: "jupyter-ada", Container: "notebook"}
	registered := func(names ...string) (p plugin.Status) {
		for _, name := range names {
			p.Resources = append(p.Resources, plugin.ResourceStatus{Name: name, Registered: true, Devices: 8, Healthy: 7, Allocations: 2})
		}
		return p
	}
	mig := registered("nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb", "nvidia.com/mig-3g.40gb")
	unregistered := plugin.Status{AuditErr: "pod-resources/kubelet.sock does not exist", Resources: []plugin.ResourceStatus{}}
	for _, r := range mig.Resources {
		r.Registered, r.Err = false, "the kubelet does not answer on device-plugins/kubelet.sock"
		unregistered.Resources = append(unregistered.Resources, r)
	}
	var allLost []timedEvent
	for i := range 16 {
		allLost = append(allLost, timedEvent{5 * time.Minute, fmt.Sprintf("{gpu: %d, lost: true}", i)})
	}
	for name, c := range map[string]simulation{
		"h100-8": {
			profile: "h100-8", plugin: registered("nvidia.com/gpu"),
			events: []timedEvent{
				{14 * time.Minute, "{gpu: 5, xid: 31}"},
				{13 * time.Minute, "{gpu: 3, xid: 79, lost: true}"},
				{885 * time.Second, "{gpu: 6, rowRemapPending: true}"},
			},
			holders: map[int]podresources.Holder{0: torch, 1: torch, 2: torch, 3: torch, 4: vllm, 5: vllm},
		},
		"h100-8-mig": {
			profile: "h100-8-mig", plugin: mig,
			events:  []timedEvent{{13 * time.Minute, "{gpu: 1, temperature: 94}"}, {10 * time.Minute, "{gpu: 3, xid: 79, lost: true}"}},
			holders: map[int]podresources.Holder{0: vllm, 2: notebook, 6: notebook},
		},
		"no-kubelet": {profile: "h100-8-mig", plugin: unregistered, holdersErr: unregistered.AuditErr},
		"all-lost":   {profile: "v100-16", plugin: registered("nvidia.com/gpu"), events: allLost},
		"no-source":  {profile: "h100-8", plugin: registered(), events: []timedEvent{{0, "{source: down}"}}},
		"source-down": {
			profile: "h100-8", plugin: registered("nvidia.com/gpu"),
			events: []timedEvent{
				{2 * time.Minute, "{gpu: 2, lost: true}"},
				{6 * time.Minute, "{gpu: 2, lost: false}"},
				{12 * time.Minute, "{source: down}"},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var page httptest.ResponseRecorder
			synctest.Test(t, func(t *testing.T) { page = *c.page(t) })
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Security-Policy", page.Header().Get("Content-Security-Policy"))
				w.Header().Set("Content-Type", page.Header().Get("Content-Type"))
				_, _ = w.Write(page.Body.Bytes())
			}))
			t.Cleanup(server.Close)
			for look, flags := range map[string][]string{
				"light": {"--window-size=1440,1500"},
				"dark":  {"--window-size=1440,1500", "--force-dark-mode"},
				"phone": {"--window-size=400,3000"},
			} {
				takePicture(t, browser, server.URL, filepath.Join(*screenshots, name+"-"+look+".png"), flags...)
			}
		})
	}
}

// timedEvent is an event of a simulation.
type timedEvent struct {
	at   time.Duration
	text string
}

// simulation is a simulated node.
type simulation struct {
	profile    string
	events     []timedEvent
	plugin     plugin.Status
	holders    map[int]podresources.Holder // by index of the GPU; of a partitioned GPU, it holds the first MIG device
	holdersErr string
}

// page returns the status page of the node after 15 minutes. The caller must run in a synctest bubble.
func (c simulation) page(t *testing.T) *httptest.ResponseRecorder {
	config := sim.DefaultConfig()
	config.Profile = c.profile
	for _, e := range c.events {
		event, err := sim.ParseEvent(e.text)
		if err != nil {
			t.Fatal(err)
		}
		event.At = e.at
		config.Scenario = append(config.Scenario, event)
	}
	source, err := sim.New(config, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	var (
		configs   health.Latest[judge.Config]
		sources   health.Latest[monitor.Source]
		snapshots health.Latest[health.Snapshot]
		events    Events
		history   History
	)
	healthConfig := judge.DefaultConfig()
	configs.Store(&healthConfig)
	sources.Store(&monitor.Source{
		SourceID: health.SourceID{Kind: "sim", Inventory: "sim", Simulated: true}, StallAfter: 10 * time.Second,
		Open: source.Open,
	})
	m := monitor.New(&configs, &sources, &snapshots, zap.NewNop())
	ctx, cancel := context.WithCancel(t.Context())
	var components sync.WaitGroup
	for _, run := range []func(context.Context) error{
		source.Run, m.Run,
		func(ctx context.Context) error { return events.Follow(ctx, &snapshots) },
		func(ctx context.Context) error {
			return history.Follow(ctx, &snapshots, func() time.Duration { return healthConfig.Interval })
		},
	} {
		components.Go(func() {
			if err := run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	<-time.After(15 * time.Minute)
	synctest.Wait()
	defer components.Wait()
	defer cancel()

	k := inputs{
		View: view.View{
			At: time.Now(), Node: "gpu-node-17", Version: "1.0.0", MaxAge: time.Minute, Reload: view.Reload{OK: true},
			PluginConfig: plugin.Config{Enabled: true}, Snapshot: snapshots.Load(), Plugin: c.plugin,
			Holders: podresources.Holders{At: time.Now(), Err: c.holdersErr, By: map[health.DeviceID][]podresources.Holder{}},
		},
		events: events.Latest(),
	}
	if c.holdersErr != "" {
		k.Holders.At = time.Time{}
	}
	for _, d := range k.Snapshot.Devices {
		h, held := c.holders[d.Device.Index]
		if held && !d.Device.MIGMode && (d.Device.Kind == health.KindGPU || d.Device.MIGIndex == 0) {
			k.Holders.By[d.Device.ID] = []podresources.Holder{h}
		}
	}
	w := httptest.NewRecorder()
	NewPages(func() Node { return newNode(k) }, &history, zap.NewNop()).
		ServeHTML(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
	t.Logf("%d bytes", w.Body.Len())
	return w
}

// takePicture takes one picture.
func takePicture(t *testing.T, browser, url, picture string, flags ...string) {
	t.Helper()
	picture, err := filepath.Abs(picture)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	profile, err := os.MkdirTemp("", "gna-chromium")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(profile) }()
	args := append([]string{
		"--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
		"--disable-component-update", "--disable-sync", "--disable-default-apps", "--hide-scrollbars",
		"--user-data-dir=" + profile, "--screenshot=" + picture,
	}, flags...)
	cmd := exec.CommandContext(ctx, browser, append(args, url)...)
	cmd.WaitDelay = 5 * time.Second // its child processes may keep the pipe open
	if out, err := cmd.CombinedOutput(); err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		t.Fatalf("%v: %s", err, out)
	}
}
