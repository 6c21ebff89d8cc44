package web_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// A snapshot that gets old without a word from its source is a reason not to be ready.
func TestUnreadyWhenSnapshotIsOld(t *testing.T) {
	const reason = "GPUs were last measured "
	for name, c := range map[string]struct {
		status health.SourceStatus
		age    time.Duration
		want   string // "" for none
	}{
		"fresh":             {health.SourceUp, 0, ""},
		"within the bound":  {health.SourceUp, 13 * time.Second, ""},
		"older":             {health.SourceUp, 45 * time.Second, reason + "45s ago, though the source is up"},
		"the source stalls": {health.SourceStalled, 45 * time.Second, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				snapshot := &health.Snapshot{At: time.Now(), Source: health.Source{Status: c.status}}
				time.Sleep(c.age) //nolint:forbidigo // the bubble's time
				why := web.NotReady(snapshot, plugin.Status{}, 40*time.Second)
				i := slices.IndexFunc(why, func(s string) bool { return strings.HasPrefix(s, reason) })
				if i < 0 && c.want != "" || i >= 0 && why[i] != c.want {
					t.Errorf("not ready because of %q, want %q", why, c.want)
				}
			})
		})
	}
}
