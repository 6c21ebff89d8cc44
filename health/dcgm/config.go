// Package dcgm measures GPUs through NVIDIA's DCGM. Only this package imports go-dcgm: it returns types of package health,
// and values that are blank in DCGM are absent.
//
// OBSERVED.md describes how a real DCGM behaves; comments cite its anchors. In short:
//
//   - Each poll reads DCGM's cache once and never the driver, where a faulty GPU can block for minutes.
//   - XIDs come from the stream of field 230. Policy callbacks are unusable: they are silent, lossy, and affect other
//     clients (OBSERVED.md#policies, OBSERVED.md#lossy-callbacks, OBSERVED.md#registration-leak).
//   - Presence comes from the GPU's status: DCGM's health check reports a lost GPU as healthy (OBSERVED.md#lost-gpu).
//   - Package health judges the values.
//
// go-dcgm keeps its connection in package variables, so a process has one session at a time.
package dcgm

import (
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// DefaultInterval is the default of Config.Interval.
const DefaultInterval = 10 * time.Second

// Config configures a session.
type Config struct {
	// Address of a host engine, "host:port" or "unix:///path". If empty, DCGM runs embedded in this process.
	Address string
	// Interval is how often metric fields are sampled and read; 0 means DefaultInterval. The fields that health is
	// judged by are sampled once a second regardless.
	Interval time.Duration
	// Fields are the metric fields to watch, by DCGM's numbers. Text fields are read with the inventory into health.Device.Texts, once a
	// minute. If this DCGM does not know a field in base units, the session watches the older field that it follows from
	// (health.DerivationOf). A field that is not available, or that is neither a number nor a text, is left out and logged once.
	//
	// Values of NVSwitches, NVLinks and CPUs are in health.Reading.Entities. DCGM's modules for them are used only if Fields has a field of
	// theirs.
	Fields []health.Field
	// HealthSystems are the systems that DCGM's health checks cover, by name: "pcie", "memory" and so on. Empty or "all"
	// covers all of them, "none" disables the checks.
	HealthSystems []string
	// LogLevel is the log level of an embedded engine (NONE, FATAL, ERROR, WARN, INFO, DEBUG, VERB); the default is NONE.
	// LogFile is its log file; the default is standard output. The first engine of a process opens the file. DCGM's
	// variables __DCGM_DBG_LVL and __DCGM_DBG_FILE override both.
	LogLevel, LogFile string
	// Attach makes the host engine at Address attach the driver first, if it is detached.
	Attach bool
}
