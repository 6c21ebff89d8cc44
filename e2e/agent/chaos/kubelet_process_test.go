package chaos

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// The stand-in kubelet is a separate process so that it can be frozen: this test's binary in another role. It reads
// commands from standard input and responds to each with a line.

const kubeletDirEnv = "CHAOS_KUBELET_DIR"

type command struct {
	Do       string `json:"do"` // state, start, stop, restart, drop, forget, await-end
	Resource string `json:"resource,omitempty"`
}

type answer struct {
	Error     string                          `json:"error,omitempty"`
	Running   bool                            `json:"running"`
	Resources map[string]kubelettest.Resource `json:"resources"`
	Flips     map[string]int                  `json:"flips"` // by device: the largest number of health changes on one stream
}

// journal counts the plugin's health changes per stream: a kubelet that was frozen reads the backlog of two streams in
// any order.
type journal struct {
	mu       sync.Mutex // guards everything below
	streams  map[stream]map[string]bool
	reported map[stream]map[string]int
	flips    map[string]int
}

type stream struct {
	resource     string
	registration int
}

func newJournal() *journal {
	return &journal{streams: map[stream]map[string]bool{}, reported: map[stream]map[string]int{}, flips: map[string]int{}}
}

func (j *journal) record(resource string, registration int, devices []kubelettest.Device) {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := stream{resource, registration}
	if j.streams[s] == nil {
		j.streams[s], j.reported[s] = map[string]bool{}, map[string]int{}
	}
	for _, d := range devices {
		if was, known := j.streams[s][d.ID]; known && was != d.Healthy {
			j.reported[s][d.ID]++
			j.flips[d.ID] = max(j.flips[d.ID], j.reported[s][d.ID])
		}
		j.streams[s][d.ID] = d.Healthy
	}
}

// forget resets the streams for a new kubelet, which counts its registrations from zero.
func (j *journal) forget() {
	j.mu.Lock()
	defer j.mu.Unlock()
	clear(j.streams)
	clear(j.reported)
}

// reset resets all counts for a new agent.
func (j *journal) reset() {
	j.forget()
	j.mu.Lock()
	defer j.mu.Unlock()
	clear(j.flips)
}

// awaitStreamEnd waits until the kubelet detects the end of a plugin's stream. before is the number of registrations while it was open: the
// plugin may be registered again already.
func awaitStreamEnd(k *kubelettest.Kubelet, resource string, before int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := k.WaitFor(ctx, func(s kubelettest.State) bool {
		r := s.Resources[resource]
		return !r.Connected || r.Registrations > before
	})
	return err
}

// serveKubelet runs the kubelet's role until standard input ends.
func serveKubelet(dir string) error {
	k, err := kubelettest.Start(dir)
	if err != nil {
		return err
	}
	defer k.Stop()
	j := newJournal()
	k.OnDevices(j.record)
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var c command
		if err := in.Decode(&c); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		var failed error
		switch c.Do {
		case "state":
		case "stop":
			k.Stop()
			j.forget()
		case "start":
			if !k.State().Running {
				failed = k.Restart()
			}
		case "restart":
			k.Stop()
			j.forget()
			failed = k.Restart()
		case "drop":
			before := k.State().Resources[c.Resource].Registrations
			k.Drop(c.Resource)
			failed = awaitStreamEnd(k, c.Resource, before)
		case "forget":
			k.Forget(c.Resource)
		case "await-end":
			for name, r := range k.State().Resources {
				failed = errors.Join(failed, awaitStreamEnd(k, name, r.Registrations))
			}
			j.reset()
		default:
			failed = fmt.Errorf("unknown command %q", c.Do)
		}
		s := k.State()
		a := answer{Running: s.Running, Resources: s.Resources}
		if failed != nil {
			a.Error = failed.Error()
		}
		j.mu.Lock()
		a.Flips = j.flips
		err := out.Encode(a)
		j.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

// kubelet is the kubelet's process.
type kubelet struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func startKubelet(dir string) (*kubelet, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	k := &kubelet{cmd: exec.Command(self)}
	k.cmd.Env = append(os.Environ(), kubeletDirEnv+"="+dir)
	k.cmd.Stderr = os.Stderr
	k.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if k.in, err = k.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := k.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	k.out = bufio.NewReader(out)
	if err := k.cmd.Start(); err != nil {
		return nil, err
	}
	_, err = k.request(command{Do: "state"}) // it responds when it serves
	return k, err
}

// request sends a command. The kubelet must not be frozen.
func (k *kubelet) request(c command) (a answer, err error) {
	text, err := json.Marshal(c)
	if err != nil {
		return a, err
	}
	if _, err := k.in.Write(append(text, '\n')); err != nil {
		return a, err
	}
	line, err := k.out.ReadBytes('\n')
	if err != nil {
		return a, fmt.Errorf("kubelet's process does not respond: %w", err)
	}
	if err := json.Unmarshal(line, &a); err != nil {
		return a, err
	}
	if a.Error != "" {
		return a, fmt.Errorf("kubelet %s: %s", c.Do, a.Error)
	}
	return a, nil
}

func (k *kubelet) freeze() error { return k.cmd.Process.Signal(syscall.SIGSTOP) }
func (k *kubelet) thaw() error   { return k.cmd.Process.Signal(syscall.SIGCONT) }

func (k *kubelet) end() error {
	_ = k.thaw()
	err := k.in.Close()
	ended := make(chan error, 1)
	go func() { ended <- k.cmd.Wait() }()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	select {
	case waitErr := <-ended:
		return errors.Join(err, waitErr)
	case <-ctx.Done():
		return errors.Join(err, k.cmd.Process.Kill(), <-ended)
	}
}
