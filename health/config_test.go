package health

import (
	"strings"
	"testing"
	"time"
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
		Recovery: "maybe", StateFile: "here", Flap: FlapConfig{Trips: -1, Within: time.Millisecond}, RecoverAfter: -1, Socket: "here",
		Cordon: []string{"0", "", "-1", "*H100*", "mig-1g.*", "0:", "GPU-"}, Kubernetes: KubernetesConfig{Kubeconfig: "here"},
	}
	const want = "interval confirm recovery recoverAfter temperature flap.trips flap.within " +
		"cordon[1] cordon[2] cordon[3] cordon[4] cordon[5] cordon[6] xid.preset stateFile socket kubernetes.kubeconfig"
	if got := keys(bad.Validate()); got != want {
		t.Errorf("errors for %s, want %s", got, want)
	}
}
