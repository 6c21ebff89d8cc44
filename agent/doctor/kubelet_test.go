package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// listen serves a unix socket with a function. Without one, connections are never accepted.
func listen(t *testing.T, path string, serve func(net.Conn)) *net.UnixListener {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	if serve != nil {
		go func() {
			for conn, err := l.Accept(); err == nil; conn, err = l.Accept() {
				serve(conn)
			}
		}()
	}
	return l
}

// closedSocket creates a socket without a listener.
func closedSocket(t *testing.T, path string) {
	t.Helper()
	l := listen(t, path, nil)
	l.SetUnlinkOnClose(false)
	_ = l.Close()
}

func TestCheckKubelet(t *testing.T) {
	for name, c := range map[string]struct {
		make func(t *testing.T, dir string)
		want []want
	}{
		"alive":        {func(t *testing.T, dir string) { agenttest.StartKubelet(t, dir) }, []want{{CheckOK, "kubelet.sock", ""}}},
		"no directory": {func(*testing.T, string) {}, []want{{CheckFail, "file does not exist", "plugin.kubeletDir"}}},
		"no socket": {func(t *testing.T, dir string) {
			if err := os.Mkdir(dir+"/device-plugins", 0o700); err != nil {
				t.Fatal(err)
			}
		}, []want{{CheckFail, "kubelet.sock", "start the kubelet"}}},
		"closed": {
			func(t *testing.T, dir string) { closedSocket(t, dir+"/device-plugins/kubelet.sock") },
			[]want{{CheckFail, "connection refused", "start the kubelet"}},
		},
		"hangs": {
			func(t *testing.T, dir string) { listen(t, dir+"/device-plugins/kubelet.sock", nil) },
			[]want{{CheckFail, "i/o timeout", "journalctl"}},
		},
		"not gRPC": {func(t *testing.T, dir string) {
			listen(t, dir+"/device-plugins/kubelet.sock", func(c net.Conn) {
				_, _ = c.Write([]byte("HTTP/1.1 400 Bad Request\r\n"))
			})
		}, []want{{CheckFail, "gRPC", "journalctl"}}},
		"not writable": {func(t *testing.T, dir string) {
			if os.Geteuid() == 0 {
				t.Skip("root can write everywhere")
			}
			if err := os.Mkdir(dir+"/device-plugins", 0o500); err != nil {
				t.Fatal(err)
			}
		}, []want{{CheckFail, "permission denied", "root"}, {CheckFail, "kubelet.sock", "start"}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // one waits for its timeout
			dir := agenttest.SocketDir(t)
			c.make(t, dir)
			expect(t, checkKubelet(t.Context(), dir), c.want...)
		})
	}
}

func TestCheckPodResources(t *testing.T) {
	dir := agenttest.SocketDir(t)
	expect(t, checkPodResources(t.Context(), dir), want{CheckWarn, "file does not exist", "mount " + dir + "/pod-resources"})
	agenttest.StartKubelet(t, dir)
	expect(t, checkPodResources(t.Context(), dir), want{CheckOK, dir, ""})
}

func TestCheckOtherPlugins(t *testing.T) {
	c := config.DefaultConfig().Plugin
	c.KubeletDir = agenttest.SocketDir(t)
	check := func(want want) {
		t.Helper()
		expect(t, checkOtherPlugins(t.Context(), c), want)
	}
	closedSocket(t, c.KubeletDir+"/device-plugins/nvidia-gpu.sock")
	check(want{CheckOK, "", ""})
	listen(t, c.KubeletDir+"/device-plugins/nvidia-mig-1g.10gb.sock", nil)
	check(want{CheckWarn, "nvidia-mig-1g.10gb.sock", "plugin.enabled"})
	listen(t, c.KubeletDir+"/device-plugins/nvidiaGPU-1700000000.sock", nil)
	check(want{CheckFail, "nvidiaGPU-1700000000.sock", "plugin.enabled"})
	c.Resource = "example.com/gpu"
	check(want{CheckWarn, "nvidiaGPU-1700000000.sock", "plugin.enabled"})
	c.Enabled = false
	check(want{CheckOK, "nvidiaGPU-1700000000.sock", ""})
	c.KubeletDir = agenttest.SocketDir(t)
	check(want{CheckInfo, "plugin.enabled", ""})
}

// Another plugin is found by what the kubelet counts, whatever its socket's name. The look must not take its health events from the
// kubelet.
func TestCheckOtherPluginsAsksNone(t *testing.T) {
	c := config.DefaultConfig().Plugin
	c.KubeletDir = agenttest.SocketDir(t)
	k := agenttest.StartKubelet(t, c.KubeletDir)
	other, err := kubelettest.StartNVIDIA(t.Context(), c.KubeletDir, "example.com/gpu", "GPU-0", "GPU-1")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Stop()
	allocatable := func(n int) {
		t.Helper()
		if _, err := k.WaitFor(t.Context(),
			func(s kubelettest.State) bool { return s.Resources["example.com/gpu"].Allocatable() == n }); err != nil {
			t.Fatal(err)
		}
	}
	allocatable(2)
	expect(t, checkOtherPlugins(t.Context(), c), want{CheckFail, "example.com/gpu (2 devices)", "plugin.enabled"})
	if err := other.Fail("GPU-1"); err != nil {
		t.Fatal(err)
	}
	allocatable(1)
	if streams, allocates := other.Calls(); streams != 1 || allocates != 0 {
		t.Errorf("%d streams and %d allocations, want only the kubelet's", streams, allocates)
	}
	c.Resource = "example.com/gpu"
	expect(t, checkOtherPlugins(t.Context(), c), want{CheckWarn, "nvidia-gpu.sock", "plugin.enabled"})
}

// A kubelet without a plugin must not have allocatable devices.
func TestCheckOtherPluginsFindsDeadEndpoint(t *testing.T) {
	c := config.DefaultConfig().Plugin
	c.KubeletDir = agenttest.SocketDir(t)
	k := agenttest.StartKubelet(t, c.KubeletDir)
	snapshots, configs := &health.Latest[health.Snapshot]{}, &health.Latest[plugin.Config]{}
	snapshots.Store(agenttest.Node())
	configs.Store(&c)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- plugin.New(configs, snapshots, zap.NewNop()).Run(ctx) }()
	if _, err := k.WaitFor(t.Context(), func(s kubelettest.State) bool { return s.Resources[c.Resource].Allocatable() > 0 }); err != nil {
		t.Fatal(err)
	}
	expect(t, checkOtherPlugins(t.Context(), c), want{CheckOK, "", ""})
	k.KeepEndpoints(c.Resource)
	stop()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	expect(t, checkOtherPlugins(t.Context(), c), want{CheckWarn, c.Resource, "restart the kubelet"})
	if err := k.Restart(); err != nil {
		t.Fatal(err)
	}
	expect(t, checkOtherPlugins(t.Context(), c), want{CheckOK, "", ""})
}

func TestCheckAgentAndPort(t *testing.T) {
	c := config.DefaultConfig()
	c.Plugin.KubeletDir = agenttest.SocketDir(t)
	var engine survey
	checkAgent := func(ctx context.Context, c config.Config) []Check { return checkAgent(ctx, c, engine) }
	check := func(what string, f func(context.Context, config.Config) []Check, want want) {
		t.Helper()
		got := f(t.Context(), c)
		expect(t, got, want)
		if t.Failed() {
			t.Fatal(what)
		}
	}

	c.Metrics.Listen = "127.0.0.1:0"
	check("no server", checkAgent, want{CheckInfo, "", ""})
	check("no server", checkPort, want{CheckOK, c.Metrics.Listen, ""})
	c.Metrics.Listen = "192.0.2.1:9400"
	check("address of another host", checkPort, want{CheckFail, "192.0.2.1:9400", "metrics.listen"})

	ready, name, text := http.StatusOK, "gpu-node-agent", "ok"
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/readyz" {
			w.WriteHeader(ready)
			_, _ = fmt.Fprintln(w, text)
			return
		}
		_, _ = fmt.Fprintln(w, name)
	}))
	defer web.Close()
	c.Metrics.Listen = strings.TrimPrefix(web.URL, "http://")
	check("ready", checkAgent, want{CheckOK, "", ""})
	check("ready", checkPort, want{CheckOK, c.Metrics.Listen, ""})
	// /readyz follows at the agent's next poll.
	standalone := config.DefaultConfig().Source
	standalone.Address = "localhost:5555"
	engine = survey{source: standalone, engineErr: errors.New("connection refused")}
	check("ready, but the engine has just ended", checkAgent, want{CheckWarn, "connection refused", "host engine"})
	engine = survey{source: standalone, pollErr: errTimeout}
	check("ready, but the engine does not answer", checkAgent, want{CheckWarn, "no response within 30s", "DCGM"})
	engine = survey{source: standalone, reading: &health.Reading{}}
	check("ready, but the engine lists no GPU", checkAgent, want{CheckWarn, "lists no GPU", "DCGM"})
	engine = survey{source: standalone, libraryErr: errors.New("no libdcgm here, but beside the agent")}
	check("ready, and the engine is unknown", checkAgent, want{CheckOK, "", ""})
	engine = survey{source: config.DefaultConfig().Source, pollErr: errors.New("no driver here")}
	check("ready, with an engine of its own", checkAgent, want{CheckOK, "", ""})
	text = "ok\nhealth checks down: version mismatch"
	check("ready with a warning", checkAgent, want{CheckWarn, text[3:], "log"})
	ready, text = http.StatusServiceUnavailable, "source: down: no libdcgm\nplugin: no GPUs"
	check("not ready", checkAgent, want{CheckWarn, "source: down: no libdcgm; plugin: no GPUs", "log"})

	name = "dcgm-exporter"
	check("another program", checkAgent, want{CheckInfo, "", ""})
	check("another program", checkPort, want{CheckFail, c.Metrics.Listen, "dcgm-exporter"})

	listen(t, c.Plugin.KubeletDir+"/device-plugins/gpu-node-agent.sock", nil)
	check("an agent that requires a client certificate", checkAgent, want{CheckInfo, "gpu-node-agent.sock", ""})
	check("an agent that requires a client certificate", checkPort, want{CheckInfo, c.Metrics.Listen, ""})
}

// The host engine has just ended, and the agent has not polled since.
func TestReportOfDeadEngine(t *testing.T) {
	agent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_,
			_ = fmt.Fprintln(w, "ok\ngpu-node-agent")
	}))
	defer agent.Close()
	dir := agenttest.SocketDir(t)
	file := agenttest.WriteFile(t, dir, "config.yaml",
		fmt.Sprintf("source: {address: 'unix://%[1]s/engine.sock'}\nplugin: {kubeletDir: %[1]s}\n"+
			"health: {socket: ''}\nmetrics: {listen: '%[2]s'}\n", dir, strings.TrimPrefix(agent.URL, "http://")))
	var got []Check
	for _, c := range goodDoctor(goodNode().root(t), config.Loader{File: file, StateDir: dir}, nil).run(t.Context()).Checks {
		if c.Name == "agent" {
			got = append(got, c)
		}
	}
	expect(t, got, want{CheckWarn, "host engine: no connection", "host engine"})
}

func TestCheckAgentFiles(t *testing.T) {
	c := config.DefaultConfig()
	dir := t.TempDir()
	c.StateDir, c.Health.Socket = dir+"/a/b", ""
	expect(t, checkAgentFiles(c), want{CheckOK, "", ""})
	// Not even root can create a file below a file.
	c.Health.Socket = agenttest.WriteFile(t, dir, "file", "") + "/agent.sock"
	expect(t, checkAgentFiles(c), want{CheckWarn, c.Health.Socket, "health.socket"})
}
