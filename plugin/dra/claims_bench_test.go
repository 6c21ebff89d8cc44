package dra

import (
	"fmt"
	"os"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

// benchNode has eight GPUs. Nothing of it asks a source: a host engine that hangs delays no claim.
func benchNode(b *testing.B) *claimNode {
	n := newClaimNode(b)
	n.update(func(s *health.Snapshot) {
		s.Source.Status = health.SourceStalled
		s.Devices = nil
		for i := range 8 {
			s.Devices = append(s.Devices, health.DeviceState{
				Device: health.Device{
					ID: health.DeviceID(fmt.Sprintf("GPU-%d", i)), Kind: health.KindGPU, Index: i, Minor: i, Memory: 80 * gib,
					PCI: fmt.Sprintf("00000000:1%d:00.0", i),
					GI:  -1, CI: -1, MIGIndex: -1,
				},
				Sample: health.Sample{Presence: health.Present}, Verdict: health.Verdict{State: health.Healthy},
			})
		}
	})
	return n
}

func (n *claimNode) prepareAll(b *testing.B, claims []*resourceapi.ResourceClaim) {
	results, err := n.prepare.PrepareResourceClaims(b.Context(), claims)
	if err != nil {
		b.Fatal(err)
	}
	for _, r := range results {
		if r.Err != nil {
			b.Fatal(r.Err)
		}
	}
}

func (n *claimNode) unprepareAll(b *testing.B, claims []*resourceapi.ResourceClaim) {
	var refs []kubeletplugin.NamespacedObject
	for _, c := range claims {
		ref := kubeletplugin.NamespacedObject{UID: c.UID}
		ref.Namespace, ref.Name = c.Namespace, c.Name
		refs = append(refs, ref)
	}
	results, err := n.prepare.UnprepareResourceClaims(b.Context(), refs)
	if err != nil {
		b.Fatal(err)
	}
	for _, err := range results {
		if err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPrepare prepares eight devices beside a source that hangs: of one claim, and of eight claims.
func BenchmarkPrepare(b *testing.B) {
	one := claim("a")
	var each []*resourceapi.ResourceClaim
	for i := range 8 {
		r := result(fmt.Sprintf("gpu-%d", i))
		one.Status.Allocation.Devices.Results = append(one.Status.Allocation.Devices.Results, r)
		each = append(each, claim(fmt.Sprintf("c%d", i), r))
	}
	for name, claims := range map[string][]*resourceapi.ResourceClaim{"one claim": {one}, "eight claims": each} {
		b.Run(name, func(b *testing.B) {
			n := benchNode(b)
			for b.Loop() {
				n.prepareAll(b, claims)
				b.StopTimer()
				n.unprepareAll(b, claims)
				b.StartTimer()
			}
		})
	}
}

// BenchmarkPrepareCycles prepares and unprepares a claim again and again beside 200 others, and reports the anonymous memory before and
// after.
func BenchmarkPrepareCycles(b *testing.B) {
	n := benchNode(b)
	for i := range 200 {
		n.must(claim(fmt.Sprintf("admin%d", i), result(fmt.Sprintf("gpu-%d", i%8), asAdmin)))
	}
	cycle := func(i int) {
		claims := []*resourceapi.ResourceClaim{claim(fmt.Sprintf("c%d", i), result("gpu-0"))}
		n.prepareAll(b, claims)
		n.unprepareAll(b, claims)
	}
	for i := range 500 { // until the heap has its size
		cycle(i)
	}
	before := anonymousMemory(b)
	i := 500
	for b.Loop() {
		cycle(i)
		i++
	}
	b.ReportMetric(before, "RssAnon-KiB-before")
	b.ReportMetric(anonymousMemory(b), "RssAnon-KiB-after")
	if got := len(n.prepared()); got != 200 || len(n.specs()) != 200 {
		b.Errorf("left %d and %d", got, len(n.specs()))
	}
}

// anonymousMemory returns the anonymous memory of this process in KiB.
func anonymousMemory(b *testing.B) float64 {
	u, err := node.UsageOf(os.Getpid())
	if err != nil {
		b.Skip(err)
	}
	return float64(u.Anon) / 1024
}
