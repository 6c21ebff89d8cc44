package health_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// node is what a reading shows of a node's GPUs.
type node struct {
	gpus []health.DeviceState
	bus  int // GPUs on the PCI bus, at the slots from 1; 0 if it is unknown
}

// card returns a GPU in a slot.
func card(id health.DeviceID, index, slot int, p health.Presence) health.DeviceState {
	d := health.Device{ID: id, Kind: health.KindGPU, Index: index, PCI: pciOf(slot)}
	return health.DeviceState{Device: d, Sample: health.Sample{Device: id, Presence: p}}
}

func pciOf(slot int) string { return fmt.Sprintf("00000000:%02X:00.0", slot) }

func (n node) onBus() (all []string) {
	for slot := 1; slot <= n.bus; slot++ {
		all = append(all, pciOf(slot))
	}
	return all
}

func listed(bus int, gpus ...health.DeviceState) node { return node{gpus, bus} }

// Three GPUs, all listed.
var (
	cardA, cardB, cardC = card("GPU-a", 0, 1, health.Present), card("GPU-b", 1, 2, health.Present), card("GPU-c", 2, 3, health.Present)
	threeCards          = listed(3, cardA, cardB, cardC)
)

// An entry keeps the GPU that was first listed with its index. Each case reads the node several times; the binding is as of the last
// reading.
func TestBind(t *testing.T) {
	entries := health.IndexEntries{Refs: []health.IndexRef{{Key: judge.KeyCordon, Entry: "1"}}, Final: true}
	missing := card("GPU-b", 1, 2, health.Missing)
	for name, c := range map[string]struct {
		readings []node
		want     health.Binding // without Others
		text     string         // part of the warning's
	}{
		"all GPUs": {[]node{threeCards}, health.Binding{GPU: "GPU-b", PCI: pciOf(2), Confirmed: true}, ""},
		"the only GPU": {
			[]node{listed(1, card("GPU-b", 1, 1, health.Present))},
			health.Binding{GPU: "GPU-b", PCI: pciOf(1), Confirmed: true},
			"",
		},
		"an unknown bus":        {[]node{listed(0, cardA, cardB)}, health.Binding{GPU: "GPU-b", PCI: pciOf(2)}, ""},
		"no GPU with the index": {[]node{listed(1, cardA)}, health.Binding{}, ""},
		"no GPU, unknown bus":   {[]node{listed(0, cardA)}, health.Binding{}, ""},
		"a hidden GPU": {
			[]node{listed(3, cardA)},
			health.Binding{Warning: health.BindingWarning{Reason: health.BindingIncomplete}},
			"no GPU has index 1, and the driver lists 1 of the 3 GPUs",
		},
		"a missing GPU": {
			[]node{listed(3, cardA, missing, cardC)},
			health.Binding{GPU: "GPU-b", PCI: pciOf(2), Warning: health.BindingWarning{Reason: health.BindingIncomplete}},
			"lists 2 of the 3 GPUs",
		},
		"a GPU that is not read": {
			[]node{listed(3, cardA, card("GPU-b", 1, 2, health.PresenceUnknown), cardC)},
			health.Binding{Warning: health.BindingWarning{Reason: health.BindingIncomplete}},
			"lists 2 of the 3 GPUs",
		},
		"a lost GPU": {
			[]node{listed(3, cardA, card("GPU-b", 1, 2, health.Lost), cardC)},
			health.Binding{GPU: "GPU-b", PCI: pciOf(2), Confirmed: true},
			"",
		},
		"another GPU is not read": {
			[]node{listed(3, cardA, cardB, card("GPU-c", 2, 3, health.PresenceUnknown))},
			health.Binding{GPU: "GPU-b", PCI: pciOf(2), Warning: health.BindingWarning{Reason: health.BindingIncomplete}},
			"index 1 may be another GPU",
		},
		"bound while one was hidden, then renumbered": {
			[]node{listed(3, cardA, card("GPU-c", 1, 3, health.Present)), threeCards},
			health.Binding{GPU: "GPU-c", PCI: pciOf(3), Warning: health.BindingWarning{Reason: health.BindingRenumbered}},
			"it means GPU-c, which has index 2 now; index 1 is now that of GPU-b",
		},
		"bound while one was hidden, then confirmed": {
			[]node{listed(3, cardA, cardB), threeCards, listed(3, cardA, cardB)},
			health.Binding{GPU: "GPU-b", PCI: pciOf(2), Confirmed: true},
			"",
		},
		"missing":    {[]node{threeCards, listed(3, cardA, missing, cardC)}, health.Binding{GPU: "GPU-b", PCI: pciOf(2), Confirmed: true}, ""},
		"not listed": {[]node{threeCards, listed(2, cardA, cardC)}, health.Binding{GPU: "GPU-b", PCI: pciOf(2), Confirmed: true}, ""},
		"missing, and another has its index": {
			[]node{threeCards, listed(3, cardA, card("GPU-b", -1, 2, health.Missing), card("GPU-c", 1, 3, health.Present))},
			health.Binding{GPU: "GPU-b", PCI: pciOf(2), Confirmed: true, Warning: health.BindingWarning{Reason: health.BindingRenumbered}},
			"which is missing; index 1 is now that of GPU-c",
		},
		"not read, and another has its index": {
			[]node{threeCards, listed(3, cardA, card("GPU-b", 1, 2, health.PresenceUnknown), card("GPU-c", 1, 3, health.Present))},
			health.Binding{GPU: "GPU-b", PCI: pciOf(2), Confirmed: true, Warning: health.BindingWarning{Reason: health.BindingRenumbered}},
			"whose index is unknown now; index 1 is now that of GPU-c",
		},
		"without an index, and another has it": {
			[]node{threeCards, listed(3, cardA, card("GPU-b", -1, 2, health.Lost), card("GPU-c", 1, 3, health.Present))},
			health.Binding{GPU: "GPU-b", PCI: pciOf(2), Confirmed: true, Warning: health.BindingWarning{Reason: health.BindingRenumbered}},
			"whose index is unknown now",
		},
		"first of all": {
			[]node{threeCards, listed(3, card("GPU-b", 0, 2, health.Present), card("GPU-a", 1, 1, health.Present), cardC)},
			health.Binding{GPU: "GPU-b", PCI: pciOf(2), Confirmed: true, Warning: health.BindingWarning{Reason: health.BindingRenumbered}},
			"which has index 0 now; index 1 is now that of GPU-a",
		},
		"no GPU has the index now": {
			[]node{threeCards, listed(3, cardA, card("GPU-b", 2, 2, health.Present))},
			health.Binding{GPU: "GPU-b", PCI: pciOf(2), Confirmed: true, Warning: health.BindingWarning{Reason: health.BindingRenumbered}},
			"which has index 2 now; no GPU has index 1",
		},
		"a new card at its address": {
			[]node{threeCards, listed(3, cardA, card("GPU-new", 1, 2, health.Present), cardC)},
			health.Binding{
				GPU: "GPU-new", PCI: pciOf(2), Confirmed: true, Replaced: "GPU-b",
				Warning: health.BindingWarning{Reason: health.BindingReplaced},
			},
			"it means GPU-new, the card that replaced GPU-b at " + pciOf(2),
		},
		"a new card at its address, a GPU hidden": {
			[]node{threeCards, listed(3, cardA, card("GPU-new", 1, 2, health.Present))},
			health.Binding{GPU: "GPU-b", PCI: pciOf(2), Confirmed: true, Warning: health.BindingWarning{Reason: health.BindingRenumbered}},
			"which is missing; index 1 is now that of GPU-new",
		},
		"a new card at its address, a GPU not read": {
			[]node{threeCards, listed(2, cardA, card("GPU-new", 1, 2, health.Present), card("GPU-c", 2, 3, health.PresenceUnknown))},
			health.Binding{GPU: "GPU-b", PCI: pciOf(2), Confirmed: true, Warning: health.BindingWarning{Reason: health.BindingRenumbered}},
			"index 1 is now that of GPU-new",
		},
		"a new card at its address, unknown bus": {
			[]node{threeCards, listed(0, cardA, card("GPU-new", 1, 2, health.Present), cardC)},
			health.Binding{GPU: "GPU-b", PCI: pciOf(2), Confirmed: true, Warning: health.BindingWarning{Reason: health.BindingRenumbered}},
			"index 1 is now that of GPU-new",
		},
		"a new card while it is not read": {
			[]node{threeCards, listed(3, cardA, card("GPU-b", 1, 2, health.PresenceUnknown), card("GPU-new", 1, 2, health.Present), cardC)},
			health.Binding{GPU: "GPU-b", PCI: pciOf(2), Confirmed: true, Warning: health.BindingWarning{Reason: health.BindingRenumbered}},
			"whose index is unknown now",
		},
		"a known GPU moved to its address": {
			[]node{threeCards, listed(2, cardA, card("GPU-c", 1, 2, health.Present))},
			health.Binding{GPU: "GPU-b", PCI: pciOf(2), Confirmed: true, Warning: health.BindingWarning{Reason: health.BindingRenumbered}},
			"which is missing; index 1 is now that of GPU-c",
		},
		"a GPU that came while it was missing moved to its address": {
			[]node{
				threeCards, listed(4, cardA, missing, cardC, card("GPU-d", 3, 4, health.Present)),
				listed(3, cardA, card("GPU-d", 1, 2, health.Present), cardC),
			},
			health.Binding{GPU: "GPU-b", PCI: pciOf(2), Confirmed: true, Warning: health.BindingWarning{Reason: health.BindingRenumbered}},
			"which is missing; index 1 is now that of GPU-d",
		},
		"the card at its address is listed late": { // so it was not known beside it
			[]node{
				threeCards, listed(3, cardA, card("GPU-new", 1, 2, health.Present)),
				listed(3, cardA, card("GPU-new", 1, 2, health.Present), cardC),
			},
			health.Binding{
				GPU: "GPU-new", PCI: pciOf(2), Confirmed: true, Replaced: "GPU-b",
				Warning: health.BindingWarning{Reason: health.BindingReplaced},
			},
			"replaced GPU-b",
		},
		"moved, then a new card at its old address": {
			[]node{
				threeCards, listed(4, cardA, card("GPU-b", 1, 4, health.Present), cardC),
				listed(3, cardA, card("GPU-new", 1, 2, health.Present), cardC),
			},
			health.Binding{GPU: "GPU-b", PCI: pciOf(4), Confirmed: true, Warning: health.BindingWarning{Reason: health.BindingRenumbered}},
			"index 1 is now that of GPU-new",
		},
		"replaced, and the driver lists it with another index": {
			[]node{threeCards, listed(3, cardA, card("GPU-new", 2, 2, health.Present), card("GPU-c", 1, 3, health.Present))},
			health.Binding{
				GPU: "GPU-new", PCI: pciOf(2), Confirmed: true, Replaced: "GPU-b",
				Warning: health.BindingWarning{Reason: health.BindingRenumbered},
			},
			"it means GPU-new, which has index 2 now",
		},
	} {
		t.Run(name, func(t *testing.T) {
			var all health.Bindings
			for _, n := range c.readings {
				before := slices.Clone(all)
				next := health.Bind(entries, all, n.gpus, n.onBus())
				if !slices.EqualFunc(all, before, func(a, b health.Binding) bool { return a.GPU == b.GPU && slices.Equal(a.Others, b.Others) }) {
					t.Errorf("Bind modified %+v to %+v", before, all)
				}
				all = next
			}
			if len(all) != 1 {
				t.Fatalf("%+v", all)
			}
			got := all[0]
			text := got.Warning.Text
			if (text == "") != (c.text == "") || !strings.Contains(text, c.text) || text != "" && !strings.HasPrefix(text, `health.cordon "1": `) {
				t.Errorf("warning %q, want %q", text, c.text)
			}
			got.Others, got.Warning.Text, c.want.IndexRef = nil, "", entries.Refs[0]
			if fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", c.want) {
				t.Errorf("got %+v\nwant %+v", got, c.want)
			}
		})
	}
}

// Once a configuration is accepted, there are no bindings but its own. Before, the bindings of the configuration in force stay, without a
// warning.
func TestBindEntries(t *testing.T) {
	ref := func(key, entry string) health.IndexRef { return health.IndexRef{Key: key, Entry: entry} }
	renumbered := listed(3, card("GPU-b", 0, 2, health.Present), card("GPU-a", 1, 1, health.Present), cardC)
	before := health.Bind(health.IndexEntries{Refs: []health.IndexRef{ref("a", "0"), ref("a", "1")}}, nil, threeCards.gpus, threeCards.onBus())
	before = health.Bind(
		health.IndexEntries{Refs: []health.IndexRef{ref("a", "0"), ref("a", "1")}}, before, renumbered.gpus, renumbered.onBus(),
	)
	for _, c := range []struct {
		refs  []health.IndexRef
		final bool
		want  string
	}{
		{[]health.IndexRef{ref("a", "1"), ref("b", "1"), ref("a", "1")}, true, "a 1 GPU-b renumbered, b 1 GPU-a "},
		{[]health.IndexRef{ref("a", "1"), ref("b", "1")}, false, "a 1 GPU-b renumbered, b 1 GPU-a , a 0 GPU-a "},
		{nil, true, ""},
		{nil, false, "a 0 GPU-a , a 1 GPU-b "},
	} {
		var got []string
		for _, b := range health.Bind(health.IndexEntries{Refs: c.refs, Final: c.final}, before, renumbered.gpus, renumbered.onBus()) {
			got = append(got, fmt.Sprintf("%s %s %s %s", b.Key, b.Entry, b.GPU, b.Warning.Reason))
		}
		if text := strings.Join(got, ", "); text != c.want {
			t.Errorf("%v, final %v: %q, want %q", c.refs, c.final, text, c.want)
		}
	}
	if one := health.Bind(health.IndexEntries{}, before[:1], renumbered.gpus, nil); len(one) != 1 || one[0].GPU != "GPU-a" {
		t.Errorf("one binding of before: %+v", one)
	}
	if before[1].Warning.Reason != health.BindingRenumbered {
		t.Errorf("Bind modified the bindings before: %+v", before)
	}
	if all := health.Bind(health.IndexEntries{Final: true}, nil, threeCards.gpus, nil); all != nil {
		t.Errorf("without entries: %+v", all)
	}
	if b := before.Find(ref("a", "1")); b == nil || b.GPU != "GPU-b" || before.Find(ref("b", "1")) != nil ||
		before.Find(ref("a", "2")) != nil {
		t.Errorf("found %+v", b)
	}
	config := cordoning("GPU-1", "3", "0:1", "0000:1b:00.0", "h100")
	want := []health.IndexRef{{Key: judge.KeyCordon, Entry: "3"}, {Key: judge.KeyCordon, Entry: "0:1"}}
	if got := config.IndexRefs(); !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// A bound entry means its GPU with the MIG devices, or one of these, whatever index the GPU has.
func TestBindingsMatch(t *testing.T) {
	bound := func(entry string, gpu health.DeviceID) health.Binding {
		return health.Binding{IndexRef: health.IndexRef{Key: judge.KeyCordon, Entry: entry}, GPU: gpu}
	}
	all := health.Bindings{bound("1", "GPU-0"), bound("1:0", "GPU-0"), bound("1:1", "GPU-0"), bound("7", "")}
	for _, c := range []struct {
		key, entry string
		want       [4]bool // of GPU-0, its MIG devices 0 and 1, and GPU-1
	}{
		{judge.KeyCordon, "1", [4]bool{true, true, true, false}},
		{judge.KeyCordon, "1:0", [4]bool{false, true, false, false}},
		{judge.KeyCordon, "1:1", [4]bool{false, false, true, false}},
		{judge.KeyCordon, "7", [4]bool{}},
		{judge.KeyCordon, "GPU-1", [4]bool{false, false, false, true}},
		{"another", "1", [4]bool{false, false, false, true}},
		{"another", "0:1", [4]bool{false, false, true, false}},
	} {
		for i, d := range []health.Device{gpu0, mig0, mig1, gpu1} {
			if match, valid := all.Match(c.key, c.entry, &d); match != c.want[i] || !valid {
				t.Errorf("%s %s means %s: %v, %v", c.key, c.entry, d.ID, match, valid)
			}
		}
	}
	if match, valid := all.Match(judge.KeyCordon, "h100", &gpu0); match || valid {
		t.Error("a model is a device reference")
	}
	bindings := health.Bindings{bound("9", "GPU-0"), bound("0", "GPU-gone")}
	var unmatched []string
	for _, u := range cordoning("9", "1", "0", "5").UnmatchedCordons(bindings, []health.DeviceState{{Device: gpu0}, {Device: gpu1}}) {
		unmatched = append(unmatched, u.String())
	}
	if want := []string{`health.cordon: no device of this node matches "0", "5"`}; !slices.Equal(unmatched, want) {
		t.Errorf("unmatched %q, want %q", unmatched, want)
	}
	devices := healthtest.Judge(cordoning("9").WithBindings(bindings), nil, 0, nil, nil, gpu0, gpu1)
	healthtest.WantStates(t, devices, map[health.DeviceID]health.State{gpu0.ID: health.Unhealthy, gpu1.ID: health.Healthy})
}

// An operator binds the entries with one text anew. Other bindings stay.
func TestRebindConfirms(t *testing.T) {
	ref := func(key, entry string) health.Binding {
		return health.Binding{IndexRef: health.IndexRef{Key: key, Entry: entry}, GPU: "GPU-old", PCI: pciOf(9), Replaced: "GPU-older"}
	}
	before := health.Bindings{ref("a", "1"), ref("a", "2"), ref("b", "1"), ref("b", "1:0")}
	hidden := listed(9, card("GPU-e", 4, 5, health.Present), card("GPU-d", 3, 4, health.Present), cardC, cardB, cardA)
	after, err := health.Rebind(before, "1", hidden.gpus, hidden.onBus())
	if err != nil {
		t.Fatal(err)
	}
	for i, b := range after {
		if i == 1 || i == 3 {
			if b.GPU != "GPU-old" || b.Confirmed {
				t.Errorf("%+v", b)
			}
			continue
		}
		if b.IndexRef != before[i].IndexRef || b.GPU != "GPU-b" || b.PCI != pciOf(2) || !b.Confirmed || b.Replaced != "" ||
			!slices.Equal(b.Others, []health.DeviceID{"GPU-a", "GPU-c", "GPU-d", "GPU-e"}) {
			t.Errorf("%+v", b)
		}
		if w := health.Bind(health.IndexEntries{Refs: []health.IndexRef{b.IndexRef}}, after, hidden.gpus,
			hidden.onBus())[0].Warning; w.Reason != "" {
			t.Errorf("warns after it was confirmed: %+v", w)
		}
	}
	if before[0].GPU != "GPU-old" {
		t.Errorf("Rebind modified %+v", before)
	}
	for entry, want := range map[string]string{"3": `no key of the configuration has the entry "3"`, "2": "no GPU has index 2 now"} {
		if after, err := health.Rebind(before, entry, listed(0, cardA, cardB).gpus, nil); err == nil || after != nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v", entry, after, err)
		}
	}
}
