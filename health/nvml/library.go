//go:build linux

package nvml

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "symbols.h"

const char *nvmlErrorString(int result); // nvml.h; symbols.c defines it
*/
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// soname is the name that the dynamic linker, go-nvml and DCGM find the library by.
const soname = "libnvidia-ml.so.1"

var errNotLoaded = errors.New("cannot load " + soname)

// process holds what belongs to the process: the loaded library, and go-nvml's view of it.
//
//nolint:gochecknoglobals // NVML's state is the process's; this one mirrors it
var process struct {
	mu      sync.Mutex // guards the fields below
	loaded  bool
	library nvml.Interface
}

// Error is a result of NVML.
type Error nvml.Return

// Error returns the library's text, and the code, because the text depends on the driver.
func (e Error) Error() string {
	return fmt.Sprintf("%s (NVML error %d)", C.GoString(C.nvmlErrorString(C.int(e))), int(e))
}

// failure returns the error of a call, nil if it succeeded.
func failure(call string, ret nvml.Return) error {
	if ret == nvml.SUCCESS {
		return nil
	}
	return fmt.Errorf("%s: %w", call, Error(ret))
}

// Path loads NVML, unless it is loaded already, and returns the path of its file.
func Path() (string, error) {
	process.mu.Lock()
	defer process.mu.Unlock()
	if err := load(soname); err != nil {
		return "", err
	}
	return C.GoString(C.gna_nvml_path()), nil
}

// load loads the library and keeps it loaded: go-nvml's Shutdown releases its own reference, which must not be the last, because
// a call that hangs is still in the library. The caller holds process.mu.
func load(name string) error {
	if process.loaded {
		return nil
	}
	cname := C.CString(name)
	defer C.free(unsafe.Pointer(cname))
	if reason := C.gna_nvml_load(cname); reason != nil {
		defer C.free(unsafe.Pointer(reason))
		return fmt.Errorf("%w: %s; NVIDIA's driver has this file, and its container toolkit mounts it into containers "+
			"with NVIDIA_DRIVER_CAPABILITIES=utility", errNotLoaded, C.GoString(reason))
	}
	process.loaded, process.library = true, nvml.New()
	return nil
}

// Use loads NVML, unless it is loaded already, and initializes it, which opens the driver's files. All users share the library:
// go-nvml's functions are variables of its package. Each use needs one release; the last one closes the files. Both may block as
// long as the driver does.
func Use() (library nvml.Interface, release func(), err error) {
	process.mu.Lock()
	err = load(soname)
	library = process.library
	process.mu.Unlock()
	if err != nil {
		return nil, nil, err
	}
	// NVML counts Init and Shutdown itself, and DCGM's too.
	if err := failure("nvmlInit_v2", library.Init()); err != nil {
		return nil, nil, err
	}
	return library, sync.OnceFunc(func() { _ = library.Shutdown() }), nil
}

// use is a use of NVML that survives a reload of the driver. It belongs to one goroutine.
type use struct {
	library nvml.Interface // nil between a failure of endAfter and the next call of get
	release func()
}

func openUse() (*use, error) {
	library, release, err := Use()
	if err != nil {
		return nil, err
	}
	return &use{library, release}, nil
}

// get returns the library. It initializes NVML again if the driver was unloaded.
func (u *use) get() (nvml.Interface, error) {
	if u.library == nil {
		library, release, err := Use()
		if err != nil {
			return nil, err
		}
		u.library, u.release = library, release
	}
	return u.library, nil
}

// endAfter ends the use if err says that the driver was unloaded.
func (u *use) endAfter(err error) {
	code, _ := errors.AsType[Error](err)
	switch nvml.Return(code) {
	case nvml.ERROR_UNINITIALIZED, nvml.ERROR_DRIVER_NOT_LOADED, nvml.ERROR_UNKNOWN:
		u.end()
	}
}

func (u *use) end() {
	u.release()
	u.library, u.release = nil, func() {}
}
