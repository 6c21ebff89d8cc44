package plugin

import (
	"regexp"
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/deviceref"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// newResolver returns a function that finds the device behind a kubelet ID. The ID's form depends on the plugin that
// registered the resource: a UUID (GPU-…, MIG-…) with or without a replica (::n), or, for a resource of GPUs, an index
// ("0", "0:1" for a MIG device, see runtimeID) or a name of GKE (nvidia0, nvidia0/gi1, nvidia0/gi1/vgpu2; see
// pkg/gpu/nvidia in container-engine-accelerators).
func newResolver(cfg Config, snap *health.Snapshot) podresources.Resolver {
	configured := make(map[string]bool)
	cfg.Enabled = true // another plugin may serve the same names
	for _, r := range Layout(cfg, snap) {
		configured[r.Name] = true
	}
	gke := regexp.MustCompile(`^nvidia(\d{1,9})(?:/gi(\d{1,9}))?(?:/vgpu\d+)?$`)
	return func(resource, id string) (health.DeviceID, bool) {
		device := deviceid.Parse(id).Device()
		if strings.HasPrefix(id, "GPU-") || strings.HasPrefix(id, "MIG-") {
			return device, true
		}
		if !configured[resource] && !strings.HasPrefix(resource, "nvidia.com/") || snap == nil {
			return "", false
		}
		if index, err := strconv.Atoi(string(device)); err == nil {
			return search(snap, func(d *health.Device) bool { return d.Kind == health.KindGPU && d.Index == index })
		}
		if gpu, mig, found := strings.Cut(string(device), ":"); found {
			return searchMIG(snap, gpu, mig)
		}
		m := gke.FindStringSubmatch(string(device))
		if m == nil {
			return "", false
		}
		minor, _ := strconv.Atoi(m[1]) // nine digits are no error
		if m[2] == "" {
			return search(snap, func(d *health.Device) bool { return d.Kind == health.KindGPU && d.Minor == minor })
		}
		gi, _ := strconv.Atoi(m[2])
		return search(snap, func(d *health.Device) bool { return d.Kind == health.KindMIG && d.Minor == minor && d.GI == gi })
	}
}

func search(snap *health.Snapshot, matches func(*health.Device) bool) (health.DeviceID, bool) {
	for i := range snap.Devices {
		if d := &snap.Devices[i].Device; matches(d) {
			return d.ID, true
		}
	}
	return "", false
}

// searchMIG finds a MIG device by the driver's index of its GPU and its index on the GPU.
func searchMIG(snap *health.Snapshot, gpu, mig string) (health.DeviceID, bool) {
	gpuIndex, okGPU := deviceref.ParseDigits(gpu)
	migIndex, okMIG := deviceref.ParseDigits(mig)
	if !okGPU || !okMIG {
		return "", false
	}
	return search(snap, func(d *health.Device) bool {
		return d.Kind == health.KindMIG && d.Index == gpuIndex && d.MIGIndex == migIndex
	})
}
