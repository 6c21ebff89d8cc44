package cdi

import (
	"context"
	"fmt"
	"maps"
	"path"
	"reflect"
	"regexp"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Toolkit generates the parts of a spec with nvcdi, the library of NVIDIA's container toolkit. nvcdi asks the driver by NVML,
// so a call may hang: Run calls it, and Writer takes what there is. There is one call per device, so that one GPU does not
// cost the others their parts.
type Toolkit struct {
	edits  func(r request, id health.DeviceID, log *zap.Logger) (*specs.ContainerEdits, error) // of all devices if the ID is empty
	log    *zap.Logger
	wanted health.Latest[request]
	made   health.Latest[made]
}

// The time limits of a call. The first call may initialize every GPU.
const (
	commonLimit = 30 * time.Second
	deviceLimit = 5 * time.Second
	retryAfter  = time.Minute // after a failure
)

// request is what the Writer wants.
type request struct {
	host     Host
	hookPath string
	keys     map[health.DeviceID]string // of Input
}

// made is what there is. It is never modified once stored.
type made struct {
	number uint64 // identifies it
	parts  map[health.DeviceID]part
}

// part is the result of the last calls for a device.
type part struct {
	key   string                // for which it is
	edits *specs.ContainerEdits // of the last call that succeeded; nil: none
	err   error                 // of the last call
}

func newToolkit(log *zap.Logger) *Toolkit { return &Toolkit{edits: nvcdiEdits, log: log} }

// Changed returns a channel that closes when there are new parts.
func (t *Toolkit) Changed() <-chan struct{} {
	_, changed := t.made.Watch()
	return changed
}

// Run generates what is wanted until ctx ends. It returns when no call is left, so that it holds no file of the driver. The
// first parts of each Run are new ones: the driver may be another after a detach. Older ones serve until then.
func (t *Toolkit) Run(ctx context.Context) {
	r := run{t: t, current: map[health.DeviceID]string{}, hanging: map[health.DeviceID]call{}}
	defer r.calls.Wait()
	for {
		want, changed := t.wanted.Watch()
		var retry <-chan time.Time
		if want != nil && !r.generate(ctx, want) {
			retry = time.After(retryAfter)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-retry:
		}
	}
}

// want returns the parts for an input, and whether each is up to date or has failed. It requests those that are missing.
func (t *Toolkit) want(in Input, keys map[health.DeviceID]string) (m *made, complete bool) {
	if last := t.wanted.Load(); last == nil || !maps.Equal(last.keys, keys) { // the keys contain the rest
		t.wanted.Store(&request{in.Host, in.Config.HookPath, keys})
	}
	if m = t.made.Load(); m == nil {
		m = &made{}
	}
	for id, key := range keys {
		if m.parts[id].key != key {
			return m, false
		}
	}
	return m, true
}

// Stop ends the generation until the next spec is wanted.
func (t *Toolkit) Stop() {
	if t.wanted.Load() != nil {
		t.wanted.Store(nil)
	}
}

// keys returns what the parts of a spec depend on, by device; the part of all devices has no ID. At boot some nodes and sockets
// appear late.
func (in Input) keys() map[health.DeviceID]string {
	h := in.Host
	base := fmt.Sprintf("%q %q %q %q %q", in.Config.HookPath, in.Driver, h.DriverRoot, h.ContainerDriverRoot, h.DevRoot)
	keys := map[health.DeviceID]string{"": fmt.Sprintf("%s %q %q", base, h.ControlNodes(), h.driverSockets())}
	for _, d := range in.Devices {
		nodes, err := h.DeviceNodes(&d.State.Device)
		keys[d.State.Device.ID] = fmt.Sprintf("%s %q %v", base, nodes, err)
	}
	return keys
}

// run is one Run of a Toolkit.
type run struct {
	t       *Toolkit
	calls   sync.WaitGroup
	current map[health.DeviceID]string // the keys of the parts that this Run has made
	hanging map[health.DeviceID]call   // calls that exceeded their limit
}

type call struct {
	key    string
	result chan result
}

type result struct {
	edits *specs.ContainerEdits
	err   error
}

// generate makes the parts that are missing or old, and reports whether all are made. If the common part fails, NVML does, and
// no device is tried.
func (r *run) generate(ctx context.Context, want *request) bool {
	before := r.t.made.Load()
	if before == nil {
		before = &made{}
	}
	maps.DeleteFunc(r.current, func(id health.DeviceID, _ string) bool { return want.keys[id] == "" })
	now := &made{number: before.number + 1, parts: map[health.DeviceID]part{}}
	var failed error
	ok := true
	for _, id := range slices.Sorted(maps.Keys(want.keys)) { // the common part has no ID and is the first
		p := part{key: want.keys[id]}
		if last := before.parts[id]; last.key == p.key {
			p.edits = last.edits
		}
		if p.edits == nil || r.current[id] != p.key {
			edits, err := (*specs.ContainerEdits)(nil), failed
			if err == nil {
				edits, err = r.call(ctx, want, id)
			}
			if ctx.Err() != nil {
				return true // nothing failed, and the next Run tries again
			}
			if p.err = err; err == nil {
				p.edits, r.current[id] = edits, p.key
			} else {
				ok = false
			}
			if id == "" {
				failed = err
			}
		}
		now.parts[id] = p
	}
	if !reflect.DeepEqual(now.parts, before.parts) {
		r.t.made.Store(now)
	}
	return ok
}

// call calls nvcdi with a time limit. While a call of a device hangs there is no second one; its late result counts.
func (r *run) call(ctx context.Context, want *request, id health.DeviceID) (*specs.ContainerEdits, error) {
	limit := deviceLimit
	if id == "" {
		limit = commonLimit
	}
	errHangs := fmt.Errorf("no answer from NVML in %v", limit)
	c, hangs := r.hanging[id]
	if hangs {
		select {
		case late := <-c.result:
			delete(r.hanging, id)
			if c.key == want.keys[id] {
				return late.edits, late.err
			}
		default:
			return nil, errHangs
		}
	}
	c = call{want.keys[id], make(chan result, 1)}
	r.calls.Go(func() {
		edits, err := r.t.edits(*want, id, r.t.log)
		c.result <- result{edits, err}
	})
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case got := <-c.result:
		return got.edits, got.err
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-timer.C:
		r.hanging[id] = c
		return nil, errHangs
	}
}

// spec returns the spec of the devices from their parts, of which that of all devices must exist. A device without a part has
// its device nodes only. As in newSpec, a device without known nodes is left out; so is one whose nodes do not exist, of which
// nvcdi only warns.
func (m *made) spec(in Input) (spec *specs.Spec, warnings []string, err error) {
	spec = &specs.Spec{Version: specVersion, Kind: in.Config.EffectiveKind(), ContainerEdits: *m.parts[""].edits}
	left, bare, old := reasons{}, reasons{}, reasons{}
	for _, d := range in.Devices {
		p := m.parts[d.State.Device.ID]
		nodes, err := in.Host.DeviceNodes(&d.State.Device)
		switch {
		case p.edits != nil:
			err = in.Host.checkNodes(p.edits, nodes)
			old.add(d, p.err)
		case err == nil:
			p.edits = &specs.ContainerEdits{DeviceNodes: in.Host.specNodes(nodes)}
			err = in.Host.checkNodes(p.edits, nodes)
			bare.add(d, p.err)
		}
		if err != nil {
			left.add(d, err)
			continue
		}
		spec.Devices = append(spec.Devices, specs.Device{Name: d.Name, ContainerEdits: *p.edits})
	}
	if spec.Version, err = minimumVersion(spec); err != nil {
		return nil, nil, err
	}
	return spec, slices.Concat(left.list("left out of the CDI spec"), bare.list("with its device nodes only in the CDI spec"),
		old.list("as before in the CDI spec")), nil
}

// minimumVersion returns the oldest CDI version that a spec is valid in.
func minimumVersion(spec *specs.Spec) (string, error) {
	v, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return "", err
	}
	return max(v, specVersion), nil // both have one digit per number
}

// checkNodes returns an error unless edits contain the device nodes and these exist. Without nodes, edits must contain that of
// a GPU.
func (h Host) checkNodes(edits *specs.ContainerEdits, nodes []string) error {
	if len(nodes) == 0 && !slices.ContainsFunc(nodePaths(edits), regexp.MustCompile(`^/dev/nvidia[0-9]+$`).MatchString) {
		return fmt.Errorf("expected a device node /dev/nvidiaN, found %q", nodePaths(edits))
	}
	for _, node := range nodes {
		if !h.hasNode(node) {
			return fmt.Errorf("expected device node %s, found none in %s", node, path.Join(h.visibleDevRoot(), path.Dir(node)))
		}
		if !slices.Contains(nodePaths(edits), node) {
			return fmt.Errorf("expected device node %s, found %q", node, nodePaths(edits))
		}
	}
	return nil
}

func nodePaths(edits *specs.ContainerEdits) (paths []string) {
	for _, n := range edits.DeviceNodes {
		paths = append(paths, n.Path)
	}
	return paths
}
