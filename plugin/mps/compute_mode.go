package mps

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
)

// ComputeModes reads and sets the compute modes of GPUs. Its functions may block as long as the driver does.
type ComputeModes struct {
	Get func(gpu health.DeviceID) (driver.ComputeMode, error)
	Set func(gpu health.DeviceID, mode driver.ComputeMode) error
}

// makeExclusive lets one process only use a GPU: the MPS server. A container that does not find the server then fails, instead of
// running beside it without limits. What the mode was is recorded before it is set, so that it can be set back after a crash.
func (m *ComputeModes) makeExclusive(r Root, gpu health.DeviceID) error {
	mode, err := m.Get(gpu)
	switch {
	case err != nil:
		return fmt.Errorf("cannot read the compute mode: %w", err)
	case mode == driver.ComputeModeExclusiveProcess: // set before MPS, and not recorded; or set and recorded by a Supervisor that was killed
		return nil
	case mode == driver.ComputeModeProhibited:
		return fmt.Errorf("the compute mode is %s; to let MPS use the GPU, run nvidia-smi -i %s -c DEFAULT", mode, gpu)
	}
	if _, err := (durable.Options{}).Replace(r.computeModeFile(gpu), fmt.Appendln(nil, int32(mode))); err != nil {
		return fmt.Errorf("cannot record the compute mode %s: %w", mode, err)
	}
	if err := m.Set(gpu, driver.ComputeModeExclusiveProcess); err != nil {
		return fmt.Errorf("cannot set the compute mode %s: %w", driver.ComputeModeExclusiveProcess, err)
	}
	return nil
}

// setBack sets the mode that makeExclusive recorded, unless somebody changed the mode meanwhile. Without a record it does nothing.
func (m *ComputeModes) setBack(r Root, gpu health.DeviceID) error {
	path := r.computeModeFile(gpu)
	text, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("cannot read what the compute mode was: %w", err)
	}
	recorded, badRecord := parseComputeMode(text) // Default if it is bad
	mode, err := m.Get(gpu)
	if err == nil && mode == driver.ComputeModeExclusiveProcess {
		err = m.Set(gpu, recorded)
	}
	if err != nil {
		return fmt.Errorf("cannot set the compute mode back to %s: %w", recorded, err)
	}
	if badRecord != nil {
		badRecord = fmt.Errorf("%s: %w; the compute mode is %s now", path, badRecord, recorded)
	}
	return errors.Join(badRecord, os.Remove(path))
}

// parseComputeMode parses a record. The mode is the default if the text is no record.
func parseComputeMode(text []byte) (driver.ComputeMode, error) {
	const last = driver.ComputeModeExclusiveProcess
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || n < 0 || n > int(last) {
		return driver.ComputeModeDefault, fmt.Errorf("expected a compute mode from 0 to %d, found %.20q", last, text)
	}
	return driver.ComputeMode(n), nil
}
