package chaos

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

// detachResponse and takenBack are the parts of the agent's responses that these tests check.
type detachResponse struct {
	Since   time.Time `json:"since"`
	Until   time.Time `json:"until"`
	Already bool      `json:"already"`
	Engine  string    `json:"engine"`
	Open    []string  `json:"open"`
	Unknown string    `json:"unknown"`
}

type attachResponse struct {
	Already  bool               `json:"already"`
	Source   string             `json:"source"`
	Standing []remainingFinding `json:"standing"`
}

type remainingFinding struct {
	GPU   int    `json:"gpu"`
	Cause string `json:"cause"`
}

// request sends a request to the agent as an operator does.
func request[T any](ctx context.Context, n *node.Node, stepTimeout time.Duration, route string, body any) (answer T, err error) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	err = unixsock.Call(ctx, filepath.Join(n.Dir, "agent.sock"), route, body, &answer)
	return answer, err
}

// refused reports whether the agent answered a request with an error.
func refused(err error) bool { return errors.As(err, new(*unixsock.StatusError)) }

func (w *world) requestDetach(ctx context.Context, duration time.Duration, force bool) (detachResponse, error) {
	return request[detachResponse](ctx, w.Node, scaled(stepTimeout), "POST /detach", map[string]any{"for": duration.String(), "force": force})
}

// applyDriver plays the steps of an operator who resets a GPU.
func (w *world) applyDriver(ctx context.Context, s step) error {
	host := w.engine != nil && w.engine.host && w.measuring()
	switch s.kind {
	case "attach":
		return w.attach(ctx)
	case "detach":
		if s.arg == "polite" {
			return w.detachPolitely(ctx)
		}
		_, err := w.detach(ctx, 30*time.Minute)
		return err
	case "expire":
		return w.detachUntilExpiry(ctx)
	case "detach-often":
		for i := 0; i < 10 && w.source == "up"; i++ {
			if _, err := w.detach(ctx, time.Hour); err != nil {
				return err
			}
			if err := w.attach(ctx); err != nil {
				return err
			}
		}
	case "detach-refused":
		if !host {
			return nil
		}
		if err := w.setTrap(ctx, "refuse"); err != nil {
			return err
		}
		if _, err := w.requestDetach(ctx, time.Hour, true); !refused(err) || !strings.Contains(err.Error(), "Timeout") { // DCGM_ST_TIMEOUT
			return violated("detach", "host engine refuses, and the response is: %v", err)
		}
		w.release()
		w.measure()
		return w.setTrap(ctx, "none")
	case "detach-hung":
		if !host {
			return nil
		}
		if err := w.setTrap(ctx, "hang"); err != nil {
			return err
		}
		w.source = "hung"
		_, err := w.detach(ctx, time.Hour)
		w.detachAsked = true
		return err
	}
	return nil
}

// holdersDelay is how long the agent may wait for the holders before a polite detach: it asks the kubelet twice, within 1.25
// seconds each, and a second apart.
const holdersDelay = 3500 * time.Millisecond

// detachPolitely detaches the driver unless pods hold GPUs. No pod does, but the kubelet may not report it.
func (w *world) detachPolitely(ctx context.Context) error {
	if w.unmeasured || w.detached || w.kubeletFrozen || w.source == "hung" {
		return nil
	}
	before, err := w.holdersKnown(ctx)
	if err != nil {
		return err
	}
	answer, err := request[detachResponse](ctx, w.Node, scaled(stepTimeout)+holdersDelay, "POST /detach", map[string]any{"for": "1h"})
	if err == nil {
		if !before {
			if after, err := w.holdersKnown(ctx); err != nil || !after {
				return violated("detach", "holders unknown, and the response is %+v; %v", answer, err)
			}
		}
		if !w.engineMayBeUnasked(answer.Engine != "", false) {
			return violated("detach", "source %s, and the response is %+v", w.source, answer)
		}
		w.release()
		w.detached, w.engineNotAsked = true, answer.Engine != ""
		_, err = w.detach(ctx, time.Hour) // a repeated detach
		return err
	}
	after, err2 := w.holdersKnown(ctx)
	if err2 != nil || before && after || !refused(err) {
		return violated("detach", "no pod holds a GPU, and the response is: %v; %v", err, err2)
	}
	return nil
}

// holdersKnown reports whether the kubelet tells the agent the holders.
func (w *world) holdersKnown(ctx context.Context) (bool, error) {
	s, err := w.snapshot(ctx)
	return s.Kubelet.HoldersError == "", err
}

// setTrap sets the host engine's reaction to a detach, and waits until the library has read it.
func (w *world) setTrap(ctx context.Context, what string) error {
	if err := w.engine.write(map[string]string{"refuse": "refuse", "hang": "trap", "none": "up"}[what] + "\n"); err != nil {
		return err
	}
	return w.await(ctx, scaled(stepTimeout), func(context.Context) error {
		_, _, trap, err := w.engine.readState()
		if err == nil && trap != what {
			err = fmt.Errorf("library's trap is %s, want %s", trap, what)
		}
		return err
	})
}

// detach detaches the driver. A hung DCGM delays the response, but the GPUs are withheld from pods.
func (w *world) detach(ctx context.Context, duration time.Duration) (detachResponse, error) {
	was, stuck := w.detached, w.detachPending
	hangs := w.engine != nil && w.source == "hung" && (!w.detached || w.detachPending)
	begin := time.Now()
	answer, err := w.requestDetach(ctx, duration, true)
	if !was {
		w.release()
	}
	w.detached, w.detachPending = true, hangs
	switch {
	case hangs && (err == nil || !errors.Is(err, unixsock.ErrNoResponse)):
		return answer, violated("detach", "DCGM hangs, and the response is %+v, %v", answer, err)
	case hangs:
		return answer, nil
	case err != nil:
		return answer, violated("detach", "%v", err)
	case answer.Already != was || len(answer.Open) > 0 || answer.Unknown != "" || !w.engineMayBeUnasked(answer.Engine != "", was && !stuck):
		return answer, violated("detach", "detached before: %t; the response is %+v", was, answer)
	case answer.Until.Before(begin.Add(duration)) || time.Until(answer.Until) > duration:
		return answer, violated("detach", "%v are %+v", duration, answer)
	}
	w.engineNotAsked = answer.Engine != ""
	return answer, w.noteDetached(ctx, !w.engineNotAsked, answer.Until)
}

// engineMayBeUnasked reports whether the host engine may not have been asked, which is so without a connection.
func (w *world) engineMayBeUnasked(notAsked, already bool) bool {
	switch {
	case already:
		return notAsked == w.engineNotAsked
	case w.engine == nil || !w.engine.host || w.source == "up":
		return !notAsked
	}
	return notAsked || w.source == "blind"
}

// noteDetached updates the model after a detach. asked reports whether the host engine was asked to detach. After until, the agent may use
// the driver again.
func (w *world) noteDetached(ctx context.Context, asked bool, until time.Time) error {
	s, err := w.snapshot(ctx)
	if err != nil {
		return err
	}
	w.measuredAt = s.Source.Measured
	if w.engine == nil {
		return nil
	}
	return w.await(ctx, scaled(stepTimeout), func(context.Context) error { // the library updates its state shortly after
		connected, detached, _, err := w.engine.readState()
		if err == nil && (connected || w.engine.host && asked && !detached) && time.Now().Before(until) {
			err = violated("detach", "connected to DCGM: %t; engine detached: %t", connected, detached)
		}
		w.engineDetached = detached
		return err
	})
}

// awaitDetached waits for the detach that DCGM delayed. A measurement that hung may have succeeded.
func (w *world) awaitDetached(ctx context.Context, measured time.Time) error {
	var s snapshot
	err := w.await(ctx, scaled(stepTimeout), func(ctx context.Context) (err error) {
		if s, err = w.snapshot(ctx); err == nil && s.Source.Status != "detached" {
			err = violated("detach", "DCGM recovered, and the source is %s", s.Source.Status)
		}
		return err
	})
	if err != nil {
		return err
	}
	w.detachPending, w.detachAsked = false, false
	if !s.Source.Measured.Equal(measured) {
		w.unmeasured = false
		for i := range w.gpu {
			g := &w.gpu[i]
			g.change(func() { g.measure(); g.released = true })
		}
	}
	w.engineNotAsked = false
	return w.noteDetached(ctx, true, s.Source.Until)
}

// detachUntilExpiry detaches the driver for a second.
func (w *world) detachUntilExpiry(ctx context.Context) error {
	if w.detachPending || w.engine != nil && w.source == "hung" && !w.detached {
		return nil
	}
	answer, err := w.detach(ctx, time.Second)
	if err != nil {
		return err
	}
	err = w.await(ctx, time.Until(answer.Until)+scaled(stepTimeout), func(ctx context.Context) error {
		s, err := w.snapshot(ctx)
		if err == nil && s.Source.Status == "detached" {
			err = violated("expire", "still detached %v after the end of --for", time.Since(answer.Until))
		}
		return err
	})
	if err != nil {
		return err
	}
	if early := time.Until(answer.Until); early > 0 {
		return violated("expire", "attached %v too early", early)
	}
	return w.noteAttached(ctx)
}

// attach attaches the driver.
func (w *world) attach(ctx context.Context) error {
	was := w.detached
	answer, err := request[attachResponse](ctx, w.Node, scaled(stepTimeout)+time.Second, "POST /attach", nil)
	want := map[string]string{"up": "up", "dead": "down", "hung": "stalled"}[w.source]
	switch {
	case err != nil:
		return violated("attach", "source %s: %v", w.source, err)
	case answer.Already == was, (was || w.source == "up") && w.source != "blind" && answer.Source != want:
		return violated("attach", "detached before: %t, source %s; the response is %+v", was, w.source, answer)
	}
	if err := w.noteAttached(ctx); err != nil {
		return err
	}
	for i, g := range w.gpu {
		reported := slices.ContainsFunc(answer.Standing, func(s remainingFinding) bool { return s.GPU == i && s.Cause == "xid-48" })
		if reported != g.xid48 && was && w.source == "up" {
			return violated("attach", "GPU %d has XID 48: %t; the response is %+v", i, g.xid48, answer)
		}
	}
	return nil
}

// noteAttached updates the model after an attach.
func (w *world) noteAttached(ctx context.Context) error {
	if w.detachPending && !w.detachAsked { // it never detached: the state is as before
		for i := range w.gpu {
			g := &w.gpu[i]
			g.change(func() { g.released = false })
		}
	}
	w.detached, w.detachPending, w.detachAsked, w.attaching = false, false, false, true
	if w.source != "dead" {
		w.engineDetached = false
	}
	w.measure()
	if w.source == "up" {
		return w.awaitSource(ctx, scaled(stepTimeout), "gpu_node_agent_source_up", 1)
	}
	return nil
}
