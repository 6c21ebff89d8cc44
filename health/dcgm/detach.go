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
)

// CanDetach tells why a host engine cannot let go of the driver: that came with DCGM 4.5. An engine in this process
// needs no word for it, its end lets go.
func (s *session) CanDetach() error {
	switch {
	case s.cfg.Address == "":
		return nil
	case !has("dcgmDetachDriver") || !has("dcgmAttachDriver"):
		return fmt.Errorf("libdcgm here is too old to have the host engine at %s let go of the driver, which takes DCGM 4.5; %s", s.cfg.Address, otherwise)
	case before(s.versions.Engine, 4, 5):
		return fmt.Errorf("the host engine at %s is DCGM %s and cannot let go of the driver, which takes DCGM 4.5; %s",
			s.cfg.Address, s.versions.Engine, otherwise)
	}
	return nil
}

const otherwise = "stop the host engine itself (systemctl stop nvidia-dcgm), and then say detach again"

// before reports whether a version is known and older.
func before(version string, major, minor int) bool {
	parts := strings.SplitN(version, ".", 3)
	if len(parts) < 2 {
		return false
	}
	a, err := strconv.Atoi(parts[0])
	b, err2 := strconv.Atoi(parts[1])
	return err == nil && err2 == nil && (a < major || a == major && b < minor)
}

// Detach has a host engine let go of the driver, for all of its clients. It waits for a poll under way and blocks for as
// long as the engine does. What we watch is taken back first: nobody says what becomes of it without a driver.
func (s *session) Detach(context.Context) error {
	if err := s.CanDetach(); err != nil || s.cfg.Address == "" {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return errors.New("the DCGM session is closed")
	case s.failed != nil:
		return s.failed
	}
	if err := s.watches.close(); err != nil {
		s.log.Debug("the watches could not be taken back", zap.Error(err))
	}
	s.watches = &watches{}
	if err := dcgm.DetachDriver(); err != nil {
		s.failed = fmt.Errorf("the host engine at %s does not let go of the driver: %w", s.cfg.Address, err)
		return s.failed
	}
	s.failed = errDetached
	return nil
}

var errDetached = errors.New("the host engine has let go of the driver")

// attach has the host engine take the driver back. It does nothing if the engine has it, and one that is too old to let
// go of it has it. It comes before anything is read: without a driver there is no inventory.
func attach(cfg Config) error {
	if !cfg.Attach || cfg.Address == "" || !has("dcgmAttachDriver") {
		return nil
	}
	err := dcgm.AttachDriver()
	if err == nil && has("dcgmDetachDriver") && halfAttached() {
		// An engine that took the driver back too early has it, and does nothing when it is told again: what it then
		// found is all that it will ever have (DCGM, DcgmNvmlSystemEventThread::AttachDriverImpl).
		if err = dcgm.DetachDriver(); err == nil {
			err = dcgm.AttachDriver()
		}
	}
	if err != nil {
		return fmt.Errorf("the host engine at %s does not take the driver back: %w", cfg.Address, err)
	}
	return nil
}

// halfAttached tells whether an engine lacks a GPU that it knows, or has none.
func halfAttached() bool {
	gpus, err := dcgm.GetEntityGroupEntities(dcgm.FE_GPU)
	return err == nil && (len(gpus) == 0 || slices.ContainsFunc(gpus, func(id uint) bool {
		return dcgm.GetGPUStatus(id) == dcgm.EntityStatusDetached
	}))
}
