package cdi

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"reflect"
	"regexp"
	"slices"
	"time"

	"go.uber.org/zap"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/grouped"
)

// Toolkit generates the parts of a spec with nvcdi, the library of NVIDIA's container toolkit. nvcdi asks the driver by NVML,
// so a call may hang: Run calls it, and Writer uses the newest parts. There is one call per device, so that one GPU does not
// cost the others their parts.
type Toolkit struct {
	edits     func(r request, id health.DeviceID, log *zap.Logger) (*specs.ContainerEdits, error) // of all devices if the ID is empty
	log       *zap.Logger
	requested health.Latest[request]
	parts     health.Latest[partSet]
}

// The time limits of a call. The first call may initialize every GPU.
const (
	commonLimit = 30 * time.Second
	deviceLimit = 5 * time.Second
	retryAfter  = time.Minute // after a failure
)

// request is an order for the parts of a spec.
type request struct {
	host     Host
	hookPath string
	limits   bool                       // with the hook that sets memory limits
	keys     map[health.DeviceID]string // of Input
}

// partSet holds the newest part of each device. It is never modified once stored.
type partSet struct {
	number   uint64 // identifies it
	byDevice map[health.DeviceID]part
}

// part is the result of the last calls for a device.
type part struct {
	key   string                // for which it is
	edits *specs.ContainerEdits // of the last call that succeeded; nil: none
	err   error                 // of the last call
}

func newToolkit(log *zap.Logger) *Toolkit { return &Toolkit{edits: nvcdiEdits, log: log} }

// Parts is replaced when there are new parts.
func (t *Toolkit) Parts() health.Replaceable { return &t.parts }

// Run generates the requested parts until ctx ends. It returns when no call is left, so that it holds no file of the driver. The
// first parts of each Run are new ones: the driver may be another after a detach. Older ones serve until then.
func (t *Toolkit) Run(ctx context.Context) {
	r := run{
		t: t, current: map[health.DeviceID]string{},
		commonCalls: calls{Limit: commonLimit, KeepLate: true}, deviceCalls: calls{Limit: deviceLimit, KeepLate: true},
	}
	defer r.deviceCalls.Wait()
	defer r.commonCalls.Wait()
	for {
		req, changed := t.requested.Watch()
		var retry <-chan time.Time
		if req != nil && !r.generate(ctx, req) {
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

// request requests the parts for an input. It returns the newest parts, and whether each is for this input or has failed.
func (t *Toolkit) request(in Input, keys map[health.DeviceID]string) (s *partSet, complete bool) {
	if last := t.requested.Load(); last == nil || !maps.Equal(last.keys, keys) { // the keys contain the rest
		t.requested.Store(&request{in.Host, in.Config.HookPath, in.wantsLimits(), keys})
	}
	if s = t.parts.Load(); s == nil {
		s = &partSet{}
	}
	for id, key := range keys {
		if s.byDevice[id].key != key {
			return s, false
		}
	}
	return s, true
}

// Stop ends the generation until the next request.
func (t *Toolkit) Stop() {
	if t.requested.Load() != nil {
		t.requested.Store(nil)
	}
}

// keys returns what the parts of a spec depend on, by device; the part of all devices has no ID. At boot some nodes and sockets
// appear late.
func (in Input) keys() map[health.DeviceID]string {
	h := in.Host
	base := fmt.Sprintf("%q %t %q %q %q %q", in.Config.HookPath, in.wantsLimits(), in.Driver, h.DriverRoot, h.ContainerDriverRoot, h.DevRoot)
	keys := map[health.DeviceID]string{"": fmt.Sprintf("%s %q %q", base, h.ControlNodes(), h.driverSockets())}
	for _, d := range in.Devices {
		nodes, err := h.DeviceNodes(&d.State.Device)
		keys[d.State.Device.ID] = fmt.Sprintf("%s %q %v", base, nodes, err)
	}
	return keys
}

// run is one Run of a Toolkit.
type run struct {
	t                        *Toolkit
	current                  map[health.DeviceID]string // the keys of the parts that this Run has generated
	commonCalls, deviceCalls calls
}

// calls are calls of nvcdi. While a call for a device hangs there is no second one.
type calls = health.Guard[health.DeviceID, result]

type result struct {
	key   string // of the request
	edits *specs.ContainerEdits
	err   error
}

// generate generates the parts that are missing or old, and reports whether it has all. If the common part fails, NVML fails, so
// no device is tried.
func (r *run) generate(ctx context.Context, req *request) bool {
	before := r.t.parts.Load()
	if before == nil {
		before = &partSet{}
	}
	maps.DeleteFunc(r.current, func(id health.DeviceID, _ string) bool { return req.keys[id] == "" })
	now := &partSet{number: before.number + 1, byDevice: map[health.DeviceID]part{}}
	var failed error
	ok := true
	for _, id := range slices.Sorted(maps.Keys(req.keys)) { // the common part has no ID and is the first
		p := part{key: req.keys[id]}
		if last := before.byDevice[id]; last.key == p.key {
			p.edits = last.edits
		}
		if p.edits == nil || r.current[id] != p.key {
			edits, err := (*specs.ContainerEdits)(nil), failed
			if err == nil {
				edits, err = r.call(ctx, req, id)
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
		now.byDevice[id] = p
	}
	if !reflect.DeepEqual(now.byDevice, before.byDevice) {
		r.t.parts.Store(now)
	}
	return ok
}

// call calls nvcdi with a time limit. A late result for the same key counts.
func (r *run) call(ctx context.Context, req *request, id health.DeviceID) (*specs.ContainerEdits, error) {
	calls := &r.deviceCalls
	if id == "" {
		calls = &r.commonCalls
	}
	for {
		got, err := calls.Call(ctx.Done(), id, func() result {
			edits, err := r.t.edits(*req, id, r.t.log)
			return result{req.keys[id], edits, err}
		}, nil)
		switch {
		case errors.Is(err, health.ErrLate):
			return nil, fmt.Errorf("no answer from NVML in %v", calls.Limit)
		case err != nil:
			return nil, err
		case got.key == req.keys[id]:
			return got.edits, got.err
		}
	}
}

// spec returns the spec of the devices from their parts. The part of all devices must exist. A device without a part has its device nodes
// only. As in newSpec, a device without known nodes is left out. So is a device whose nodes do not exist, of which nvcdi only warns.
func (s *partSet) spec(in Input) (spec *specs.Spec, warnings []string, err error) {
	spec = &specs.Spec{Version: specVersion, Kind: in.Config.EffectiveKind(), ContainerEdits: *s.byDevice[""].edits}
	var texts grouped.Texts
	for _, d := range in.Devices {
		p := s.byDevice[d.State.Device.ID]
		nodes, err := in.Host.DeviceNodes(&d.State.Device)
		switch {
		case p.edits != nil:
			err = in.Host.checkNodes(p.edits, nodes)
			addError(&texts, d, "as before in the CDI spec", p.err)
		case err == nil:
			p.edits = &specs.ContainerEdits{DeviceNodes: in.Host.specNodes(nodes)}
			err = in.Host.checkNodes(p.edits, nodes)
			addError(&texts, d, "with its device nodes only in the CDI spec", p.err)
		}
		if err != nil {
			addError(&texts, d, leftOut, err)
			continue
		}
		spec.Devices = append(spec.Devices, specs.Device{Name: d.Name, ContainerEdits: *p.edits})
	}
	if spec.Version, err = minimumVersion(spec); err != nil {
		return nil, nil, err
	}
	return spec, texts.NamesFirst(" "), nil
}

// minimumVersion returns the oldest CDI version that a spec is valid in.
func minimumVersion(spec *specs.Spec) (string, error) {
	v, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return "", err
	}
	return max(v, specVersion), nil // both have one digit per number
}

// checkNodes returns an error unless edits contain the device nodes and these exist. Without nodes, edits must contain the node of a GPU.
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
