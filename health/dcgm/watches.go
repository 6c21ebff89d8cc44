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

	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/lib"
)

// entity is a GPU, a GPU instance or a compute instance, by DCGM's number, which is not the driver's.
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

// Intervals between samples, and how long or how many DCGM keeps. Ten minutes of XIDs outlast a reconnect.
const (
	healthInterval    = time.Second
	inventoryInterval = time.Minute
	keepLatest        = 1
	keepXIDs          = 10 * time.Minute
)

// watches are the fields that DCGM samples for an inventory. A changed inventory gets new watches.
type watches struct {
	gpus, instances, computes []entity // in DCGM's groups

	gpuPairs, instancePairs, computePairs []dcgm.GroupEntityPair // the same for go-dcgm
	xidPairs                              []dcgm.GroupEntityPair // all of them

	gpuFields     []dcgm.Short // of GPUs, read in full polls
	computeFields []dcgm.Short // of compute instances, read in full polls; field 230 is first
	lightFields   []dcgm.Short // of GPUs, read in every poll

	inventoryFields []dcgm.Short // of GPUs, read with the inventory
	texts           []dcgm.Short // the text fields of Config.Fields among them

	gpuGroup  dcgm.GroupHandle // GPUs: health checks, health and metric fields
	allGroup  dcgm.GroupHandle // GPUs and instances: inventory and XIDs
	xidFields dcgm.FieldHandle
	checked   bool // DCGM's health checks are enabled

	cleanup []func() error // removes everything, in reverse order

	inventory dcgm.FieldHandle
	intervals []func() error // watch the inventory, and the fields that it shares with other watches, as at first
}

// speedUpInventory makes DCGM sample the inventory at once, and then once a second.
func (w *watches) speedUpInventory() error {
	return dcgm.WatchFieldsWithGroupEx(w.inventory, w.allGroup, healthInterval.Microseconds(), 0, keepLatest)
}

// restoreIntervals ends speedUpInventory.
func (w *watches) restoreIntervals() error {
	var errs []error
	for _, watch := range w.intervals {
		errs = append(errs, watch())
	}
	return errors.Join(errs...)
}

// newWatches watches the entities of the hierarchy, except unreachable GPUs: DCGM adds no lost GPU to a group
// (OBSERVED.md#lost-gpu).
func (s *session) newWatches(h hierarchy) (w *watches, err error) {
	w = &watches{}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
			w = nil
		}
	}()
	if len(h.gpus) == 0 {
		return w, nil
	}
	if w.gpuGroup, err = s.newGroup(w, "gpus"); err != nil {
		return w, err
	}
	if w.allGroup, err = s.newGroup(w, "all"); err != nil {
		return w, err
	}
	lost := map[uint]bool{}
	for _, id := range h.gpus {
		err := dcgm.AddEntityToGroup(w.gpuGroup, dcgm.FE_GPU, id)
		if err == nil {
			err = dcgm.AddEntityToGroup(w.allGroup, dcgm.FE_GPU, id)
		}
		switch {
		case err == nil:
			w.gpus = append(w.gpus, entity{dcgm.FE_GPU, id})
		case s.reaches(id) && reachable(dcgm.GetGPUStatus(id)): // still reachable
			return w, err
		default:
			lost[id] = true
		}
	}
	if len(w.gpus) == 0 {
		return w, nil
	}
	for _, in := range h.instances {
		if lost[in.gpu] {
			continue
		}
		if err := dcgm.AddEntityToGroup(w.allGroup, in.kind, in.id); err != nil {
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
	return w, s.addWatches(w, h)
}

func (s *session) addWatches(w *watches, h hierarchy) (err error) {
	selected, err := s.selectFields()
	if err != nil {
		return err
	}
	metrics := selected.metrics
	profiling := slices.DeleteFunc(slices.Clone(metrics), func(f dcgm.Short) bool { return !isProfiling(f) })
	metrics = slices.DeleteFunc(metrics, isProfiling)
	w.lightFields = slices.Concat(selected.health, []dcgm.Short{fieldXID})
	w.gpuFields = slices.Concat(w.lightFields, metrics)
	w.computeFields = slices.Concat([]dcgm.Short{fieldXID}, instanceFields(metrics))

	if w.inventory, err = s.watchFieldGroup(w, "inventory", w.allGroup, inventoryFields(), inventoryInterval, 0); err != nil {
		return err
	}
	w.texts, w.inventoryFields = selected.texts, union(inventoryFields(), selected.texts)
	texts := w.inventoryFields[len(inventoryFields()):] // each field once: DCGM does not count the watches of a client
	if err = s.watchLatest(w, "texts", w.gpuGroup, texts, inventoryInterval); err != nil {
		return err
	}
	if w.xidFields, err = s.watchFieldGroup(w, "xids", w.allGroup, []dcgm.Short{fieldXID}, healthInterval, keepXIDs); err != nil {
		return err
	}
	if err = s.watchLatest(w, "health", w.gpuGroup, selected.health, healthInterval); err != nil {
		return err
	}
	if err = s.watchLatest(w, "metrics", w.gpuGroup, metrics, s.cfg.Interval); err != nil {
		return err
	}
	if fields := w.computeFields[1:]; len(w.computes) > 0 && len(fields) > 0 {
		computes, err := s.newGroupOf(w, "instances", w.computes)
		if err != nil {
			return err
		}
		if err := s.watchLatest(w, "instance-metrics", computes, fields, s.cfg.Interval); err != nil {
			return err
		}
	}
	if err = s.watchProfiling(w, h, profiling); err != nil {
		return err
	}
	if s.systems != 0 {
		w.cleanup = append(w.cleanup, w.disableHealthChecks)
		s.enableHealthChecks(w)
	}
	return nil
}

func (w *watches) disableHealthChecks() error {
	if !w.checked {
		return nil // they would fail again; DCGM also removes them with the group
	}
	return dcgm.HealthSet(w.gpuGroup, 0)
}

// groupName returns a name that is unique in an engine with other clients and earlier runs of this program.
func (s *session) groupName(purpose string) string {
	return fmt.Sprintf("gpu-node-agent-%d-%d-%s", os.Getpid(), s.groupCount.Add(1), purpose)
}

func (s *session) newGroup(w *watches, purpose string) (dcgm.GroupHandle, error) {
	g, err := dcgm.CreateGroup(s.groupName(purpose))
	if err == nil {
		w.cleanup = append(w.cleanup, func() error { return dcgm.DestroyGroup(g) })
	}
	return g, err
}

// newGroupOf creates a group of reachable entities.
func (s *session) newGroupOf(w *watches, purpose string, entities []entity) (dcgm.GroupHandle, error) {
	g, err := s.newGroup(w, purpose)
	for _, e := range entities {
		if err == nil {
			err = dcgm.AddEntityToGroup(g, e.kind, e.id)
		}
	}
	return g, err
}

// watchLatest makes DCGM sample any number of fields of a group and keep the newest samples.
func (s *session) watchLatest(w *watches, purpose string, g dcgm.GroupHandle, fields []dcgm.Short, every time.Duration) error {
	for chunk := range slices.Chunk(fields, maxFields) {
		if _, err := s.watchFieldGroup(w, purpose, g, chunk, every, 0); err != nil {
			return err
		}
	}
	return nil
}

// watchFieldGroup makes DCGM sample 1 to maxFields fields, of which it creates a field group, and keep the samples for a time, or only the
// newest ones. It returns when each field has been sampled once.
func (s *session) watchFieldGroup(
	w *watches, purpose string, g dcgm.GroupHandle, fields []dcgm.Short, every, keep time.Duration,
) (handle dcgm.FieldHandle, err error) {
	if handle, err = dcgm.FieldGroupCreate(s.groupName(purpose), fields); err != nil {
		return handle, fmt.Errorf("fields of %s: %w", purpose, err)
	}
	samples := int32(keepLatest)
	if keep > 0 {
		samples = 0 // all
	}
	watch := func() error {
		return dcgm.WatchFieldsWithGroupEx(handle, g, every.Microseconds(), keep.Seconds(), samples)
	}
	if err := watch(); err != nil {
		// Best effort: if only its first update failed, the watch exists.
		_ = dcgm.UnwatchFields(handle, g)
		_ = dcgm.FieldGroupDestroy(handle)
		return handle, fmt.Errorf("watch fields of %s: %w", purpose, err)
	}
	w.cleanup = append(w.cleanup,
		func() error { return dcgm.FieldGroupDestroy(handle) },
		func() error { return dcgm.UnwatchFields(handle, g) })
	if slices.ContainsFunc(fields, func(f dcgm.Short) bool { return slices.Contains(inventoryFields(), f) }) {
		w.intervals = append(w.intervals, watch) // in their order: of two watches of a client for a field, the later one applies
	}
	return handle, nil
}

// close removes everything, which would otherwise exist until the connection ends. It ignores the error that a field is not watched: DCGM
// returns it for global fields (OBSERVED.md#global-fields) and removed instances, after removing the other watches.
func (w *watches) close() error {
	var errs []error
	for _, remove := range slices.Backward(w.cleanup) {
		if err := remove(); err != nil && !isResult(err, dcgm.DCGM_ST_NOT_WATCHED) {
			errs = append(errs, err)
		}
	}
	w.cleanup = nil
	return errors.Join(errs...)
}

// errorCode returns DCGM's number of an error (dcgm_structs.h: dcgmReturn_t), or 0 if go-dcgm returns none
// (OBSERVED.md#error-codes).
func errorCode(err error) int {
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

// isResult reports whether a function of DCGM returned the result with this error. go-dcgm returns most as a text only.
func isResult(err error, result int) bool {
	return errorCode(err) == result || strings.HasSuffix(err.Error(), lib.ErrorText(result))
}
