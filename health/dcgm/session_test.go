//go:build cgo && linux

package dcgm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/lib"
)

func TestConnectAddress(t *testing.T) {
	tests := []struct {
		address, want string
		socket        bool
	}{
		{"dcgm.example:5555", "dcgm.example:5555", false},
		{"10.0.0.1:5555", "10.0.0.1:5555", false},
		{"unix:///run/nv-hostengine.sock", "/run/nv-hostengine.sock", true},
	}
	for _, tt := range tests {
		t.Run(tt.address, func(t *testing.T) {
			cfg := testConfig()
			cfg.Address = tt.address
			b := openFixture(t, 1, cfg)
			address, socket := b.lib.Address()
			if address != tt.want || socket != tt.socket {
				t.Errorf("dcgmConnect_v2(%q, unix socket %v), want (%q, %v)", address, socket, tt.want, tt.socket)
			}
			for _, function := range []string{"dcgmStartEmbedded", "dcgmConnect_v3"} {
				b.expectCalls(function, 0)
			}
			_, r := b.poll()
			want := health.Versions{Driver: "580.95.05", CUDA: "13.0", DCGM: "4.6.0", Engine: "4.5.2"}
			if r.Versions != want {
				t.Errorf("versions %+v, want %+v", r.Versions, want)
			}
		})
	}
}

func TestOpenInvalidAddress(t *testing.T) {
	b := newFixture(t, 0)
	for _, address := range []string{"unix://run/sock", "http://host:5555", "tcp://host:5555"} {
		cfg := testConfig()
		cfg.Address = address
		_, err := open(t.Context(), cfg, b.log, b.clock.now)
		if err == nil || !strings.Contains(err.Error(), address) {
			t.Errorf("%s: error %v, want one with the address", address, err)
		}
	}
	b.expectCalls("dcgmInit", 0)
}

// After a failure of any call in Open nothing remains, and the next Open works. The error has the address and DCGM's text.
func TestFailedOpenLeaksNothing(t *testing.T) {
	connecting := []string{"dcgmInit", "dcgmConnect_v2", "dcgmStartEmbedded"} // after which go-dcgm leaves the library initialized
	functions := append([]string{
		"dcgmGetEntityGroupEntities", "dcgmGetGpuInstanceHierarchy", "dcgmGroupCreate", "dcgmGroupAddEntity",
		"dcgmFieldGroupCreate", "dcgmWatchFields", "dcgmUpdateAllFields", "dcgmEntitiesGetLatestValues",
	}, connecting...)
	for _, function := range functions {
		t.Run(function, func(t *testing.T) {
			b := newFixture(t, 2)
			cfg := testConfig()
			if function == "dcgmConnect_v2" {
				cfg = hostConfig()
			}
			b.lib.Fail(function, errTimeout, -1)
			for range 3 {
				s, err := Open(t.Context(), cfg, b.log)
				if err == nil || s != nil || !strings.Contains(err.Error(), cfg.Address) || !strings.Contains(err.Error(), lib.ErrorText(errTimeout)) {
					t.Fatalf("Open: session %v, error %v", s, err)
				}
				if b.lib.Initialized() && !slices.Contains(connecting, function) {
					t.Error("the library is still initialized")
				}
			}
			b.lib.Fail("", 0, 0)
			b.open(cfg).poll()
		})
	}
}

func TestReconnectAfterDeadEngine(t *testing.T) {
	b := newFixture(t, 2)
	cfg := hostConfig()
	first := b.open(cfg).session
	b.poll()

	b.lib.Fail("*", errNotConnected, -1)
	_, err := b.Poll(t.Context())
	if err == nil || !strings.Contains(err.Error(), "Host engine connection invalid") {
		t.Fatalf("Poll of a dead engine: %v", err)
	}
	if _, again := b.Poll(t.Context()); again == nil || b.lib.Calls("dcgmEntitiesGetLatestValues") > 3 {
		t.Errorf("Poll of a failed session: %v", again)
	}
	// Close makes no calls to remove groups: each could last a minute.
	groups := b.lib.Calls("dcgmGroupDestroy")
	if err := first.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	b.expectCalls("dcgmGroupDestroy", groups)
	if _, err := Open(t.Context(), cfg, b.log); err == nil {
		t.Fatal("Open of a dead engine succeeded")
	}

	b.lib.Fail("", 0, 0)
	samples, _ := b.open(cfg).poll()
	if s := samples[gpuID(1)]; s.Values[health.FieldGPUTemp] != 41 || s.Presence != health.Present {
		t.Errorf("after the reconnect: %+v", s)
	}
}

func TestPollCancelledContext(t *testing.T) {
	b := openFixture(t, 1, testConfig())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.Poll(ctx); err == nil {
		t.Error("Poll with a cancelled context succeeded")
	}
	if _, err := Open(ctx, testConfig(), b.log); err == nil {
		t.Error("Open with a cancelled context succeeded")
	}
	b.poll()
}

// go-dcgm returns DCGM's number in some errors, in the text of others, and mostly not at all (OBSERVED.md#error-codes).
func TestErrorCode(t *testing.T) {
	for err, want := range map[error]int{
		&dcgm.Error{Code: dcgm.DCGM_ST_TIMEOUT}:                         dcgm.DCGM_ST_TIMEOUT,
		fmt.Errorf("read: %w", &dcgm.Error{Code: dcgm.DCGM_ST_NO_DATA}): dcgm.DCGM_ST_NO_DATA,
		errors.New("the dcgm_fields.h call failed with error code -21"): dcgm.DCGM_ST_CONNECTION_NOT_VALID,
		errors.New("error connecting to nv-hostengine: something"):      0,
		errors.New("failed with error code without a number"):           0,
	} {
		if got := errorCode(err); got != want {
			t.Errorf("%v: code %d, want %d", err, got, want)
		}
	}
}
