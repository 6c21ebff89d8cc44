// The scripted libdcgm.so.4: groups, watches and values.

#include "libdcgm.h"

#include <stdio.h>

const char *library_version(void) { return state.library[0] ? state.library : "4.6.0"; }
const char *engine_version(void) { return state.embedded ? library_version() : state.engine[0] ? state.engine : "4.5.2"; }

// The highest field before a version (DCGM_FI_MAX_FIELDS in the versions' dcgm_fields.h; that of 4.7 second hand).
static const struct {
    int before;
    unsigned short highest;
} generations[] = { { 40300, 1503 }, { 40601, 1533 }, { 40700, 1612 }, { 999999, 1650 } };

int version_number(const char *version) {
    int major = 0, minor = 0, patch = 0;
    sscanf(version, "%d.%d.%d", &major, &minor, &patch);
    return major * 10000 + minor * 100 + patch;
}

static unsigned short highest_field(const char *version) {
    int i = 0;
    while (version_number(version) >= generations[i].before) i++;
    return generations[i].highest;
}

// has_fields reports whether a version has all fields. Numbers from 1534 to 1599 are in range, but no fields.
static int has_fields(const char *version, const unsigned short *fields, unsigned count) {
    unsigned short highest = highest_field(version);
    for (unsigned i = 0; i < count; i++)
        if (fields[i] == 0 || fields[i] > highest || (fields[i] >= 1534 && fields[i] < 1600)) return 0;
    return 1;
}

EXPORT dcgmReturn_t dcgmGroupCreate(dcgmHandle_t handle, dcgmGroupType_t type, const char *name, dcgmGpuGrp_t *group) {
    ENTER
    (void)type, (void)name;
    for (int i = 1; i < MAX_GROUPS; i++)
        if (!state.group[i].used) {
            state.group[i].used = 1;
            state.group[i].count = 0;
            *group = (dcgmGpuGrp_t)i;
            return leave(DCGM_ST_OK);
        }
    return leave(DCGM_ST_MAX_LIMIT);
}

group_t *group_of(dcgmGpuGrp_t group) { return group > 0 && group < MAX_GROUPS && state.group[group].used ? &state.group[group] : NULL; }
fields_t *fields_of(dcgmFieldGrp_t fields) { return fields > 0 && fields < MAX_GROUPS && state.fields[fields].used ? &state.fields[fields] : NULL; }

EXPORT dcgmReturn_t dcgmGroupDestroy(dcgmHandle_t handle, dcgmGpuGrp_t group) {
    ENTER
    if (group_of(group) == NULL) return leave(DCGM_ST_NOT_CONFIGURED);
    state.group[group].used = 0;
    return leave(DCGM_ST_OK);
}

EXPORT dcgmReturn_t dcgmGroupAddEntity(dcgmHandle_t handle, dcgmGpuGrp_t group, dcgm_field_entity_group_t kind, dcgm_field_eid_t id) {
    ENTER
    group_t *g = group_of(group);
    entity_t *e = find((int)kind, id);
    if (g == NULL || e == NULL) return leave(DCGM_ST_BADPARAM);
    if (kind == DCGM_FE_GPU && e->status == DcgmEntityStatusLost) return leave(DCGM_ST_GPU_IS_LOST); // (OBSERVED.md#lost-gpu)
    g->entity[g->count].entityGroupId = kind;
    g->entity[g->count++].entityId = id;
    return leave(DCGM_ST_OK);
}

EXPORT dcgmReturn_t dcgmFieldGroupCreate(dcgmHandle_t handle, int count, const unsigned short *ids, const char *name, dcgmFieldGrp_t *fields) {
    ENTER
    (void)name;
    if (count < 1 || count > MAX_FIELDS) return leave(DCGM_ST_BADPARAM);
    if (!has_fields(engine_version(), ids, (unsigned)count)) return leave(DCGM_ST_UNKNOWN_FIELD);
    for (int i = 1; i < MAX_GROUPS; i++)
        if (!state.fields[i].used) {
            state.fields[i].used = 1;
            state.fields[i].watched = 0;
            state.fields[i].count = count;
            memcpy(state.fields[i].field, ids, (size_t)count * sizeof(*ids));
            *fields = (dcgmFieldGrp_t)i;
            return leave(DCGM_ST_OK);
        }
    return leave(DCGM_ST_MAX_LIMIT);
}

EXPORT dcgmReturn_t dcgmFieldGroupDestroy(dcgmHandle_t handle, dcgmFieldGrp_t fields) {
    ENTER
    if (fields_of(fields) == NULL) return leave(DCGM_ST_BADPARAM);
    state.fields[fields].used = 0;
    return leave(DCGM_ST_OK);
}

// forget_rows removes an entity's rows, as DCGM does when their last watch ends.
static void forget_rows(entity_t *e) {
    int kept = 0;
    for (int i = 0; i < state.rows; i++)
        if (state.row[i].kind != e->kind || state.row[i].id != e->id) state.row[kept++] = state.row[i];
    state.rows = kept;
}

static dcgm_field_entity_group_t level_of(unsigned short field) {
    if (module_level_of(field) != DCGM_FE_NONE) return module_level_of(field);
    switch (field) {
        case 1: case 2: case 5: return DCGM_FE_NONE;
        case 50: case 54: case 1001: case 1002: case 1003: return DCGM_FE_GPU_CI;
        case 250: case 251: case 252: case 253: case 1625: case 1626: case 1627: case 1628: return DCGM_FE_GPU_I;
        default: return field >= 1100 && field < 1400 ? DCGM_FE_GPU_I : DCGM_FE_GPU;
    }
}

// mark sets whether a group's fields are watched. It does not count the watches of a client. When a watch of a global field
// ends, it returns "not watched", removes the other watches, and keeps sampling the global field
// (OBSERVED.md#global-fields; DcgmHostEngineHandler.cpp: UnwatchFieldGroup).
static int mark(dcgmGpuGrp_t group, dcgmFieldGrp_t fields, int watched, long long every, double age, int samples) {
    group_t *g = group_of(group);
    fields_t *f = fields_of(fields);
    if (g == NULL || f == NULL) return DCGM_ST_BADPARAM;
    if (g->count == 0) return DCGM_ST_GROUP_IS_EMPTY;
    int unknown = 0;
    for (int i = 0; i < g->count; i++) {
        entity_t *e = find((int)g->entity[i].entityGroupId, g->entity[i].entityId);
        if (e == NULL) unknown = 1; // a removed instance
        for (int j = 0; e != NULL && watched && j < f->count; j++)
            if (!can_measure(e, f->field[j])) return DCGM_ST_BADPARAM;
        for (int j = 0; e != NULL && j < f->count; j++) {
            value_t *v = value_of(e, f->field[j]);
            if (!watched && (!v->ever_watched || level_of(f->field[j]) == DCGM_FE_NONE)) {
                unknown = 1;
                continue;
            }
            v->watched = watched;
            v->ever_watched = 1;
            v->series = watched;
            if (watched) {
                v->blank = v->held > 0; // the first sample of a watch stays until the next
                if (v->held > 0) v->held--;
            } else if (v->behind.set) {
                v->latest = v->behind;
                v->behind.set = 0;
            }
            v->every = every;
            v->age = age;
            v->samples = samples;
            if (f->field[j] == DCGM_FI_DEV_XID_ERROR && !watched) forget_rows(e);
        }
        if (e != NULL && !watched) unwatch_module(e);
    }
    state.watches += watched - f->watched; // to watch it again only changes how
    f->watched = watched;
    return !watched && unknown ? DCGM_ST_NOT_WATCHED : DCGM_ST_OK;
}

EXPORT dcgmReturn_t dcgmWatchFields(dcgmHandle_t handle, dcgmGpuGrp_t group, dcgmFieldGrp_t fields, long long every, double age, int samples) {
    ENTER
    int refused = refuses_profiling(group_of(group), fields_of(fields));
    if (refused != DCGM_ST_OK) return leave(refused);
    if (every <= 0 || (age == 0 && samples == 0)) return leave(DCGM_ST_BADPARAM); // would keep all samples
    return leave(mark(group, fields, 1, every, age, samples));
}

EXPORT dcgmReturn_t dcgmUnwatchFields(dcgmHandle_t handle, dcgmGpuGrp_t group, dcgmFieldGrp_t fields) {
    ENTER
    return leave(mark(group, fields, 0, 0, 0, 0));
}

EXPORT dcgmReturn_t dcgmUpdateAllFields(dcgmHandle_t handle, int wait) {
    ENTER
    (void)wait;
    return leave(DCGM_ST_OK);
}

// The types in dcgm_fields.cpp of the fields that the tests use.
static int type_of(unsigned short field) {
    switch (field) {
        case 1: case 2: case 50: case 51: case 53: case 54: case 57: case 85: return DCGM_FT_STRING;
        case 515: return DCGM_FT_BINARY;
        case 155: case 1001: case 1002: case 1003: return DCGM_FT_DOUBLE;
        default: return field >= 1612 && field <= 1624 ? DCGM_FT_DOUBLE : DCGM_FT_INT64;
    }
}

EXPORT dcgm_field_meta_p DcgmFieldGetById(unsigned short field) {
    static __thread dcgm_field_meta_t meta;
    if (field > highest_field(library_version())) return NULL;
    memset(&meta, 0, sizeof(meta));
    if (!has_fields(library_version(), &field, 1)) return &meta; // empty
    meta.fieldId = field;
    meta.fieldType = (char)type_of(field);
    meta.entityLevel = level_of(field);
    snprintf(meta.tag, sizeof(meta.tag), "field_%u", field);
    return &meta;
}

EXPORT dcgmReturn_t dcgmEntitiesGetLatestValues(dcgmHandle_t handle, dcgmGroupEntityPair_t entities[], unsigned int count,
                                                unsigned short fields[], unsigned int fieldCount, unsigned int flags,
                                                dcgmFieldValue_v2 values[]) {
    ENTER
    allocate_message();
    if (fieldCount > MAX_FIELDS) return leave(DCGM_ST_BADPARAM);
    if (!has_fields(engine_version(), fields, fieldCount)) return leave(DCGM_ST_UNKNOWN_FIELD);
    for (unsigned j = 0; j < fieldCount; j++)
        if (flags != 0 && fields[j] == DCGM_FI_DEV_XID_ERROR) return leave(DCGM_ST_GENERIC_ERROR); // (OBSERVED.md#live-reads)
    if (flags != 0) state.stats.live++;
    if ((int)(count * fieldCount) > state.stats.widest) state.stats.widest = (int)(count * fieldCount);
    // Last entity first: DCGM guarantees no order.
    for (unsigned i = 0; i < count; i++) {
        dcgmGroupEntityPair_t pair = entities[count - 1 - i];
        entity_t *e = find((int)pair.entityGroupId, pair.entityId);
        if (e == NULL) return leave(DCGM_ST_BADPARAM);
        for (unsigned j = 0; j < fieldCount; j++) {
            dcgmFieldValue_v2 *out = &values[i * fieldCount + j];
            value_t *v = value_of(e, fields[j]);
            out->version = dcgmFieldValue_version2;
            out->entityGroupId = pair.entityGroupId;
            out->entityId = pair.entityId;
            out->fieldId = fields[j];
            sample_t *s = &v->latest;
            out->fieldType = (unsigned short)(s->set ? s->type : type_of(fields[j]));
            out->status = v->watched ? (s->set ? s->status : DCGM_ST_NO_DATA) : DCGM_ST_NOT_WATCHED;
            out->ts = s->at;
            int blank = state.blind || state.stats.detached || v->blank || !s->set || !v->watched || (e->kind == DCGM_FE_GPU && e->status == DcgmEntityStatusLost);
            switch (out->fieldType) {
                case DCGM_FT_DOUBLE: out->value.dbl = blank ? DCGM_FP64_BLANK : s->d; break;
                case DCGM_FT_STRING: snprintf(out->value.str, sizeof(out->value.str), "%s", blank ? DCGM_STR_BLANK : s->s); break;
                default: out->value.i64 = blank ? DCGM_INT64_BLANK : s->i; break;
            }
        }
    }
    return leave(DCGM_ST_OK);
}

#ifndef LACK_VALUES_SINCE
EXPORT dcgmReturn_t dcgmGetValuesSince_v2(dcgmHandle_t handle, dcgmGpuGrp_t group, dcgmFieldGrp_t fields, long long since,
                                          long long *next, dcgmFieldValueEntityEnumeration_f callback, void *user) {
    ENTER
    allocate_message();
    group_t *g = group_of(group);
    if (g == NULL || fields_of(fields) == NULL) return leave(DCGM_ST_BADPARAM);
    *next = since;
    for (int i = 0; i < g->count; i++) {
        dcgmFieldValue_v1 v;
        int found = 0;
        memset(&v, 0, sizeof(v));
        v.version = dcgmFieldValue_version1;
        v.fieldId = DCGM_FI_DEV_XID_ERROR;
        v.fieldType = DCGM_FT_INT64;
        for (int j = 0; j < state.rows; j++) {
            row_t *r = &state.row[j];
            if (r->kind != (int)g->entity[i].entityGroupId || r->id != g->entity[i].entityId || r->at < since) continue;
            v.status = r->status;
            v.ts = r->at;
            v.value.i64 = r->xid;
            found = 1;
            if (r->at + 1 > *next) *next = r->at + 1;
            callback(g->entity[i].entityGroupId, g->entity[i].entityId, &v, 1, user);
        }
        if (!found) { // a row without data in every read (OBSERVED.md#rows-without-data)
            v.status = DCGM_ST_NO_DATA;
            v.value.i64 = DCGM_INT64_BLANK;
            callback(g->entity[i].entityGroupId, g->entity[i].entityId, &v, 1, user);
        }
    }
    return leave(DCGM_ST_OK);
}
#endif
