// Package nvml gives the agent what DCGM lacks and NVML has: events as they happen, the processes and properties of each device, the
// driver's memory limits and the compute mode. It is the only importer of go-nvml.
package nvml
