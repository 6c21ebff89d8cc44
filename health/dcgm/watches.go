//go:build cgo && linux

package dcgm

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"
)

// entity is a GPU, a GPU instance or a compute instance by DCGM's own number, which is not the driver's.
type entity struct {
	kind dcgm.Field_Entity_Group
	id   uint
}

func pairs(entities []entity) []dcgm.GroupEntityPair {
	all := make([]dcgm.GroupEntityPair, len(entities))
	for i, e := range entities {
		all[i] = dcgm.GroupEntityPair{EntityGroupId: e.kind, EntityId: e.id}
	}
	return all
}

// How samples are taken and kept. XIDs are events: ten minutes of them outlive a reconnect.
const (
	healthEvery    = time.Second
	inventoryEvery = time.Minute
	keepLatest     = 1
	keepXIDs       = 10 * time.Minute
)

// watches are what one inventory has DCGM sample. They are made anew when the inventory changes.
type watches struct {
	gpus, instances, computes []entity // those that DCGM took into its groups

	gpuPairs, instancePairs, computePairs []dcgm.GroupEntityPair // the same, as go-dcgm takes them
	xidPairs                              []dcgm.GroupEntityPair // all of them

	gpuFields     []dcgm.Short // of GPUs, at a full poll
	computeFields []dcgm.Short // of compute instances, at a full poll
	lightFields   []dcgm.Short // of GPUs, at every poll

	inventoryFields []dcgm.Short // of GPUs, when the inventory is read
	texts           []dcgm.Short // those among them that are asked for as they are

	gpuGroup  group // GPUs: health and metrics
	all       group // GPUs and instances: inventory and XIDs
	xidFields fieldGroup
	health    bool // DCGM's own health checks are on

	undo []func() error // what takes all of it back, last first

	inventory fieldGroup
	sampled   []sampled // in the order in which they were asked for
}

// sampled is a field group that DCGM samples. Of two of one client that have a field in common the last one counts.
type sampled struct {
	fields  []dcgm.Short
	handle  fieldGroup
	group   group
	every   time.Duration
	keep    time.Duration
	samples int32
}

func (f sampled) watch(every time.Duration) error {
	return dcgm.WatchFieldsWithGroupEx(f.handle.handle, f.group.handle, every.Microseconds(), f.keep.Seconds(), f.samples)
}

// hasten has the inventory sampled now, and once a second from now on.
func (w *watches) hasten() error {
	for _, f := range w.sampled {
		if f.handle == w.inventory {
			return f.watch(healthEvery)
		}
	}
	return nil
}

// restore ends what hasten has begun, for the inventory and for what has a field in common with it.
func (w *watches) restore() error {
	var errs []error
	for _, f := range w.sampled {
		if slices.ContainsFunc(f.fields, func(field dcgm.Short) bool { return slices.Contains(inventoryFields(), field) }) {
			errs = append(errs, f.watch(f.every))
		}
	}
	return errors.Join(errs...)
}

type group struct{ handle dcgm.GroupHandle }

type fieldGroup struct{ handle dcgm.FieldHandle }

// watch has DCGM watch the topology's entities. status tells which GPUs can be reached: DCGM takes no
// other into a group (10).
func (s *session) watch(t topology, status map[uint]dcgm.EntityStatus) (w *watches, err error) {
	w = &watches{}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
			w = nil
		}
	}()
	if len(t.gpus) == 0 {
		return w, nil
	}
	if w.gpuGroup, err = s.newGroup(w, "gpus"); err != nil {
		return w, err
	}
	if w.all, err = s.newGroup(w, "all"); err != nil {
		return w, err
	}
	lost := map[uint]bool{}
	for _, id := range t.gpus {
		err := dcgm.AddEntityToGroup(w.gpuGroup.handle, dcgm.FE_GPU, id)
		if err == nil {
			err = dcgm.AddEntityToGroup(w.all.handle, dcgm.FE_GPU, id)
		}
		switch {
		case err == nil:
			w.gpus = append(w.gpus, entity{dcgm.FE_GPU, id})
		case reachable(status[id]) && reachable(dcgm.GetGPUStatus(id)): // it is not just lost
			return w, err
		default:
			lost[id] = true
		}
	}
	if len(w.gpus) == 0 {
		return w, nil
	}
	for _, in := range t.instances {
		if lost[in.gpu] {
			continue
		}
		if err := dcgm.AddEntityToGroup(w.all.handle, in.kind, in.id); err != nil {
			return w, err
		}
		if in.kind == dcgm.FE_GPU_I {
			w.instances = append(w.instances, in.entity)
		} else {
			w.computes = append(w.computes, in.entity)
		}
	}
	w.gpuPairs, w.instancePairs, w.computePairs = pairs(w.gpus), pairs(w.instances), pairs(w.computes)
	w.xidPairs = slices.Concat(w.gpuPairs, w.instancePairs, w.computePairs)
	return w, s.watchFields(w, t)
}

func (s *session) watchFields(w *watches, t topology) (err error) {
	c, err := s.fields()
	if err != nil {
		return err
	}
	judged, metrics := c.judged, c.metrics
	profiling := slices.DeleteFunc(slices.Clone(metrics), func(f dcgm.Short) bool { return !isProfiling(f) })
	metrics = slices.DeleteFunc(metrics, isProfiling)
	w.lightFields = slices.Concat(judged, []dcgm.Short{fieldXID})
	w.gpuFields = slices.Concat(w.lightFields, metrics)
	w.computeFields = slices.Concat([]dcgm.Short{fieldXID}, perInstance(metrics))

	if w.inventory, err = s.watchFew(w, "inventory", w.all, inventoryFields(), inventoryEvery, 0, keepLatest); err != nil {
		return err
	}
	w.texts, w.inventoryFields = c.texts, union(inventoryFields(), c.texts)
	own := w.inventoryFields[len(inventoryFields()):] // a field is watched once: one client's watches are not counted
	if err = s.watchGroup(w, "texts", w.gpuGroup, own, inventoryEvery); err != nil {
		return err
	}
	if w.xidFields, err = s.watchFew(w, "xids", w.all, []dcgm.Short{fieldXID}, healthEvery, keepXIDs, 0); err != nil {
		return err
	}
	if err = s.watchGroup(w, "health", w.gpuGroup, judged, healthEvery); err != nil {
		return err
	}
	if err = s.watchGroup(w, "metrics", w.gpuGroup, metrics, s.cfg.Interval); err != nil {
		return err
	}
	if own := w.computeFields[1:]; len(w.computes) > 0 && len(own) > 0 {
		parts, err := s.groupOf(w, "instances", w.computes)
		if err != nil {
			return err
		}
		if err := s.watchGroup(w, "instance-metrics", parts, own, s.cfg.Interval); err != nil {
			return err
		}
	}
	if err = s.watchProfiling(w, t, profiling); err != nil {
		return err
	}
	if s.systems == 0 || !has("dcgmHealthSet") || !has("dcgmHealthCheck") {
		return nil
	}
	if err := dcgm.HealthSet(w.gpuGroup.handle, s.systems); err != nil {
		s.log.Warn("DCGM's own health checks are not available", zap.Error(err))
		return nil
	}
	w.health = true
	w.undo = append(w.undo, func() error { return dcgm.HealthSet(w.gpuGroup.handle, 0) })
	return nil
}

// name is unique in an engine that others, and an earlier run of this program, use too.
func (s *session) name(what string) string {
	s.names++
	return fmt.Sprintf("gpu-node-agent-%d-%d-%s", os.Getpid(), s.names, what)
}

func (s *session) newGroup(w *watches, what string) (group, error) {
	handle, err := dcgm.CreateGroup(s.name(what))
	if err != nil {
		return group{}, err
	}
	w.undo = append(w.undo, func() error { return dcgm.DestroyGroup(handle) })
	return group{handle}, nil
}

// groupOf makes a group of entities that can be reached.
func (s *session) groupOf(w *watches, what string, entities []entity) (group, error) {
	g, err := s.newGroup(w, what)
	if err != nil {
		return group{}, err
	}
	for _, e := range entities {
		if err := dcgm.AddEntityToGroup(g.handle, e.kind, e.id); err != nil {
			return group{}, err
		}
	}
	return g, nil
}

// watchGroup has the newest sample of fields of a group at hand, sampled every so often.
func (s *session) watchGroup(w *watches, what string, g group, fields []dcgm.Short, every time.Duration) error {
	for some := range slices.Chunk(fields, maxFields) {
		if _, err := s.watchFew(w, what, g, some, every, 0, keepLatest); err != nil {
			return err
		}
	}
	return nil
}

// watchFew has fields of a group sampled: every so often, kept for so long, so many of them; 0 is no bound. It returns
// when each has been sampled once. They are as many as one field group has, and at least one: go-dcgm panics over an
// empty list.
func (s *session) watchFew(
	w *watches, what string, g group, fields []dcgm.Short, every, keep time.Duration, samples int32,
) (fieldGroup, error) {
	handle, err := dcgm.FieldGroupCreate(s.name(what), fields)
	if err != nil {
		return fieldGroup{}, fmt.Errorf("fields of %s: %w", what, err)
	}
	f := sampled{fields, fieldGroup{handle}, g, every, keep, samples}
	if err := f.watch(every); err != nil {
		// Best effort: the watch may stand, if it was its first update that failed, or not.
		_ = dcgm.UnwatchFields(handle, g.handle)
		_ = dcgm.FieldGroupDestroy(handle)
		return fieldGroup{}, fmt.Errorf("watch fields of %s: %w", what, err)
	}
	w.undo = append(w.undo,
		func() error { return dcgm.FieldGroupDestroy(handle) },
		func() error { return dcgm.UnwatchFields(handle, g.handle) })
	w.sampled = append(w.sampled, f)
	return f.handle, nil
}

// close takes everything back. Without it the watches would go on until the connection ends. That a field is not
// watched is no error: DCGM says so of global fields, such as the driver's version, which it watches for the whole node
// and looks for on each entity of the group, and of instances that are gone. It has then taken the others back.
func (w *watches) close() error {
	var errs []error
	for _, undo := range slices.Backward(w.undo) {
		if err := undo(); err != nil && !notWatched(err) {
			errs = append(errs, err)
		}
	}
	w.undo = nil
	return errors.Join(errs...)
}

// code is DCGM's number for an error (dcgm_structs.h: dcgmReturn_t), 0 if it has none: go-dcgm gives
// most of its errors as words only.
func code(err error) int {
	if e, ok := errors.AsType[*dcgm.Error](err); ok {
		return int(e.Code)
	}
	if _, number, ok := strings.Cut(fmt.Sprint(err), "failed with error code "); ok {
		var n int
		if _, err := fmt.Sscan(number, &n); err == nil {
			return n
		}
	}
	return 0
}

// notWatched reports whether DCGM says that a field is not watched. go-dcgm gives that as words only.
func notWatched(err error) bool {
	return strings.HasSuffix(err.Error(), words(dcgm.DCGM_ST_NOT_WATCHED))
}
