package metrics

import (
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// A missing GPU whose index another one has keeps its series, without the index.
func TestMissingGPUHasNoIndexLabel(t *testing.T) {
	snap := testNode()
	missing, mig := &snap.Devices[1], snap.Devices[3]
	missing.Device.Index, missing.Sample = -1, health.Sample{Presence: health.Missing}
	mig.Device.ID, mig.Device.Parent, mig.Device.Index = "MIG-missing", missing.Device.ID, -1
	snap.Devices = append(snap.Devices, mig)
	snap.Entities = append(snap.Entities, health.Entity{
		Kind: health.EntityGPULink, ID: 1, GPU: missing.Device.ID, Values: map[health.Field]float64{health.FieldGPUTemp: 1},
	})
	src := testSources(snap)
	asked := false
	src.Jobs = func(index int, _ string) []string { asked = asked || index < 0; return []string{"job"} }
	found := 0
	for line := range strings.Lines(render(t, collectorOf(src))) {
		of := strings.Contains(line, `="`+string(missing.Device.ID)+`"`) || strings.Contains(line, `="MIG-missing"`)
		if !of || strings.HasPrefix(line, "#") || strings.HasPrefix(line, namespace+"device_info") &&
			!strings.Contains(line, `UUID="`+string(missing.Device.ID)) {
			continue
		}
		found++
		if !strings.Contains(line, `gpu=""`) || strings.Contains(line, `device="nvidia`) || strings.Contains(line, `hpc_job="job"`) {
			t.Error(line)
		}
	}
	if found < 10 || asked {
		t.Errorf("%d series; jobs of no index: %v", found, asked)
	}
}
