package chaos

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
)

// start starts the agent with the model's faults and waits until it responds.
func (w *world) start(ctx context.Context) error {
	w.scenario = w.faultScenario()
	if err := w.Write(w.config() + w.configEnd); err != nil {
		return err
	}
	w.configInvalid, w.unmeasured = false, w.source != "up" || w.engineDetached
	var env []string
	if w.engine != nil {
		if err := w.engine.reset(w.model); err != nil {
			return err
		}
		env = w.engine.env()
	}
	if err := w.Start(w.log, env...); err != nil {
		return err
	}
	return w.await(ctx, scaled(10*time.Second), func(ctx context.Context) error {
		if status, _, err := w.Get(ctx, "/livez"); err != nil || status != http.StatusOK {
			return violated("life", "restarted: /livez: status %d, %v", status, err)
		}
		if err := w.Clear(ctx, "nobody", ""); !refused(err) {
			return violated("life", "clear of an unknown device: %v", err)
		}
		return w.Event(ctx, "{gpu: 0, temperature: 0}") // no change; events are accepted from now on
	})
}

// faultScenario returns the model's faults as a scenario.
func (m *model) faultScenario() string {
	events := []string{"{at: 0s, source: " + simSource(m.source) + "}"}
	for i, g := range m.gpu {
		events = append(events, fmt.Sprintf("{at: 0s, gpu: %d, lost: %t, rowRemapPending: %t, mig: %q}", i, g.lost, g.remapPending, g.mig))
	}
	return strings.Join(events, ", ")
}

// restart ends the agent with SIGTERM or SIGKILL, and starts another with the same state file.
//
// Findings survive: the new agent has exactly these, and the first list that the kubelet receives is correct. Counters
// restart: XIDs count from the start, and XIDs that no agent could know yet are lost (the simulated GPUs end with
// their agent). To the kubelet the plugin disappears and returns, which changes no device.
func (w *world) restart(ctx context.Context, how string) error {
	if w.diskFull && !w.disk.Mounted {
		return nil // the state file is missing, not only out of date
	}
	if w.detached {
		return nil // a detach survives: the tests of health/monitor restart during one
	}
	if slices.ContainsFunc(w.gpu[:], func(g gpu) bool { return g.owed }) {
		return nil // the new simulation will never report it, so the next XID with its number would pay the debt and not count
	}
	s, err := w.snapshot(ctx)
	if err != nil {
		return err
	}
	stateLost := s.Memory.Error != "" // reported: a failed write is retried after ten seconds
	if !stateLost {
		if err := w.await(ctx, w.patience, func(context.Context) error { return w.checkSaved() }); err != nil {
			return err
		}
	}
	if saved, err := w.readState(); err != nil {
		return err
	} else if saved.Detachment != (health.Detachment{}) {
		return nil // a full disk kept the end of the detach from being saved, so it survives as well
	}
	w.stopScrapes()
	w.closeStreams()
	if err := w.endAgent(ctx, how); err != nil {
		return err
	}
	if !stateLost {
		if err := w.checkSaved(); err != nil {
			return fmt.Errorf("after the exit: %w", err)
		}
	}
	kept, trips, err := w.savedFindings()
	if err != nil {
		return err
	}
	for i := range w.gpu {
		g := &w.gpu[i]
		clear(g.counts)
		clear(g.pendingXIDs)
		g.xid48Pending, g.migMeasured = false, g.mig
		// If the state was not saved, the file is older than the model.
		g.change(func() { g.released, g.xid48, g.lossMeasured = false, kept[i]["xid-48"], kept[i][health.CauseLost] })
		g.trips = trips[i]
		g.remapPending = g.remapPending && !g.xid48
	}
	w.sessionClosing, w.savedCauses = false, kept     // a host engine keeps its state until a pending attach
	w.baseline, w.endpoint = nil, map[string]string{} // new process and sockets
	maps.Copy(w.orphans, w.registration.served)
	w.registration.restarted()
	for i := range w.gpu {
		w.gpu[i].failures = 0 // counters restart
	}
	w.measure()
	w.changesAtFull = w.changeCount()
	if !w.kubeletFrozen { // otherwise it still has to read the previous agent's messages
		if _, err := w.kubelet.request(command{Do: "await-end"}); err != nil {
			return err
		}
		for i := range w.gpu {
			w.gpu[i].changesBefore = w.gpu[i].changes
		}
	}
	w.CloseIdleConnections()
	if err := w.start(ctx); err != nil {
		return err
	}
	w.scrape(context.WithoutCancel(ctx))
	if w.unmeasured {
		return nil
	}
	return w.await(ctx, w.patience, func(ctx context.Context) error { return w.checkFindings(ctx, kept) })
}

// endAgent ends the agent and waits for it.
func (w *world) endAgent(ctx context.Context, how string) error {
	if w.logBlocked { // the agent must exit without a reader of its log
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

// savedFindings returns the causes of each GPU's findings in the state file, and its number of trips.
func (w *world) savedFindings() (causes [gpus]map[string]bool, trips [gpus]int, err error) {
	m, err := w.readState()
	if err != nil {
		return causes, trips, err
	}
	for i := range causes {
		causes[i] = map[string]bool{}
	}
	for _, d := range m.Devices {
		if d.Device.Kind != health.KindGPU {
			continue
		}
		trips[d.Device.Index] = len(d.Memory.Trips)
		for _, f := range d.Verdict.Findings {
			causes[d.Device.Index][f.Cause] = true
		}
	}
	return causes, trips, nil
}

func (w *world) readState() (m statefile.Saved, err error) {
	text, err := os.ReadFile(w.stateFile())
	if err == nil {
		err = json.Unmarshal(text, &m)
	}
	if err != nil {
		return m, violated("memory", "%v", err)
	}
	return m, nil
}

// checkSaved checks that the state file has what must survive a restart.
func (w *world) checkSaved() error {
	kept, trips, err := w.savedFindings()
	if err != nil {
		return err
	}
	for i, g := range w.gpu {
		if kept[i][health.CauseReleased] {
			return violated("memory", "state file: GPU %d was detached, which a new agent must not restore", i)
		}
		if trips[i] != g.trips {
			return violated("trips", "state file: GPU %d has %d trips, want %d", i, trips[i], g.trips)
		}
		if kept[i]["xid-48"] != g.xid48 || kept[i][health.CauseLost] != g.lossMeasured {
			return violated("memory", "state file: %v of GPU %d; lost %t, XID 48 %t", kept[i], i, g.lossMeasured, g.xid48)
		}
	}
	return nil
}

// checkFindings checks that a new agent has the saved findings that still apply, and no others.
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
		applies := map[string]bool{"xid-48": g.xid48, health.CauseLost: g.lossMeasured, health.CauseRemapPending: g.remapPending}
		for cause := range has {
			if !applies[cause] && !kept[d.Index][cause] {
				return violated("findings", "unexpected %s on GPU %d; saved were %v", cause, d.Index, kept[d.Index])
			}
		}
		for cause, applies := range applies {
			if applies && kept[d.Index][cause] && !has[cause] {
				return violated("findings", "missing %s on GPU %d, which has %v", cause, d.Index, has)
			}
		}
	}
	return nil
}
