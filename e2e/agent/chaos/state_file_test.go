package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

// stateFile returns the path of the state of the world's kind of source.
func (w *world) stateFile() string {
	if w.engine != nil {
		return filepath.Join(w.StateDir(), "state.json")
	}
	return filepath.Join(w.StateDir(), "state.sim.json")
}

// rewriteTimeout is how long the agent may need to detect a foreign state file and rewrite it.
const rewriteTimeout = 15 * time.Second

// replaceState removes or replaces the state file. The agent must rewrite it in full.
func (w *world) replaceState(ctx context.Context, s step) error {
	if w.diskFull {
		return nil
	}
	if err := w.await(ctx, w.patience, func(context.Context) error { return w.checkSaved() }); err != nil {
		return err
	}
	var err error
	switch s.arg {
	case "":
		err = os.Remove(w.stateFile())
	case "garbage":
		err = os.WriteFile(w.stateFile(), []byte("\x00\xff{not json"), 0o600)
	case "empty":
		err = os.WriteFile(w.stateFile(), nil, 0o600)
	case "another": // written by an agent with other GPUs
		err = os.WriteFile(w.stateFile(),
			[]byte(`{"format":"gpu-node-agent state","version":1,"bootID":"","source":"another","devices":[]}`+"\n"), 0o600)
	}
	if err != nil {
		return err
	}
	return w.await(ctx, w.patience+scaled(rewriteTimeout), func(context.Context) error { return w.checkSaved() })
}

// secondAgent runs another agent with the same state directory for a while. It restores the findings, and the file stays the
// first agent's.
func (w *world) secondAgent(ctx context.Context, how string) (err error) {
	if w.engine != nil || w.diskFull || w.unmeasured || w.detached || w.engineDetached {
		return nil
	}
	if err := w.await(ctx, w.patience, func(context.Context) error { return w.checkSaved() }); err != nil {
		return err
	}
	n, err := node.New(ctx, w.agent)
	if err != nil {
		return err
	}
	log := &buffer{}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w\nend of the second agent's log:\n%s", err, log.last(2000))
		}
		err = errors.Join(err, n.Remove())
	}()
	const config = "source: {mode: sim, sim: {profile: h100-8, control: DIR/sim.sock}}\nhealth: {socket: DIR/agent.sock}\n" +
		"plugin: {kubeletDir: DIR}\nmetrics: {listen: ADDRESS}\n"
	if err := n.Write(config); err != nil {
		return err
	}
	if err := n.Start(log, "GPU_NODE_AGENT_STATE_DIR="+w.StateDir()); err != nil {
		return err
	}
	if err := w.await(ctx, scaled(10*time.Second), func(ctx context.Context) error {
		if err := w.checkSecond(ctx, n); err != nil {
			return err
		}
		return n.Event(ctx, "{gpu: 0, temperature: 0}") // no change; events are accepted from now on
	}); err != nil {
		return err
	}
	// An XID on the second agent's own GPU does not affect the first.
	if err := n.Event(ctx, "{gpu: 7, xid: 79}"); err != nil {
		return err
	}
	if err := hold(ctx, 3*time.Second, w.checkSaved); err != nil {
		return fmt.Errorf("with a second agent: %w", err)
	}
	if how == "kill" {
		if err := n.Signal(syscall.SIGKILL); err != nil {
			return err
		}
		_ = n.Stop() // returns the error of SIGKILL
	} else if err := n.Stop(); err != nil {
		return violated("end", "second agent: %v", err)
	}
	if err := w.checkSaved(); err != nil {
		return fmt.Errorf("after the second agent's exit: %w", err)
	}
	return nil
}

// checkSecond checks that the second agent serves and has the saved findings. To it a lost GPU has returned, which
// clears what a reset clears.
func (w *world) checkSecond(ctx context.Context, n *node.Node) error {
	status, text, err := n.Get(ctx, "/api/v1/snapshot")
	if err != nil || status != http.StatusOK {
		return violated("second", "/api/v1/snapshot: status %d, %v", status, err)
	}
	var s snapshot
	if err := json.Unmarshal(text, &s); err != nil {
		return err
	}
	if s.Source.Status != "up" || len(s.GPUs) != gpus {
		return violated("second", "source %s with %d GPUs", s.Source.Status, len(s.GPUs))
	}
	for _, d := range s.GPUs {
		g, has := w.gpu[d.Index], d.causes()
		if !g.lossMeasured && has["xid-48"] != g.xid48 || has[health.CauseLost] {
			return violated("second", "GPU %d has %v; XID 48 %t", d.Index, has, g.xid48)
		}
	}
	return nil
}
