package node

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// Options configure a Follower.
type Options struct {
	Config    *health.Latest[Config]
	Plugin    *health.Latest[plugin.Config]
	Health    *health.Latest[judge.Config] // stored before Config
	Snapshots *health.Latest[health.Snapshot]
	Node      string                                // the node's name in Kubernetes
	Serving   func(*health.Snapshot) plugin.Serving // with the configuration in Plugin
	// OffersAll reports whether every resource is registered and audited, or the devices are published by dynamic resource allocation.
	OffersAll func() bool
	SysFS     func() string // where the host of the devices has its sysfs; empty if that is another host
	// Properties reads what NVML has of devices. It omits devices of which NVML has nothing. It may take seconds.
	Properties func(context.Context, []health.Device) map[health.DeviceID]*health.Properties
	Cleaned    *health.Latest[string] // kube.CleanedAnnotation of the agent's pod; nil, empty or "": none
	Log        *zap.Logger
}

// Follower derives the labels and the taints of the node from the snapshots. It writes the file with labels, and stores for agent/kube what
// the API server must have.
type Follower struct {
	Options
	desired   health.Latest[kube.NodeState]
	written   health.Latest[kube.NodeState]
	saved     health.Latest[[]byte]
	inventory health.Latest[inventory] // empty until the devices are known
	host      health.Latest[host]      // empty until the host was examined
	known     health.Latest[health.KnownProperties]
	asked     health.Latest[struct{}] // somebody asked for what NVML has
	late      health.Latest[section]  // of RestoreLate
	file      *fileWriter

	// Run uses these.
	memory      memory // and Restore before it
	lastSaved   section
	inputs      inputs // of the inventory
	spareInputs []deviceInputs
	labels      map[string]string // of the inventory; nil while it is unknown
	labelled    *inventory        // that labels were made from
}

// memory is the section of the state file without the inventory: the places where something may be written. A later process removes what is
// there and no longer configured.
type memory struct {
	Labels    bool     `json:"labels,omitempty"`
	Feature   bool     `json:"feature,omitempty"`
	Taints    bool     `json:"taints,omitempty"`
	Condition bool     `json:"condition,omitempty"`
	Files     []string `json:"files,omitempty"`
	Cleaned   string   `json:"cleaned,omitempty"` // the newest Options.Cleaned that was followed
}

// section is the section of the state file.
type section struct {
	memory
	Node      string     `json:"node,omitempty"` // Options.Node
	Inventory *inventory `json:"inventory,omitempty"`
}

// NewFollower returns a follower that stores nothing before Run.
func NewFollower(o Options) *Follower {
	if o.Cleaned == nil {
		o.Cleaned = new(health.Latest[string])
	}
	f := &Follower{Options: o, file: &fileWriter{log: o.Log, wall: time.Now}}
	f.known.Store(&health.KnownProperties{})
	return f
}

// FileErr returns why the file with labels is not as configured; empty if it is. It may be called from any goroutine.
func (f *Follower) FileErr() string { return f.file.Err() }

// Desired holds what the API server must have, nothing before that is known.
func (f *Follower) Desired() *health.Latest[kube.NodeState] { return &f.desired }

// Written is where agent/kube stores the newest of Desired that the API server has in full.
func (f *Follower) Written() *health.Latest[kube.NodeState] { return &f.written }

// Saved holds the section of the state file for Restore, empty before there is one.
func (f *Follower) Saved() *health.Latest[[]byte] { return &f.saved }

// Restore continues with the section that an earlier process has saved. sameBoot is false if that was before a reboot: then the labels stay
// until the first poll. It ignores the inventory of another node, which a state file in a machine image has. Call it before Run.
func (f *Follower) Restore(text []byte, sameBoot bool) error {
	s, err := f.parseSection(text, sameBoot)
	if err != nil {
		return err
	}
	f.memory = s.memory
	f.inventory.Store(s.Inventory)
	return nil
}

// RestoreLate is Restore while Run runs: the section could not be read at the start.
func (f *Follower) RestoreLate(text []byte, sameBoot bool) error {
	s, err := f.parseSection(text, sameBoot)
	if err == nil {
		f.late.Store(&s)
	}
	return err
}

// add adds what an earlier process may have written.
func (m *memory) add(earlier memory) {
	m.Labels, m.Feature, m.Taints = m.Labels || earlier.Labels, m.Feature || earlier.Feature, m.Taints || earlier.Taints
	m.Condition, m.Cleaned = m.Condition || earlier.Condition, cmp.Or(m.Cleaned, earlier.Cleaned)
	for _, path := range earlier.Files {
		if !slices.Contains(m.Files, path) {
			m.Files = append(slices.Clone(m.Files), path)
		}
	}
}

func (f *Follower) parseSection(text []byte, sameBoot bool) (s section, err error) {
	if err := json.Unmarshal(text, &s); err != nil {
		return s, fmt.Errorf("labels of the node: %w", err)
	}
	switch {
	case s.Inventory == nil:
	case s.Node != f.Node:
		s.Inventory = nil
	default:
		s.Inventory.OtherBoot = s.Inventory.OtherBoot || !sameBoot
	}
	return s, nil
}

// Labels are the labels of a node for the command.
type Labels struct {
	Labels   map[string]string `json:"labels"`
	Warnings []string          `json:"warnings,omitempty"` // why they may be out of date
}

// Labels returns the labels, whatever the output is. It waits for what NVML has while ctx allows. It may be called from any goroutine.
func (f *Follower) Labels(ctx context.Context) (Labels, error) {
	snap := f.Snapshots.Load()
	f.AwaitKnown(ctx, snap)
	return f.labelsOf(snap, f.host.Load())
}

// LabelsOnce returns the labels without Run.
func (f *Follower) LabelsOnce(ctx context.Context) (Labels, error) {
	snap := f.Snapshots.Load()
	if !snap.Polled() {
		return f.labelsOf(snap, nil)
	}
	found, _ := f.examine(ctx, snap, nil, true)
	return f.labelsOf(snap, found)
}

// labelsOf returns the labels of a snapshot, or the saved ones before the first poll. found may be nil.
func (f *Follower) labelsOf(snap *health.Snapshot, found *host) (l Labels, err error) {
	n := f.inventory.Load()
	if snap.Polled() {
		n = cmp.Or(n, &inventory{}).update(snap, f.Serving(snap), cmp.Or(found, &host{}))
	}
	if snap != nil && snap.Source.Status != health.SourceUp {
		reason := cmp.Or(snap.Source.Err, "no answer yet")
		if n == nil {
			return l, fmt.Errorf("labels are unknown: source %s: %s", snap.Source.Status, reason)
		}
		l.Warnings = append(l.Warnings, fmt.Sprintf("source %s: %s; the labels are those from before", snap.Source.Status, reason))
	}
	if n == nil {
		return l, errors.New("labels are unknown: the source has not answered yet")
	}
	l.Labels = n.labels()
	return l, nil
}

// fileEndTimeout limits how long Run waits for the disk when it ends.
const fileEndTimeout = time.Second

// hostWait limits how long the first labels wait for what NVML has.
const hostWait = 8 * time.Second

// Run follows the snapshots, and what Examine has found, until ctx ends. Then it removes the labels with node.labels.removeOnExit.
func (f *Follower) Run(ctx context.Context) error {
	fileCtx, endFile := context.WithCancel(context.WithoutCancel(ctx))
	fileEnded := make(chan struct{})
	go func() { defer close(fileEnded); f.file.run(fileCtx) }()
	defer func() {
		endFile()
		select {
		case <-fileEnded:
		case <-time.After(fileEndTimeout): // abandoned: the disk hangs
		}
	}()
	var waited <-chan time.Time
	var restored *section // the newest of late that is in the memory
	var unknown *host     // not nil once the host has not answered in time
	wake := health.Wake(ctx, f.Config, f.Plugin, f.Health, &f.host, f.Snapshots, &f.written, &f.file.result, f.Cleaned, &f.late)
	for {
		config, found, snap, late := f.Config.Load(), f.host.Load(), f.Snapshots.Load(), f.late.Load()
		if late != nil && late != restored {
			restored = late
			f.memory.add(late.memory)
			if late.Inventory != nil && f.inventory.Load() == nil {
				f.inventory.Store(late.Inventory)
			}
		}
		switch {
		case found != nil || !snap.Polled():
		case waited == nil:
			waited = time.After(hostWait)
		default:
			found = unknown
		}
		f.follow(config, snap, found)
		select {
		case <-ctx.Done():
			if config := f.Config.Load(); config != nil && config.Labels.RemoveOnExit {
				config := *config
				config.Labels.Output = LabelsOff
				f.follow(&config, f.Snapshots.Load(), f.host.Load())
			}
			return nil
		case <-wake:
		case <-waited:
			unknown = &host{}
		}
	}
}

// follow stores what follows from a configuration and a snapshot.
func (f *Follower) follow(config *Config, snap *health.Snapshot, found *host) {
	if found != nil && snap.Polled() {
		in := inputsOf(snap, f.Plugin.Load(), found, f.spareInputs)
		if same := in.equal(&f.inputs); same {
			f.spareInputs = in.devices
		} else {
			f.spareInputs, f.inputs = f.inputs.devices, in
			before := f.inventory.Load()
			if now := cmp.Or(before, &inventory{}).update(snap, f.Serving(snap), found); !reflect.DeepEqual(now, before) {
				f.inventory.Store(now)
			}
		}
	}
	if n := f.inventory.Load(); n != f.labelled {
		f.labels, f.labelled = n.labels(), n
	}
	if config == nil {
		return
	}
	state, want := f.state(config, snap), f.fileWant(config.Labels)
	f.save() // first, so that a later process removes what this one wrote
	if last := f.file.want.Load(); last == nil || !reflect.DeepEqual(*last, want) {
		f.file.want.Store(&want)
	}
	if last := f.desired.Load(); last == nil || !reflect.DeepEqual(*last, state) {
		f.desired.Store(&state)
	}
}

// state returns what the API server must have.
func (f *Follower) state(config *Config, snap *health.Snapshot) (s kube.NodeState) {
	if last := f.desired.Load(); last != nil && f.written.Load() == last {
		f.memory.Labels = f.memory.Labels && (last.Labels == nil || len(last.Labels) > 0)
		f.memory.Feature = f.memory.Feature && (last.Feature == nil || len(last.Feature) > 0)
		f.memory.Taints = f.memory.Taints && (last.Taints == nil || len(last.Taints) > 0 || len(last.Undecided) > 0)
		f.memory.Condition = f.memory.Condition && !last.RemoveCondition
	}
	reports := f.Health.Load().Kubernetes.Enabled
	f.followCleaned(config, reports)
	part := func(configured bool, mayExist *bool) map[string]string {
		switch {
		case configured:
			*mayExist = true
			return f.labels
		case *mayExist && f.mayRemove(config.Labels):
			return map[string]string{}
		}
		return nil
	}
	s.Labels = part(config.Labels.Output == LabelsAPI, &f.memory.Labels)
	s.Feature = part(config.Labels.Output == LabelsNodeFeature, &f.memory.Feature)
	if len(config.Taints) > 0 || f.memory.Taints {
		s.Taints, s.Undecided = Taints(config.Taints, snap)
		f.memory.Taints = f.memory.Taints || len(s.Taints)+len(s.Undecided) > 0 // a node that never had one has none to remove
	}
	f.memory.Condition = f.memory.Condition || reports
	s.RemoveCondition = f.memory.Condition && !reports
	if config.StartupTaint != "" {
		if t, err := ParseTaint(config.StartupTaint); err == nil {
			s.StartupTaint, s.OffersAll = &t, f.OffersAll()
		}
	}
	return s
}

// followCleaned forgets what is not configured after somebody else has removed it from the node. Each removal changes the annotation. A
// value that was followed before proves nothing about what this or an earlier process has written since. Comparing values needs no clock:
// the clocks of nodes differ.
func (f *Follower) followCleaned(config *Config, reports bool) {
	at := f.Cleaned.Load()
	if at == nil || *at == "" || *at == f.memory.Cleaned {
		return
	}
	f.Log.Info("what earlier agents left of the node in the API server was removed", zap.String("at", *at))
	f.memory.Cleaned = *at
	f.memory.Labels = f.memory.Labels && config.Labels.Output == LabelsAPI
	f.memory.Feature = f.memory.Feature && config.Labels.Output == LabelsNodeFeature
	f.memory.Taints = f.memory.Taints && len(config.Taints) > 0
	f.memory.Condition = f.memory.Condition && reports
}

// mayRemove reports whether labels can be removed from a place where they are not configured. They stay there while they are unknown,
// because the configured place does not have them yet either.
func (f *Follower) mayRemove(config LabelsConfig) bool {
	return f.labels != nil || config.Output == LabelsOff
}

// fileWant returns what the disk must have.
func (f *Follower) fileWant(config LabelsConfig) (w fileWant) {
	files := f.memory.Files
	if r := f.file.result.Load(); r != nil && r.want == f.file.want.Load() {
		files = slices.DeleteFunc(slices.Clone(files), func(path string) bool { return slices.Contains(r.absent, path) })
	}
	if config.Output == LabelsFile {
		w.path, w.labels = config.File, f.labels
		if !slices.Contains(files, w.path) {
			files = append(slices.Clone(files), w.path)
		}
	}
	for _, path := range files {
		if path != w.path && f.mayRemove(config) {
			w.remove = append(w.remove, path)
		}
	}
	f.memory.Files = files
	return w
}

// save stores the section of the state file if it has changed.
func (f *Follower) save() {
	s := section{memory: f.memory, Node: f.Node, Inventory: f.inventory.Load()}
	if s.Inventory == f.lastSaved.Inventory && reflect.DeepEqual(s.memory, f.lastSaved.memory) {
		return
	}
	text, err := json.Marshal(s)
	if err != nil {
		return // impossible: all values have texts
	}
	f.lastSaved = s
	f.saved.Store(&text)
}
