package mps

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

const (
	clientsInterval = 30 * time.Second // between lists of clients
	limitsInterval  = 5 * time.Minute  // between checks that the daemon still has its limits
)

// maxPinnedMemory replaces a limit: no command removes one, and no device has as much memory.
const maxPinnedMemory = 1 << 40

// examination is what one examination of a daemon found.
type examination struct {
	spec     Spec
	pid      int     // of the daemon
	err      error   // why the daemon was not examined; one of the errors of runControl
	files    error   // what containers mount and is missing
	limits   error   // why the limits do not hold; nil if they do
	percent  float64 // the daemon's default limits, as it reports them
	pinned   uint64  // 0 for none
	servers  []health.MPSServer
	listed   time.Time // when the clients of all servers were listed; zero if never
	unlisted bool      // the daemon has no command that lists its servers
	adopted  bool      // the daemon had its limits already
}

// command runs the control program with one command to the daemon of a device, and returns the answer.
type command func(ctx context.Context, program string, r Root, device health.DeviceID, command string) (string, error)

// examiner examines the daemon of a device. Only one goroutine at a time uses it.
type examiner struct {
	root    Root
	command command
	program string

	spec     Spec // the limits that were set
	pid      int  // the daemon to which the fields below belong
	limited  bool // the defaults equal spec
	adopted  bool
	pinnedBy bool // a limit of memory may be set, and the daemon may be unable to report it
	percent  float64
	pinned   uint64
	checked  time.Time     // when the defaults were checked
	unproven bool          // servers may have been started before the defaults were set
	proven   map[int]bool  // servers that have the limits
	clients  map[int][]int // by server
	listed   time.Time
}

// request is what an examination is about.
type request struct {
	program    string
	spec       Spec
	pid        int
	pinnedBy   bool // a limit of memory may be set already
	allClients bool // list the clients in any case
}

// examine has the daemon report its limits, sets them if they are others, and returns the states of its servers.
func (e *examiner) examine(ctx context.Context, r request) examination {
	if r.pid != e.pid {
		*e = examiner{root: e.root, command: e.command, pid: r.pid}
	}
	e.pinnedBy = e.pinnedBy || r.pinnedBy
	e.program = r.program
	if r.spec != e.spec {
		e.pinnedBy = e.pinnedBy || e.spec.PinnedMemory > 0
		e.spec, e.limited = r.spec, false
	}
	x := examination{spec: r.spec, pid: r.pid, files: e.checkFiles()}
	x.err = e.ask(ctx, r, &x)
	x.percent, x.pinned, x.listed, x.adopted = e.percent, e.pinned, e.listed, e.adopted
	return x
}

// checkFiles returns an error if something is missing that containers mount.
func (e *examiner) checkFiles() error {
	for _, dir := range []string{e.root.PipeDir(e.spec.Device), e.root.LogDir(e.spec.Device), e.root.ShmDir()} {
		info, err := os.Stat(dir)
		if err != nil {
			return err
		}
		if !info.IsDir() {
			return fmt.Errorf("%s: expected a directory, found %s", dir, info.Mode())
		}
	}
	return nil
}

// ask asks the daemon. An error means that the daemon could not be asked.
func (e *examiner) ask(ctx context.Context, r request, x *examination) error {
	now := time.Now()
	// The limits of a share are unknown if its device leaves and only its directory is left.
	if e.spec.ThreadPercentage > 0 && (!e.limited || now.Sub(e.checked) >= limitsInterval) {
		first := e.checked.IsZero()
		set, err := e.hold(ctx, defaults)
		if x.limits = err; notAsked(err) {
			return err
		}
		if e.checked = now; first || set {
			e.unproven, e.proven = true, make(map[int]bool)
		}
		e.limited, e.adopted = err == nil, first && !set
	}
	pids, active := slices.Sorted(maps.Keys(e.clients)), false
	var err error
	if len(pids) > 0 && !e.unproven && !r.allClients && now.Sub(e.listed) < clientsInterval {
		if x.servers, active, err = e.statuses(ctx, pids); err != nil {
			return err
		}
	}
	if !active { // a server may have ended, and another one started
		if err := e.list(ctx, r, now, x); err != nil || x.unlisted {
			return err
		}
	}
	for i := range x.servers {
		x.servers[i].Clients = e.clients[x.servers[i].PID]
	}
	return nil
}

// list has the daemon list its servers, and their clients if they may have changed. It sets the limits of servers that may lack them.
func (e *examiner) list(ctx context.Context, r request, now time.Time, x *examination) error {
	pids, err := e.pids(ctx, "get_server_list")
	switch {
	case lacksCommand(err) && e.clients == nil:
		x.unlisted = true
		return nil
	case err != nil:
		return err
	}
	if e.unproven {
		for _, pid := range pids {
			if e.proven[pid] {
				continue
			}
			_, err := e.hold(ctx, ofServer(pid))
			switch {
			case notAsked(err):
				return err
			case e.adopted && lacksCommand(err): // its defaults are the only limits that it has
			case err != nil:
				x.limits = errors.Join(x.limits, fmt.Errorf("server %d: %w", pid, err))
				continue
			}
			e.proven[pid] = true
		}
		e.unproven = x.limits != nil
	}
	changed := !slices.Equal(pids, slices.Sorted(maps.Keys(e.clients)))
	var active bool
	if x.servers, active, err = e.statuses(ctx, pids); err != nil {
		return err
	}
	if changed || !active || r.allClients || now.Sub(e.listed) >= clientsInterval {
		clients := make(map[int][]int, len(pids))
		for _, pid := range pids {
			if clients[pid], err = e.pids(ctx, "get_client_list %d", pid); errors.Is(err, errRefused) {
				clients[pid] = e.clients[pid] // the server may be ending
			} else if err != nil {
				return err
			}
		}
		e.clients, e.listed = clients, now
	}
	return nil
}

// statuses returns the servers without their clients, and whether all are active.
func (e *examiner) statuses(ctx context.Context, pids []int) (servers []health.MPSServer, active bool, err error) {
	active = true
	for _, pid := range pids {
		answer, err := e.send(ctx, "get_server_status %d", pid)
		if notAsked(err) {
			return nil, false, err
		}
		s := health.MPSServer{PID: pid, Status: parseServerStatus(answer)}
		servers, active = append(servers, s), active && s.Status == serverActive
	}
	return servers, active, nil
}

// notAsked reports whether an error means that the daemon did not answer. A refusal is an answer.
func notAsked(err error) bool {
	return err != nil && !errors.Is(err, errRefused) && !errors.Is(err, errLimit)
}

// errLimit is a limit that does not hold.
var errLimit = errors.New("limit not set")

// send sends a command to the daemon and returns its answer.
func (e *examiner) send(ctx context.Context, format string, args ...any) (string, error) {
	return e.command(ctx, e.program, e.root, e.spec.Device, fmt.Sprintf(format, args...))
}

func (e *examiner) pids(ctx context.Context, format string, args ...any) ([]int, error) {
	answer, err := e.send(ctx, format, args...)
	if err != nil {
		return nil, err
	}
	return parsePIDs(answer)
}

// allClients returns the clients of each server.
func (e *examiner) allClients(ctx context.Context) (map[int][]int, error) {
	servers, err := e.pids(ctx, "get_server_list")
	if err != nil {
		return nil, err
	}
	clients := make(map[int][]int, len(servers))
	for _, server := range servers {
		if clients[server], err = e.pids(ctx, "get_client_list %d", server); err != nil {
			return nil, err
		}
	}
	return clients, nil
}

// scope is whose limits a command concerns: the defaults, for servers that start later, or a running server's, for clients that connect
// later.
type scope struct{ infix, server string }

//nolint:gochecknoglobals // a constant
var defaults = scope{infix: "default_"}

func ofServer(pid int) scope { return scope{server: strconv.Itoa(pid) + " "} }

// hold has the limits of e.spec hold in a scope, and reports whether it set any. It sets nothing if the daemon reports them already. A
// limit that the daemon cannot report, as with older drivers, is set without proof.
func (e *examiner) hold(ctx context.Context, s scope) (set bool, err error) {
	threads, err := e.holdThreads(ctx, s)
	if err != nil {
		return threads, err
	}
	pinned, err := e.holdPinned(ctx, s)
	return threads || pinned, err
}

func (e *examiner) holdThreads(ctx context.Context, s scope) (set bool, err error) {
	want := float64(e.spec.ThreadPercentage)
	get := strings.TrimSpace("get_" + s.infix + "active_thread_percentage " + s.server)
	answer, err := e.send(ctx, "%s", get)
	if notAsked(err) {
		return false, err
	}
	got, ok := parsePercentage(answer)
	if set = !ok || got != want; set {
		if _, err := e.send(ctx, "set_%sactive_thread_percentage %s%d", s.infix, s.server, e.spec.ThreadPercentage); err != nil {
			return false, err
		}
		if answer, err = e.send(ctx, "%s", get); notAsked(err) {
			return true, err
		}
		got, ok = parsePercentage(answer)
	}
	if ok && (got < want-1 || got > want+1) {
		return set, fmt.Errorf("%w: the active thread percentage was set to %v, but the daemon reports %v", errLimit, want, got)
	}
	if s == defaults {
		if e.percent = want; ok {
			e.percent = got
		}
	}
	return set, nil
}

func (e *examiner) holdPinned(ctx context.Context, s scope) (set bool, err error) {
	want := e.spec.PinnedMemory
	get := fmt.Sprintf("get_%sdevice_pinned_mem_limit %s0", s.infix, s.server)
	answer, err := e.send(ctx, "%s", get)
	if notAsked(err) {
		return false, err
	}
	got, ok := parseSize(answer)
	switch {
	case want > 0:
		set = !ok || got.bytes != want
	case ok:
		set = got.bytes > 0 && got.bytes < maxPinnedMemory
	default:
		set = e.pinnedBy
	}
	if set {
		value := want
		if want == 0 {
			value = maxPinnedMemory
		}
		if _, err := e.send(ctx, "set_%sdevice_pinned_mem_limit %s0 %dM", s.infix, s.server, value>>20); err != nil {
			return false, err
		}
		if answer, err = e.send(ctx, "%s", get); notAsked(err) {
			return true, err
		}
		got, ok = parseSize(answer)
	}
	if ok && want > 0 && !got.near(want) {
		return set, fmt.Errorf("%w: the pinned memory limit was set to %d MiB, but the daemon reports %d MiB", errLimit, want>>20, got.bytes>>20)
	}
	if s == defaults {
		e.pinned = want
	}
	return set, nil
}
