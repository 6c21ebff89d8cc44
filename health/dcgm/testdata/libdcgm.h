// Declarations shared by the parts of the scripted libdcgm.so.4.

#ifndef LIBDCGM_H
#define LIBDCGM_H

#include <pthread.h>
#include <string.h>

#include "dcgm_agent.h"
#include "dcgm_errors.h"
#include "dcgm_fields.h"
#include "dcgm_structs.h"
#include "script.h"

#define EXPORT __attribute__((visibility("default")))
#define HIDDEN __attribute__((visibility("hidden")))

#define MAX_ENTITIES 256
#define MAX_FIELDS 127 // of one group or call
#define MAX_ROWS 4096
#define MAX_GROUPS 64

typedef struct {
    int set, type, status;
    long long at, i;
    double d;
    char s[DCGM_MAX_STR_LENGTH];
} sample_t;

typedef struct {
    unsigned short field;
    int watched, ever_watched, samples;
    long long every;
    double age;
    sample_t latest, behind; // behind arrived later with an earlier time
    int series;              // DCGM keeps its samples from the first watch until one is removed, also after the connection has ended
    int held, blank;         // number of samples that will be blank, and whether the last one was
} value_t;

typedef struct {
    int kind, status;
    unsigned id;
    int in_hierarchy, parent_kind;
    unsigned parent, gi, ci, profile, slices;
    char gpu[128];
    int values, room;
    value_t *value;
    int links;
    unsigned peer[32];
    unsigned long long path[32];
    int profiling_fields;
    unsigned short profiling[8];
} entity_t;

typedef struct {
    int kind, status;
    unsigned id;
    long long at, xid;
} row_t;

typedef struct {
    int used, count;
    dcgmGroupEntityPair_t entity[MAX_ENTITIES];
} group_t;

typedef struct {
    int used, count, watched;
    unsigned short field[MAX_FIELDS];
} fields_t;

typedef struct {
    pthread_mutex_t lock; // guards everything below
    pthread_cond_t changed;
    int entities;
    entity_t entity[MAX_ENTITIES];
    int rows;
    row_t row[MAX_ROWS];
    group_t group[MAX_GROUPS];
    fields_t fields[MAX_GROUPS];
    int watches;
    int listeners; // registrations for policy violations
    int incidents;
    dcgmIncidentInfo_t incident[16];
    unsigned refused; // health systems
    script_stats_t stats;
    int connected, blind;
    int empty;    // it lists no GPU and returns no error
    long long clock; // how far its clock is ahead of the test's, in microseconds
    char library[32], engine[32]; // versions; "" is the default
    int embedded;    // the engine is in this process, and so has the library's version
    char fail[64];
    int fail_code, fail_times;
    char hang[64];
    int hanging;
    int message;    // bytes; see allocate_message
    int names;
    char name[96][48];
    int called[96];
} state_t;

extern state_t state HIDDEN;

// enter counts a call, blocks if the test makes it hang, and returns the code that it must fail with. It acquires the
// lock; leave releases it.
int enter(const char *function, int needs_connection) HIDDEN;
dcgmReturn_t leave(int result) HIDDEN;

// allocate_message allocates, clears and frees a message in the calling thread, as libdcgm does in each read of values
// (OBSERVED.md#messages). It does nothing until a test sets the size. The caller holds the lock.
void allocate_message(void) HIDDEN;
// The functions of messages.c in the table (script.h).
void message(int bytes) HIDDEN;
void callers(int n, int every) HIDDEN;
int arenas(void) HIDDEN;
int gap(void) HIDDEN;

// ENTER starts a function that needs a connection.
#define ENTER                                        \
    int result = enter(__func__, 1);                 \
    if (result != DCGM_ST_OK) return leave(result);  \
    (void)handle;

// find returns an entity, or NULL. The caller of this and the following functions holds the lock.
entity_t *find(int kind, unsigned id) HIDDEN;
// value_of returns an entity's value of a field; it creates an empty one if there is none.
value_t *value_of(entity_t *e, unsigned short field) HIDDEN;
// The versions of the library and of the engine that it is connected to.
const char *library_version(void) HIDDEN;
const char *engine_version(void) HIDDEN;
// version_number returns 40601 for "4.6.1".
int version_number(const char *version) HIDDEN;
group_t *group_of(dcgmGpuGrp_t group) HIDDEN;
fields_t *fields_of(dcgmFieldGrp_t fields) HIDDEN;
int refuses_profiling(group_t *g, fields_t *f) HIDDEN;
void leak_listeners(void) HIDDEN;
// module_of returns DCGM's module that measures an entity, DcgmModuleIdCore for GPUs and their NVLinks.
int module_of(const entity_t *e) HIDDEN;
// module_level_of returns the level of a field of entities beside the GPUs, DCGM_FE_NONE for other fields.
dcgm_field_entity_group_t module_level_of(unsigned short field) HIDDEN;
int can_measure(const entity_t *e, unsigned short field) HIDDEN;
void unwatch_module(const entity_t *e) HIDDEN;
int left(void) HIDDEN;
int called(const char *function) HIDDEN;

#endif
