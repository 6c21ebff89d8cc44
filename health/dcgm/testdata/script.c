// The scripted libdcgm.so.4: the functions that tests call.

#include "libdcgm.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

state_t state = { .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER };

static void lock(void) { pthread_mutex_lock(&state.lock); }
static void unlock(void) { pthread_mutex_unlock(&state.lock); }

entity_t *find(int kind, unsigned id) {
    for (int i = 0; i < state.entities; i++)
        if (state.entity[i].kind == kind && state.entity[i].id == id) return &state.entity[i];
    return NULL;
}

value_t *value_of(entity_t *e, unsigned short field) {
    for (int i = 0; i < e->values; i++)
        if (e->value[i].field == field) return &e->value[i];
    if (e->values == e->room) {
        e->room = e->room == 0 ? 32 : 2 * e->room;
        e->value = realloc(e->value, (size_t)e->room * sizeof(*e->value));
        if (e->value == NULL) abort();
    }
    value_t *v = &e->value[e->values++];
    memset(v, 0, sizeof(*v));
    v->field = field;
    return v;
}

int left(void) {
    int n = state.watches + state.listeners;
    for (int i = 0; i < MAX_GROUPS; i++) n += state.group[i].used + state.fields[i].used;
    return n;
}

int called(const char *function) {
    for (int i = 0; i < state.names; i++)
        if (strcmp(state.name[i], function) == 0) return i;
    snprintf(state.name[state.names], sizeof(state.name[0]), "%s", function);
    state.called[state.names] = 0;
    return state.names++;
}

static void reset(void) {
    lock();
    int initialized = state.stats.initialized, connected = state.connected;
    for (int i = 0; i < state.entities; i++) free(state.entity[i].value);
    memset((char *)&state + sizeof(pthread_mutex_t) + sizeof(pthread_cond_t), 0,
           sizeof(state) - sizeof(pthread_mutex_t) - sizeof(pthread_cond_t));
    state.stats.initialized = initialized;
    state.connected = connected;
    pthread_cond_broadcast(&state.changed);
    unlock();
}

static entity_t *get_or_create(int kind, unsigned id) {
    entity_t *e = find(kind, id);
    if (e == NULL) {
        e = &state.entity[state.entities++];
        memset(e, 0, sizeof(*e));
        e->kind = kind;
        e->id = id;
    }
    return e;
}

static void entity(int kind, unsigned id, int status) {
    lock();
    get_or_create(kind, id)->status = status;
    unlock();
}

static void drop(int kind, unsigned id) {
    lock();
    entity_t *e = find(kind, id);
    if (e != NULL) {
        free(e->value);
        *e = state.entity[--state.entities];
    }
    unlock();
}

static void instance(int kind, unsigned id, int parentKind, unsigned parent, const char *gpu, unsigned gi, unsigned ci) {
    lock();
    entity_t *e = get_or_create(kind, id);
    e->status = DcgmEntityStatusOk;
    e->in_hierarchy = 1;
    e->parent_kind = parentKind;
    e->parent = parent;
    e->gi = gi;
    e->ci = ci;
    snprintf(e->gpu, sizeof(e->gpu), "%s", gpu);
    unlock();
}

static void profile(int kind, unsigned id, unsigned profile, unsigned slices) {
    lock();
    entity_t *e = find(kind, id);
    if (e != NULL) {
        e->profile = profile;
        e->slices = slices;
    }
    unlock();
}

// add_sample adds a sample to a time series. DCGM sorts it by time, and the latest value is that with the latest time: after
// the engine's clock was set back, a new sample is behind (OBSERVED.md#sample-order).
static void add_sample(value_t *v, const sample_t *sample) {
    if (v->series && v->latest.set && sample->at < v->latest.at) v->behind = *sample;
    else v->latest = *sample, v->behind.set = 0;
    v->blank = v->held > 0;
    if (v->held > 0) v->held--;
}

static void value(int kind, unsigned id, unsigned field, int type, int status, long long at, long long i, double d, const char *s) {
    lock();
    entity_t *e = find(kind, id);
    if (e != NULL) {
        value_t *v = value_of(e, (unsigned short)field);
        sample_t sample = { .set = 1, .type = type, .status = status, .at = at + state.clock, .i = i, .d = d };
        snprintf(sample.s, sizeof(sample.s), "%s", s);
        if (field == DCGM_FI_DEV_XID_ERROR) v->latest = sample; // always the latest (OBSERVED.md#kernel-log-xid)
        else add_sample(v, &sample);
    }
    unlock();
}

// insert adds a row to the stream, which is sorted by time. Rows of one entity have different times
// (OBSERVED.md#equal-times).
static long long insert(row_t row) {
    for (int i = 0; i < state.rows; i++)
        if (state.row[i].kind == row.kind && state.row[i].id == row.id && state.row[i].at == row.at &&
            state.row[i].xid != row.xid) row.at++, i = -1;
    int at = state.rows;
    if (at == MAX_ROWS) return row.at;
    for (; at > 0 && state.row[at - 1].at > row.at; at--) state.row[at] = state.row[at - 1];
    state.row[at] = row;
    state.rows++;
    return row.at;
}

static void row(int kind, unsigned id, int status, long long at, long long xid) {
    lock();
    insert((row_t){ .kind = kind, .id = id, .status = status, .at = at + state.clock, .xid = xid });
    unlock();
}

static void xid(int kind, unsigned id, long long at, long long xid) {
    lock();
    sample_t sample = { .set = 1, .type = DCGM_FT_INT64, .i = xid };
    sample.at = insert((row_t){ .kind = kind, .id = id, .at = at + state.clock, .xid = xid });
    entity_t *e = find(kind, id);
    if (e != NULL) add_sample(value_of(e, DCGM_FI_DEV_XID_ERROR), &sample);
    unlock();
}

static void clock_(long long offset) {
    lock();
    state.clock = offset;
    unlock();
}

static void hold(int kind, unsigned id, unsigned field, int samples) {
    lock();
    entity_t *e = find(kind, id);
    if (e != NULL) value_of(e, (unsigned short)field)->held = samples;
    unlock();
}

static void empty(int is) {
    lock();
    state.empty = is;
    unlock();
}

static void link_(unsigned gpu, unsigned peer, unsigned long long path) {
    lock();
    entity_t *e = find(DCGM_FE_GPU, gpu);
    if (e != NULL && e->links < 32) {
        e->peer[e->links] = peer;
        e->path[e->links++] = path;
    }
    unlock();
}

static void incident(int kind, unsigned id, unsigned system, int health, unsigned code, const char *message) {
    lock();
    if (health == 0) {
        state.incidents = 0;
    } else if (state.incidents < 16) {
        dcgmIncidentInfo_t *in = &state.incident[state.incidents++];
        memset(in, 0, sizeof(*in));
        in->system = (dcgmHealthSystems_t)system;
        in->health = (dcgmHealthWatchResults_t)health;
        in->error.code = code;
        snprintf(in->error.msg, sizeof(in->error.msg), "%s", message);
        in->entityInfo.entityGroupId = (dcgm_field_entity_group_t)kind;
        in->entityInfo.entityId = id;
    }
    unlock();
}

static void refuse(unsigned systems) {
    lock();
    state.refused = systems;
    unlock();
}

static void profiling(unsigned gpu, unsigned field) {
    lock();
    entity_t *e = find(DCGM_FE_GPU, gpu);
    if (e != NULL && e->profiling_fields < 8) e->profiling[e->profiling_fields++] = (unsigned short)field;
    unlock();
}

static void blind(int is) {
    lock();
    state.blind = is;
    unlock();
}

static void engine(const char *version) {
    lock();
    snprintf(state.engine, sizeof(state.engine), "%s", version);
    unlock();
}

static void library(const char *version) {
    lock();
    snprintf(state.library, sizeof(state.library), "%s", version);
    unlock();
}

static void fail(const char *function, int code, int times) {
    lock();
    snprintf(state.fail, sizeof(state.fail), "%s", function);
    state.fail_code = code;
    state.fail_times = times;
    unlock();
}

static void hang(const char *function) {
    lock();
    snprintf(state.hang, sizeof(state.hang), "%s", function);
    unlock();
}

static void wait_hanging(void) {
    lock();
    while (!state.hanging) pthread_cond_wait(&state.changed, &state.lock);
    unlock();
}

static void release(void) {
    lock();
    state.hang[0] = 0;
    pthread_cond_broadcast(&state.changed);
    unlock();
}

static int calls(const char *function) {
    lock();
    int n = state.called[called(function)];
    unlock();
    return n;
}

static int watch(int kind, unsigned id, unsigned field, long long *every, double *age, int *samples) {
    lock();
    entity_t *e = find(kind, id);
    value_t *v = e == NULL ? NULL : value_of(e, (unsigned short)field);
    int watched = v != NULL && v->watched;
    if (watched) {
        *every = v->every;
        *age = v->age;
        *samples = v->samples;
    }
    unlock();
    return watched;
}

static int handlers(unsigned long long *handler, int n) {
    for (int i = 0; i < n; i++) {
        struct sigaction now;
        handler[i] = sigaction(i + 1, NULL, &now) == 0 ? (unsigned long long)now.sa_sigaction : 0;
    }
    return n;
}

EXPORT script_table_t script_table = {
    .reset = reset, .refuse = refuse, .entity = entity, .drop = drop, .instance = instance, .profile = profile, .value = value, .row = row, .xid = xid,
    .clock = clock_, .hold = hold, .empty = empty,
    .link = link_, .incident = incident, .profiling = profiling,
    .blind = blind, .engine = engine, .library = library, .message = message, .callers = callers, .arenas = arenas, .gap = gap, .fail = fail, .hang = hang, .wait_hanging = wait_hanging, .release = release,
    .calls = calls, .watch = watch, .handlers = handlers, .stats = &state.stats,
};
