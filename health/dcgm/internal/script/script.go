//go:build linux

package script

/*
#cgo CFLAGS: -I${SRCDIR}/../../testdata
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdlib.h>
#include "script.h"

static script_table_t *find(void) {
	void *library = dlopen("libdcgm.so.4", RTLD_NOLOAD | RTLD_LAZY);
	return library == NULL ? NULL : dlsym(library, "script_table");
}
static void reset(script_table_t *t) { t->reset(); }
static void entity(script_table_t *t, int kind, unsigned id, int status) { t->entity(kind, id, status); }
static void drop(script_table_t *t, int kind, unsigned id) { t->drop(kind, id); }
static void instance(script_table_t *t, int kind, unsigned id, int pkind, unsigned parent, char *gpu, unsigned gi, unsigned ci) {
	t->instance(kind, id, pkind, parent, gpu, gi, ci);
}
static void profile(script_table_t *t, int kind, unsigned id, unsigned profile, unsigned slices) {
	t->profile(kind, id, profile, slices);
}
static void value(script_table_t *t, int kind, unsigned id, unsigned field, int type, int status, long long at, long long i, double d, char *s) {
	t->value(kind, id, field, type, status, at, i, d, s);
}
static void row(script_table_t *t, int kind, unsigned id, int status, long long at, long long xid) { t->row(kind, id, status, at, xid); }
static void xid(script_table_t *t, int kind, unsigned id, long long at, long long xid) { t->xid(kind, id, at, xid); }
static void set_clock(script_table_t *t, long long offset) { t->clock(offset); }
static void hold(script_table_t *t, int kind, unsigned id, unsigned field, int samples) { t->hold(kind, id, field, samples); }
static void empty(script_table_t *t, int is) { t->empty(is); }
static void set_link(script_table_t *t, unsigned gpu, unsigned peer, unsigned long long path) { t->link(gpu, peer, path); }
static void incident(script_table_t *t, int kind, unsigned id, unsigned system, int health, unsigned code, char *message) {
	t->incident(kind, id, system, health, code, message);
}
static void profiling(script_table_t *t, unsigned gpu, unsigned field) { t->profiling(gpu, field); }
static void blind(script_table_t *t) { t->blind(); }
static int detached(script_table_t *t) { return t->detached(); }
static void engine(script_table_t *t, char *version) { t->engine(version); }
static void fail(script_table_t *t, char *function, int code, int times) { t->fail(function, code, times); }
static void hang(script_table_t *t, char *function) { t->hang(function); }
static void wait_hanging(script_table_t *t) { t->wait_hanging(); }
static void release(script_table_t *t) { t->release(); }
static int calls(script_table_t *t, char *function) { return t->calls(function); }
static int left(script_table_t *t) { return t->left(); }
static int leaked(script_table_t *t) { return t->leaked(); }
static int initialized(script_table_t *t) { return t->initialized(); }
static const char *address(script_table_t *t) { return t->address(); }
static int is_socket(script_table_t *t) { return t->is_socket(); }
static int widest(script_table_t *t) { return t->widest(); }
static int live(script_table_t *t) { return t->live(); }
static int most_hanging(script_table_t *t) { return t->most_hanging(); }
static unsigned systems(script_table_t *t) { return t->systems(); }
static const char *log_(script_table_t *t) { return t->log(); }
static int watch(script_table_t *t, int kind, unsigned id, unsigned field, long long *every, double *age, int *samples) {
	return t->watch(kind, id, field, every, age, samples);
}
static int handlers(script_table_t *t, unsigned long long *handler, int n) { return t->handlers(handler, n); }
static long long nanoseconds(script_table_t *t) { return t->nanoseconds(); }
*/
import "C"

import (
	"errors"
	"time"
	"unsafe"
)

// Kind is an entity's kind, by DCGM's numbers (dcgm_fields.h: dcgm_field_entity_group_t).
type Kind int

// The kinds that the library has.
const (
	GPU Kind = 1
	GI  Kind = 4
	CI  Kind = 5
)

// Library is the scripted library, once it is loaded.
type Library struct{ table *C.script_table_t }

// Find returns the library that the process has loaded.
func Find() (*Library, error) {
	table := C.find()
	if table == nil {
		return nil, errors.New("the scripted libdcgm.so.4 is not loaded")
	}
	return &Library{table}, nil
}

// Reset forgets everything but whether there is a connection.
func (l *Library) Reset() { C.reset(l.table) }

// Entity adds an entity or changes its status (dcgm_structs.h: DcgmEntityStatus_t).
func (l *Library) Entity(kind Kind, id uint, status int) {
	C.entity(l.table, C.int(kind), C.uint(id), C.int(status))
}

// Drop removes an entity.
func (l *Library) Drop(kind Kind, id uint) { C.drop(l.table, C.int(kind), C.uint(id)) }

// Instance adds a GPU instance or a compute instance to the MIG hierarchy.
func (l *Library) Instance(kind Kind, id uint, parentKind Kind, parent uint, gpu string, gi, ci uint) {
	with(gpu, func(gpu *C.char) {
		C.instance(l.table, C.int(kind), C.uint(id), C.int(parentKind), C.uint(parent), gpu, C.uint(gi), C.uint(ci))
	})
}

// Profile gives an instance the driver's number of its profile.
func (l *Library) Profile(kind Kind, id, profile, slices uint) {
	C.profile(l.table, C.int(kind), C.uint(id), C.uint(profile), C.uint(slices))
}

// Int sets a field's latest value.
func (l *Library) Int(kind Kind, id, field uint, v int64, status int, at time.Time) {
	l.value(kind, id, field, 'i', status, at, v, 0, "")
}

// Float sets a field's latest value.
func (l *Library) Float(kind Kind, id, field uint, v float64, status int, at time.Time) {
	l.value(kind, id, field, 'd', status, at, 0, v, "")
}

// Text sets a field's latest value.
func (l *Library) Text(kind Kind, id, field uint, v string, status int, at time.Time) {
	l.value(kind, id, field, 's', status, at, 0, 0, v)
}

func (l *Library) value(kind Kind, id, field uint, typ, status int, at time.Time, i int64, d float64, s string) {
	with(s, func(s *C.char) {
		C.value(l.table, C.int(kind), C.uint(id), C.uint(field), C.int(typ), C.int(status),
			C.longlong(at.UnixMicro()), C.longlong(i), C.double(d), s)
	})
}

// Row adds a row to the stream of field 230, and does not change the latest value.
func (l *Library) Row(kind Kind, id uint, xid int64, status int, at time.Time) {
	C.row(l.table, C.int(kind), C.uint(id), C.int(status), C.longlong(at.UnixMicro()), C.longlong(xid))
}

// XID has the engine record an XID: a row of the stream that is the latest value too, unless a row has a later time.
func (l *Library) XID(kind Kind, id uint, xid int64, at time.Time) {
	C.xid(l.table, C.int(kind), C.uint(id), C.longlong(at.UnixMicro()), C.longlong(xid))
}

// Clock sets how far the engine's clock is ahead of the times that tests give: all samples and rows from now on bear its
// time. DCGM sorts samples by time, so that after a step back the latest values stay what they were before it, until a
// watch is taken back or the engine's clock has caught up.
func (l *Library) Clock(ahead time.Duration) { C.set_clock(l.table, C.longlong(ahead.Microseconds())) }

// Hold makes a field blank in as many samples as are taken next. The inventory is sampled once a minute, or when it is
// watched anew.
func (l *Library) Hold(kind Kind, id, field uint, samples int) {
	C.hold(l.table, C.int(kind), C.uint(id), C.uint(field), C.int(samples))
}

// Empty has the engine list no GPU and report no error, as one does that was started without a driver, until it is told
// otherwise or an engine is started in this process.
func (l *Library) Empty(is bool) {
	n := 0
	if is {
		n = 1
	}
	C.empty(l.table, C.int(n))
}

// Link sets DCGM's path bits from a GPU to another (dcgm_structs.h: dcgmGpuTopologyLevel_t).
func (l *Library) Link(gpu, peer uint, path uint64) {
	C.set_link(l.table, C.uint(gpu), C.uint(peer), C.ulonglong(path))
}

// Incident adds a finding of DCGM's health check; one of health 0 removes them all.
func (l *Library) Incident(kind Kind, id, system uint, health int, code uint, message string) {
	with(message, func(message *C.char) {
		C.incident(l.table, C.int(kind), C.uint(id), C.uint(system), C.int(health), C.uint(code), message)
	})
}

// Profiling gives a GPU a profiling field.
func (l *Library) Profiling(gpu, field uint) { C.profiling(l.table, C.uint(gpu), C.uint(field)) }

// Blind makes all values blank until an engine is started in this process.
func (l *Library) Blind() { C.blind(l.table) }

// Detached reports whether the host engine has let go of the driver.
func (l *Library) Detached() bool { return C.detached(l.table) != 0 }

// Engine gives the host engine a version, instead of 4.5.2.
func (l *Library) Engine(version string) {
	with(version, func(version *C.char) { C.engine(l.table, version) })
}

// Fail has a function return a code so many times, or always if times is negative. "*" is every function
// that needs a connection: a dead engine.
func (l *Library) Fail(function string, code, times int) {
	with(function, func(function *C.char) { C.fail(l.table, function, C.int(code), C.int(times)) })
}

// Hang has the next call of a function wait for Release.
func (l *Library) Hang(function string) {
	with(function, func(function *C.char) { C.hang(l.table, function) })
}

// WaitHanging returns when a call hangs.
func (l *Library) WaitHanging() { C.wait_hanging(l.table) }

// Release lets the call that hangs go on.
func (l *Library) Release() { C.release(l.table) }

// Calls is how often a function was called.
func (l *Library) Calls(function string) (n int) {
	with(function, func(function *C.char) { n = int(C.calls(l.table, function)) })
	return n
}

// Left counts the groups, watches and registrations that there are.
func (l *Library) Left() int { return int(C.left(l.table)) }

// Leaked counts those that there were when the last connection ended.
func (l *Library) Leaked() int { return int(C.leaked(l.table)) }

// Initialized reports whether dcgmInit was called and dcgmShutdown was not.
func (l *Library) Initialized() bool { return C.initialized(l.table) != 0 }

// Address is what dcgmConnect_v2 was asked to connect to, and whether as a unix socket.
func (l *Library) Address() (address string, isSocket bool) {
	return C.GoString(C.address(l.table)), C.is_socket(l.table) != 0
}

// Widest is the most values that one call asked for.
func (l *Library) Widest() int { return int(C.widest(l.table)) }

// Live is how many reads asked the driver instead of the cache.
func (l *Library) Live() int { return int(C.live(l.table)) }

// MostHanging is how many calls hung at the same time, at most.
func (l *Library) MostHanging() int { return int(C.most_hanging(l.table)) }

// Systems are those that the health check was asked for, by DCGM's bits.
func (l *Library) Systems() uint32 { return uint32(C.systems(l.table)) }

// Log is how an engine in this process was told to log: "ERROR to /var/log/nv-hostengine.log".
func (l *Library) Log() string { return C.GoString(C.log_(l.table)) }

// Watch is how a field is sampled and kept.
type Watch struct {
	Every, Keep time.Duration
	Samples     int
}

// Watched tells how a field of an entity is watched, if it is.
func (l *Library) Watched(kind Kind, id, field uint) (w Watch, ok bool) {
	var every C.longlong
	var age C.double
	var samples C.int
	ok = C.watch(l.table, C.int(kind), C.uint(id), C.uint(field), &every, &age, &samples) != 0
	return Watch{time.Duration(every) * time.Microsecond, time.Duration(float64(age) * float64(time.Second)), int(samples)}, ok
}

// Handlers are what this process does at each signal, from 1 up, as addresses.
func (l *Library) Handlers() (handlers [64]uint64) {
	C.handlers(l.table, (*C.ulonglong)(unsafe.Pointer(&handlers[0])), C.int(len(handlers)))
	return handlers
}

// Spent is the time spent in the library's functions.
func (l *Library) Spent() time.Duration { return time.Duration(C.nanoseconds(l.table)) }

func with(s string, use func(*C.char)) {
	c := C.CString(s)
	defer C.free(unsafe.Pointer(c))
	use(c)
}
