package health

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health/deviceref"
)

// IndexRef is an entry of a configuration key that names a GPU by its index: 3, or 3:0 for a MIG device of it. Key has no positions of
// lists, so that an entry is the same when others are added before it.
type IndexRef struct {
	Key   string `json:"key"`
	Entry string `json:"entry"`
}

// IndexRefs returns the entries of a key that name a GPU by its index.
func IndexRefs(key string, entries []string) (refs []IndexRef) {
	for _, entry := range entries {
		if _, _, ok := deviceref.ParseIndex(entry); ok {
			refs = append(refs, IndexRef{key, entry})
		}
	}
	return refs
}

// IndexEntries are the entries of a whole configuration that name a GPU by its index.
type IndexEntries struct {
	Refs  []IndexRef
	Final bool // the configuration is accepted: no earlier one can replace it, so the bindings of other entries end
}

// Binding is the GPU that an IndexRef means. The driver and DCGM number the GPUs anew when one of them is missing at their start. So an
// entry is bound once: to the first GPU that is listed with its index, or to the missing GPU that had the index. It keeps this GPU, also
// while the GPU is missing, until the entry leaves the configuration or an operator binds it anew.
type Binding struct {
	IndexRef
	GPU       DeviceID   `json:"gpu"`                 // empty while no GPU was listed with the index
	PCI       string     `json:"pci"`                 // bus ID of the GPU when it was last listed
	Others    []DeviceID `json:"others,omitempty"`    // GPUs that were listed beside it, or since then at other addresses; not modified
	Confirmed bool       `json:"confirmed,omitempty"` // all GPUs on the PCI bus were listed, and the GPU had the index; or by an operator
	Replaced  DeviceID   `json:"replaced,omitempty"`  // the GPU that it meant before the card was replaced

	Warning BindingWarning `json:"-"` // of the latest reading; zero if there is none
}

// BindingWarning says why an entry may not mean the GPU that its author meant. Text starts with the key and the entry.
type BindingWarning struct{ Reason, Text string }

// The values of BindingWarning.Reason.
const (
	BindingRenumbered = "renumbered" // the GPU does not have the index now
	BindingReplaced   = "replaced"   // another card is at the address of the GPU
	BindingIncomplete = "incomplete" // it was bound while the driver did not list all GPUs
)

// Bindings are the bindings of the entries in force. They are not modified once stored.
type Bindings []Binding

// Match reports whether an entry of a configuration key means a device, and whether it is a device reference at all. For an entry without a
// binding, Device.Matches decides.
func (all Bindings) Match(key, entry string, d *Device) (match, valid bool) {
	for i := range all {
		if b := &all[i]; b.Entry == entry && b.Key == key && b.GPU != "" {
			_, mig, _ := deviceref.ParseIndex(entry)
			return d.GPU() == b.GPU && (mig < 0 || d.Kind == KindMIG && d.MIGIndex == mig), true
		}
	}
	return d.Matches(entry)
}

// Find returns the binding of an entry, nil if there is none.
func (all Bindings) Find(ref IndexRef) *Binding {
	if i := slices.IndexFunc(all, func(b Binding) bool { return b.IndexRef == ref }); i >= 0 {
		return &all[i]
	}
	return nil
}

// Bind returns the bindings of the entries after a reading. before are the saved bindings; devices are judged. onBus are the bus IDs of the
// GPUs that the driver should list, nil if they are unknown. It is pure.
//
// A binding follows a replaced card: the bound GPU is nowhere, and a GPU that is new on the node has its address. It stays while the driver
// lists fewer GPUs than the bus has, because the bound GPU may be one of the unlisted.
func Bind(entries IndexEntries, before Bindings, devices []DeviceState, onBus []string) Bindings {
	if len(entries.Refs) == 0 && len(before) == 0 {
		return nil
	}
	n := newListing(devices, onBus)
	var all Bindings
	for _, ref := range entries.Refs {
		if all.Find(ref) != nil {
			continue
		}
		b := Binding{IndexRef: ref}
		if old := before.Find(ref); old != nil {
			b = *old
		}
		all = append(all, b.update(n))
	}
	if !entries.Final {
		for _, b := range before {
			if b.Warning = (BindingWarning{}); all.Find(b.IndexRef) == nil {
				all = append(all, b)
			}
		}
	}
	return all
}

// Rebind binds all entries with one text to the GPU that has the index now. An operator asks for it.
func Rebind(before Bindings, entry string, devices []DeviceState, onBus []string) (Bindings, error) {
	n, all, found := newListing(devices, onBus), slices.Clone(before), false
	for i := range all {
		if all[i].Entry != entry {
			continue
		}
		index, _, _ := deviceref.ParseIndex(entry)
		gpu := n.byIndex[index]
		if gpu == nil {
			return nil, fmt.Errorf("no GPU has index %d now; remove the entry, or name a UUID instead", index)
		}
		b := Binding{IndexRef: all[i].IndexRef}
		b.bind(n, gpu)
		b.Confirmed, found = true, true
		all[i] = b
	}
	if !found {
		return nil, fmt.Errorf("no key of the configuration has the entry %q; gpu-node-agent status -o json lists the entries that "+
			"name a GPU by its index", entry)
	}
	return all, nil
}

// listing holds the node's GPUs as a reading shows them.
type listing struct {
	byID    map[DeviceID]*Device
	byIndex map[int]*Device
	missing map[int]*Device   // missing GPUs, by the index that they had; a listed GPU has none of these
	unknown map[DeviceID]bool // GPUs that the driver may list a moment later
	onBus   int               // 0 if it is unknown
	hidden  int               // GPUs on the PCI bus that the driver does not list
}

func newListing(devices []DeviceState, onBus []string) listing {
	n := listing{
		byID: make(map[DeviceID]*Device), byIndex: make(map[int]*Device), missing: make(map[int]*Device), unknown: make(map[DeviceID]bool),
		onBus: len(onBus),
	}
	listed := make(map[deviceref.PCIAddress]bool)
	for i := range devices {
		d := &devices[i].Device
		switch p := devices[i].Sample.Presence; {
		case d.Kind != KindGPU:
		case p == Missing:
			n.missing[d.Index] = d
		case p == PresenceUnknown:
			n.unknown[d.ID] = true
		default:
			n.byID[d.ID], n.byIndex[d.Index] = d, d
			if address, ok := deviceref.ParsePCI(d.PCI); ok {
				listed[address] = true
			}
		}
	}
	for _, id := range onBus {
		if address, ok := deviceref.ParsePCI(id); ok && !listed[address] {
			n.hidden++
		}
	}
	return n
}

// complete reports whether the listed GPUs are certainly all GPUs of the node.
func (n *listing) complete() bool { return n.onBus > 0 && n.hidden == 0 && len(n.unknown) == 0 }

// at returns the GPU at a PCI address, nil if none is listed there.
func (n *listing) at(pci string) *Device {
	address, ok := deviceref.ParsePCI(pci)
	for _, d := range n.byID {
		if a, valid := deviceref.ParsePCI(d.PCI); ok && valid && a == address {
			return d
		}
	}
	return nil
}

// bind binds to a listed GPU and records the GPUs beside it.
func (b *Binding) bind(n listing, gpu *Device) {
	b.GPU, b.PCI, b.Others = gpu.ID, gpu.PCI, nil
	b.addOthers(n, gpu)
}

// addOthers adds the listed GPUs to Others, except one.
func (b *Binding) addOthers(n listing, except *Device) {
	others := slices.Clone(b.Others)
	for id, d := range n.byID {
		if d != except && !slices.Contains(others, id) {
			others = append(others, id)
		}
	}
	slices.Sort(others)
	b.Others = others
}

// update returns the binding after a reading.
func (b Binding) update(n listing) Binding {
	index, _, _ := deviceref.ParseIndex(b.Entry)
	holder := n.byIndex[index]
	switch gpu := cmp.Or(n.byID[b.GPU], holder, n.missing[index]); {
	case b.GPU == "" && gpu == nil, n.unknown[b.GPU]:
	case b.GPU == "" || n.byID[b.GPU] != nil:
		b.bind(n, gpu)
	default: // nowhere, or missing
		card := n.at(b.PCI)
		if card == nil || !n.complete() || slices.Contains(b.Others, card.ID) {
			b.addOthers(n, card)
			break
		}
		b.Replaced = b.GPU
		b.bind(n, card)
	}
	gpu := n.byID[b.GPU]
	b.Confirmed = b.Confirmed || gpu != nil && gpu == holder && n.complete()
	if b.Warning = b.warning(n, index, holder, gpu); b.Warning.Reason != "" {
		b.Warning.Text = fmt.Sprintf("%s %q: %s", b.Key, b.Entry, b.Warning.Text)
	}
	return b
}

// warning returns what an operator should know of the binding. holder has the index now; gpu is the bound GPU, nil if it is not listed.
func (b *Binding) warning(n listing, index int, holder, gpu *Device) BindingWarning {
	rebind := "name a UUID instead, or run gpu-node-agent clear --binding " + b.Entry
	switch {
	case b.GPU == "" && n.hidden > 0:
		return BindingWarning{BindingIncomplete, fmt.Sprintf("no GPU has index %d, and the driver lists %d of the %d GPUs on the PCI bus", index,
			n.onBus-n.hidden, n.onBus)}
	case b.GPU == "":
	case holder != nil && holder != gpu:
		where := "which is missing"
		switch {
		case gpu != nil && gpu.Index >= 0:
			where = fmt.Sprintf("which has index %d now", gpu.Index)
		case gpu != nil || n.unknown[b.GPU]:
			where = "whose index is unknown now"
		}
		return BindingWarning{BindingRenumbered, fmt.Sprintf("it means %s, %s; index %d is now that of %s: %s to mean that GPU", b.GPU, where,
			index, holder.ID, rebind)}
	case gpu != nil && gpu.Index != index:
		return BindingWarning{BindingRenumbered, fmt.Sprintf("it means %s, which has index %d now; no GPU has index %d: name a UUID instead",
			b.GPU, gpu.Index, index)}
	case b.Replaced != "":
		return BindingWarning{BindingReplaced, fmt.Sprintf(
			"it means %s, the card that replaced %s at %s; remove the entry to use the new card, or run gpu-node-agent clear --binding %s to "+
				"keep it",
			b.GPU, b.Replaced, b.PCI, b.Entry)}
	case !b.Confirmed && n.hidden > 0:
		return BindingWarning{BindingIncomplete, fmt.Sprintf(
			"it means %s, bound while the driver lists %d of the %d GPUs on the PCI bus; with all of them, index %d may be another GPU: %s to "+
				"confirm it",
			b.GPU, n.onBus-n.hidden, n.onBus, index, rebind)}
	}
	return BindingWarning{}
}

// UnmatchedRefs holds the device references of one key that match no device of a node. They are not errors, because one configuration
// may serve many nodes.
type UnmatchedRefs struct {
	Key  string
	Refs []string
}

// Unmatched returns the device references of a key that match no device, nil if there is none. Entries that are no device references,
// such as models, may match none. name is the key with the positions of lists.
func (all Bindings) Unmatched(key, name string, entries []string, devices []DeviceState) []UnmatchedRefs {
	refs := slices.DeleteFunc(slices.Clone(entries), func(ref string) bool {
		_, isRef := (&Device{}).Matches(ref)
		return !isRef || slices.ContainsFunc(devices, func(d DeviceState) bool { match, _ := all.Match(key, ref, &d.Device); return match })
	})
	if len(refs) == 0 {
		return nil
	}
	return []UnmatchedRefs{{name, refs}}
}

// String returns a text like: health.cordon: no device of this node matches "9", "GPU-1".
func (u UnmatchedRefs) String() string {
	quoted := make([]string, len(u.Refs))
	for i, ref := range u.Refs {
		quoted[i] = strconv.Quote(ref)
	}
	return u.Key + ": no device of this node matches " + strings.Join(quoted, ", ")
}
