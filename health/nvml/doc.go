// Package nvml is what the agent has from NVML beside DCGM: events as they happen, and the processes of each device. It is the
// only importer of go-nvml.
package nvml
