// The stand-in for nvidia-cuda-mps-control, NVIDIA's program that controls MPS, without CUDA.
//
// Modelled after public documents, never seen run beside the real program:
//   - NVIDIA's MPS documentation (https://docs.nvidia.com/deploy/mps) and the manual page nvidia-cuda-mps-control(1): the commands, the
//     options, one user at a time, defaults that reach only servers started later, limits of the environment that count only if they
//     are tighter, FAULT until all clients have left, a server that outlives its clients;
//   - control.log of users' reports: its lines;
//   - NVIDIA/k8s-device-plugin: the files, the answers with a decimal, an exit code that tells only whether there is a daemon.
//
// Guesses, each chosen as the less convenient: a refused command has the exit code 0; set_default_device_pinned_mem_limit answers
// nothing; SIGTERM ends a daemon without its servers; a server whose daemon was killed keeps the device, so that the next daemon
// cannot start one; commands are served one by one, and so a slow one delays all; the daemon needs the directory of its logs; the
// texts of errors. Not modelled: control_privileged, SM partitions, client priorities, namespaces and MPS v3.
//
// Only the stand-in has: the command standin_fault; the subcommand standin-client; faults and a log of commands beside the program
// (package mpstest).
package main

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/gpu-node-agent/gpu-node-agent/internal/mpstest"
)

const serverName = "nvidia-cuda-mps-server"

const usage = "usage: nvidia-cuda-mps-control [-d | -f] [-multiuser-server]"

func main() {
	switch args := os.Args[1:]; {
	case filepath.Base(os.Args[0]) == serverName:
		os.Exit(runServer())
	case len(args) > 0 && args[0] == "standin-client":
		os.Exit(runClient(args[1:]))
	default:
		os.Exit(run(args))
	}
}

// settings are the environment of the control program, a daemon or a server.
type settings struct {
	pipe, log string
	devices   []string
	device    string // for faults: all of CUDA_VISIBLE_DEVICES
	program   string
}

func newSettings() settings {
	s := settings{
		pipe: os.Getenv("CUDA_MPS_PIPE_DIRECTORY"), log: os.Getenv("CUDA_MPS_LOG_DIRECTORY"),
		device: os.Getenv("CUDA_VISIBLE_DEVICES"),
	}
	if s.pipe == "" {
		s.pipe = "/tmp/nvidia-mps"
	}
	if s.log == "" {
		s.log = "/var/log/nvidia-mps"
	}
	if s.device != "" {
		s.devices = strings.Split(s.device, ",")
	}
	var err error
	if s.program, err = os.Executable(); err != nil {
		panic(err)
	}
	return s
}

func (s settings) socket() string  { return filepath.Join(s.pipe, "control") }
func (s settings) pidFile() string { return filepath.Join(s.pipe, "nvidia-cuda-mps-control.pid") }

// faults returns the faults in force. A file that cannot be read is a test's mistake.
func (s settings) faults() mpstest.Faults {
	f, err := mpstest.ReadFaults(s.program, s.device)
	if err != nil {
		panic(err)
	}
	return f
}

func run(args []string) int {
	s := newSettings()
	options := []string{"-d", "-f", "-multiuser-server"}
	if s.faults().NoMultiUser {
		options = options[:2]
	}
	for _, arg := range args {
		if !slices.Contains(options, arg) {
			fmt.Fprintf(os.Stderr, "nvidia-cuda-mps-control: unrecognized option '%s'\n%s\n", arg, usage)
			return 1
		}
	}
	background, foreground := slices.Contains(args, "-d"), slices.Contains(args, "-f")
	switch {
	case background && foreground, len(args) > 0 && !background && !foreground:
		fmt.Fprintln(os.Stderr, usage)
		return 1
	case background:
		return startInBackground(s, args)
	case foreground:
		return runDaemon(s, slices.Contains(args, "-multiuser-server"))
	}
	return control(s, os.Stdin, os.Stdout)
}

// backgroundVariable has a daemon write a line once it serves its socket.
const (
	backgroundVariable = "MPS_STANDIN_BACKGROUND"
	serving            = "serving"
)

// startInBackground returns once the daemon serves its socket or has exited.
func startInBackground(s settings, args []string) int {
	args = slices.Clone(args)
	args[slices.Index(args, "-d")] = "-f"
	cmd := exec.Command(s.program, args...) //nolint:noctx // it outlives this process
	cmd.Env = append(os.Environ(), backgroundVariable+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	r, w, err := os.Pipe()
	cmd.Stdout, cmd.Stderr = w, w
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	_ = w.Close()
	if line, _ := bufio.NewReader(r).ReadString('\n'); line != serving+"\n" {
		fmt.Fprint(os.Stderr, line)
		return 1
	}
	return 0
}

// control sends each line to the daemon and writes its answers.
func control(s settings, in io.Reader, out io.Writer) int {
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		command := strings.TrimSpace(lines.Text())
		if command == "" {
			continue
		}
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: s.socket(), Net: "unix"})
		if err != nil {
			fmt.Fprintln(out, "Cannot find MPS control daemon process")
			return 1
		}
		_, err = fmt.Fprintln(conn, command)
		var answer []byte
		if err == nil {
			answer, err = io.ReadAll(conn)
		}
		_ = conn.Close()
		// The daemon ends each answer, also an empty one; without that it has ended itself.
		text, complete := strings.CutSuffix(string(answer), endOfAnswer)
		fmt.Fprint(out, text)
		if err != nil || !complete {
			fmt.Fprintln(out, "Failed to communicate with MPS control daemon")
			return 1
		}
	}
	return 0
}

// endOfAnswer follows each answer.
const endOfAnswer = "\x00"

// runClient uses the device until its standard input ends or MPS fails it.
func runClient(args []string) int {
	flags := flag.NewFlagSet("standin-client", flag.ExitOnError)
	uid := flags.Int("uid", os.Getuid(), "user")
	_ = flags.Parse(args) // exits
	req := mpstest.ClientRequest{UID: uid, Command: strings.Join(os.Args, " "), Env: make(map[string]string)}
	for _, v := range os.Environ() {
		if name, value, _ := strings.Cut(v, "="); strings.HasPrefix(name, "CUDA_") {
			req.Env[name] = value
		}
	}
	c, err := mpstest.Connect(newSettings().pipe, req)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println(c)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	select {
	case <-ended:
		c.Close()
		return 0
	case <-c.Done():
		fmt.Println(c.Err())
		return 1
	}
}
