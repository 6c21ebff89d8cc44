//go:build linux

package nvml

/*
#cgo LDFLAGS: -lpthread
#include <stdlib.h>
#include "waiter.h"
*/
import "C"

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"sync"
	"time"
	"unsafe"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"
)

// waiter waits for the events of a set on a thread of C. A Go call that blocks for a second wakes the scheduler's monitor thread
// about sixty times, which costs more than all else that an idle agent does.
type waiter struct {
	pipe  *os.File
	in    *bufio.Reader
	unend func() bool // undoes what ends the waiter with its context

	mu     sync.Mutex // guards thread
	thread *C.gna_nvml_waiter_t
}

// driverEvent is an event of a set.
type driverEvent struct {
	device   unsafe.Pointer // of the handle with which the event was registered: see handleOf
	kind     uint64
	data     uint64
	gi, ci   uint32
	received time.Time
}

// handleOf returns the driver's handle of a device or a set, which go-nvml does not export.
func handleOf(v any) unsafe.Pointer { return reflect.ValueOf(v).Field(0).UnsafePointer() }

// startWaiter starts a waiter. A wait that ends without an event has a result, too. The waiter begins no wait after ctx has ended.
func startWaiter(ctx context.Context, set nvml.EventSet, timeout time.Duration) (*waiter, error) {
	in, out, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("wait for NVML's events: %w", err)
	}
	defer func() { _ = out.Close() }()
	fd, err := unix.FcntlInt(out.Fd(), unix.F_DUPFD_CLOEXEC, 0) // the thread closes it
	if err != nil {
		return nil, errors.Join(fmt.Errorf("wait for NVML's events: %w", err), in.Close())
	}
	thread := C.gna_nvml_wait(handleOf(set), C.uint(timeout.Milliseconds()), C.int(fd))
	if thread == nil {
		return nil, errors.Join(errors.New("wait for NVML's events: cannot start a thread"), in.Close())
	}
	w := &waiter{thread: thread, pipe: in, in: bufio.NewReader(in)}
	w.unend = context.AfterFunc(ctx, w.end)
	return w, nil
}

// next returns the next result of the thread. After a failure there is none.
func (w *waiter) next() (driverEvent, nvml.Return, error) {
	var r C.gna_nvml_result_t
	if _, err := io.ReadFull(w.in, unsafe.Slice((*byte)(unsafe.Pointer(&r)), unsafe.Sizeof(r))); err != nil {
		return driverEvent{}, nvml.ERROR_UNKNOWN, err
	}
	return driverEvent{
		device: r.event.device, kind: uint64(r.event._type), data: uint64(r.event.data),
		gi: uint32(r.event.gpu_instance), ci: uint32(r.event.compute_instance), received: time.Now(),
	}, nvml.Return(r.result), nil
}

// end makes the thread end once its call has returned.
func (w *waiter) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.thread != nil {
		C.gna_nvml_stop(w.thread)
	}
}

// stop ends the thread, and passes on the events that it has received. It returns when no call is left in the driver.
func (w *waiter) stop(receive func(driverEvent)) {
	w.end()
	w.unend()
	for {
		e, ret, err := w.next()
		if err != nil {
			break
		}
		if ret == nvml.SUCCESS {
			receive(e)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	C.free(unsafe.Pointer(w.thread))
	w.thread = nil
	_ = w.pipe.Close()
}
