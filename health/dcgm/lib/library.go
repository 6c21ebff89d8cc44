//go:build linux

// Package lib loads libdcgm, and has what go-dcgm lacks: whether the library has a function, reads that go-dcgm makes costly, and the
// values of fields without their blanks.
package lib

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "symbols.h"

const char *errorString(int result); // dcgm_structs.h; symbols.c defines it
*/
import "C"

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"unsafe"
)

// Soname is the name that the dynamic linker, and go-dcgm, find the library by.
const Soname = "libdcgm.so.4"

// process holds what belongs to the process and not to a session: the loaded library and go-dcgm's only connection.
//
//nolint:gochecknoglobals // go-dcgm's connection is a variable of its package; this one mirrors it
var process struct {
	mu     sync.Mutex // guards the fields below
	loaded bool
	inUse  bool            // a session is open, or is being opened or closed
	ownEnv map[string]bool // environment variables that setLog has set
}

// requiredFunctions returns the functions that a session needs: dcgmConnect_v2 only with an address, none for versions,
// links and incidents.
func requiredFunctions(address string) []string {
	connect := []string{"dcgmStartEmbedded", "dcgmStopEmbedded"}
	if address != "" {
		connect = []string{"dcgmConnect_v2", "dcgmDisconnect"}
	}
	return append(connect,
		"dcgmInit", "dcgmShutdown", "errorString", "DcgmFieldGetById", "dcgmGetEntityGroupEntities",
		"dcgmGetGpuInstanceHierarchy", "dcgmGetGpuStatus", "dcgmGroupCreate", "dcgmGroupAddEntity",
		"dcgmGroupDestroy", "dcgmFieldGroupCreate", "dcgmFieldGroupDestroy", "dcgmWatchFields",
		"dcgmUnwatchFields", "dcgmUpdateAllFields", "dcgmEntitiesGetLatestValues", "dcgmGetValuesSince_v2")
}

// Load loads the library from a path, or by Soname, unless one is loaded already. It returns the path of the loaded file.
func Load(name string) (path string, err error) {
	process.mu.Lock()
	defer process.mu.Unlock()
	if err := load(name); err != nil {
		return "", err
	}
	return C.GoString(C.gna_path()), nil
}

// ErrSessionOpen is the error of Acquire while the connection is in use.
var ErrSessionOpen = errors.New("a DCGM session is open in this process; close it first")

// load loads the library and keeps it loaded: go-dcgm's Shutdown releases its own reference, so that one must not be the last. The caller
// holds process.mu.
func load(name string) error {
	if process.loaded {
		return nil
	}
	cname := C.CString(name)
	defer C.free(unsafe.Pointer(cname))
	if reason := C.gna_load(cname); reason != nil {
		defer C.free(unsafe.Pointer(reason))
		return fmt.Errorf("cannot load libdcgm.so.4: %s; install NVIDIA's package datacenter-gpu-manager-4-core, or libdcgm from DCGM 4.7 on "+
			"(source.address needs it too: the library connects to the host engine)", C.GoString(reason))
	}
	process.loaded = true
	return nil
}

// Has reports whether the loaded library has a function.
func Has(symbol string) bool {
	csymbol := C.CString(symbol)
	defer C.free(unsafe.Pointer(csymbol))
	return C.gna_has(csymbol) != 0
}

// ErrorText returns the library's text for a result of its functions.
func ErrorText(result int) string { return C.GoString(C.errorString(C.int(result))) }

// Log is where an embedded engine logs.
type Log struct {
	File  string // "" is standard output
	Level string // "" is NONE
}

// Acquire reserves the only connection of this process, until Release, and loads the library. address is that of a host engine, "" for an
// embedded one.
func Acquire(address string, log Log) error {
	process.mu.Lock()
	defer process.mu.Unlock()
	if process.inUse {
		return ErrSessionOpen
	}
	if address == "" { // clients of a host engine do not log
		if err := setLog(log); err != nil {
			return err
		}
	}
	if err := load(Soname); err != nil {
		return err
	}
	var missing []string
	for _, symbol := range requiredFunctions(address) {
		if !Has(symbol) {
			missing = append(missing, symbol)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("%s is too old or incomplete: missing %s; install a newer DCGM 4",
			C.GoString(C.gna_path()), strings.Join(missing, ", "))
	}
	process.inUse = true
	return nil
}

// setLog sets log level and file of an embedded engine. Without it DCGM writes to /var/log/nv-hostengine.log, which has
// filled disks: an ERROR for each read of a field without a sample, a few per minute from 4.4 on
// (OBSERVED.md#engine-log). Variables that the operator has set take precedence. The caller holds process.mu.
func setLog(log Log) error {
	// For DCGM, "-" is standard output.
	for name, value := range map[string]string{
		"__DCGM_DBG_FILE": cmp.Or(log.File, "-"), "__DCGM_DBG_LVL": cmp.Or(log.Level, "NONE"),
	} {
		if _, ok := os.LookupEnv(name); ok && !process.ownEnv[name] {
			continue
		}
		if err := os.Setenv(name, value); err != nil {
			return fmt.Errorf("configure DCGM's log: %w", err)
		}
		if process.ownEnv == nil {
			process.ownEnv = map[string]bool{}
		}
		process.ownEnv[name] = true
	}
	return nil
}

// Release ends what Acquire has reserved.
func Release() {
	process.mu.Lock()
	defer process.mu.Unlock()
	process.inUse = false
}
