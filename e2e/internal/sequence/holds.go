package sequence

import (
	"fmt"
	"slices"
	"strings"
)

// Device is a GPU or a MIG device of the node.
type Device struct {
	ID, Parent string // Parent is empty for a GPU
	Memory     uint64 // bytes
	MIGMode    bool
}

// Mode is how a container holds a device, or how a device is offered.
type Mode string

// The modes. Several containers may hold a device in all but the first, if they do so in one way.
const (
	Whole   Mode = "whole"
	Replica Mode = "replica" // of time-slicing or MPS
	Unit    Mode = "unit"    // of memory, by the device plugin
	Share   Mode = "share"   // of memory, by a claim
	Admin   Mode = "admin"   // by a claim with adminAccess: it takes nothing from others
)

// DRA is the Way of claims.
const DRA = "DRA"

// Hold is what a container has of a device, or what a new one can get.
type Hold struct {
	Pod    string // empty for an offer
	Device string
	Mode   Mode
	Way    string // what containers that share a device have in common: the resource and the form of its IDs, or DRA
	Bytes  uint64 // of memory; 0 if it is no amount
	Orphan bool   // its pod was deleted by force: the scheduler offers the device before the container has ended
}

func (h Hold) String() string {
	text := fmt.Sprintf("%s as %s by %s", h.Device, h.Mode, h.Way)
	if h.Pod != "" {
		text += " for " + h.Pod
	}
	return text
}

// Node is the devices of a node.
type Node []Device

// related reports whether two devices are one, or a GPU and a part of it.
func (n Node) related(a, b string) bool {
	return a == b || n.parent(a) == b || n.parent(b) == a
}

func (n Node) parent(id string) string {
	if i := slices.IndexFunc(n, func(d Device) bool { return d.ID == id }); i >= 0 && n[i].Parent != "" {
		return n[i].Parent
	}
	return "none"
}

func (n Node) memory(id string) uint64 {
	i := slices.IndexFunc(n, func(d Device) bool { return d.ID == id })
	return n[max(i, 0)].Memory
}

// conflict reports whether two containers must not have both.
func (n Node) conflict(a, b Hold) bool {
	switch {
	case a.Mode == Admin || b.Mode == Admin || !n.related(a.Device, b.Device):
		return false
	case a.Pod != "" && a.Pod == b.Pod && a.Way == b.Way:
		return false
	}
	return a.Mode == Whole || b.Mode == Whole || a.Device != b.Device || a.Way != b.Way
}

// lost reports whether nothing tells the other API of one of two holds: the kubelet lists no pod that was deleted by force.
func lost(a, b Hold) bool { return (a.Orphan || b.Orphan) && (a.Way == DRA) != (b.Way == DRA) }

// CheckHeld returns an error if containers hold one device that did not ask to share it, or more of its memory than it has.
func (n Node) CheckHeld(held []Hold) error {
	memory := make(map[string]uint64)
	for i, a := range held {
		for _, b := range held[:i] {
			if n.conflict(a, b) && !lost(a, b) {
				return fmt.Errorf("held twice: %v, and %v", b, a)
			}
		}
		if memory[a.Device] += a.Bytes; memory[a.Device] > n.memory(a.Device) {
			return fmt.Errorf("more memory than the device has: %v", a)
		}
	}
	return nil
}

// CheckOffers returns an error if something is offered that a container holds under another layout's ID, resource or API.
func (n Node) CheckOffers(offers, held []Hold) error {
	for _, o := range offers {
		for _, h := range held {
			if n.conflict(o, h) && !h.Orphan {
				return fmt.Errorf("offered although it is held: offered is %v, held %v", o, h)
			}
		}
	}
	return nil
}

// CheckFree returns an error if nothing is offered of a healthy GPU of which no container holds anything.
func (n Node) CheckFree(offers, held []Hold, unhealthy map[string]bool) error {
	var missing []string
	for _, d := range n {
		if d.Parent != "" || unhealthy[d.ID] {
			continue
		}
		related := func(h Hold) bool { return n.related(d.ID, h.Device) }
		if !slices.ContainsFunc(held, related) && !slices.ContainsFunc(offers, related) {
			missing = append(missing, d.ID)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("free and healthy, but not offered: %s", strings.Join(missing, ", "))
	}
	return nil
}
