package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/mpstest"
)

// maxClients is the limit of Volta and newer GPUs.
const maxClients = 48

// serverConfig is what a daemon gives a server on its standard input.
type serverConfig struct {
	UID    int
	Limits mpstest.Limits
}

// The requests of a daemon besides commands.
const (
	opExpect = "expect" // a client comes
	opDrain  = "drain"  // exit when there are no clients
	opFault  = "fault"
)

// serverRequest is a daemon's request; a client's request has none of these fields.
type serverRequest struct {
	Op   string
	Args []string
}

type serverAnswer struct{ Text string }

// ask sends a request to a server.
func ask(pipe string, pid int, req serverRequest) (answer serverAnswer, err error) {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: mpstest.ServerSocket(pipe, pid), Net: "unix"})
	if err != nil {
		return answer, err
	}
	defer conn.Close() //nolint:errcheck // the answer counts
	if err := json.NewEncoder(conn).Encode(req); err != nil {
		return answer, err
	}
	err = json.NewDecoder(conn).Decode(&answer)
	return answer, err
}

// client is a client of a server.
type client struct {
	pid, uid int
	command  string
	conn     *net.UnixConn
}

type mpsServer struct {
	settings
	log logFile

	mu       sync.Mutex // guards what follows
	limits   mpstest.Limits
	clients  []*client
	expected int
	fault    bool
	draining bool
}

// runServer serves clients until it has drained. It outlives its daemon.
func runServer() int { //nolint:unparam // an exit code
	s := &mpsServer{settings: newSettings()}
	var err error
	if s.log, err = openLog(s.settings.log, "server.log", "Server"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	var config serverConfig
	if err := json.NewDecoder(os.Stdin).Decode(&config); err != nil {
		s.log.printf("no configuration: %s", err)
		return 1
	}
	s.limits = config.Limits
	for _, device := range s.devices {
		// In EXCLUSIVE_PROCESS mode one process only can have the device.
		lock, err := os.OpenFile(s.program+"."+device+".lock", os.O_CREATE|os.O_RDWR, 0o600)
		if err == nil {
			err = syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) //nolint:gosec // a descriptor
		}
		if err != nil {
			s.log.printf("Failed to start: all CUDA-capable devices are busy or unavailable")
			return 1
		}
	}
	faults := s.faults()
	<-time.After(startDelay(faults.ServerDelay))
	if faults.NoServers {
		s.log.printf("Failed to start: the stand-in was told to")
		return 1
	}
	l, err := listen(mpstest.ServerSocket(s.pipe, os.Getpid()))
	if err != nil {
		s.log.printf("%s", err)
		return 1
	}
	s.log.printf("New server started for user %d", config.UID)
	fmt.Println("ready")
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			s.log.printf("%s", err)
			return 1
		}
		go s.serve(conn)
	}
}

func (s *mpsServer) serve(conn *net.UnixConn) {
	defer conn.Close() //nolint:errcheck // the peer sees it
	r := bufio.NewReader(conn)
	line, err := r.ReadBytes('\n')
	if err != nil {
		return
	}
	var req struct {
		serverRequest
		mpstest.ClientRequest
	}
	if json.Unmarshal(line, &req) != nil {
		return
	}
	if req.Op != "" {
		answer := s.request(req.serverRequest)
		_ = json.NewEncoder(conn).Encode(answer)
		s.exitIfDrained()
		return
	}
	c := &client{conn: conn, command: req.Command}
	c.pid, c.uid = identify(conn, req.ClientRequest)
	if !s.add(c, req.Env) {
		return
	}
	_, _ = r.ReadByte() // until the client exits, or is terminated
	s.remove(c)
	s.exitIfDrained()
}

// add answers a client and returns whether it was accepted.
func (s *mpsServer) add(c *client, env map[string]string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.expected = max(0, s.expected-1)
	var reply mpstest.Reply
	switch {
	case s.fault:
		reply.Error = mpstest.ServerNotReady
	case len(s.clients) >= maxClients:
		reply.Error = mpstest.MaxClients
	default:
		reply.Limits = s.tighten(env)
		s.clients = append(s.clients, c)
		s.log.printf("New client %d connected", c.pid)
	}
	_ = json.NewEncoder(c.conn).Encode(reply) // a client that ended is removed
	return reply.Error == 0
}

func (s *mpsServer) remove(c *client) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clients = slices.DeleteFunc(s.clients, func(other *client) bool { return other == c })
	s.log.printf("Client process %d disconnected", c.pid)
	if len(s.clients) == 0 && s.fault {
		s.fault = false
		s.log.printf("All faulting clients have disconnected, the server is ACTIVE")
	}
}

func (s *mpsServer) exitIfDrained() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining && len(s.clients) == 0 && s.expected == 0 {
		s.log.printf("Server exits")
		os.Exit(0) //nolint:forbidigo // the process of main.go's runServer
	}
}

// tighten returns the limits of a client: a limit in its environment counts only if it is tighter. The caller holds s.mu.
func (s *mpsServer) tighten(env map[string]string) mpstest.Limits {
	l := s.limits.Clone()
	if v, ok := parsePercentage(env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]); ok {
		l.ThreadPercentage = min(l.ThreadPercentage, v)
	}
	for limit := range strings.SplitSeq(env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"], ",") {
		device, value, _ := strings.Cut(limit, "=")
		i, err := strconv.Atoi(strings.TrimSpace(device))
		size, ok := parseSize(strings.TrimSpace(value))
		if err != nil || !ok || i < 0 || i >= len(s.devices) {
			continue
		}
		if now := l.PinnedMemory[s.devices[i]]; now == 0 || size < now {
			l.PinnedMemory[s.devices[i]] = size
		}
	}
	return l
}

func (s *mpsServer) request(req serverRequest) (answer serverAnswer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var lines []string
	switch args := req.Args; req.Op {
	case opExpect:
		if s.draining {
			return serverAnswer{Text: "drains"}
		}
		s.expected++
		time.AfterFunc(2*time.Second, func() { // one that does not come
			s.mu.Lock()
			s.expected = max(0, s.expected-1)
			s.mu.Unlock()
			s.exitIfDrained()
		})
	case opDrain:
		s.draining = true
	case opFault:
		s.log.printf("Fatal fault on a client")
		s.fault = len(s.clients) > 0
		for _, c := range s.clients {
			_ = json.NewEncoder(c.conn).Encode(mpstest.Reply{Error: mpstest.RPCFailure})
		}
		if !s.fault {
			return serverAnswer{Text: "no clients"}
		}
	case "get_server_status":
		lines = append(lines, map[bool]string{false: "ACTIVE", true: "FAULT"}[s.fault])
	case "get_client_list":
		for _, c := range s.clients {
			lines = append(lines, strconv.Itoa(c.pid))
		}
	case "get_device_client_list":
		for _, device := range s.devices {
			lines = append(lines, "Device "+device)
			for _, c := range s.clients {
				lines = append(lines, strconv.Itoa(c.pid))
			}
		}
	case "ps":
		for i, c := range s.clients {
			if len(args) == 2 && args[1] != strconv.Itoa(c.pid) {
				continue
			}
			lines = append(lines, fmt.Sprintf("%-9d %-5d %-9d %-18.18s %-11s %s", c.pid, i, os.Getpid(), s.device, "4026531836", c.command))
		}
	case "set_active_thread_percentage":
		s.limits.ThreadPercentage, _ = parsePercentage(args[1])
		fallthrough
	case "get_active_thread_percentage":
		lines = append(lines, formatPercentage(s.limits.ThreadPercentage))
	case "set_device_pinned_mem_limit":
		s.limits.PinnedMemory[args[1]], _ = parseSize(args[2])
	case "get_device_pinned_mem_limit":
		lines = append(lines, formatMemory(s.limits.PinnedMemory[args[1]]))
	case "terminate_client":
		i := slices.IndexFunc(s.clients, func(c *client) bool { return strconv.Itoa(c.pid) == args[1] })
		if i < 0 {
			return serverAnswer{Text: "Client " + args[1] + " not found"}
		}
		_ = json.NewEncoder(s.clients[i].conn).Encode(mpstest.Reply{Error: mpstest.ClientTerminated})
		_ = s.clients[i].conn.Close()
	}
	return serverAnswer{Text: strings.Join(lines, "\n")}
}

// identify returns the PID and the user of a client.
func identify(conn *net.UnixConn, req mpstest.ClientRequest) (pid, uid int) {
	pid, uid = req.PID, -1
	if req.UID != nil {
		uid = *req.UID
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return pid, uid
	}
	_ = raw.Control(func(fd uintptr) {
		cred, err := syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED) //nolint:gosec // a descriptor
		if err != nil {
			return
		}
		if req.PID == 0 {
			pid = int(cred.Pid)
		}
		if req.UID == nil {
			uid = int(cred.Uid)
		}
	})
	return pid, uid
}

func parsePercentage(s string) (float64, bool) {
	v, err := strconv.ParseFloat(s, 64)
	return v, err == nil && v > 0 && v <= 100
}

func formatPercentage(v float64) string { return strconv.FormatFloat(v, 'f', 1, 64) }

// parseSize parses a limit such as 3G or 1024M.
func parseSize(s string) (uint64, bool) {
	shift := map[byte]uint{'M': 20, 'G': 30}
	if s == "" || shift[s[len(s)-1]] == 0 {
		return 0, false
	}
	n, err := strconv.ParseUint(s[:len(s)-1], 10, 30)
	return n << shift[s[len(s)-1]], err == nil && n > 0
}

func formatMemory(v uint64) string {
	switch {
	case v == 0:
		return "No limit is set"
	case v%(1<<30) == 0:
		return strconv.FormatUint(v>>30, 10) + "G"
	}
	return strconv.FormatUint(v>>20, 10) + "M"
}
