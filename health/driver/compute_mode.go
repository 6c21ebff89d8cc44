package driver

import "fmt"

// ComputeMode is how many processes may use a GPU, with the driver's numbers.
type ComputeMode int32

// The compute modes of a GPU. In MIG mode a GPU has the default only.
const (
	ComputeModeDefault          ComputeMode = iota // any number of processes
	ComputeModeExclusiveThread                     // obsolete: the driver treats it as ComputeModeExclusiveProcess
	ComputeModeProhibited                          // none
	ComputeModeExclusiveProcess                    // one, such as an MPS server
)

// String returns the name as nvidia-smi writes it.
func (m ComputeMode) String() string {
	switch m {
	case ComputeModeDefault:
		return "Default"
	case ComputeModeExclusiveThread:
		return "Exclusive_Thread"
	case ComputeModeProhibited:
		return "Prohibited"
	case ComputeModeExclusiveProcess:
		return "Exclusive_Process"
	}
	return fmt.Sprintf("ComputeMode(%d)", int32(m))
}
