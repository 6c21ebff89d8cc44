package agent

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// startReload returns an agent with the configuration in dir, and reloads in the background.
func startReload(t *testing.T, dir string, log *zap.Logger, hup <-chan os.Signal, afterLoad func()) *Agent {
	t.Helper()
	a := &Agent{
		loader: config.Loader{File: filepath.Join(dir, "config.yaml"), StateDir: dir}, log: log, level: zap.NewAtomicLevel(),
		reloadInterval: reloadInterval,
	}
	c, err := a.loader.Load()
	if err != nil {
		t.Fatal(err)
	}
	afterLoad()
	a.apply(c)
	a.lastReload.Store(&view.Reload{OK: true, At: time.Now()})
	go a.reloadOn(t.Context(), hup)
	synctest.Wait()
	return a
}

// waitIntervals waits for some reload intervals.
func waitIntervals(n int) {
	<-time.After(time.Duration(n) * reloadInterval)
	synctest.Wait()
}

func TestReloadWaitsForCompleteFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		agenttest.WriteFile(t, dir, "config.yaml", "source: {mode: sim}\nhealth: {temperature: 70}\n")
		a := startReload(t, dir, zap.NewNop(), nil, func() {})
		start := a.lastReload.Load()
		<-time.After(reloadInterval / 2)
		for _, text := range []string{"", "source: {mode: sim}\n", "source: {mode: sim}\nhealth: {temperature: 80}\n"} {
			if a.lastReload.Load() != start || a.healthConfig.Load().Temperature != 70 {
				t.Errorf("reloaded before %q was written", text)
			}
			agenttest.WriteFile(t, dir, "config.yaml", text)
			waitIntervals(1)
		}
		waitIntervals(1)
		if !a.lastReload.Load().OK || a.healthConfig.Load().Temperature != 80 {
			t.Errorf("complete file: %+v", a.lastReload.Load())
		}
		agenttest.WriteFile(t, dir, "config.yaml", "")
		waitIntervals(3)
		if a.lastReload.Load().OK || a.healthConfig.Load().Temperature != 80 {
			t.Errorf("empty file: %+v, %v °C", a.lastReload.Load(), a.healthConfig.Load().Temperature)
		}
	})
}

// A change between the first load and the first comparison is detected.
func TestReloadDetectsChangeDuringStart(t *testing.T) {
	const fields = "DCGM_FI_DEV_GPU_TEMP, gauge, temperature\n"
	for name, c := range map[string]struct {
		file, text string // the change
		reload     bool
	}{
		"configuration file": {"config.yaml", "health: {temperature: 80}\n", true},
		"named file":         {"fields.csv", "DCGM_FI_DEV_POWER_USAGE, gauge, power\n", true},
		"no change":          {"fields.csv", fields, false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range map[string]string{
				"config.yaml": fmt.Sprintf("source: {mode: sim}\nplugin: {nvidiaConfig: %[1]s/nvidia.yaml}\n"+
					"metrics: {fieldsFile: %[1]s/fields.csv, webConfigFile: %[1]s/web.yaml}\n", dir),
				"fields.csv":  fields,
				"nvidia.yaml": "version: v1\n",
				"web.yaml":    "http_server_config: {http2: true}\n",
			} {
				agenttest.WriteFile(t, dir, file, text)
			}
			synctest.Test(t, func(t *testing.T) {
				a := startReload(t, dir, zap.NewNop(), nil, func() { agenttest.WriteFile(t, dir, c.file, c.text) })
				start := a.lastReload.Load()
				waitIntervals(3)
				r := a.lastReload.Load()
				if (r != start) != c.reload || !r.OK {
					t.Errorf("reloaded: %v, %+v", r != start, r)
				}
				waitIntervals(3)
				if a.lastReload.Load() != r {
					t.Error("reloaded again without a change")
				}
			})
		})
	}
}

// Each SIGHUP is logged with its result. Without a signal, an error is logged once.
func TestReloadLogsEachSignal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		agenttest.WriteFile(t, dir, "config.yaml", "source: {mode: sim}\n")
		core, logs := observer.New(zap.InfoLevel)
		hup := make(chan os.Signal)
		startReload(t, dir, zap.New(core), hup, func() {})
		agenttest.WriteFile(t, dir, "config.yaml", "source: {mode: simm}\n")
		waitIntervals(5)
		for _, c := range []struct {
			text  string
			level zapcore.Level
		}{
			{"", zap.ErrorLevel}, {"", zap.ErrorLevel}, {"source: {mode: sim}\n", zap.InfoLevel}, {"", zap.InfoLevel},
		} {
			if c.text != "" {
				agenttest.WriteFile(t, dir, "config.yaml", c.text)
			}
			before := logs.FilterField(zap.String("reason", "SIGHUP")).Len()
			hup <- syscall.SIGHUP
			synctest.Wait()
			if all := logs.FilterField(zap.String("reason", "SIGHUP")).All(); len(all) != before+1 || all[before].Level != c.level {
				t.Errorf("%q: logged %v, want %v", c.text, all, c.level)
			}
		}
		waitIntervals(5)
		if all := logs.FilterField(zap.String("reason", "file changed")).All(); len(all) != 1 {
			t.Errorf("logged without a signal: %v", all)
		}
	})
}

// A change of the web configuration, or of a certificate that it names, is applied. An invalid one changes nothing.
func TestReloadAppliesWebConfig(t *testing.T) {
	t.Parallel()
	s := newSite(t, "{}\n")
	address := s.Address()
	s.MustGet(http.StatusOK, "/metrics", nil, "")
	conn := s.Dial(nil)
	if _, err := io.WriteString(conn, "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	response := make([]byte, len("HTTP/1.1 200"))
	if _, err := io.ReadFull(conn, response); err != nil {
		t.Fatal(err)
	}

	s.Write("web.yaml", agenttest.TLSConfig)
	s.Eventually("TLS", func() error { _, _, err := s.Get("/metrics", s.CA.Client(), ""); return err })
	if now := s.Address(); now != address {
		t.Errorf("address changed from %s to %s", address, now)
	}
	s.MustGet(http.StatusBadRequest, "/metrics", nil, "")
	if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a plain connection outlived the change to TLS")
	}

	awaitReload := func(what string, ok bool) {
		t.Helper()
		s.Eventually(what, func() error {
			if s.lastReload.Load().OK != ok {
				return errors.New("no reload yet")
			}
			return nil
		})
	}
	for text, want := range map[string]string{
		"{": "did not find", "tls: {}": "unmarshal", "tls_server_config: {cert_file: none.crt, key_file: server.key}": "none.crt",
		"basic_auth_users: {a: b}": "bcrypt", "tls_server_config: {cert_file: server.crt}": "missing one of key",
	} {
		s.Write("web.yaml", text)
		s.Eventually(text, func() error { // not only that a reload has failed: the one before did too
			if err := s.lastReload.Load().Err; !strings.Contains(err, "metrics.webConfigFile: "+s.File("web.yaml")) || !strings.Contains(err, want) {
				return errors.New(err)
			}
			return nil
		})
		s.MustGet(http.StatusOK, "/metrics", s.CA.Client(), "")
	}

	// A new certificate, in two steps.
	s.Write("web.yaml", agenttest.TLSConfig)
	awaitReload("valid configuration", true)
	serial := func() string {
		return s.Dial(s.CA.Client()).(*tls.Conn).ConnectionState().PeerCertificates[0].SerialNumber.String()
	}
	first := serial()
	s.CA.Issue(t, "next", "localhost")
	s.rename("next.crt", "server.crt")
	awaitReload("certificate without its key", false)
	if now := serial(); now != first {
		t.Errorf("certificate %s, want still %s", now, first)
	}
	s.rename("next.key", "server.key")
	s.Eventually("new certificate", func() error {
		if now := serial(); now == first {
			return errors.New("still " + first)
		}
		return nil
	})

	s.Write("web.yaml", agenttest.TLSConfig+agenttest.Users)
	s.Eventually("passwords", func() error {
		if code, _, err := s.Get("/metrics", s.CA.Client(), ""); code != http.StatusUnauthorized {
			return fmt.Errorf("%d %w", code, err)
		}
		return nil
	})
	s.MustGet(http.StatusOK, "/metrics", s.CA.Client(), "ada:1815")
	s.Write("config.yaml", "metrics: {listen: 127.0.0.1:0}\n")
	s.Eventually("plain HTTP again", func() error {
		code, _, err := s.Get("/metrics", nil, "")
		if code != http.StatusOK {
			return fmt.Errorf("%d %w", code, err)
		}
		return nil
	})
}

// gpus returns a snapshot of so many GPUs.
func gpus(n int, inventory string) *health.Snapshot {
	s := &health.Snapshot{At: time.Now(), Source: health.Source{Inventory: inventory}}
	for i := range n {
		id := health.DeviceID(fmt.Sprintf("GPU-09ee17f8-f59d-55e2-a8b5-%012d", i))
		s.Devices = append(s.Devices, health.DeviceState{Device: health.Device{ID: id, Kind: health.KindGPU, Index: i}})
	}
	return s
}

// Replicas that the kubelet could not receive are refused once the devices are known. A configuration from before stays if there is
// no last good one.
func TestReloadChecksDevices(t *testing.T) {
	file := func(replicas int, more string) string {
		return fmt.Sprintf("source: {mode: sim}\nplugin: {sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: %d}]}}}\n%s",
			replicas, more)
	}
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		agenttest.WriteFile(t, dir, "config.yaml", file(900, ""))
		a := startReload(t, dir, zap.NewNop(), nil, func() {})
		want := func(what string, replicas int, ok, saved bool) {
			t.Helper()
			waitIntervals(3)
			if n := a.pluginConfig.Load().Sharing.TimeSlicing.Resources[0].Replicas; n != replicas || a.lastReload.Load().OK != ok {
				t.Errorf("%s: %d replicas, %+v, %v", what, n, a.lastReload.Load(), a.problems())
			}
			if good := a.lastGood.Load(); (good != nil && bytes.Equal(*good, a.files)) != saved {
				t.Errorf("%s: saved: %v, want %v", what, !saved, saved)
			}
		}
		inventory := sourceID(a.sourceConfig.Load().SourceConfig).Inventory
		want("no devices yet", 900, true, false)
		a.snapshots.Store(gpus(8, "other"))
		want("devices of another source", 900, true, false)
		a.snapshots.Store(gpus(100, inventory))
		want("no last good one", 900, true, false)
		agenttest.WriteFile(t, dir, "config.yaml", file(800, ""))
		want("still too many", 800, true, false)
		agenttest.WriteFile(t, dir, "config.yaml", file(10, ""))
		want("fits", 10, true, true)
		agenttest.WriteFile(t, dir, "config.yaml", file(900, ""))
		want("refused", 10, false, true)
		agenttest.MustContain(t, a.lastReload.Load().Err, "plugin.sharing.timeSlicing.resources[0].replicas: ", "900")
		a.snapshots.Store(gpus(8, inventory))
		want("fewer devices", 900, true, true)
		a.snapshots.Store(gpus(100, inventory))
		want("more devices", 900, true, true)
	})
}

// A device in two kinds of sharing and units too small for the kubelet's list are refused as well.
func TestReloadChecksSharing(t *testing.T) {
	const id = "GPU-09ee17f8-f59d-55e2-a8b5-000000000001"
	for name, c := range map[string]struct{ sharing, key string }{
		"time-slicing and MPS": {
			"{timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2, devices: [1]}]}, mps: {resources: [{name: nvidia.com/gpu, replicas: " +
				"2, devices: [" + id + "]}]}}",
			"plugin.sharing.timeSlicing.resources[0] and plugin.sharing.mps.resources[0]: ",
		},
		"MPS and memory": {
			"{memory: {resource: nvidia.com/gpu-memory, devices: [1]}, mps: {resources: [{name: nvidia.com/gpu, replicas: 2, devices: [" + id +
				"]}]}}",
			"plugin.sharing.mps.resources[0] and plugin.sharing.memory: ",
		},
		"pinned memory": {
			"{mps: {resources: [{name: nvidia.com/gpu, replicas: 2, pinnedMemory: 41Gi}]}}",
			"plugin.sharing.mps.resources[0].pinnedMemory: ",
		},
		"unit": {"{memory: {resource: nvidia.com/gpu-memory, unit: 1Mi}}", "plugin.sharing.memory.unit: "},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				file := func(sharing string) {
					agenttest.WriteFile(t, dir, "config.yaml", "source: {mode: sim}\nplugin: {sharing: "+sharing+"}\n")
				}
				file("{memory: {resource: nvidia.com/gpu-memory}}")
				a := startReload(t, dir, zap.NewNop(), nil, func() {})
				snap := gpus(8, sourceID(a.sourceConfig.Load().SourceConfig).Inventory)
				for i := range snap.Devices {
					snap.Devices[i].Device.Memory = 81559 << 20
				}
				a.snapshots.Store(snap)
				waitIntervals(3)
				good := a.pluginConfig.Load()
				file(c.sharing)
				waitIntervals(3)
				if !reflect.DeepEqual(a.pluginConfig.Load(), good) || a.lastReload.Load().OK {
					t.Fatalf("%+v, %+v", a.pluginConfig.Load().Sharing, a.lastReload.Load())
				}
				agenttest.MustContain(t, a.lastReload.Load().Err, c.key)
				file("{}")
				waitIntervals(3)
				if !a.lastReload.Load().OK {
					t.Error(a.lastReload.Load().Err)
				}
			})
		})
	}
}

// After a start with too many replicas, a last good configuration that fits the same devices replaces the file when they are known.
func TestStartChecksDevices(t *testing.T) {
	const shared = "plugin: {sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: %d}]}}}\n"
	for name, c := range map[string]struct {
		saved    string
		replaced bool
	}{
		"fits":               {"source: {mode: sim}\n", true},
		"with shares":        {"source: {mode: sim}\n" + fmt.Sprintf(shared, 10), true},
		"too many too":       {"source: {mode: sim}\n" + fmt.Sprintf(shared, 901), false},
		"of another driver":  {"source: {mode: sim}\nplugin: {dra: {driverName: gpu.example.com}}\n", false},
		"for another source": {"source: {mode: sim, sim: {seed: 7}}\n", false},
		"invalid":            {"source: {mode: simm}\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				file := agenttest.WriteFile(t, dir, "config.yaml", c.saved)
				good, _ := config.Loader{File: file}.Load()
				agenttest.WriteFile(t, dir, "last-good-config.json", string(good.LastGood))
				agenttest.WriteFile(t, dir, "config.yaml", "source: {mode: sim}\n"+fmt.Sprintf(shared, 900))
				a := startReload(t, dir, zap.NewNop(), nil, func() {})
				a.snapshots.Store(gpus(100, sourceID(a.sourceConfig.Load().SourceConfig).Inventory))
				waitIntervals(3)
				want := *a.pluginConfig.Load()
				if c.replaced {
					want = good.Plugin
				}
				if got := *a.pluginConfig.Load(); !reflect.DeepEqual(got, want) || a.lastReload.Load().OK == c.replaced ||
					(a.lastGood.Load() != nil) != c.replaced {
					t.Errorf("%+v, %+v, %v", got.Sharing, a.lastReload.Load(), a.problems())
				}
			})
		})
	}
}
