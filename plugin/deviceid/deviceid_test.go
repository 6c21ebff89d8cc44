package deviceid_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
)

func TestParse(t *testing.T) {
	type parts struct {
		device health.DeviceID
		kind   deviceid.Kind
		size   uint64
		number int
	}
	for text, want := range map[string]parts{
		"GPU-1":                         {"GPU-1", deviceid.Whole, 0, 0},
		"GPU-1::3":                      {"GPU-1", deviceid.Replica, 0, 3},
		"MIG-1::10":                     {"MIG-1", deviceid.Replica, 0, 10},
		"GPU-1::mps4::3":                {"GPU-1", deviceid.MPSShare, 4, 3},
		"GPU-1::mps8192Mi::0":           {"GPU-1", deviceid.MPSMemory, 8192, 0},
		"GPU-1::1024Mi::3":              {"GPU-1", deviceid.Memory, 1024, 3},
		"GPU-1::1024Mi-mps::3":          {"GPU-1", deviceid.MemoryByMPS, 1024, 3},
		"GPU-1::999999999Mi::999999999": {"GPU-1", deviceid.Memory, 999999999, 999999999},

		// of other plugins
		"":                  {"", deviceid.Whole, 0, 0},
		"GPU-a-b":           {"GPU-a-b", deviceid.Whole, 0, 0},
		"nvidia0/gi1/vgpu2": {"nvidia0/gi1/vgpu2", deviceid.Whole, 0, 0},
		"0::1":              {"0", deviceid.Replica, 0, 1},
		"0:1::2":            {"0:1", deviceid.Replica, 0, 2},
		"GPU-1::":           {"GPU-1", deviceid.Other, 0, 0},
		"GPU-1::x":          {"GPU-1", deviceid.Other, 0, 0},

		// not as the agent writes them
		"GPU-1:::3":                  {"GPU-1", deviceid.Other, 0, 0},
		"GPU-1::03":                  {"GPU-1", deviceid.Other, 0, 0},
		"GPU-1::+3":                  {"GPU-1", deviceid.Other, 0, 0},
		"GPU-1::-3":                  {"GPU-1", deviceid.Other, 0, 0},
		"GPU-1::1000000000":          {"GPU-1", deviceid.Other, 0, 0},
		"GPU-1::1024Mi":              {"GPU-1", deviceid.Other, 0, 0},
		"GPU-1::1024Mi::":            {"GPU-1", deviceid.Other, 0, 0},
		"GPU-1::1024::3":             {"GPU-1", deviceid.Other, 0, 0},
		"GPU-1::01024Mi::3":          {"GPU-1", deviceid.Other, 0, 0},
		"GPU-1::1000000000Mi::3":     {"GPU-1", deviceid.Other, 0, 0},
		"GPU-1::Mi::3":               {"GPU-1", deviceid.Other, 0, 0},
		"GPU-1::mps::3":              {"GPU-1", deviceid.Other, 0, 0},
		"GPU-1::mps1024Mi-mps::3":    {"GPU-1", deviceid.Other, 0, 0},
		"GPU-1::1024-mps::3":         {"GPU-1", deviceid.Other, 0, 0},
		"GPU-1::1024Mi::3::0":        {"GPU-1", deviceid.Other, 0, 0},
		"GPU-1::mps4::3\n":           {"GPU-1", deviceid.Other, 0, 0},
		"GPU-1::1024Mi-mps-mps::100": {"GPU-1", deviceid.Other, 0, 0},
	} {
		id := deviceid.Parse(text)
		n, ok := id.Form().Number(id)
		got := parts{id.Device(), id.Form().Kind, id.Form().Size, n}
		if ok == (want.kind == deviceid.Other) {
			t.Errorf("%q has a number: %v", text, ok)
		}
		if got != want || id.String() != text {
			t.Errorf("%q: %+v, want %+v", text, got, want)
		}
	}
}

func TestUnits(t *testing.T) {
	form := deviceid.Form{Kind: deviceid.Memory, Size: 1024}
	for _, n := range []int{0, 1, 10, 11, 101, 1001} {
		next := 0
		for i, text := range form.Units("GPU-1", n) {
			if want := fmt.Sprint("GPU-1::1024Mi::", i); text != want || i != next {
				t.Errorf("%d of %d: %s, want %s", i, n, text, want)
			}
			next++
		}
		if next != n {
			t.Fatalf("%d units, want %d", next, n)
		}
	}
	for i, text := range (deviceid.Form{}).Units("GPU-1", 1) {
		if i != 0 || text != "GPU-1" {
			t.Errorf("a whole device has the unit %d: %s", i, text)
		}
	}
	for range form.Units("GPU-1", 3) { // may be left
		break
	}
}

// FuzzParse checks that any text is an ID, and that one in a form of the agent is the text that the agent writes.
func FuzzParse(f *testing.F) {
	for _, text := range []string{
		"GPU-1", "GPU-1::3", "GPU-1::mps4::3", "GPU-1::mps8192Mi::0", "GPU-1::1024Mi::3", "GPU-1::1024Mi-mps::3", "nvidia0/gi1/vgpu2", "0:1",
		"::", "a:::3", "a::::3", "a::+1", "a::01", "a::mps-mps::0", "a::Mi::0", "a::18446744073709551616Mi::0", "a::99999999999", "a::b::c::d",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		id := deviceid.Parse(text)
		device, _, unit := strings.Cut(text, "::")
		form := id.Form()
		n, ok := form.Number(id)
		if id.String() != text || string(id.Device()) != device || (form.Kind != deviceid.Whole) != unit || n < 0 ||
			ok != (form.Kind != deviceid.Other) {
			t.Errorf("%q is unit %d of %q in the form %+v", text, n, id.Device(), form)
		}
		if ok && form.ID(id.Device(), n) != id {
			t.Errorf("%q: the agent writes %q", text, form.ID(id.Device(), n))
		}
	})
}

// FuzzUnit checks that the text of an ID has all its parts, so that no other ID has that text.
func FuzzUnit(f *testing.F) {
	f.Add("GPU-1", uint8(0), uint32(0), uint32(0))
	f.Add("GPU-1", uint8(1), uint32(0), uint32(9))
	f.Add("MIG-1", uint8(2), uint32(48), uint32(47))
	f.Add("GPU-1", uint8(3), uint32(8192), uint32(0))
	f.Add("0:1", uint8(4), uint32(1024), uint32(1e9-1))
	f.Add("", uint8(5), uint32(1e9-1), uint32(100))
	f.Fuzz(func(t *testing.T, device string, kind uint8, size, number uint32) {
		if strings.Contains(device+":", "::") {
			return // no driver has such a device
		}
		form, n := deviceid.Form{Kind: deviceid.Kind(kind % uint8(deviceid.Other))}, 0
		if form.Kind != deviceid.Whole {
			n = int(number % 1e9)
		}
		if form.Kind > deviceid.Replica {
			form.Size = uint64(size % 1e9)
		}
		id := form.ID(health.DeviceID(device), n)
		got := deviceid.Parse(id.String())
		gotNumber, ok := form.Number(got)
		if got != id || string(got.Device()) != device || got.Form() != form || !ok || gotNumber != n {
			t.Errorf("unit %d of %q in the form %+v is %q: unit %d of %q in the form %+v", n, device, form, id, gotNumber, got.Device(),
				got.Form())
		}
	})
}
