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
	if err := DefaultConfig().Validate(); err != nil {
		t.Fatal(err)
	}
	bad := Config{
		Recovery: "maybe", StateFile: "here", Flap: FlapConfig{Trips: -1, Within: time.Millisecond}, RecoverAfter: -1, Socket: "here",
		Kubernetes: KubernetesConfig{Kubeconfig: "here"},
	}
	const want = "interval confirm recovery recoverAfter temperature flap.trips flap.within xid.preset stateFile socket kubernetes.kubeconfig"
	if got := keys(bad.Validate()); got != want {
		t.Errorf("errors for %s, want %s", got, want)
	}
}
