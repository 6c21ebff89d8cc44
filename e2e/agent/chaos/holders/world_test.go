package holders

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/sequence"
	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// release is a release of the chart.
type release struct {
	agent     agent
	installed bool
	values    sequence.Values
	history   []sequence.Values // before values
}

// world is a node, its cluster, and what an operator does to them.
type world struct {
	*cluster
	dir       string
	releases  [sequence.Releases]release
	disk      *disk
	unhealthy map[string]bool
	fault     func(gpu int, unhealthy bool) error
	resync    func() error // repeats the faults that are and are not there; nil if an agent cannot begin with others
	patience  time.Duration
	killed    time.Time // when an agent was killed last
}

// worldOptions are what differs between worlds.
type worldOptions struct {
	dir      string
	seed     uint64
	kubelet  newKubelet
	version  kubelettest.Version // of the manager of claims
	second   time.Duration
	patience time.Duration
	devices  sequence.Node
	byName   map[string]string
	log      func(string, ...any)
}

// newWorld returns a node with a running kubelet and without an agent.
func newWorld(api *apiservertest.Server, o worldOptions) (*world, error) {
	w := &world{dir: o.dir, unhealthy: make(map[string]bool), patience: o.patience, cluster: &cluster{
		node: &node{kubelet: o.kubelet(o.dir, o.second)}, api: api, scheduler: newScheduler(api), devices: o.devices, second: o.second,
		cdiDir: filepath.Join(o.dir, "cdi"), byName: o.byName, log: o.log, rng: rand.New(rand.NewPCG(o.seed, 7)),
		//nolint:gosec // reproducible, not secret
	}}
	var err error
	if w.disk, err = newDisk(o.dir); err != nil {
		return nil, err
	}
	wipe := func(driver string) error {
		if !w.isAPIUp() {
			return errors.New("the API server is away")
		}
		for _, s := range api.Slices() {
			if driver == "" || s.Spec.Driver == driver {
				api.Delete("resourceslices", "", s.Name)
			}
		}
		return nil
	}
	if w.node.dra, err = kubelettest.StartDRAWith(o.dir, o.version, time.Duration(float64(kubelettest.WipingDelay)*o.second.Seconds()),
		wipe); err != nil {
		return nil, err
	}
	w.node.dra.Stop() // setRunning starts it
	_, err = w.node.setRunning(true)
	return w, err
}

// close ends everything.
func (w *world) close() (err error) {
	w.mu.Lock()
	w.apiDown = false
	pods := slices.Clone(w.pods)
	w.mu.Unlock()
	w.api.SetRefused(false)
	_, startErr := w.node.setRunning(true)
	for _, p := range pods {
		p.delete()
	}
	for i := range w.releases { // a driver unprepares the claims
		if r := &w.releases[i]; r.installed {
			err = errors.Join(err, r.agent.stop())
		}
		w.releases[i].installed = i == 0
	}
	_, diskErr := w.disk.set(false)
	err = errors.Join(err, diskErr, w.releases[0].agent.start(sequence.Values{DRA: true}))
	done := make(chan struct{})
	go func() { w.workers.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(w.patience + 10*time.Second):
		err = errors.Join(err, errors.New("pods do not end"))
	}
	for i := range w.releases {
		if r := &w.releases[i]; r.installed {
			err = errors.Join(err, r.agent.stop())
		}
	}
	_, stopErr := w.node.setRunning(false)
	return errors.Join(err, startErr, stopErr, w.disk.End())
}

// apply plays a step. It reports whether the step changed something.
//
//nolint:contextcheck // a kubelet outlasts the step that starts it
func (w *world) apply(ctx context.Context, s sequence.Step) (changed bool, err error) {
	r := &w.releases[s.Release]
	switch s.Kind {
	case sequence.Upgrade, sequence.Rollback, sequence.Reload, sequence.Kill, sequence.Uninstall:
		if !r.installed {
			r = &w.releases[1-s.Release]
		}
	}
	switch s.Kind {
	case sequence.Install:
		if r.installed {
			return false, nil
		}
		r.installed, r.values, r.history = true, s.Values, nil
		return true, r.agent.start(s.Values)
	case sequence.Upgrade, sequence.Reload:
		v := s.Values
		if s.Kind == sequence.Reload {
			v = v.InPodOf(r.values)
		}
		if !r.installed || r.values == v {
			return false, nil
		}
		r.history = append(r.history, r.values)
		return true, w.change(r, v)
	case sequence.Rollback:
		if !r.installed || len(r.history) == 0 {
			return false, nil
		}
		last := r.history[len(r.history)-1]
		r.history = r.history[:len(r.history)-1]
		return true, w.change(r, last)
	case sequence.Uninstall:
		if !r.installed {
			return false, nil
		}
		r.installed = false
		return true, r.agent.stop()
	case sequence.Kill:
		if !r.installed {
			return false, nil
		}
		return true, w.kill(r)
	case sequence.KubeletRestart:
		stopped, err := w.node.setRunning(false)
		if err != nil || !stopped {
			return false, err
		}
		return w.node.setRunning(true)
	case sequence.KubeletStop:
		return w.node.setRunning(false)
	case sequence.KubeletStart:
		return w.node.setRunning(true)
	case sequence.APIDown, sequence.APIUp:
		down := s.Kind == sequence.APIDown
		w.mu.Lock()
		changed, w.apiDown = w.apiDown != down, down
		w.mu.Unlock()
		if changed {
			w.setAPI(down)
		}
		return changed, nil
	case sequence.DiskFull, sequence.DiskFree:
		return w.disk.set(s.Kind == sequence.DiskFull)
	case sequence.Fault, sequence.Heal:
		return w.faultOrHeal(s)
	case sequence.Pod:
		return w.start(ctx, w.pickResource(s.Pick), int(s.Pick>>8), false), nil
	case sequence.Claim:
		return w.start(ctx, "", int(s.Pick%sequence.ClaimForms), s.Stale), nil
	case sequence.PodEnd, sequence.PodForce:
		return w.remove(s.Pick, s.Kind == sequence.PodForce), nil
	}
	return false, fmt.Errorf("unknown step %v", s)
}

// kill kills the agent of a release, and starts it again.
func (w *world) kill(r *release) (err error) {
	if w.installed() == 1 { // one that waits for another writes nothing
		err = w.leaveFiles(r.values)
	}
	err = errors.Join(err, r.agent.kill())
	w.killed = time.Now()
	return errors.Join(err, r.agent.start(r.values))
}

// faultOrHeal has a GPU fail or recover. It reports whether the step changed something.
func (w *world) faultOrHeal(s sequence.Step) (changed bool, err error) {
	gpus := w.gpus()
	id := gpus[int(s.Pick)%len(gpus)]
	if s.Kind == sequence.Heal {
		sick := slices.Sorted(maps.Keys(w.unhealthy))
		if len(sick) == 0 {
			return false, nil
		}
		id = sick[int(s.Pick)%len(sick)]
	}
	gpu := slices.Index(gpus, id)
	if w.unhealthy[id] == (s.Kind == sequence.Fault) {
		return false, nil
	}
	if s.Kind == sequence.Fault && len(w.unhealthy) == len(gpus)-1 {
		return false, nil // the agent takes the loss of all GPUs for the source's fault at first
	}
	delete(w.unhealthy, id)
	if s.Kind == sequence.Fault {
		w.unhealthy[id] = true
	}
	return true, w.fault(gpu, s.Kind == sequence.Fault)
}

// installed returns the number of installed releases.
func (w *world) installed() (n int) {
	for _, r := range w.releases {
		if r.installed {
			n++
		}
	}
	return n
}

// gpus returns the IDs of the GPUs, by index.
func (w *world) gpus() (ids []string) {
	for _, d := range w.devices {
		if d.Parent == "" {
			ids = append(ids, d.ID)
		}
	}
	return ids
}

// setAPI takes the API server away, or brings it back.
func (w *world) setAPI(down bool) { w.api.SetRefused(down) }

// change gives a release other values, as helm upgrade does.
func (w *world) change(r *release, v sequence.Values) error {
	before := r.values
	r.values = v
	if before.SamePod(v) {
		return r.agent.reload(v)
	}
	return errors.Join(r.agent.stop(), r.agent.start(v))
}

// pickResource returns a resource that the node has, or the default.
func (w *world) pickResource(pick uint32) string {
	names := []string{"nvidia.com/gpu"}
	_ = w.node.call(func(context.Context) error {
		for name, n := range w.node.allocatable() {
			if n > 0 && name != names[0] {
				names = append(names, name)
			}
		}
		return nil
	})
	slices.Sort(names)
	return names[int(pick)%len(names)]
}

// violated returns the violation that the pods have found.
func (w *world) violated() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.violation
}

// check waits until the invariants hold. What holds at every moment was checked when it happened.
//
// After half of the patience it repeats the faults once, because they may be others than the model's. The agents are judged as before.
func (w *world) check(ctx context.Context) error {
	begin, resync := time.Now(), w.resync
	for {
		err := w.checkNow()
		if v := errors.Join(w.violated(), w.checkCheckpoint()); v != nil {
			return v
		}
		if err == nil {
			return nil
		}
		if time.Since(begin) > w.patience {
			return err
		}
		if resync != nil && time.Since(begin) > w.patience/2 {
			w.log("  the faults are repeated, because of: %v", err)
			if err := resync(); err != nil {
				return err
			}
			resync = nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(w.second / 5):
		}
	}
}

func (w *world) checkNow() error {
	held, offers := w.held(), w.offers()
	if err := w.devices.CheckOffers(offers, held); err != nil {
		return err
	}
	if !w.mustOffer(held) {
		return nil
	}
	if slices.ContainsFunc(w.releases[:], func(r release) bool { return r.installed && r.values.DRA }) { // others do not have the directories
		if err := w.checkLeftovers(); err != nil {
			return err
		}
	}
	cannot := maps.Clone(w.unhealthy)
	for _, r := range w.releases {
		if r.installed && !r.values.DRA && r.values.MIG == "" && r.values.Sharing != "" && r.values.Sharing != sequence.TimeSlicing {
			for _, d := range w.devices {
				cannot[d.ID] = cannot[d.ID] || d.MIGMode // neither MPS nor memory shares a GPU in MIG mode
			}
		}
	}
	return w.devices.CheckFree(offers, append(held, w.allocated()...), cannot)
}

// preparedClaim is a claim of the agent's checkpoint.
type preparedClaim struct {
	Name    string
	Devices []struct {
		Device string
		Admin  bool
		Memory uint64
	}
}

// checkpoint returns the claims of the agent's checkpoint, by UID.
func (w *world) checkpoint() (map[string]preparedClaim, error) {
	text, _ := os.ReadFile(filepath.Join(w.dir, "plugins", draDriver, "gpu-node-agent.json"))
	if text == nil {
		return nil, nil // there is none yet
	}
	var c struct{ Claims map[string]preparedClaim }
	if err := json.Unmarshal(text, &c); err != nil {
		return nil, fmt.Errorf("the checkpoint: %w", err)
	}
	return c.Claims, nil
}

// checkCheckpoint returns an error if the checkpoint has one device for two claims.
func (w *world) checkCheckpoint() error {
	claims, err := w.checkpoint()
	if err != nil {
		return err
	}
	var all []sequence.Hold
	for _, claim := range claims {
		for _, d := range claim.Devices {
			h := sequence.Hold{Pod: claim.Name, Device: d.Device, Mode: sequence.Whole, Way: sequence.DRA, Bytes: d.Memory}
			switch {
			case d.Admin:
				h.Mode = sequence.Admin
			case d.Memory > 0:
				h.Mode = sequence.Share
			}
			all = append(all, h)
		}
	}
	if err := w.devices.CheckHeld(all); err != nil {
		return fmt.Errorf("the checkpoint: %w", err)
	}
	return nil
}

// mustOffer reports whether what is free must be offered: an agent and what it needs run, and no container keeps an API from handing over.
func (w *world) mustOffer(held []sequence.Hold) bool {
	if !w.node.up() || !w.isAPIUp() || w.disk.full {
		return false
	}
	byClaim := slices.ContainsFunc(held, func(h sequence.Hold) bool { return h.Way == sequence.DRA })
	byPlugin := slices.ContainsFunc(held, func(h sequence.Hold) bool { return h.Way != sequence.DRA })
	w.mu.Lock()
	pending := slices.ContainsFunc(w.pods, func(p *pod) bool { return p.claim != nil && p.bound }) // may be prepared
	w.mu.Unlock()
	for _, r := range w.releases {
		if r.installed && (r.values.DRA && byPlugin || !r.values.DRA && (byClaim || pending)) {
			return false
		}
	}
	return w.installed() == 1
}

// describe describes the node for a failure.
func (w *world) describe() string {
	lines := []string{fmt.Sprintf("held: %v", w.held()), fmt.Sprintf("offered: %v", w.offers())}
	for i, r := range w.releases {
		if r.installed {
			lines = append(lines, fmt.Sprintf("release %c, %v: %s", 'a'+i, r.values, r.agent.status()))
		}
	}
	return strings.Join(lines, "\n")
}

// leaveFiles makes what an agent leaves that is killed while it writes: a partial CDI spec and a partial spare file of the checkpoint.
func (w *world) leaveFiles(v sequence.Values) error {
	if !v.DRA || w.disk.full {
		return nil
	}
	var errs []error
	for _, name := range []string{
		fmt.Sprintf("cdi/.gpu-node-agent-%d.tmp", time.Now().UnixNano()),
		"plugins/" + draDriver + "/gpu-node-agent.json.spare",
	} {
		path := filepath.Join(w.dir, name)
		if err := os.WriteFile(path, []byte("{"), 0o600); !errors.Is(err, fs.ErrNotExist) { // its directory
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// checkLeftovers returns an error if there are partial files older than the last kill, or CDI specs of claims that are not prepared.
func (w *world) checkLeftovers() error {
	for _, pattern := range []string{
		"cdi/.*", "cdi/*tmp*", "state/*tmp*", "plugins/" + draDriver + "/*tmp*", "device-plugins/.gna-*",
		"cdi/*.json",
	} {
		files, _ := filepath.Glob(filepath.Join(w.dir, pattern))
		for _, f := range files {
			info, err := os.Lstat(f)
			if err != nil || info.ModTime().After(w.killed) {
				continue
			}
			uid, isSpec := strings.CutSuffix(f[strings.LastIndex(f, "_")+1:], ".json")
			if claims, _ := w.checkpoint(); !isSpec || claims[uid].Name == "" {
				return fmt.Errorf("a killed agent's file is left: %s", f)
			}
		}
	}
	return nil
}
