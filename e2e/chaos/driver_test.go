package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

// letGo and takenBack are the parts of the agent's responses that these tests check.
type letGo struct {
	Since   time.Time `json:"since"`
	Until   time.Time `json:"until"`
	Already bool      `json:"already"`
	Engine  string    `json:"engine"`
	Open    []string  `json:"open"`
	Unknown string    `json:"unknown"`
}

type takenBack struct {
	Already  bool       `json:"already"`
	Source   string     `json:"source"`
	Standing []standing `json:"standing"`
}

type standing struct {
	GPU   int    `json:"gpu"`
	Cause string `json:"cause"`
}

// ask sends a request to the agent as an operator does.
func ask[T any](ctx context.Context, w *world, within time.Duration, question map[string]any) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	var answer struct {
		Result T `json:"result"`
	}
	text, err := unixsock.Call(ctx, filepath.Join(w.Dir, "agent.sock"), question)
	if err == nil {
		err = json.Unmarshal([]byte(text), &answer)
	}
	return answer.Result, err
}

// refused reports whether the agent answered a request with an error.
func refused(err error) bool {
	return err != nil && !errors.Is(err, unixsock.ErrNoResponse) && !errors.Is(err, unixsock.ErrProtocol) && !errors.Is(err, syscall.ECONNREFUSED) &&
		!errors.Is(err, fs.ErrNotExist)
}

func (w *world) askToDetach(ctx context.Context, long time.Duration, force bool) (letGo, error) {
	return ask[letGo](ctx, w, slow(within), map[string]any{"detach": map[string]any{"for": long.String(), "force": force}})
}

// applyDriver plays the steps of an operator who resets a GPU.
func (w *world) applyDriver(ctx context.Context, s step) error {
	host := w.engine != nil && w.engine.host && w.measured()
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
		return w.expire(ctx)
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
		if err := w.trap(ctx, "refuse"); err != nil {
			return err
		}
		if _, err := w.askToDetach(ctx, time.Hour, true); !refused(err) {
			return violated("detach", "host engine refuses, and the response is: %v", err)
		}
		w.release()
		w.look()
		return w.trap(ctx, "none")
	case "detach-hung":
		if !host {
			return nil
		}
		if err := w.trap(ctx, "hang"); err != nil {
			return err
		}
		w.source = "hung"
		_, err := w.detach(ctx, time.Hour)
		return err
	}
	return nil
}

// detachPolitely detaches the driver unless pods hold GPUs. No pod does, but the kubelet may not report it.
func (w *world) detachPolitely(ctx context.Context) error {
	if w.unseen || w.away || w.frozen || w.source == "hung" {
		return nil
	}
	before, err := w.holdersKnown(ctx)
	if err != nil {
		return err
	}
	answer, err := ask[letGo](ctx, w, slow(within), map[string]any{"detach": map[string]any{"for": "1h"}})
	if err == nil {
		if !before {
			if after, err := w.holdersKnown(ctx); err != nil || !after {
				return violated("detach", "holders unknown, and the response is %+v; %v", answer, err)
			}
		}
		if !w.mayHaveEngine(answer.Engine != "", false) {
			return violated("detach", "source %s, and the response is %+v", w.source, answer)
		}
		w.release()
		w.away, w.unasked = true, answer.Engine != ""
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
	page, err := w.Metrics(ctx)
	up, _ := page.Value("gpu_node_agent_pod_resources_up")
	return up == 1, err
}

// trap sets the host engine's reaction to a detach, and waits until the library has read it.
func (w *world) trap(ctx context.Context, what string) error {
	if err := w.engine.say(map[string]string{"refuse": "refuse", "hang": "trap", "none": "up"}[what] + "\n"); err != nil {
		return err
	}
	return w.await(ctx, slow(within), func(context.Context) error {
		_, _, is, err := w.engine.is()
		if err == nil && is != what {
			err = fmt.Errorf("library's trap is %s, want %s", is, what)
		}
		return err
	})
}

// detach detaches the driver. While DCGM hangs there is no response, but the GPUs are withheld from pods.
func (w *world) detach(ctx context.Context, long time.Duration) (letGo, error) {
	was, stuck := w.away, w.stuck
	hangs := w.engine != nil && w.source == "hung" && (!w.away || w.stuck)
	begin := time.Now()
	answer, err := w.askToDetach(ctx, long, true)
	if !was {
		w.release()
	}
	w.away, w.stuck = true, hangs
	switch {
	case hangs && (err == nil || !errors.Is(err, unixsock.ErrNoResponse)):
		return answer, violated("detach", "DCGM hangs, and the response is %+v, %v", answer, err)
	case hangs:
		return answer, nil
	case err != nil:
		return answer, violated("detach", "%v", err)
	case answer.Already != was || len(answer.Open) > 0 || answer.Unknown != "" || !w.mayHaveEngine(answer.Engine != "", was && !stuck):
		return answer, violated("detach", "detached before: %t; the response is %+v", was, answer)
	case answer.Until.Before(begin.Add(long)) || time.Until(answer.Until) > long:
		return answer, violated("detach", "%v are %+v", long, answer)
	}
	w.unasked = answer.Engine != ""
	return answer, w.letGo(ctx, !w.unasked)
}

// mayHaveEngine reports whether the host engine may not have been asked, which is so without a connection.
func (w *world) mayHaveEngine(unasked, already bool) bool {
	switch {
	case already:
		return unasked == w.unasked
	case w.engine == nil || !w.engine.host || w.source == "up":
		return !unasked
	}
	return unasked || w.source == "blind"
}

// letGo updates the model after a detach. asked reports whether the host engine was asked to detach.
func (w *world) letGo(ctx context.Context, asked bool) error {
	s, err := w.snapshot(ctx)
	if err != nil {
		return err
	}
	w.measuredAt = s.Source.Measured
	if w.engine == nil {
		return nil
	}
	return w.await(ctx, slow(within), func(context.Context) error { // the library updates its state shortly after
		connected, gone, _, err := w.engine.is()
		if err == nil && (connected || w.engine.host && asked && !gone) {
			err = violated("detach", "connected to DCGM: %t; engine detached: %t", connected, gone)
		}
		w.gone = gone
		return err
	})
}

// awaitLetGo waits for the detach that DCGM delayed. A measurement that hung may have succeeded.
func (w *world) awaitLetGo(ctx context.Context, measured time.Time) error {
	var s snapshot
	err := w.await(ctx, slow(within), func(ctx context.Context) (err error) {
		if s, err = w.snapshot(ctx); err == nil && s.Source.Status != "detached" {
			err = violated("detach", "DCGM recovered, and the source is %s", s.Source.Status)
		}
		return err
	})
	if err != nil {
		return err
	}
	w.stuck = false
	if !s.Source.Measured.Equal(measured) {
		w.unseen = false
		for i := range w.gpu {
			g := &w.gpu[i]
			g.change(func() { g.see(); g.released = true })
		}
	}
	w.unasked = false
	return w.letGo(ctx, true)
}

// expire detaches the driver for a second.
func (w *world) expire(ctx context.Context) error {
	if w.stuck || w.engine != nil && w.source == "hung" && !w.away {
		return nil
	}
	answer, err := w.detach(ctx, time.Second)
	if err != nil {
		return err
	}
	err = w.await(ctx, time.Until(answer.Until)+slow(within), func(ctx context.Context) error {
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
	return w.back(ctx)
}

// attach attaches the driver.
func (w *world) attach(ctx context.Context) error {
	was := w.away
	answer, err := ask[takenBack](ctx, w, slow(within)+time.Second, map[string]any{"attach": map[string]any{}})
	want := map[string]string{"up": "up", "dead": "down", "hung": "stalled"}[w.source]
	switch {
	case err != nil:
		return violated("attach", "source %s: %v", w.source, err)
	case answer.Already == was, (was || w.source == "up") && w.source != "blind" && answer.Source != want:
		return violated("attach", "detached before: %t, source %s; the response is %+v", was, w.source, answer)
	}
	if err := w.back(ctx); err != nil {
		return err
	}
	for i, g := range w.gpu {
		told := slices.ContainsFunc(answer.Standing, func(s standing) bool { return s.GPU == i && s.Cause == "xid-48" })
		if told != g.fatal && was && w.source == "up" {
			return violated("attach", "GPU %d has XID 48: %t; the response is %+v", i, g.fatal, answer)
		}
	}
	return nil
}

// back updates the model after an attach.
func (w *world) back(ctx context.Context) error {
	if w.stuck { // it never detached: the state is that of before
		for i := range w.gpu {
			g := &w.gpu[i]
			g.change(func() { g.released = false })
		}
	}
	w.away, w.stuck, w.attaching = false, false, true
	if w.source != "dead" {
		w.gone = false
	}
	w.look()
	if w.source == "up" {
		return w.awaitSource(ctx, slow(within), "gpu_node_agent_source_up", 1)
	}
	return nil
}
