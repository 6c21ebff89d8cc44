package doctor

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// listen serves a unix socket by a function, or by none if that is nil.
func listen(t *testing.T, path string, serve func(net.Conn)) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	if serve == nil {
		return
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			serve(conn)
		}
	}()
}

// dead makes a socket that nobody listens at.
func dead(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestDoctorKubelet(t *testing.T) {
	for name, c := range map[string]struct {
		make func(t *testing.T, dir string)
		want []wanted
	}{
		"alive": {func(t *testing.T, dir string) {
			k, err := kubelettest.Start(dir)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(k.Stop)
		}, []wanted{{CheckOK, "answers at ", ""}}},
		"nothing": {func(*testing.T, string) {}, []wanted{{CheckFail, "no directory", "plugin.kubeletDir"}}},
		"no socket": {func(t *testing.T, dir string) {
			if err := os.Mkdir(dir+"/device-plugins", 0o700); err != nil {
				t.Fatal(err)
			}
		}, []wanted{{CheckFail, "kubelet.sock is not there", "start the kubelet"}}},
		"dead":  {func(t *testing.T, dir string) { dead(t, dir+"/device-plugins/kubelet.sock") }, []wanted{{CheckFail, "connection refused", "start the kubelet"}}},
		"hangs": {func(t *testing.T, dir string) { listen(t, dir+"/device-plugins/kubelet.sock", nil) }, []wanted{{CheckFail, "does not reply", "journalctl"}}},
		"not gRPC": {func(t *testing.T, dir string) {
			listen(t, dir+"/device-plugins/kubelet.sock", func(c net.Conn) {
				_, _ = c.Write([]byte("HTTP/1.1 400 Bad Request\r\n"))
			})
		}, []wanted{{CheckFail, "no gRPC server", "journalctl"}}},
		"not ours to write": {func(t *testing.T, dir string) {
			if os.Geteuid() == 0 {
				t.Skip("root may write everywhere")
			}
			if err := os.Mkdir(dir+"/device-plugins", 0o500); err != nil {
				t.Fatal(err)
			}
		}, []wanted{{CheckFail, "no right to make a socket", "root"}, {CheckFail, "kubelet.sock is not there", "start"}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // one waits for an answer that does not come
			dir := agenttest.SocketDir(t)
			c.make(t, dir)
			expect(t, checkKubelet(t.Context(), dir), c.want...)
		})
	}
}

func TestDoctorPodResources(t *testing.T) {
	dir := agenttest.SocketDir(t)
	expect(t, checkPodResources(t.Context(), dir), wanted{CheckWarn, "file does not exist", "mount " + dir + "/pod-resources"})
	k, err := kubelettest.Start(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Stop()
	expect(t, checkPodResources(t.Context(), dir), wanted{CheckOK, "answers", ""})
}

func TestDoctorOtherPlugins(t *testing.T) {
	c := config.DefaultConfig().Plugin
	c.KubeletDir = agenttest.SocketDir(t)
	check := func(want wanted) {
		t.Helper()
		expect(t, checkOtherPlugins(t.Context(), c), want)
	}
	dead(t, c.KubeletDir+"/device-plugins/nvidia-gpu.sock")
	check(wanted{CheckOK, "none", ""})
	listen(t, c.KubeletDir+"/device-plugins/nvidia-mig-1g.10gb.sock", nil)
	check(wanted{CheckWarn, "nvidia-mig-1g.10gb.sock", "take it off"})
	listen(t, c.KubeletDir+"/device-plugins/nvidiaGPU-1700000000.sock", nil)
	check(wanted{CheckFail, "nvidiaGPU-1700000000.sock", "take it off"})
	c.Resource = "example.com/gpu"
	check(wanted{CheckWarn, "nvidiaGPU-1700000000.sock", "plugin.enabled"})
	c.Enabled = false
	check(wanted{CheckOK, "nvidiaGPU-1700000000.sock serves GPUs; the plugin is off", ""})
	c.KubeletDir = agenttest.SocketDir(t)
	check(wanted{CheckInfo, "the plugin is off", ""})
}

func TestDoctorFindsAnAgent(t *testing.T) {
	c := config.DefaultConfig()
	c.Plugin.KubeletDir = agenttest.SocketDir(t)
	check := func(what string, f func(context.Context, config.Config) []Check, want wanted) {
		t.Helper()
		got := f(t.Context(), c)
		expect(t, got, want)
		if t.Failed() {
			t.Fatal(what)
		}
	}

	c.Metrics.Listen = "127.0.0.1:0"
	check("nobody", checkRunning, wanted{CheckInfo, "none runs", ""})
	check("nobody", checkPort, wanted{CheckOK, "is free", ""})
	c.Metrics.Listen = "192.0.2.1:9400"
	check("no address of ours", checkPort, wanted{CheckFail, "192.0.2.1:9400", "metrics.listen"})

	ready, name := http.StatusOK, "gpu-node-agent"
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/readyz" {
			w.WriteHeader(ready)
			_, _ = fmt.Fprintln(w, "source down: no libdcgm\nplugin: no GPUs")
			return
		}
		_, _ = fmt.Fprintln(w, name)
	}))
	defer web.Close()
	c.Metrics.Listen = strings.TrimPrefix(web.URL, "http://")
	check("ready", checkRunning, wanted{CheckOK, "ready", ""})
	check("ready", checkPort, wanted{CheckOK, "the agent that runs here", ""})
	ready = http.StatusServiceUnavailable
	check("not ready", checkRunning, wanted{CheckWarn, "not ready: source down: no libdcgm; plugin: no GPUs", "log"})

	name = "dcgm-exporter"
	check("another program", checkRunning, wanted{CheckInfo, "none runs", ""})
	check("another program", checkPort, wanted{CheckFail, "taken by another program", "dcgm-exporter"})

	listen(t, c.Plugin.KubeletDir+"/device-plugins/gpu-node-agent-nvidia.com_gpu.sock", nil)
	check("an agent with a password", checkRunning, wanted{CheckInfo, "gpu-node-agent-nvidia.com_gpu.sock", ""})
	check("an agent with a password", checkPort, wanted{CheckInfo, "most likely", ""})
}

func TestDoctorOwnFiles(t *testing.T) {
	c := config.DefaultConfig()
	dir := t.TempDir()
	c.Health.StateFile, c.Health.Socket = dir+"/a/b/state.json", ""
	expect(t, checkOwnFiles(c), wanted{CheckOK, "can be written", ""})
	// Where not even root can.
	if err := os.WriteFile(dir+"/file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c.Health.Socket = dir + "/file/agent.sock"
	expect(t, checkOwnFiles(c), wanted{CheckWarn, "no right to make " + c.Health.Socket, "set health.socket"})
}
