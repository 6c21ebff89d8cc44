// Package dcgm measures GPUs through NVIDIA's DCGM. It is the only importer of go-dcgm: whatever leaves
// it is a noun of package health, and a value that DCGM calls blank leaves it as absent.
//
// Numbers in comments, as (5), are those of OBSERVED.md: how a real DCGM 4.6.0 behaves. What follows from it:
//
//	one read of the cache a poll, never a read of the driver: a sick GPU makes that block for minutes
//	XIDs from the stream of field 230; policy callbacks are not used: they are silent, lossy, and harm other clients (5, 6, 7)
//	presence from the GPU's status: DCGM's health check calls a lost GPU healthy (10)
//	nothing is judged here
//
// go-dcgm keeps its connection in variables of its package, so a process has one session at a time.
package dcgm

import (
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// DefaultInterval is how often metric fields are sampled if Config says nothing.
const DefaultInterval = 10 * time.Second

// Config says what to connect to and what to watch.
type Config struct {
	// Address of a host engine, "host:port" or "unix:///path". Empty runs DCGM inside this process.
	Address string
	// Interval is how often metric fields are sampled and read; DefaultInterval if 0. The fields that
	// health is judged by are sampled once a second whatever it is.
	Interval time.Duration
	// Fields are the metric fields to watch, by DCGM's numbers. Texts are read with the inventory, into
	// health.Device.Texts, which is read again when one of them has changed: they are looked at once a minute. A
	// field that this DCGM does not know, or that is neither a number nor a text, is left out and logged once.
	Fields []health.Field
	// HealthSystems are those of DCGM's own health checks that are made, by name: "pcie", "memory" and so on.
	// Nothing or "all" alone is all, "none" alone is none.
	HealthSystems []string
	// LogLevel is DCGM's own (NONE, FATAL, ERROR, WARN, INFO, DEBUG, VERB) for an engine inside this process,
	// NONE if empty, and LogFile where it writes, standard output if empty. The first engine of a process
	// decides on the file. DCGM's variables __DCGM_DBG_LVL and __DCGM_DBG_FILE, if set, decide on both.
	LogLevel, LogFile string
	// Attach has the host engine at Address take the driver back before anything else, if it has let go of it.
	Attach bool
}
