package agent

import (
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
)

func TestDRAWarnings(t *testing.T) {
	for name, c := range map[string]struct {
		status dra.Status
		want   []string
	}{
		"off":              {dra.Status{}, nil},
		"served":           {dra.Status{Enabled: true, Registered: true}, nil},
		"not served":       {dra.Status{Enabled: true, Err: "waiting"}, nil}, // not ready
		"not published":    {dra.Status{Enabled: true, PublishErr: "forbidden"}, []string{"forbidden"}},
		"dropped features": {dra.Status{Enabled: true, DroppedFeatures: []string{"A", "B"}}, []string{"A, B"}},
		"checkpoint": {
			dra.Status{Checkpoint: durable.Failure{Path: "/x/c.json", Err: "no space", Since: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}},
			[]string{"/x/c.json cannot be written since 2026-01-02T03:04:05Z: no space; claims are refused"},
		},
		"all": {
			dra.Status{PublishErr: "forbidden", DroppedFeatures: []string{"A"}, Warning: "releasing"},
			[]string{"forbidden", "A", "releasing"},
		},
	} {
		got := draWarnings(c.status)
		if len(got) != len(c.want) {
			t.Errorf("%s: %q", name, got)
			continue
		}
		for i, part := range c.want {
			if !strings.HasPrefix(got[i], "dra: ") || !strings.HasSuffix(got[i], part) {
				t.Errorf("%s: %q, want %q", name, got[i], part)
			}
		}
	}
}
