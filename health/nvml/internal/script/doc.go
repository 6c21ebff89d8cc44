// Package script controls the scripted libnvidia-ml.so.1 of health/nvml/testdata. Only tests use it; it is a package because test
// files cannot use cgo.
package script
