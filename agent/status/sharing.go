package status

import (
	"fmt"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
)

// Shares is how the units of a shared device are used: replicas, MPS shares, or units of memory.
type Shares struct {
	Sharing  string `json:"sharing"`             // timeSlicing, mps, memory
	Resource string `json:"resource,omitempty"`  // empty with dynamic resource allocation
	Unit     uint64 `json:"unitBytes,omitempty"` // memory: of one unit
	Total    int    `json:"total"`               // offered
	Free     *int   `json:"free,omitempty"`      // of these, held by no container
	Largest  *int   `json:"largest,omitempty"`   // the largest request of a container that the device can serve now

	// Enforcement is what keeps the next container within its memory: driver, mps or none.
	Enforcement       string `json:"enforcement,omitempty"`
	EnforcementReason string `json:"enforcementReason,omitempty"` // why it is not the configured one
}

// MPS is the state of a device's MPS daemon.
type MPS struct {
	Ready            bool        `json:"ready"`
	Leaving          bool        `json:"leaving,omitempty"` // MPS no longer serves the device; the daemon waits for its last clients
	Cause            string      `json:"cause,omitempty"`   // of the device's finding
	Reason           string      `json:"reason,omitempty"`  // why it is not ready
	PID              int         `json:"pid,omitempty"`     // in the PID namespace of mps-daemon
	Started          time.Time   `json:"started,omitzero"`
	Restarts         uint64      `json:"restarts"` // since mps-daemon started
	MultiUser        bool        `json:"multiUser"`
	ThreadPercentage float64     `json:"activeThreadPercentage,omitempty"` // of the SMs, that a client can use
	PinnedMemory     uint64      `json:"pinnedMemoryBytes,omitempty"`      // that a client can use
	Clients          int         `json:"clients"`
	Servers          []MPSServer `json:"servers"`
}

// MPSServer is an MPS server process.
type MPSServer struct {
	PID     int         `json:"pid"`
	Status  string      `json:"status,omitempty"` // as the daemon writes it, such as ACTIVE
	Clients []MPSClient `json:"clients"`
}

// MPSClient is a client of an MPS server, with its container if metrics.processes knows it.
type MPSClient struct {
	PID       int    `json:"pid"`
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	Container string `json:"container,omitempty"`
}

// MemoryLimit is the memory of a container on a device that is shared by memory.
type MemoryLimit struct {
	Namespace   string  `json:"namespace"`
	Pod         string  `json:"pod"`
	Container   string  `json:"container"`
	Resource    string  `json:"resource,omitempty"` // empty for a claim, as units
	Units       int     `json:"units,omitempty"`
	Limit       uint64  `json:"limitBytes"`          // what the container requested
	Enforcement string  `json:"enforcement"`         // what keeps the container within it: driver, mps, none
	Reason      string  `json:"reason,omitempty"`    // why that is not the configured one
	Used        *uint64 `json:"usedBytes,omitempty"` // by the driver's account
}

// addSharing adds the units of the shared devices, their MPS daemons, and the memory of their containers.
func addSharing(devices []Device, v *view.View) {
	at := make(map[health.DeviceID]*Device)
	for i := range devices {
		at[devices[i].UUID] = &devices[i]
		for j := range devices[i].MIG {
			at[devices[i].MIG[j].UUID] = &devices[i].MIG[j]
		}
	}
	for i := range v.Snapshot.Devices {
		if s := &v.Snapshot.Devices[i]; s.MPS != nil && at[s.Device.ID] != nil {
			at[s.Device.ID].MPS = MPSStatus(s.MPS, v.Processes)
		}
	}
	known := func(n int) *int {
		if n < 0 {
			return nil
		}
		return &n
	}
	for _, u := range v.Shares {
		if d := at[u.Device]; d != nil {
			d.Shares = &Shares{
				string(u.Sharing), u.Resource, u.Unit, u.Total, known(u.Free), known(u.Largest), string(u.Enforcement), u.Reason,
			}
		}
	}
	if v.Memory == nil {
		return
	}
	for _, c := range v.Memory.Containers {
		d := at[c.Device]
		if d == nil {
			continue
		}
		l := MemoryLimit{c.Namespace, c.Pod, c.Name, c.Resource, c.Units, c.Limit, string(c.Enforcement), c.Reason, nil}
		if c.HasUsed {
			l.Used = &c.Used
		}
		d.MemoryLimits = append(d.MemoryLimits, l)
	}
}

// MPSStatus returns the state of a daemon; nil if MPS does not serve the device. p finds the pods of its clients; it may be nil.
func MPSStatus(m *health.MPSDaemon, p *processes.Snapshot) *MPS {
	if m == nil {
		return nil
	}
	s := &MPS{
		Ready: m.Ready, Leaving: m.Leaving, Cause: m.Cause, Reason: m.Reason, PID: m.PID, Started: m.Started.UTC(), Restarts: m.Restarts,
		MultiUser:        m.MultiUser,
		ThreadPercentage: m.ThreadPercentage, PinnedMemory: m.PinnedMemory, Clients: m.ClientCount(), Servers: make([]MPSServer, len(m.Servers)),
	}
	for i, server := range m.Servers {
		s.Servers[i] = MPSServer{PID: server.PID, Status: server.Status, Clients: mpsClients(server.Clients, p)}
	}
	return s
}

// mpsClients returns clients with their containers.
func mpsClients(pids []int, p *processes.Snapshot) []MPSClient {
	clients := make([]MPSClient, len(pids))
	for i, pid := range pids {
		c := p.ContainerOf(pid)
		clients[i] = MPSClient{pid, c.Namespace, c.Pod, c.Name}
	}
	return clients
}

// sharesText returns a text like "38 of 78 free", with details like "38 of 78 free, memory, 1 GiB each, largest request 30,
// enforcement none: driver 580 cannot limit memory". It returns "" for a device that is not shared.
func sharesText(d Device, details bool) string {
	s := d.Shares
	if s == nil {
		return ""
	}
	text := fmt.Sprintf("– of %d free", s.Total)
	if s.Free != nil {
		text = fmt.Sprintf("%d of %d free", *s.Free, s.Total)
	}
	parts := []string{text}
	if details {
		parts = append(parts, s.Sharing)
		if s.Unit > 0 {
			parts = append(parts, sizeText(s.Unit)+" each")
		}
		if s.Largest != nil {
			parts = append(parts, fmt.Sprintf("largest request %d", *s.Largest))
		}
		if s.Enforcement != "" {
			parts = append(parts, "enforcement "+s.Enforcement+formatIf(": %s", s.EnforcementReason))
		}
	}
	return strings.Join(parts, ", ")
}

// State returns ready, leaving or not ready.
func (m *MPS) State() string {
	switch {
	case m.Leaving:
		return "leaving"
	case m.Ready:
		return "ready"
	}
	return "not ready"
}

// colour returns the colour of the state: a daemon that is starting or leaving is no fault.
func (m *MPS) colour() terminal.Colour {
	switch {
	case m.Ready && !m.Leaving:
		return terminal.Green
	case m.Cause == "":
		return terminal.Yellow
	}
	return terminal.Red
}

// Details returns a text like "pid 41, 3 clients, 2 restarts, 25 % of the SMs and 20 GiB per client, single-user", or why the daemon is not
// ready.
func (m *MPS) Details() string {
	var parts []string
	if !m.Ready {
		parts = nonEmpty(m.Reason)
	}
	if m.PID > 0 {
		parts = append(parts, fmt.Sprintf("pid %d", m.PID), Plural(m.Clients, "client"))
	}
	if m.Restarts > 0 {
		parts = append(parts, Plural(m.Restarts, "restart"))
	}
	var limits []string
	if m.Ready && m.ThreadPercentage > 0 && m.ThreadPercentage < 100 {
		limits = append(limits, fmt.Sprintf("%g %% of the SMs", m.ThreadPercentage))
	}
	if m.Ready && m.PinnedMemory > 0 {
		limits = append(limits, sizeText(m.PinnedMemory))
	}
	if len(limits) > 0 {
		parts = append(parts, strings.Join(limits, " and ")+" per client")
	}
	if m.PID > 0 && !m.MultiUser {
		parts = append(parts, "single-user")
	}
	return strings.Join(parts, ", ")
}

// mpsCell returns the state of a device's MPS daemon, and the number of its clients or all details.
func mpsCell(d Device, details bool) terminal.Cell {
	if d.MPS == nil {
		return plain("")
	}
	text := d.MPS.State()
	switch {
	case details:
		text = strings.Join(nonEmpty(text, d.MPS.Details()), ", ")
	case d.MPS.Clients > 0:
		text += ", " + Plural(d.MPS.Clients, "client")
	}
	return terminal.Cell{Text: text, Colour: d.MPS.colour()}
}

// sharedAlike reports whether two devices are shared in one way and their daemons have one state.
func sharedAlike(a, b Device) bool {
	if (a.Shares == nil) != (b.Shares == nil) || (a.MPS == nil) != (b.MPS == nil) {
		return false
	}
	return (a.Shares == nil || a.Shares.Sharing == b.Shares.Sharing && a.Shares.Resource == b.Shares.Resource) &&
		(a.MPS == nil || a.MPS.State() == b.MPS.State() && a.MPS.Cause == b.MPS.Cause)
}

// addShares returns what the table shows of the shares of both devices together.
func addShares(a, b Device) (*Shares, *MPS) {
	shares, mps := a.Shares, a.MPS
	if shares != nil {
		sum := *shares
		sum.Total += b.Shares.Total
		sum.Free = nil
		if shares.Free != nil && b.Shares.Free != nil {
			sum.Free = new(*shares.Free + *b.Shares.Free)
		}
		shares = &sum
	}
	if mps != nil {
		sum := *mps
		sum.Clients += b.MPS.Clients
		mps = &sum
	}
	return shares, mps
}

// memoryLimitTexts returns at most limit texts like "team/chat-0 (llm): 10 GiB, enforcement driver, 5.0 GiB used", and how many more
// there are.
func memoryLimitTexts(d Device, limit int) []string {
	texts := make([]string, len(d.MemoryLimits))
	for i, l := range d.MemoryLimits {
		if d.Shares != nil && l.Reason == d.Shares.EnforcementReason {
			l.Reason = "" // the shares have it
		}
		parts := []string{sizeText(l.Limit), "enforcement " + l.Enforcement + formatIf(" (%s)", l.Reason)}
		if l.Used != nil {
			parts = append(parts, sizeText(*l.Used)+" used")
		}
		texts[i] = fmt.Sprintf("%s/%s (%s): %s", l.Namespace, l.Pod, l.Container, strings.Join(parts, ", "))
	}
	return limitTexts(texts, limit)
}

// sizeText returns a text like "10 GiB", "2.5 GiB" or "256 MiB".
func sizeText(bytes uint64) string {
	switch {
	case bytes < gib:
		return fmt.Sprintf("%d MiB", bytes>>20)
	case bytes%gib == 0:
		return fmt.Sprintf("%d GiB", bytes/gib)
	}
	return fmt.Sprintf("%.1f GiB", float64(bytes)/gib)
}
