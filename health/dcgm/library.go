//go:build linux

package dcgm

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

// soname is the library as the dynamic linker knows it; go-dcgm asks for it by this name too.
const soname = "libdcgm.so.4"

// process is what belongs to the process and not to a session: the loaded library, go-dcgm's one
// connection, and which XIDs have been reported already.
//
//nolint:gochecknoglobals // go-dcgm's connection is a variable of its package; this one mirrors it
var process struct {
	mu     sync.Mutex // guards the fields below
	loaded bool
	taken  bool            // a session is open, or is being opened or closed
	set    map[string]bool // environment variables that are ours, not the operator's
	xids   *ledger
}

// required are the functions without which there is no session. dcgmConnect_v2 is asked for only if
// there is an address; versions, links and incidents are done without.
func required(address string) []string {
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

// Library loads libdcgm if that was not done yet and returns the file that it was loaded from.
func Library() (path string, err error) {
	process.mu.Lock()
	defer process.mu.Unlock()
	if err := load(soname); err != nil {
		return "", err
	}
	return C.GoString(C.gna_path()), nil
}

// load loads the library once and keeps it for the life of the process: go-dcgm's Shutdown gives back
// its own reference, and if that were the last the functions would go with it. The caller holds
// process.mu.
func load(name string) error {
	if process.loaded {
		return nil
	}
	cname := C.CString(name)
	defer C.free(unsafe.Pointer(cname))
	if why := C.gna_load(cname); why != nil {
		defer C.free(unsafe.Pointer(why))
		// go-dcgm says no more than "not found", whatever the reason was.
		return fmt.Errorf("libdcgm.so.4 cannot be loaded: %s; install NVIDIA's package datacenter-gpu-manager-4-core "+
			"(it is needed for source.address too: a host engine is reached through the library)", C.GoString(why))
	}
	process.loaded = true
	return nil
}

func has(symbol string) bool {
	csymbol := C.CString(symbol)
	defer C.free(unsafe.Pointer(csymbol))
	return C.gna_has(csymbol) != 0
}

// words returns what the loaded library calls a result of its functions.
func words(result int) string { return C.GoString(C.errorString(C.int(result))) }

// take makes this process's one connection the caller's, who gives it back with release.
func take(cfg Config) (*ledger, error) {
	process.mu.Lock()
	defer process.mu.Unlock()
	if process.taken {
		return nil, errors.New("a DCGM session is open in this process already: close it first")
	}
	if err := setLog(cfg); err != nil {
		return nil, err
	}
	if err := load(soname); err != nil {
		return nil, err
	}
	var missing []string
	for _, symbol := range required(cfg.Address) {
		if !has(symbol) {
			missing = append(missing, symbol)
		}
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("%s is too old or incomplete: it has no %s; install a newer DCGM 4",
			C.GoString(C.gna_path()), strings.Join(missing, ", "))
	}
	if process.xids == nil {
		process.xids = newLedger()
	}
	process.taken = true
	return process.xids, nil
}

// setLog tells an engine of this process what to log, and where. Without it DCGM writes to
// /var/log/nv-hostengine.log, which has filled disks: an ERROR for each read of a field that has no sample
// yet, a few each minute from 4.4 on. The file counts at the first start of an engine, the level at each.
// What the operator has set in the environment stands. The caller holds process.mu.
func setLog(cfg Config) error {
	if cfg.Address != "" {
		return nil // a client of an engine logs nothing
	}
	// "-" is DCGM's word for standard output.
	for name, value := range map[string]string{
		"__DCGM_DBG_FILE": cmp.Or(cfg.LogFile, "-"), "__DCGM_DBG_LVL": cmp.Or(cfg.LogLevel, "NONE"),
	} {
		if _, there := os.LookupEnv(name); there && !process.set[name] {
			continue
		}
		if err := os.Setenv(name, value); err != nil {
			return fmt.Errorf("set DCGM's log: %w", err)
		}
		if process.set == nil {
			process.set = map[string]bool{}
		}
		process.set[name] = true
	}
	return nil
}

func release() {
	process.mu.Lock()
	defer process.mu.Unlock()
	process.taken = false
}
