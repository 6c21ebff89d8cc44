package plugin

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestRefusedAllocationIsLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zapcore.DebugLevel)
		s := newTestServer(with(snapshot(2), 1, health.Unhealthy))
		s.refusals = newRefusalLog(zap.New(core))
		refuse := func(ids ...string) {
			t.Helper()
			if _, err := s.Allocate(t.Context(), request(ids)); err == nil {
				t.Fatalf("%v: allocated", ids)
			}
		}
		if _, err := s.Allocate(t.Context(), request([]string{"GPU-0"})); err != nil || logs.Len() != 0 {
			t.Errorf("%v, log %v", err, logs.All())
		}
		refuse("GPU-0", "GPU-1")
		for _, line := range logs.All() {
			fields := line.ContextMap()
			if line.Message != msgRefused || line.Level != zapcore.WarnLevel || fields["reason"] != reasonUnhealthyDevice ||
				fields["ids"] != "GPU-0, GPU-1" || fields["suppressed"] != nil {
				t.Errorf("line %+v %v", line, fields)
			}
		}
		if logs.Len() != 1 {
			t.Fatalf("%d lines", logs.Len())
		}
		// A controller that replaces a refused pod every ten seconds for an hour.
		for range 363 {
			time.Sleep(10 * time.Second) //nolint:forbidigo // synthetic time
			refuse("GPU-1")
			s.refusals.flush(false)
		}
		if n := logs.Len(); n < 60 || n > 60+2*refusalLines {
			t.Errorf("%d lines in an hour", n)
		}
		s.refusals.flush(true)
		s.refusals.flush(true)
		if n := refusalsIn(logs); n != 364 {
			t.Errorf("the lines report %d refusals, want 364", n)
		}
		if _, refused := s.counts.read(); refused[reasonUnhealthyDevice] != 364 {
			t.Errorf("counted %v", refused)
		}
		// A burst is complete in the log when the limit allows the next line.
		for range 100 {
			refuse("GPU-1")
		}
		logs.TakeAll()
		time.Sleep(refusalInterval) //nolint:forbidigo // synthetic time
		s.refusals.flush(false)
		if n := logs.FilterField(zap.Uint64("suppressed", 99)).Len(); n != 1 || logs.Len() != 1 {
			t.Errorf("after a burst: %v", logs.All())
		}

		// After a quiet time each refusal has its line again.
		time.Sleep(refusalLines * refusalInterval) //nolint:forbidigo // synthetic time
		logs.TakeAll()
		refuse("GPU-9")
		refuse("GPU-1")
		if n := logs.Len(); n != 2 {
			t.Errorf("%d lines after a quiet time", n)
		}
	})
}

// refusalsIn returns how many refusals the lines report.
func refusalsIn(logs *observer.ObservedLogs) (n int) {
	for _, line := range logs.FilterMessage(msgRefused).All() {
		suppressed, _ := line.ContextMap()["suppressed"].(uint64)
		n += 1 + int(suppressed)
	}
	return n
}

// The log has all refusals when the plugin ends.
func TestRefusalsAreLoggedAtTheEnd(t *testing.T) {
	t.Parallel()
	h, k := startHarness(t, snapshot(1))
	for range 2 * refusalLines {
		if _, err := k.AllocateIDs(h.ctx, gpu, "GPU-9"); err == nil {
			t.Fatal("allocated")
		}
	}
	if n := h.logs.FilterMessage(msgRefused).Len(); n != refusalLines {
		t.Errorf("%d lines", n)
	}
	h.stop()
	if n := refusalsIn(h.logs); n != 2*refusalLines {
		t.Errorf("the lines report %d refusals, want %d", n, 2*refusalLines)
	}
}

// Every call that the agent does not answer is counted and logged, also one that nobody waits for or that is too large.
func TestAllocateEndsWithItsContext(t *testing.T) {
	core, logs := observer.New(zapcore.DebugLevel)
	s := newTestServer(snapshot(2))
	s.refusals = newRefusalLog(zap.New(core))
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range []struct {
		ctx        context.Context //nolint:containedctx // of one call
		containers int
		want       codes.Code
	}{{canceled, 1, codes.Canceled}, {t.Context(), maxContainers + 1, codes.ResourceExhausted}, {t.Context(), maxContainers, codes.OK}} {
		if _, err := s.Allocate(c.ctx, request(slices.Repeat([][]string{{"GPU-1"}}, c.containers)...)); status.Code(err) != c.want {
			t.Errorf("Allocate for %d containers: %v, want %v", c.containers, err, c.want)
		}
		preferred := &pluginapi.PreferredAllocationRequest{ContainerRequests: slices.Repeat(
			[]*pluginapi.ContainerPreferredAllocationRequest{{AllocationSize: 1}}, c.containers)}
		if _, err := s.GetPreferredAllocation(c.ctx, preferred); status.Code(err) != c.want {
			t.Errorf("GetPreferredAllocation for %d containers: %v, want %v", c.containers, err, c.want)
		}
	}
	if _, refused := s.counts.read(); refused[reasonOther] != 2 || logs.FilterMessage(msgRefused).Len() != 2 {
		t.Errorf("counted %v, logged %v", refused, logs.All())
	}
}

func TestRequestedIDsAreAbbreviated(t *testing.T) {
	var ids []string
	for i := range 100_000 {
		ids = append(ids, fmt.Sprint("GPU-", i))
	}
	if got := requestedIDs(request(ids[:3], ids)); len(got) > 200 {
		t.Errorf("%d bytes", len(got))
	}
}
