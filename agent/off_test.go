package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// TestPluginOff: an agent that only shows is ready, and says that it does no more; a reload makes it serve, and
// another one takes the GPUs back.
func TestPluginOff(t *testing.T) {
	t.Parallel()
	s := newSite(t, "")
	dir := tempDir(t)
	kubelet, err := kubelettest.Start(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(kubelet.Stop)
	configure := func(plugin string) {
		s.write("config.yaml", fmt.Sprintf("metrics: {listen: 127.0.0.1:0}\nplugin: {kubeletDir: %s, %s}\n", dir, plugin))
	}
	configure(`exclude: ["*"]`)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.devices.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})

	ready := func(want int, says string) {
		t.Helper()
		s.eventually(fmt.Sprint("/readyz is ", want, " and says ", says), func() error {
			code, text, err := s.ask(readyzPath, nil, "")
			if err == nil && (code != want || !strings.Contains(text, says)) {
				err = fmt.Errorf("%d: %s", code, text)
			}
			return err
		})
	}
	shows := func(word, metric string) {
		t.Helper()
		var status NodeStatus
		if err := json.Unmarshal([]byte(s.must(http.StatusOK, snapshotPath, nil, "")), &status); err != nil {
			t.Fatal(err)
		}
		if status.Kubelet.Plugin != word || !status.Ready || status.Kubelet.Error != "" || (word == "off") != (len(status.Kubelet.Resources) == 0) {
			t.Errorf("%+v, want it to be %s", status.Kubelet, word)
		}
		page, table := s.must(http.StatusOK, "/", nil, ""), status.Table(false, false)
		if off := word == "off"; strings.Contains(page, "plugin off") != off || strings.Contains(table, "plugin off") != off {
			t.Errorf("it is %s, but the page and the table say\n%s\n%s", word, page, table)
		}
		mustHave(t, s.must(http.StatusOK, "/metrics", nil, ""), "\ngpu_node_agent_plugin_enabled "+metric+"\n")
	}

	ready(http.StatusServiceUnavailable, "plugin.include and plugin.exclude leave none")
	configure("enabled: false")
	ready(http.StatusOK, "ok")
	shows("off", "0")
	if s := kubelet.State(); len(s.Resources) != 0 {
		t.Errorf("registered: %+v", s.Resources)
	}
	configure("enabled: true")
	has := func(healthy, all int) {
		t.Helper()
		s.eventually(fmt.Sprintf("the kubelet has %d of %d", healthy, all), func() error {
			r := kubelet.State().Resources["nvidia.com/gpu"]
			if r.Registrations != 1 || r.Allocatable() != healthy || r.Capacity() != all {
				return fmt.Errorf("%+v", r)
			}
			return nil
		})
	}
	has(2, 3)
	ready(http.StatusOK, "ok")
	shows("on", "1")
	configure("enabled: false")
	has(0, 0)
	s.eventually("the plugin is off", func() error {
		if st := s.devices.Status(); !st.Off || len(st.Resources) != 0 {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
	ready(http.StatusOK, "ok")
	shows("off", "0")
}

// TestDoctorWhenOff: what only a device plugin needs is not missed.
func TestDoctorWhenOff(t *testing.T) {
	dir := tempDir(t)
	file := filepath.Join(dir, "config.yaml")
	text := fmt.Sprintf("plugin: {kubeletDir: %[1]s, enabled: false, deviceList: [cdi-cri]}\n"+
		"health: {stateFile: %[1]s/state.json, socket: ''}\nmetrics: {listen: '127.0.0.1:0'}\n", dir)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	report := goodDoctor(goodNode().root(t), Loader{File: file}, goodReading()).run(t.Context())
	var off, missed []string
	for _, c := range report.Checks {
		switch {
		case strings.Contains(c.Found, "not needed: the plugin is off (plugin.enabled)"):
			off = append(off, c.Name)
		case c.Status != CheckOK && c.Status != CheckInfo:
			missed = append(missed, c.Name)
		}
	}
	if want := []string{"container runtime", "CDI specs", "kubelet"}; !slices.Equal(off, want) || !report.OK {
		t.Errorf("not needed: %v, want %v:\n%s", off, want, report)
	}
	// Metrics have no pods without it.
	if !slices.Equal(missed, []string{"pod resources"}) {
		t.Errorf("missed: %v:\n%s", missed, report)
	}
}
