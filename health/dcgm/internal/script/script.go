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
static void value(
	script_table_t *t, int kind, unsigned id, unsigned field, int type, int status, long long at, long long i, double d, char *s
) {
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
static void refuse(script_table_t *t, unsigned systems) { t->refuse(systems); }
static void profiling(script_table_t *t, unsigned gpu, unsigned field) { t->profiling(gpu, field); }
static void blind(script_table_t *t) { t->blind(1); }
static void engine(script_table_t *t, char *version) { t->engine(version); }
static void set_library(script_table_t *t, char *version) { t->library(version); }
static int arenas(script_table_t *t) { return t->arenas(); }
static int gap(script_table_t *t) { return t->gap(); }
static void fail(script_table_t *t, char *function, int code, int times) { t->fail(function, code, times); }
static void hang(script_table_t *t, char *function) { t->hang(function); }
static void wait_hanging(script_table_t *t) { t->wait_hanging(); }
static void release(script_table_t *t) { t->release(); }
static int calls(script_table_t *t, char *function) { return t->calls(function); }
static int watch(script_table_t *t, int kind, unsigned id, unsigned field, long long *every, double *age, int *samples) {
	return t->watch(kind, id, field, every, age, samples);
}
static int handlers(script_table_t *t, unsigned long long *handler, int n) { return t->handlers(handler, n); }
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
	GPU    Kind = 1
	Switch Kind = 3
	GI     Kind = 4
	CI     Kind = 5
	Link   Kind = 6
	CPU    Kind = 7
	Core   Kind = 8
)

// Library is the scripted library, once it is loaded.
type Library struct{ table *C.script_table_t }

// Find returns the loaded library.
func Find() (*Library, error) {
	table := C.find()
	if table == nil {
		return nil, errors.New("the scripted libdcgm.so.4 is not loaded")
	}
	return &Library{table}, nil
}

// Reset resets everything except the connection.
func (l *Library) Reset() { C.reset(l.table) }

// Entity adds an entity or sets its status (dcgm_structs.h: DcgmEntityStatus_t).
func (l *Library) Entity(kind Kind, id uint, status int) {
	C.entity(l.table, C.int(kind), C.uint(id), C.int(status))
}

// Drop removes an entity.
func (l *Library) Drop(kind Kind, id uint) { C.drop(l.table, C.int(kind), C.uint(id)) }

// InstanceInfo is what DCGM says of an entity of the MIG hierarchy (dcgm_structs.h: dcgmMigEntityInfo_t): the UUID of its GPU, and the
// driver's IDs of its GPU instance and compute instance.
type InstanceInfo struct {
	GPU    string
	GI, CI uint
}

// Instance adds a GPU instance or a compute instance to the MIG hierarchy.
func (l *Library) Instance(kind Kind, id uint, parentKind Kind, parent uint, info InstanceInfo) {
	with(info.GPU, func(gpu *C.char) {
		C.instance(l.table, C.int(kind), C.uint(id), C.int(parentKind), C.uint(parent), gpu, C.uint(info.GI), C.uint(info.CI))
	})
}

// Profile sets the driver's ID of an instance's profile.
func (l *Library) Profile(kind Kind, id, profile, slices uint) {
	C.profile(l.table, C.int(kind), C.uint(id), C.uint(profile), C.uint(slices))
}

// Int sets a field's latest value.
func (l *Library) Int(kind Kind, id, field uint, v int64, status int, at time.Time) {
	l.value(kind, id, field, value{typ: 'i', status: status, at: at, i: v})
}

// Float sets a field's latest value.
func (l *Library) Float(kind Kind, id, field uint, v float64, status int, at time.Time) {
	l.value(kind, id, field, value{typ: 'd', status: status, at: at, d: v})
}

// Text sets a field's latest value.
func (l *Library) Text(kind Kind, id, field uint, v string, status int, at time.Time) {
	l.value(kind, id, field, value{typ: 's', status: status, at: at, s: v})
}

// value is a field's value of DCGM's type typ: 'i', 'd' or 's'.
type value struct {
	typ, status int
	at          time.Time
	i           int64
	d           float64
	s           string
}

func (l *Library) value(kind Kind, id, field uint, v value) {
	with(v.s, func(s *C.char) {
		C.value(l.table, C.int(kind), C.uint(id), C.uint(field), C.int(v.typ), C.int(v.status),
			C.longlong(v.at.UnixMicro()), C.longlong(v.i), C.double(v.d), s)
	})
}

// Row adds a row to the stream of field 230 without changing the latest value.
func (l *Library) Row(kind Kind, id uint, xid int64, status int, at time.Time) {
	C.row(l.table, C.int(kind), C.uint(id), C.int(status), C.longlong(at.UnixMicro()), C.longlong(xid))
}

// XID adds a row to the stream of field 230. It becomes the latest value unless another row has a later time.
func (l *Library) XID(kind Kind, id uint, xid int64, at time.Time) {
	C.xid(l.table, C.int(kind), C.uint(id), C.longlong(at.UnixMicro()), C.longlong(xid))
}

// Clock sets how far the engine's clock is ahead of the times that tests pass: later samples and rows have its time. After
// a step back the latest values stay the same until a watch is removed or the clock has caught up.
func (l *Library) Clock(ahead time.Duration) { C.set_clock(l.table, C.longlong(ahead.Microseconds())) }

// Hold makes the next samples of a field blank. The inventory is sampled once a minute, and when it is watched again.
func (l *Library) Hold(kind Kind, id, field uint, samples int) {
	C.hold(l.table, C.int(kind), C.uint(id), C.uint(field), C.int(samples))
}

// Empty makes the engine list no GPU without an error, like one started without a driver, until Empty(false) or the start
// of an embedded engine.
func (l *Library) Empty(empty bool) {
	n := 0
	if empty {
		n = 1
	}
	C.empty(l.table, C.int(n))
}

// Link sets DCGM's path bits from a GPU to another (dcgm_structs.h: dcgmGpuTopologyLevel_t).
func (l *Library) Link(gpu, peer uint, path uint64) {
	C.set_link(l.table, C.uint(gpu), C.uint(peer), C.ulonglong(path))
}

// Incident adds an incident of DCGM's health check; health 0 removes all incidents.
func (l *Library) Incident(kind Kind, id, system uint, health int, code uint, message string) {
	with(message, func(message *C.char) {
		C.incident(l.table, C.int(kind), C.uint(id), C.uint(system), C.int(health), C.uint(code), message)
	})
}

// RefuseSystems makes the engine refuse these health systems, like the systems of a newer DCGM.
func (l *Library) RefuseSystems(systems uint32) { C.refuse(l.table, C.uint(systems)) }

// Profiling makes a GPU support a profiling field.
func (l *Library) Profiling(gpu, field uint) { C.profiling(l.table, C.uint(gpu), C.uint(field)) }

// Blind makes all values blank until an embedded engine starts.
func (l *Library) Blind() { C.blind(l.table) }

// Detached reports whether the host engine has detached the driver.
func (l *Library) Detached() bool { return l.table.stats.detached != 0 }

// Engine sets the version of the host engine, which is 4.5.2 by default.
func (l *Library) Engine(version string) {
	with(version, func(version *C.char) { C.engine(l.table, version) })
}

// SetVersion sets the version of the library, and so of an embedded engine, which is 4.6.0 by default.
func (l *Library) SetVersion(version string) {
	with(version, func(version *C.char) { C.set_library(l.table, version) })
}

// Fail makes a function return a code a number of times, or always if times is negative. "*" is every function that needs
// a connection, as with a dead engine; "nvswitch" is the list of NVSwitches, "links" the watch of any NVLink (its code
// is always "bad parameter").
func (l *Library) Fail(function string, code, times int) {
	with(function, func(function *C.char) { C.fail(l.table, function, C.int(code), C.int(times)) })
}

// Hang makes the next call of a function block until Release.
func (l *Library) Hang(function string) {
	with(function, func(function *C.char) { C.hang(l.table, function) })
}

// WaitHanging returns when a call blocks.
func (l *Library) WaitHanging() { C.wait_hanging(l.table) }

// Release unblocks the call.
func (l *Library) Release() { C.release(l.table) }

// Calls returns how often a function was called.
func (l *Library) Calls(function string) (n int) {
	with(function, func(function *C.char) { n = int(C.calls(l.table, function)) })
	return n
}

// Leaked returns the number of groups, watches and registrations at the end of the last connection.
func (l *Library) Leaked() int { return int(l.table.stats.leaked) }

// Initialized reports whether dcgmInit was called, and not dcgmShutdown since.
func (l *Library) Initialized() bool { return l.table.stats.initialized != 0 }

// Address returns the arguments of dcgmConnect_v2.
func (l *Library) Address() (address string, isSocket bool) {
	return C.GoString(&l.table.stats.address[0]), l.table.stats.is_socket != 0
}

// Arenas returns the number of arenas of glibc's malloc in this process; 0 with another C library.
func (l *Library) Arenas() int { return int(C.arenas(l.table)) }

// Gap reports whether a block that is allocated beside a message of libdcgm precedes it in the heap.
func (l *Library) Gap() bool { return C.gap(l.table) != 0 }

// Widest returns the maximum number of values requested in one call.
func (l *Library) Widest() int { return int(l.table.stats.widest) }

// Live returns the number of live reads, which call the driver.
func (l *Library) Live() int { return int(l.table.stats.live) }

// MostHanging returns the maximum number of calls blocked at the same time.
func (l *Library) MostHanging() int { return int(l.table.stats.most_hanging) }

// Systems returns DCGM's bits of the systems that the health check covers.
func (l *Library) Systems() uint32 { return uint32(l.table.stats.systems) }

// Log returns the log level and file of the embedded engine: "ERROR to /var/log/nv-hostengine.log".
func (l *Library) Log() string { return C.GoString(&l.table.stats.log[0]) }

// Watch is how a field is sampled and kept.
type Watch struct {
	Every, Keep time.Duration
	Samples     int
}

// Watched returns how a field of an entity is watched.
func (l *Library) Watched(kind Kind, id, field uint) (w Watch, ok bool) {
	var every C.longlong
	var age C.double
	var samples C.int
	ok = C.watch(l.table, C.int(kind), C.uint(id), C.uint(field), &every, &age, &samples) != 0
	return Watch{time.Duration(every) * time.Microsecond, time.Duration(float64(age) * float64(time.Second)), int(samples)}, ok
}

// Handlers returns the addresses of this process's signal handlers, from signal 1.
func (l *Library) Handlers() (handlers [64]uint64) {
	C.handlers(l.table, (*C.ulonglong)(unsafe.Pointer(&handlers[0])), C.int(len(handlers)))
	return handlers
}

// Spent returns the time spent in the library's functions.
func (l *Library) Spent() time.Duration { return time.Duration(l.table.stats.nanoseconds) }

func with(s string, use func(*C.char)) {
	c := C.CString(s)
	defer C.free(unsafe.Pointer(c))
	use(c)
}
