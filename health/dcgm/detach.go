//go:build cgo && linux

package dcgm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/lib"
)

var (
	errDetached    = errors.New("the host engine has detached the driver")
	errDetachOld   = errors.New("cannot detach the driver before DCGM 4.5")
	errAttachFails = errors.New("cannot attach the driver")
)

// CanDetach returns an error if the host engine, or the library, cannot detach the driver (OBSERVED.md#driver-detach). An
// embedded engine detaches the driver when the session closes.
func (s *session) CanDetach() error {
	const advice = "stop the host engine itself (systemctl stop nvidia-dcgm), then run detach again"
	switch {
	case s.cfg.Address == "":
		return nil
	case !lib.Has("dcgmDetachDriver") || !lib.Has("dcgmAttachDriver"):
		return fmt.Errorf("host engine at %s: %w, and libdcgm here is older; %s", s.cfg.Address, errDetachOld, advice)
	case olderThan(s.versions.Engine, 4, 5):
		return fmt.Errorf("host engine at %s: %w, and the engine is DCGM %s; %s", s.cfg.Address, errDetachOld, s.versions.Engine, advice)
	}
	return nil
}

// olderThan reports whether a version is known and older than major.minor.
func olderThan(version string, major, minor int) bool {
	parts := strings.SplitN(version, ".", 3)
	if len(parts) < 2 {
		return false
	}
	a, err := strconv.Atoi(parts[0])
	b, err2 := strconv.Atoi(parts[1])
	return err == nil && err2 == nil && (a < major || a == major && b < minor)
}

// Detach makes a host engine detach the driver, for all of its clients. It waits for the poll in progress and blocks for as
// long as the engine does. It removes the watches first: DCGM does not document what happens to them without a driver.
func (s *session) Detach(context.Context) error {
	if err := s.CanDetach(); err != nil || s.cfg.Address == "" {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(); err != nil {
		return err
	}
	s.stopEntities()
	if err := s.watches.close(); err != nil {
		s.log.Debug("cannot remove the watches before detach", zap.Error(err))
	}
	s.watches = &watches{}
	if err := dcgm.DetachDriver(); err != nil {
		s.failed = fmt.Errorf("host engine at %s does not detach the driver: %w", s.cfg.Address, err)
		return s.failed
	}
	s.failed = errDetached
	return nil
}

// attach makes the host engine attach the driver, which has no effect if it is attached. An engine without this function
// never detaches the driver. It comes before the first read: without a driver the inventory is empty.
func attach(cfg Config) error {
	if !cfg.Attach || cfg.Address == "" || !lib.Has("dcgmAttachDriver") {
		return nil
	}
	err := dcgm.AttachDriver()
	if err == nil && lib.Has("dcgmDetachDriver") && partlyAttached() {
		// An engine that attached the driver before its GPUs were back finds no more GPUs unless it detaches it first
		// (OBSERVED.md#driver-detach).
		if err = dcgm.DetachDriver(); err == nil {
			err = dcgm.AttachDriver()
		}
	}
	if err != nil {
		return fmt.Errorf("host engine at %s: %w: %w", cfg.Address, errAttachFails, err)
	}
	return nil
}

// partlyAttached reports whether the engine has no GPU, or a detached one.
func partlyAttached() bool {
	gpus, err := dcgm.GetEntityGroupEntities(dcgm.FE_GPU)
	return err == nil && (len(gpus) == 0 || slices.ContainsFunc(gpus, func(id uint) bool {
		return dcgm.GetGPUStatus(id) == dcgm.EntityStatusDetached
	}))
}
