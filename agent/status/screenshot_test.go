package status

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

var screenshots = flag.String("screenshots", "", "directory of the pictures of TestScreenshots")

// scene is a node in a picture.
type scene struct {
	profile, plugin, scenario string
	pods                      []pod
	wait                      []string // what the status must contain before the picture is taken
}

type pod struct {
	container kubelettest.Container
	resource  string
	n         int
}

func scenes() []scene {
	const gpu = "nvidia.com/gpu"
	return []scene{
		{
			profile:  "h100-8",
			scenario: "[{at: 4s, gpu: 5, xid: 31}, {at: 5s, gpu: 3, xid: 79}, {at: 6s, gpu: 3, lost: true}, {at: 6s, gpu: 6, rowRemapPending: true}]",
			pods: []pod{
				{kubelettest.Container{Namespace: "training", Pod: "llm-70b-worker-0", Name: "torch"}, gpu, 4},
				{kubelettest.Container{Namespace: "inference", Pod: "chat-7d9f8c6b5-x2x4q", Name: "vllm"}, gpu, 2},
			},
			wait: []string{`"cause":"lost"`, `"cause":"row-remap-pending"`, `"pod":"llm-70b-worker-0"`, `"xid":31`},
		},
		{
			profile: "h100-8-mig", plugin: "migStrategy: mixed, ",
			scenario: "[{at: 4s, gpu: 1, temperature: 94}, {at: 5s, gpu: 3, xid: 79}, {at: 6s, gpu: 3, lost: true}]",
			pods: []pod{
				{kubelettest.Container{Namespace: "inference", Pod: "embeddings-6c5b9d-kk2pw", Name: "server"}, "nvidia.com/mig-1g.10gb", 3},
				{kubelettest.Container{Namespace: "notebooks", Pod: "jupyter-ada", Name: "notebook"}, "nvidia.com/mig-3g.40gb", 1},
			},
			wait: []string{`"cause":"lost"`, `"cause":"temperature"`, `"pod":"jupyter-ada"`, `"pod":"embeddings-6c5b9d-kk2pw"`},
		},
	}
}

// TestScreenshots takes pictures of a running agent (make screenshots). The README uses h100-8-light.png.
func TestScreenshots(t *testing.T) {
	if *screenshots == "" {
		t.Skip("needs -screenshots=DIR; see make screenshots")
	}
	browser, err := exec.LookPath("chromium")
	if err != nil {
		t.Skip("chromium is not installed")
	}
	binary := filepath.Join(t.TempDir(), "gpu-node-agent")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-ldflags", "-X main.version=1.0.0", "-o", binary, "../..").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, s := range scenes() {
		t.Run(s.profile, func(t *testing.T) {
			url := s.run(t, binary)
			for name, flags := range map[string][]string{
				"light": {"--window-size=1440,1500"},
				"dark":  {"--window-size=1440,1500", "--force-dark-mode"},
				"phone": {"--window-size=390,3000"},
			} {
				picture := filepath.Join(*screenshots, s.profile+"-"+name+".png")
				takePicture(t, browser, url, picture, flags...)
			}
		})
	}
}

// run starts a kubelet and an agent, plays the scenario, and returns the URL of the agent.
func (s scene) run(t *testing.T, binary string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "gna") // short enough for a unix socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	kubelet, err := kubelettest.Start(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(kubelet.Stop)
	config := fmt.Sprintf("source: {mode: sim, sim: {profile: %s, scenario: %s}}\nhealth: {stateFile: '', socket: ''}\n"+
		"plugin: {%skubeletDir: %s}\nmetrics: {listen: '%s'}\n", s.profile, s.scenario, s.plugin, dir, address)
	file := filepath.Join(dir, "config.yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(binary, "--config", file)
	cmd.Env = append(os.Environ(), "NODE_NAME=gpu-node-17")
	cmd.Stderr = t.Output()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
		cancel()
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		<-ended
	})

	for _, p := range s.pods {
		if _, err := kubelet.WaitFor(ctx, func(k kubelettest.State) bool { return k.Resources[p.resource].Allocatable() >= p.n }); err != nil {
			t.Fatal(err)
		}
		if _, err := kubelet.AllocateTo(ctx, p.container, p.resource, p.n); err != nil {
			t.Fatal(err)
		}
	}
	url := "http://" + address
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for missing := "a response"; missing != ""; {
		select {
		case <-ctx.Done():
			t.Fatalf("timed out: %s", missing)
		case <-tick.C:
		}
		if _, text, err := Ask(ctx, address, Access{}); err == nil {
			missing = ""
			for _, w := range s.wait {
				if !strings.Contains(string(text), w) {
					missing = w
				}
			}
		}
	}
	return url
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
	if err := reduceColours(picture); err != nil {
		t.Error(err)
	}
}

// reduceColours reduces a picture to its 256 most frequent colours. A page has few, except for antialiased letters.
func reduceColours(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	from, err := png.Decode(bytes.NewReader(text))
	if err != nil {
		return err
	}
	count := make(map[color.Color]int)
	size := from.Bounds()
	for y := range size.Dy() {
		for x := range size.Dx() {
			count[from.At(x, y)]++
		}
	}
	most := slices.SortedFunc(maps.Keys(count), func(a, b color.Color) int { return count[b] - count[a] })
	palette := color.Palette(most[:min(len(most), 256)])
	index := make(map[color.Color]uint8, len(most))
	for _, c := range most {
		index[c] = uint8(palette.Index(c))
	}
	to := image.NewPaletted(size, palette)
	for y := range size.Dy() {
		for x := range size.Dx() {
			to.SetColorIndex(x, y, index[from.At(x, y)])
		}
	}
	var b bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&b, to); err != nil {
		return err
	}
	return os.WriteFile(file, b.Bytes(), 0o600)
}
