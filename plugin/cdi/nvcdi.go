//go:build cgo && linux

package cdi

import (
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
)

var _ = nvcdi.New // TODO(cdi)
