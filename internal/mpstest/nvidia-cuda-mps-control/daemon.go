package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/mpstest"
)

// logFile is control.log or server.log.
type logFile struct {
	*os.File
	role string
}

func openLog(dir, name, role string) (logFile, error) {
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644) //nolint:gosec // as the real one
	return logFile{f, role}, err
}

func (l logFile) printf(format string, args ...any) {
	fmt.Fprintf(l, "[%s %s %5d] %s\n", time.Now().Format("2006-01-02 15:04:05.000"), l.role, os.Getpid(), fmt.Sprintf(format, args...))
}

// server is a server process that the daemon has started.
type server struct {
	pid, uid int
	cmd      *exec.Cmd
	ready    bool
	exited   chan struct{}
}

// waiting is a client that no server has accepted yet.
type waiting struct {
	uid   int
	reply chan mpstest.Reply // of capacity 1
}

type daemon struct {
	settings
	multiUser bool
	log       logFile
	commands  *os.File // mpstest.CommandsFile
	exit      chan struct{}

	serial sync.Mutex // held while a command or a new client is served

	mu       sync.Mutex // guards what follows
	defaults mpstest.Limits
	servers  []*server
	pending  []waiting
	quitting bool
}

func runDaemon(s settings, multiUser bool) int {
	faults := s.faults()
	lock, err := os.OpenFile(filepath.Join(s.pipe, "control_lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		fmt.Fprintln(os.Stderr, "Failed to create the lock file:", err)
		return 1
	}
	if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil { //nolint:gosec // a descriptor
		fmt.Fprintln(os.Stderr, "An instance of this daemon is already running")
		return 1
	}
	defer lock.Close() //nolint:errcheck // it unlocks
	log, err := openLog(s.log, "control.log", "Control")
	if err != nil {
		fmt.Fprintln(os.Stderr, "Failed to open the log:", err)
		return 1
	}
	d := &daemon{
		settings: s, multiUser: multiUser, log: log, exit: make(chan struct{}),
		defaults: mpstest.Limits{ThreadPercentage: 100, PinnedMemory: make(map[string]uint64)},
	}
	if d.commands, err = os.OpenFile(mpstest.CommandsFile(s.program), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err != nil {
		panic(err)
	}
	log.printf("Starting control daemon using socket %s", s.socket())
	log.printf("To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY=%s", s.pipe)
	if faults.ExitAtStart {
		log.printf("Failed to start: the stand-in was told to")
		fmt.Fprintln(os.Stderr, "Failed to start: the stand-in was told to")
		return 1
	}
	if faults.HangAtStart {
		select {}
	}
	<-time.After(startDelay(faults.StartDelay))
	if err := os.WriteFile(s.pidFile(), []byte(strconv.Itoa(os.Getpid())), 0o644); err != nil { //nolint:gosec // as the real one
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	_ = os.Remove(s.socket()) // of a daemon that was killed
	l, err := listen(s.socket())
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	d.record("start")
	if os.Getenv(backgroundVariable) != "" {
		fmt.Println(serving)
	}
	go d.accept(l)
	<-d.exit
	_ = l.Close()
	_ = os.Remove(s.pidFile())
	log.printf("Exit")
	return 0
}

// listen serves a socket to the clients of all users. A killed process leaves its socket.
func listen(path string) (*net.UnixListener, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err == nil {
		err = os.Chmod(path, 0o777) //nolint:gosec // clients of all users
	}
	return l, err
}

func startDelay(d mpstest.Duration) time.Duration {
	if d == 0 {
		return mpstest.DefaultStartDelay
	}
	return time.Duration(d)
}

// record appends to the log of commands.
func (d *daemon) record(command string) {
	fmt.Fprintf(d.commands, "%s\t%d\t%s\n", d.device, os.Getpid(), command)
}

func (d *daemon) accept(l *net.UnixListener) {
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			return
		}
		d.log.printf("Accepting connection...")
		go d.serve(conn)
	}
}

func (d *daemon) serve(conn *net.UnixConn) {
	defer conn.Close() //nolint:errcheck // the peer sees it
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		d.log.printf("User did not send valid credentials")
		return
	}
	if !strings.HasPrefix(line, "{") {
		answer, quit := d.command(strings.TrimSuffix(line, "\n"))
		if answer != "" {
			answer += "\n"
		}
		_, _ = io.WriteString(conn, answer+endOfAnswer) // the control program may have ended
		if quit {
			close(d.exit)
		}
		return
	}
	var req mpstest.ClientRequest
	if json.Unmarshal([]byte(line), &req) != nil {
		return
	}
	_, uid := identify(conn, req)
	_ = json.NewEncoder(conn).Encode(<-d.newClient(uid))
}

// newClient returns where a client gets its server from.
func (d *daemon) newClient(uid int) <-chan mpstest.Reply {
	d.serial.Lock()
	defer d.serial.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	w := waiting{uid: uid, reply: make(chan mpstest.Reply, 1)}
	if d.quitting {
		w.reply <- mpstest.Reply{Error: mpstest.ServerNotReady}
		return w.reply
	}
	if i := d.serverFor(uid); i >= 0 && d.servers[i].ready {
		d.log.printf("NEW CLIENT 0 from user %d: Server already exists", uid)
	} else {
		d.log.printf("NEW CLIENT 0 from user %d: Server is not ready, push client to pending list", uid)
	}
	d.pending = append(d.pending, w)
	d.place()
	return w.reply
}

// serverFor returns the index of the server that serves a user, -1 if there is none. The caller holds d.mu.
func (d *daemon) serverFor(uid int) int {
	return slices.IndexFunc(d.servers, func(s *server) bool { return s.uid == uid || d.multiUser })
}

// place gives clients that wait to servers, and starts and drains servers for them. The caller holds d.mu.
func (d *daemon) place() {
	d.pending = slices.DeleteFunc(d.pending, func(w waiting) bool {
		if i := d.serverFor(w.uid); i >= 0 {
			s := d.servers[i]
			if !s.ready {
				return false
			}
			if answer, err := ask(d.pipe, s.pid, serverRequest{Op: opExpect}); err != nil || answer.Text != "" {
				return false // it exits, or waits for its clients to leave: placed again then
			}
			w.reply <- mpstest.Reply{Server: s.pid}
			return true
		}
		if len(d.servers) > 0 { // of another user
			if s := d.servers[0]; s.ready {
				_, _ = ask(d.pipe, s.pid, serverRequest{Op: opDrain}) // it may have exited
			}
			return false
		}
		if d.multiUser {
			return !d.start(0, w)
		}
		return !d.start(w.uid, w)
	})
}

// start starts a server. If that fails it fails the client. The caller holds d.mu.
func (d *daemon) start(uid int, w waiting) bool {
	if err := d.startServer(uid); err != nil {
		d.log.printf("Failed to start a server for user %d: %s", uid, err)
		w.reply <- mpstest.Reply{Error: mpstest.ServerNotReady}
		return false
	}
	return true
}

// startServer starts a server, which becomes ready later. The caller holds d.mu.
func (d *daemon) startServer(uid int) error {
	config, err := json.Marshal(serverConfig{UID: uid, Limits: d.defaults})
	if err != nil {
		panic(err)
	}
	cmd := &exec.Cmd{Path: d.program, Args: []string{serverName}, Stdin: strings.NewReader(string(config)), Stderr: os.Stderr}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: d.faults().OwnSession}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd.Stdout = w
	err = cmd.Start()
	_ = w.Close()
	if err != nil {
		_ = r.Close()
		return err
	}
	s := &server{pid: cmd.Process.Pid, uid: uid, cmd: cmd, exited: make(chan struct{})}
	d.servers = append(d.servers, s)
	d.log.printf("Starting new server %d for user %d", s.pid, uid)
	go d.watch(s, r)
	return nil
}

// watch places clients when the server is ready, and again when it has exited.
func (d *daemon) watch(s *server, r *os.File) {
	line, _ := bufio.NewReader(r).ReadString('\n')
	_ = r.Close()
	if line != "" {
		d.log.printf("NEW SERVER %d: Ready", s.pid)
		d.mu.Lock()
		s.ready = true
		d.place()
		d.mu.Unlock()
	}
	_ = s.cmd.Wait() // the state has it
	d.log.printf("Server %d exited with status %d", s.pid, s.cmd.ProcessState.ExitCode())
	_ = os.Remove(mpstest.ServerSocket(d.pipe, s.pid))
	d.mu.Lock()
	defer d.mu.Unlock()
	d.servers = slices.DeleteFunc(d.servers, func(other *server) bool { return other == s })
	if !s.ready {
		d.pending = slices.DeleteFunc(d.pending, func(w waiting) bool {
			if w.uid != s.uid && !d.multiUser {
				return false
			}
			w.reply <- mpstest.Reply{Error: mpstest.ServerNotReady}
			return true
		})
	}
	if !d.quitting {
		d.place()
	}
	close(s.exited)
}

// command serves a command. The daemon exits after the answer if quit is true.
func (d *daemon) command(line string) (answer string, quit bool) {
	args := strings.Fields(line)
	if len(args) == 0 {
		return "", false
	}
	d.serial.Lock()
	f := d.faults()
	is := func(names []string) bool {
		return slices.Contains(names, args[0]) || slices.Contains(names, mpstest.AllCommands)
	}
	d.record(line)
	delay, ok := f.Delay[args[0]]
	if !ok {
		delay = f.Delay[mpstest.AllCommands]
	}
	<-time.After(time.Duration(delay))
	if is(f.Hang) {
		select {} // with d.serial
	}
	if args[0] == "quit" && !is(f.Refuse) && !is(f.Ignore) {
		d.serial.Unlock()
		answer, quit = d.quit(args[1:])
	} else {
		defer d.serial.Unlock()
		if is(f.Refuse) {
			return "Failed to serve the command " + args[0], false
		}
		d.mu.Lock()
		before := d.defaults.Clone()
		answer = d.run(args[0], args[1:], f)
		if is(f.Ignore) {
			d.defaults = before
		}
		d.mu.Unlock()
	}
	if is(f.Die) {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	if other, ok := f.Answer[args[0]]; ok {
		answer = other
	}
	return answer, quit
}

const invalid = "Invalid arguments"

// run serves a command other than quit. The caller holds d.mu.
func (d *daemon) run(name string, args []string, f mpstest.Faults) string {
	switch name {
	case "get_server_list":
		if len(args) != 0 {
			return invalid
		}
		var pids []string
		for _, s := range d.servers {
			pids = append(pids, strconv.Itoa(s.pid))
		}
		return strings.Join(pids, "\n")
	case "start_server":
		return d.startOnCommand(args)
	case "set_default_active_thread_percentage":
		if len(args) != 1 {
			return invalid
		}
		v, ok := parsePercentage(args[0])
		if !ok {
			return invalid
		}
		d.defaults.ThreadPercentage = v
		return formatPercentage(v)
	case "get_default_active_thread_percentage":
		return formatPercentage(d.defaults.ThreadPercentage)
	case "set_default_device_pinned_mem_limit":
		return d.setMemory(args)
	case "get_default_device_pinned_mem_limit":
		return d.memory(name, args, f)
	case "get_device_pinned_mem_limit":
		if f.NoMemoryLimit {
			return unknown(name)
		}
	case "standin_fault":
		var faulty []string
		for _, s := range d.servers {
			if _, err := ask(d.pipe, s.pid, serverRequest{Op: opFault}); err == nil {
				faulty = append(faulty, strconv.Itoa(s.pid))
			}
		}
		return strings.Join(faulty, " ")
	}
	return d.runForServer(name, args)
}

// startOnCommand serves start_server. The caller holds d.mu.
func (d *daemon) startOnCommand(args []string) string {
	if len(args) != 2 || args[0] != "-uid" {
		return invalid
	}
	uid, err := strconv.Atoi(args[1])
	switch {
	case err != nil:
		return invalid
	case len(d.servers) > 0:
		return "An MPS server is already running"
	}
	if err := d.startServer(uid); err != nil {
		return err.Error()
	}
	return ""
}

// setMemory serves set_default_device_pinned_mem_limit. The caller holds d.mu.
func (d *daemon) setMemory(args []string) string {
	if len(args) != 2 {
		return invalid
	}
	device, value, ok := d.parseMemory(args[0], args[1])
	if !ok {
		return invalid
	}
	d.defaults.PinnedMemory[device] = value
	return ""
}

// memory serves get_default_device_pinned_mem_limit. The caller holds d.mu.
func (d *daemon) memory(name string, args []string, f mpstest.Faults) string {
	if f.NoMemoryLimit {
		return unknown(name)
	}
	if len(args) != 1 {
		return invalid
	}
	device, ok := d.parseDevice(args[0])
	if !ok {
		return invalid
	}
	return formatMemory(d.defaults.PinnedMemory[device])
}

func unknown(name string) string { return "Unknown command: " + name }

// serverCommands are the commands about servers, with the number of arguments.
func serverCommands() map[string][2]int {
	return map[string][2]int{
		"get_server_status": {1, 1}, "shutdown_server": {1, 2}, "get_client_list": {1, 1}, "get_device_client_list": {0, 1},
		"set_active_thread_percentage": {2, 2}, "get_active_thread_percentage": {1, 1},
		"set_device_pinned_mem_limit": {3, 3}, "get_device_pinned_mem_limit": {2, 2}, "terminate_client": {2, 2}, "ps": {0, 2},
	}
}

// runForServer serves a command about one server, or about all. The caller holds d.mu.
func (d *daemon) runForServer(name string, args []string) string {
	count, ok := serverCommands()[name]
	if !ok {
		return unknown(name)
	}
	if len(args) < count[0] || len(args) > count[1] {
		return invalid
	}
	servers, refusal := d.serversOf(name, args)
	if refusal != "" {
		return refusal
	}
	var lines []string
	if name == "ps" {
		lines = append(lines, "PID       ID    SERVER    DEVICE             NAMESPACE   COMMAND")
	}
	for _, s := range servers {
		req, answer := d.serverRequest(s, name, args)
		if answer != "" {
			return answer
		}
		if name == "shutdown_server" && len(args) == 2 {
			_ = s.cmd.Process.Kill()
			return ""
		}
		if !s.ready {
			continue
		}
		reply, err := ask(d.pipe, s.pid, req)
		if err != nil {
			return "Failed to communicate with server " + strconv.Itoa(s.pid)
		}
		if reply.Text != "" {
			lines = append(lines, reply.Text)
		}
	}
	return strings.Join(lines, "\n")
}

// serversOf returns the servers that a command is about, or the answer that refuses its arguments. The caller holds d.mu.
func (d *daemon) serversOf(name string, args []string) (servers []*server, refusal string) {
	if name == "ps" {
		if len(args) == 2 && args[0] != "-p" || len(args) == 1 {
			return nil, invalid
		}
		return d.servers, ""
	}
	if len(args) == 0 {
		return d.servers, ""
	}
	pid, err := strconv.Atoi(args[0])
	if err != nil {
		return nil, invalid
	}
	i := slices.IndexFunc(d.servers, func(s *server) bool { return s.pid == pid })
	if i < 0 {
		return nil, "Server " + args[0] + " not found"
	}
	return d.servers[i : i+1], ""
}

// serverRequest returns what to ask a server for a command, or the answer that the daemon gives itself. The caller holds d.mu.
func (d *daemon) serverRequest(s *server, name string, args []string) (req serverRequest, answer string) {
	req = serverRequest{Op: name, Args: args}
	switch name {
	case "get_server_status":
		if !s.ready {
			return req, "INITIALIZING"
		}
	case "shutdown_server":
		if len(args) == 2 && args[1] != "-f" {
			return req, invalid
		}
		req.Op = opDrain
	case "set_active_thread_percentage":
		if _, ok := parsePercentage(args[1]); !ok {
			return req, invalid
		}
	case "get_device_pinned_mem_limit", "set_device_pinned_mem_limit":
		device, ok := d.parseDevice(args[1])
		if !ok {
			return req, invalid
		}
		req.Args = slices.Clone(args)
		req.Args[1] = device
		if len(args) == 3 {
			if _, _, ok := d.parseMemory(device, args[2]); !ok {
				return req, invalid
			}
		}
	}
	return req, ""
}

// quit drains all servers, and with -t kills servers that remain after so many seconds.
func (d *daemon) quit(args []string) (answer string, quit bool) {
	var timeout <-chan time.Time
	if len(args) > 0 {
		if len(args) != 2 || args[0] != "-t" {
			return invalid, false
		}
		seconds, err := strconv.Atoi(args[1])
		if err != nil || seconds < 0 {
			return invalid, false
		}
		timeout = time.After(time.Duration(seconds) * time.Second)
	}
	d.mu.Lock()
	if d.quitting {
		d.mu.Unlock()
		return "The daemon is shutting down", false
	}
	d.quitting = true
	for _, w := range d.pending {
		w.reply <- mpstest.Reply{Error: mpstest.ServerNotReady}
	}
	d.pending = nil
	servers := slices.Clone(d.servers)
	d.mu.Unlock()
	for _, s := range servers {
		go func() { // a stopped server does not answer
			if _, err := ask(d.pipe, s.pid, serverRequest{Op: opDrain}); err != nil {
				_ = s.cmd.Process.Kill() // it has no clients yet
			}
		}()
	}
	for _, s := range servers {
		select {
		case <-s.exited:
		case <-timeout:
			for _, s := range servers {
				_ = s.cmd.Process.Kill()
			}
			timeout = nil
			<-s.exited
		}
	}
	return "", true
}

func (d *daemon) parseDevice(s string) (string, bool) {
	if i, err := strconv.Atoi(s); err == nil {
		if i < 0 || i >= len(d.devices) {
			return "", false
		}
		return d.devices[i], true
	}
	return s, slices.Contains(d.devices, s)
}

func (d *daemon) parseMemory(device, value string) (string, uint64, bool) {
	device, ok := d.parseDevice(device)
	size, sizeOK := parseSize(value)
	return device, size, ok && sizeOK
}
