package judge

import (
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

// keys returns the keys of the errors, a line each.
func keys(err error) string {
	if err == nil {
		return ""
	}
	var all []string
	for line := range strings.SplitSeq(err.Error(), "\n") {
		key, _, _ := strings.Cut(line, ": ")
		all = append(all, key)
	}
	return strings.Join(all, " ")
}

func TestConfigValidate(t *testing.T) {
	for _, c := range []Config{DefaultConfig(), cordoning("GPU-1", "MIG-1", "0", "3:1", "1b:00.0")} {
		if err := c.Validate(); err != nil {
			t.Error(err)
		}
	}
	bad := Config{
		Recovery: "maybe", Flap: FlapConfig{Trips: -1, Within: time.Millisecond}, RecoverAfter: -1, Socket: "here",
		Cordon: []string{"0", "", "-1", "*H100*", "mig-1g.*", "0:", "GPU-"}, Kubernetes: KubernetesConfig{Kubeconfig: "here"},
	}
	const want = "interval confirm recovery recoverAfter temperature flap.trips flap.within " +
		"cordon[1] cordon[2] cordon[3] cordon[4] cordon[5] cordon[6] xid.preset socket kubernetes.kubeconfig"
	if got := keys(bad.Validate()); got != want {
		t.Errorf("errors for %s, want %s", got, want)
	}
}

// The limits are part of what is allowed.
func TestConfigLimits(t *testing.T) {
	path := func(n int) string { return "/" + strings.Repeat("s", n-1) }
	for _, c := range []struct {
		change func(*Config)
		want   string // the key of the error
	}{
		{func(c *Config) { c.Interval = 100 * time.Millisecond }, ""},
		{func(c *Config) { c.Interval = 99 * time.Millisecond }, "interval"},
		{func(c *Config) { c.Interval = time.Minute }, ""},
		{func(c *Config) { c.Interval = time.Minute + 1 }, "interval"},
		{func(c *Config) { c.Confirm = 1 }, ""},
		{func(c *Config) { c.Confirm = 0 }, "confirm"},
		{func(c *Config) { c.Confirm = 100 }, ""},
		{func(c *Config) { c.Confirm = 101 }, "confirm"},
		{func(c *Config) { c.Recovery = RecoverAuto }, ""},
		{func(c *Config) { c.Recovery = RecoverAfterReset }, ""},
		{func(c *Config) { c.Recovery = RecoverNever }, ""},
		{func(c *Config) { c.RecoverAfter = 0 }, ""},
		{func(c *Config) { c.Temperature = 0 }, "temperature"},
		{func(c *Config) { c.Temperature = 0.1 }, ""},
		{func(c *Config) { c.Temperature = 199.9 }, ""},
		{func(c *Config) { c.Temperature = 200 }, "temperature"},
		{func(c *Config) { c.Flap.Trips = 0 }, ""},
		{func(c *Config) { c.Flap.Trips = 100 }, ""},
		{func(c *Config) { c.Flap.Trips = 101 }, "flap.trips"},
		{func(c *Config) { c.Flap.Within = time.Second }, ""},
		{func(c *Config) { c.XID.Warn = []int{0} }, "xid.warn[0]"},
		{func(c *Config) { c.Incidents.Warn = []string{"x"} }, "incidents.warn[0]"},
		{func(c *Config) { c.Socket = "" }, ""},
		{func(c *Config) { c.Socket = path(unixsock.MaxPath) }, ""},
		{func(c *Config) { c.Socket = path(unixsock.MaxPath + 1) }, "socket"},
		{func(c *Config) { c.Kubernetes.Kubeconfig = "/etc/kubeconfig" }, ""},
	} {
		config := DefaultConfig()
		if config.Socket == "" {
			t.Errorf("no state file or socket by default: %+v", config)
		}
		c.change(&config)
		if got := keys(config.Validate()); got != c.want {
			t.Errorf("%+v: errors for %q, want %q", config, got, c.want)
		}
	}
}
