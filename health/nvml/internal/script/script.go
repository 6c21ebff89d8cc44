//go:build linux

package script

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdlib.h>

static void *find(void) {
	void *library = dlopen("libnvidia-ml.so.1", RTLD_NOLOAD | RTLD_LAZY);
	return library == NULL ? NULL : dlsym(library, "nvml_script");
}
static int call(void *script, const char *line, char *reply, size_t room) {
	return ((int (*)(const char *, char *, size_t))script)(line, reply, room);
}
*/
import "C"

import (
	"fmt"
	"strconv"
	"testing"
	"unsafe"
)

// Library is the scripted library, once it is loaded.
type Library struct {
	t        testing.TB
	function unsafe.Pointer
}

// Find returns the loaded library, in its state at the start.
func Find(t testing.TB) Library {
	t.Helper()
	function := C.find()
	if function == nil {
		t.Fatal("the scripted libnvidia-ml.so.1 is not loaded")
	}
	l := Library{t, function}
	l.Do("reset")
	return l
}

// Do runs a command of testdata/script.c and returns its reply.
func (l Library) Do(format string, args ...any) string {
	l.t.Helper()
	line := C.CString(fmt.Sprintf(format, args...))
	defer C.free(unsafe.Pointer(line))
	var reply [256]C.char
	if C.call(l.function, line, &reply[0], C.size_t(len(reply))) == 0 {
		l.t.Fatalf("the scripted libnvidia-ml.so.1 has no command %q", C.GoString(line))
	}
	return C.GoString(&reply[0])
}

// Number runs a command and returns its reply as a number.
func (l Library) Number(format string, args ...any) int {
	l.t.Helper()
	n, err := strconv.Atoi(l.Do(format, args...))
	if err != nil {
		l.t.Fatalf("%s: %v", fmt.Sprintf(format, args...), err)
	}
	return n
}
