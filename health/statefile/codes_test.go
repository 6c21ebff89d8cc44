package statefile

import (
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestClearsTokens(t *testing.T) {
	for c := health.ClearsItself; c <= health.ClearsRestart; c++ {
		if got := parseClears(clearsToken(c)); got != c {
			t.Errorf("%v is written as %q and read as %v", c, clearsToken(c), got)
		}
	}
	if got := parseClears("moon phase"); got != health.ClearsOperator {
		t.Errorf("an unknown token is read as %v", got)
	}
}

func TestParseAction(t *testing.T) {
	for text, want := range map[string]health.Action{
		"reset-gpu":                        health.ActionResetGPU,
		"drain the node and reset the GPU": health.ActionResetGPU,
		"moon dance":                       health.ActionUnknown,
		"":                                 health.ActionUnknown,
	} {
		if got := parseAction(text); got != want {
			t.Errorf("%q is read as %q, want %q", text, got, want)
		}
	}
	for prose, a := range proseActions {
		if !a.Valid() {
			t.Errorf("%q stands for the unknown action %q", prose, a)
		}
	}
}
