//go:build !cgo || !linux

package cdi

import (
	"errors"

	"go.uber.org/zap"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// nvcdiEdits fails: nvcdi needs Linux and cgo.
func nvcdiEdits(request, health.DeviceID, *zap.Logger) (*specs.ContainerEdits, error) {
	return nil, errors.New("built without nvcdi; build for Linux with CGO_ENABLED=1")
}
