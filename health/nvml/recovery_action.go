//go:build cgo && linux

package nvml

import (
	"encoding/binary"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// RecoveryAction returns the recovery action that the driver asks for on a GPU. It blocks as long as the driver does. The field's number,
// 230 in nvml.h, is not among the numbers that changed within CUDA 13.0 (251 to 273).
func RecoveryAction(gpu health.DeviceID) (action health.RecoveryAction, err error) {
	err = withGPU(gpu, func(device nvml.Device) error {
		values := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
		if err := failure("nvmlDeviceGetFieldValues", device.GetFieldValues(values)); err != nil {
			return err
		}
		v := values[0]
		if err := failure("field 230", nvml.Return(v.NvmlReturn)); err != nil { //nolint:gosec // a code
			return err
		}
		switch kind := nvml.ValueType(v.ValueType); kind {
		case nvml.VALUE_TYPE_UNSIGNED_INT, nvml.VALUE_TYPE_SIGNED_INT:
			action = health.RecoveryAction(binary.NativeEndian.Uint32(v.Value[:]))
		case nvml.VALUE_TYPE_UNSIGNED_LONG, nvml.VALUE_TYPE_UNSIGNED_LONG_LONG, nvml.VALUE_TYPE_SIGNED_LONG_LONG:
			action = health.RecoveryAction(binary.NativeEndian.Uint64(v.Value[:])) //nolint:gosec // a small number
		default:
			return fmt.Errorf("field 230: expected an integer, got a value of type %d", kind)
		}
		return nil
	})
	return action, err
}
