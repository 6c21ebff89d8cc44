package dra

import (
	"maps"
	"os"
	"path/filepath"
	"testing"

	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestPCIeRoots(t *testing.T) {
	sys := t.TempDir()
	dir := filepath.Join(sys, "bus/pci/devices")
	if err := os.MkdirAll(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	for id, target := range map[string]string{
		"0000:1b:00.0": "../../../devices/pci0000:16/0000:16:01.0/0000:1b:00.0",
		"0000:43:00.0": "../../../devices/virtual/0000:43:00.0",
	} {
		if err := os.Symlink(target, filepath.Join(dir, id)); err != nil {
			t.Fatal(err)
		}
	}
	got := PCIeRoots(simulated(t, "h100-8-mig").Devices, deviceattribute.WithFSFromRoot(sys))
	if want := map[string]string{"00000000:1B:00.0": "pci0000:16"}; !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	// A MIG device has the attribute of its GPU.
	snap := simulated(t, "h100-8-mig")
	for name, d := range devicesOf(t, BuildPool(PoolInput{Config: configured(), Snapshot: snap, PCIeRoots: got})) {
		root, has := d.Attributes[deviceattribute.StandardDeviceAttributePCIeRoot]
		if want := *d.Attributes[deviceattribute.StandardDeviceAttributePCIBusID].StringValue == "0000:1b:00.0"; has != want ||
			has && *root.StringValue != "pci0000:16" {
			t.Errorf("%s: %v", name, root)
		}
	}
	if got := PCIeRoots([]health.DeviceState{{Device: health.Device{PCI: "../../etc"}}}, deviceattribute.WithFSFromRoot(sys)); len(got) != 0 {
		t.Error(got)
	}
}
