package status

import (
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
)

// MPSDaemon is the MPS daemon of a device.
type MPSDaemon struct {
	Device health.DeviceID `json:"device"`
	Index  string          `json:"index"` // as a device reference: 3, of a MIG device 3:0
	MPS
}

// MPSDaemons returns the MPS daemons of a snapshot, by device. p finds the pods of their clients; it may be nil.
func MPSDaemons(s *health.Snapshot, p *processes.Snapshot) []MPSDaemon {
	all := []MPSDaemon{}
	if s == nil {
		return all
	}
	for i := range s.Devices {
		if d := &s.Devices[i]; d.MPS != nil {
			index := Device{Index: d.Device.Index, MIGIndex: migIndex(&d.Device)}
			all = append(all, MPSDaemon{d.Device.ID, indexText(index), *MPSStatus(d.MPS, p)})
		}
	}
	return all
}

// SetClients replaces the clients of each server. The keys are PIDs of servers. p finds their pods; it may be nil.
func (d *MPSDaemon) SetClients(byServer map[int][]int, p *processes.Snapshot) {
	var servers []MPSServer
	d.Clients = 0
	for _, pid := range slices.Sorted(maps.Keys(byServer)) {
		server := MPSServer{PID: pid}
		if i := slices.IndexFunc(d.Servers, func(s MPSServer) bool { return s.PID == pid }); i >= 0 {
			server = d.Servers[i]
		}
		server.Clients = mpsClients(byServer[pid], p)
		d.Clients += len(server.Clients)
		servers = append(servers, server)
	}
	d.Servers = list(servers)
}

// MPSTable returns daemons and their clients for a terminal.
func MPSTable(daemons []MPSDaemon, now time.Time, out terminal.Output) string {
	p := &terminal.Printer{Output: out}
	t := terminal.Table{Wrap: true, Columns: []terminal.Column{
		{Name: "GPU"},
		{Name: "MPS DAEMON"},
		{Name: "FOR"},
		{Name: "UUID"},
		{Name: "DETAILS"},
	}}
	clients := terminal.Table{Columns: []terminal.Column{
		{Name: "GPU"},
		{Name: "SERVER"},
		{Name: "STATUS"},
		{Name: "CLIENT"},
		{Name: "POD"},
	}}
	for _, d := range daemons {
		t.Rows = append(t.Rows, []terminal.Cell{
			plain(d.Index), {Text: d.State(), Colour: d.colour()}, plain(ageText(now, d.Started)), plain(string(d.Device)), plain(d.Details()),
		})
		for _, s := range d.Servers {
			row := []string{d.Index, strconv.Itoa(s.PID), s.Status}
			for _, c := range s.Clients {
				pod := ""
				if c.Pod != "" {
					pod = c.Namespace + "/" + c.Pod + formatIf(" (%s)", c.Container)
				}
				clients.Rows = append(clients.Rows, terminal.Cells("", append(row[:3:3], strconv.Itoa(c.PID), pod)...))
			}
			if len(s.Clients) == 0 {
				clients.Rows = append(clients.Rows, terminal.Cells("", append(row[:3:3], "", "")...))
			}
		}
	}
	p.Table(t)
	if len(clients.Rows) > 0 {
		p.WriteByte('\n')
		p.Table(clients)
	}
	return p.String()
}
