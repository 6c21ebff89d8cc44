package binarytest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

var screenshots = flag.String("screenshots", "", "directory of the pictures of TestScreenshots")

// pod is a container that gets devices before a picture is taken.
type pod struct {
	container kubelettest.Container
	resource  string
	devices   int
}

// TestScreenshots takes pictures of the status page (make screenshots). The README uses h100-8-light.png.
func TestScreenshots(t *testing.T) {
	if *screenshots == "" {
		t.Skip("needs -screenshots=DIR; see make screenshots")
	}
	browser, err := exec.LookPath("chromium")
	if err != nil {
		t.Skip("chromium is not installed")
	}
	for _, c := range []struct {
		profile, scenario string
		pods              []pod
		wait              []string // what the status must contain before the picture is taken
	}{
		{
			profile:  "h100-8",
			scenario: "[{at: 4s, gpu: 5, xid: 31}, {at: 5s, gpu: 3, xid: 79}, {at: 6s, gpu: 3, lost: true}, {at: 6s, gpu: 6, rowRemapPending: true}]",
			pods: []pod{
				{kubelettest.Container{Namespace: "training", Pod: "llm-70b-worker-0", Name: "torch"}, resource, 4},
				{kubelettest.Container{Namespace: "inference", Pod: "chat-7d9f8c6b5-x2x4q", Name: "vllm"}, resource, 2},
			},
			wait: []string{`"cause":"lost"`, `"cause":"row-remap-pending"`, `"pod":"llm-70b-worker-0"`, `"xid":31`},
		},
		{
			profile:  "h100-8-mig",
			scenario: "[{at: 4s, gpu: 1, temperature: 94}, {at: 5s, gpu: 3, xid: 79}, {at: 6s, gpu: 3, lost: true}]",
			pods: []pod{
				{kubelettest.Container{Namespace: "inference", Pod: "embeddings-6c5b9d-kk2pw", Name: "server"}, "nvidia.com/mig-1g.10gb", 3},
				{kubelettest.Container{Namespace: "notebooks", Pod: "jupyter-ada", Name: "notebook"}, "nvidia.com/mig-3g.40gb", 1},
			},
			wait: []string{`"cause":"lost"`, `"cause":"temperature"`, `"pod":"jupyter-ada"`, `"pod":"embeddings-6c5b9d-kk2pw"`},
		},
	} {
		t.Run(c.profile, func(t *testing.T) {
			p := newProcess(t, fmt.Sprintf("source: {mode: sim, sim: {profile: %s, scenario: %s}}", c.profile, c.scenario))
			kubelet := p.startKubelet()
			p.launch("NODE_NAME=gpu-node-17", "GPU_NODE_AGENT_PLUGIN_MIG_STRATEGY=mixed")
			for _, pod := range c.pods {
				p.await(pod.resource, func() bool { return kubelet.State().Resources[pod.resource].Allocatable() >= pod.devices })
				if _, err := kubelet.AllocateTo(t.Context(), pod.container, pod.resource, pod.devices); err != nil {
					t.Fatal(err)
				}
			}
			p.awaitPage("/api/v1/snapshot", http.StatusOK, c.wait...)
			for name, flags := range map[string][]string{
				"light": {"--window-size=1440,1500"},
				"dark":  {"--window-size=1440,1500", "--force-dark-mode"},
				"phone": {"--window-size=390,3000"},
			} {
				takePicture(t, browser, p.URL, filepath.Join(*screenshots, c.profile+"-"+name+".png"), flags...)
			}
		})
	}
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
