package chaos

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
)

// start starts the agent on the GPUs as they are and waits until it answers.
func (w *world) start(ctx context.Context) error {
	w.scenario = w.wrong()
	if err := w.Write(w.config() + w.ending); err != nil {
		return err
	}
	w.badly, w.unseen = false, w.source != "up" || w.gone
	var env []string
	if w.engine != nil {
		if err := w.engine.begin(w.model); err != nil {
			return err
		}
		env = w.engine.env()
	}
	if err := w.Start(w.log, env...); err != nil {
		return err
	}
	return w.await(ctx, slow(10*time.Second), func(ctx context.Context) error {
		if status, _, err := w.Get(ctx, "/livez"); err != nil || status != http.StatusOK {
			return violated("life", "started again: /livez: status %d, %v", status, err)
		}
		if err := w.Clear(ctx, "nobody", ""); !refused(err) {
			return violated("life", "an operator asks to clear no device, and the answer is: %v", err)
		}
		return w.Event(ctx, "{gpu: 0, temperature: 0}") // nothing; it takes events from now on
	})
}

// wrong is what is wrong with the GPUs, as a scenario.
func (m *model) wrong() string {
	events := []string{"{at: 0s, source: " + sourceWord(m.source) + "}"}
	for i, g := range m.gpu {
		events = append(events, fmt.Sprintf("{at: 0s, gpu: %d, lost: %t, rowRemapPending: %t, mig: %q}", i, g.lost, g.remap, g.mig))
	}
	return strings.Join(events, ", ")
}

// restart ends the agent, as a node's shutdown does or as the kernel does, and starts another with the same state file.
//
// Findings outlive it: those and no others are there again, and the first that the kubelet hears of each device is what is
// so. Counters do not: XIDs are counted since the start, and those that no agent could know of yet, as the source was away,
// are nobody's (the simulated GPUs end with the agent that they are in). To the kubelet the plugin disappears, which is no
// change of any device's, and comes back.
func (w *world) restart(ctx context.Context, how string) error {
	if w.full && !w.disk.mounted {
		return nil // the state file is away with its directory, and not only out of date
	}
	s, err := w.snapshot(ctx)
	if err != nil {
		return err
	}
	forgets := w.full || s.Memory.Error != "" // it has said so: a write that failed is tried again after ten seconds
	if !forgets {
		if err := w.await(ctx, w.patience, func(context.Context) error { return w.checkKept() }); err != nil {
			return err
		}
	}
	w.stopScrapes()
	w.closeStreams()
	if err := w.endAgent(ctx, how); err != nil {
		return err
	}
	if !forgets {
		if err := w.checkKept(); err != nil {
			return fmt.Errorf("after its end: %w", err)
		}
	}
	kept, trips, err := w.memory()
	if err != nil {
		return err
	}
	for i := range w.gpu {
		g := &w.gpu[i]
		clear(g.counts)
		clear(g.waiting)
		g.dying, g.shown = false, g.mig
		// If it was to forget, the file has an older truth than this.
		g.change(func() { g.released, g.fatal, g.seen = false, kept[i]["xid-48"], kept[i][health.CauseLost] })
		g.trips = trips[i]
		g.remap = g.remap && !g.fatal
	}
	w.away, w.stuck, w.attaching, w.closing, w.kept = false, false, false, false, kept // another agent attaches; a host engine stays as it is
	w.base, w.endpoint = nil, map[string]string{}                                      // another process, other sockets
	maps.Copy(w.orphans, w.registration.served)
	w.registration.restarted()
	for i := range w.gpu {
		w.gpu[i].falls = 0 // it counts its own
	}
	w.look()
	w.atFull = w.changed()
	if !w.frozen { // else it has yet to read what the agent before has said
		if _, err := w.kubelet.ask(command{Do: "mourn"}); err != nil {
			return err
		}
		for i := range w.gpu {
			w.gpu[i].before = w.gpu[i].changes
		}
	}
	w.CloseIdleConnections()
	if err := w.start(ctx); err != nil {
		return err
	}
	w.scrape(context.WithoutCancel(ctx))
	if w.unseen {
		return nil
	}
	return w.await(ctx, w.patience, func(ctx context.Context) error { return w.checkFindings(ctx, kept) })
}

// endAgent returns when the agent has ended.
func (w *world) endAgent(ctx context.Context, how string) error {
	if w.blocked { // whoever ends it does not have to read its log before
		if err := w.endBlocked(ctx, how); err != nil || how == "kill" {
			return err
		}
	}
	if how == "term" {
		if err := w.Stop(); err != nil {
			return violated("end", "%v", err)
		}
		return nil
	}
	if err := w.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-w.Exited()
	return nil
}

// memory returns the causes of each GPU's findings in the state file, and how often it has tripped.
func (w *world) memory() (causes [gpus]map[string]bool, trips [gpus]int, err error) {
	var m statefile.Saved
	text, err := os.ReadFile(w.stateFile())
	if err == nil {
		err = json.Unmarshal(text, &m)
	}
	if err != nil {
		return causes, trips, violated("memory", "%v", err)
	}
	for i := range causes {
		causes[i] = map[string]bool{}
	}
	for _, d := range m.Devices {
		if d.Device.Kind != health.KindGPU {
			continue
		}
		trips[d.Device.Index] = len(d.Verdict.Trips)
		for _, f := range d.Verdict.Findings {
			causes[d.Device.Index][f.Cause] = true
		}
	}
	return causes, trips, nil
}

// checkKept: what a restart must not forget is on the disk.
func (w *world) checkKept() error {
	kept, trips, err := w.memory()
	if err != nil {
		return err
	}
	for i, g := range w.gpu {
		if kept[i][health.CauseReleased] {
			return violated("memory", "the state file has it that GPU %d was let go of, and the next agent has it", i)
		}
		if trips[i] != g.trips {
			return violated("trips", "the state file has it that GPU %d broke %d times; it was %d", i, trips[i], g.trips)
		}
		if kept[i]["xid-48"] != g.fatal || kept[i][health.CauseLost] != g.seen {
			return violated("memory", "the state file has %v of GPU %d; lost %t, XID 48 %t", kept[i], i, g.seen, g.fatal)
		}
	}
	return nil
}

// checkFindings: another agent has the findings that were kept and still stand, and has invented none.
func (w *world) checkFindings(ctx context.Context, kept [gpus]map[string]bool) error {
	s, err := w.snapshot(ctx)
	if err != nil {
		return err
	}
	if err := w.checkDevices(s); err != nil {
		return err
	}
	for _, d := range s.GPUs {
		g, has := w.gpu[d.Index], d.causes()
		stands := map[string]bool{"xid-48": g.fatal, health.CauseLost: g.seen, health.CauseRemapPending: g.remap}
		for cause := range has {
			if !stands[cause] && !kept[d.Index][cause] {
				return violated("findings", "%s of GPU %d is invented; %v were kept", cause, d.Index, kept[d.Index])
			}
		}
		for cause, stands := range stands {
			if stands && kept[d.Index][cause] && !has[cause] {
				return violated("findings", "%s of GPU %d is forgotten; it has %v", cause, d.Index, has)
			}
		}
	}
	return nil
}
