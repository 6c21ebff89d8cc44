//go:build cgo && linux

package nvml

import (
	"encoding/binary"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// device is a GPU that reports events. Its fields are guarded by eventRun.mu.
type device struct {
	handle nvml.Device
	uuid   string

	asked     int  // events of its recovery action
	overtaken bool // an XID has arrived after the newest of them
	reading   bool // the action is being read
	hangs     bool // the read has not returned in time
}

// xidRecoveryAction is the XID by which the driver reports a recovery action; it accompanies the event.
const xidRecoveryAction = 154

// overtake notes that an XID arrived. A recovery action that was read before the XID and delivered after it would be false evidence: "none"
// looks like a reset after the XID.
func (d *device) overtake(code int) {
	d.overtaken = d.overtaken || code != xidRecoveryAction
}

// readAction reads the recovery action beside the waiter and passes the event on with it. If several events arrive before the
// read has ended, it passes on one event with the newest action. If the read does not end in time, the event has no action. The
// caller holds eventRun.mu.
func (s *session) readAction(d *device, e health.Event) {
	d.asked++
	d.overtaken = false
	switch {
	case d.handle == nil || d.hangs:
		s.to.Receive(e)
	case !d.reading:
		d.reading = true
		s.use()
		s.calls.Go(func() {
			defer s.release()
			s.deliverAction(d, e)
		})
	}
}

func (s *session) deliverAction(d *device, e health.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		asked := d.asked
		late := time.AfterFunc(s.actionLimit, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			if d.reading && d.asked == asked && !s.ended {
				d.hangs = true
				s.to.Receive(e)
			}
		})
		s.mu.Unlock()
		action, ok := readRecoveryAction(d.handle)
		late.Stop()
		s.mu.Lock()
		wasLate := d.hangs
		d.hangs = false
		if d.asked != asked { // the value may be older than the newest event
			continue
		}
		d.reading = false
		if !wasLate {
			if ok && !d.overtaken {
				e.Action, e.HasAction = action, true
			}
			s.to.Receive(e)
		}
		return
	}
}

// readRecoveryAction reads the recovery action of a GPU. The field's number, 230 in nvml.h, is not among the numbers that changed within
// CUDA 13.0 (251 to 273).
func readRecoveryAction(handle nvml.Device) (action health.RecoveryAction, ok bool) {
	values := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	if handle.GetFieldValues(values) != nvml.SUCCESS || nvml.Return(values[0].NvmlReturn) != nvml.SUCCESS { //nolint:gosec // a code
		return 0, false
	}
	v := values[0]
	switch nvml.ValueType(v.ValueType) {
	case nvml.VALUE_TYPE_UNSIGNED_INT, nvml.VALUE_TYPE_SIGNED_INT:
		return health.RecoveryAction(binary.NativeEndian.Uint32(v.Value[:])), true
	case nvml.VALUE_TYPE_UNSIGNED_LONG, nvml.VALUE_TYPE_UNSIGNED_LONG_LONG, nvml.VALUE_TYPE_SIGNED_LONG_LONG:
		return health.RecoveryAction(binary.NativeEndian.Uint64(v.Value[:])), true //nolint:gosec // a small number
	}
	return 0, false
}
