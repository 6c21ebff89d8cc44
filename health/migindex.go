package health

import (
	"cmp"
	"slices"
)

// numberMIG sets Device.MIGIndex of every device: a MIG device's place among those of its GPU, by GPU instance and
// compute instance, which is how nvidia-smi -L counts them and DCGM does not report. A missing device has no place:
// the driver does not count it.
func numberMIG(devices []DeviceState) {
	var counted []*Device
	for i := range devices {
		d := &devices[i].Device
		d.MIGIndex = -1
		if d.Kind == KindMIG && devices[i].Sample.Presence != Missing {
			counted = append(counted, d)
		}
	}
	slices.SortFunc(counted, func(a, b *Device) int {
		return cmp.Or(cmp.Compare(a.Parent, b.Parent), cmp.Compare(a.GI, b.GI), cmp.Compare(a.CI, b.CI), cmp.Compare(a.ID, b.ID))
	})
	for n, d := range counted {
		d.MIGIndex = 0
		if n > 0 && counted[n-1].Parent == d.Parent {
			d.MIGIndex = counted[n-1].MIGIndex + 1
		}
	}
}
