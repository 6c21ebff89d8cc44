// The scripted libdcgm.so.4: policy registrations, health checks and profiling.

#include "libdcgm.h"

#include <stdlib.h>
#include <unistd.h>

static void *block(void *pipe) {
    char none;
    while (read(*(int *)pipe, &none, 1) != 1) {}
    return NULL;
}

// leak_listeners leaks what DCGM leaks when a connection ends before its registrations: two threads, four descriptors and
// 2 MiB each, for the lifetime of the process (OBSERVED.md#registration-leak).
void leak_listeners(void) {
    for (; state.listeners > 0; state.listeners--)
        for (int i = 0; i < 2; i++) {
            int *ends = calloc(1, 1 << 20);
            pthread_t thread;
            if (ends == NULL || pipe(ends) != 0 || pthread_create(&thread, NULL, block, ends) != 0) abort();
        }
}

// It never calls back: no test sets a policy, and a registration without one gets no callback (OBSERVED.md#policies).
EXPORT dcgmReturn_t dcgmPolicyRegister_v2(dcgmHandle_t handle, dcgmGpuGrp_t group, dcgmPolicyCondition_t condition, fpRecvUpdates callback, uint64_t user) {
    ENTER
    (void)condition, (void)callback, (void)user;
    if (group != DCGM_GROUP_ALL_GPUS && group_of(group) == NULL) return leave(DCGM_ST_NOT_CONFIGURED);
    state.listeners++;
    return leave(DCGM_ST_OK);
}

EXPORT dcgmReturn_t dcgmPolicyUnregister(dcgmHandle_t handle, dcgmGpuGrp_t group, dcgmPolicyCondition_t condition) {
    ENTER
    (void)condition, (void)group;
    state.listeners = 0; // of the connection
    return leave(DCGM_ST_OK);
}

EXPORT dcgmReturn_t dcgmHealthSet(dcgmHandle_t handle, dcgmGpuGrp_t group, dcgmHealthSystems_t systems) {
    ENTER
    if (group_of(group) == NULL) return leave(DCGM_ST_BADPARAM);
    if (systems & state.refused) return leave(DCGM_ST_BADPARAM);
    state.stats.systems = systems;
    return leave(DCGM_ST_OK);
}

EXPORT dcgmReturn_t dcgmHealthCheck(dcgmHandle_t handle, dcgmGpuGrp_t group, dcgmHealthResponse_t *response) {
    ENTER
    if (group_of(group) == NULL || state.stats.systems == 0) return leave(DCGM_ST_NOT_CONFIGURED);
    response->incidentCount = 0;
    for (int i = 0; i < state.incidents; i++)
        if (state.incident[i].system & state.stats.systems) response->incidents[response->incidentCount++] = state.incident[i];
    return leave(DCGM_ST_OK);
}

// gpu_of returns the entity itself if it is a GPU, or the GPU of an instance.
static entity_t *gpu_of(entity_t *e) {
    while (e != NULL && e->in_hierarchy && e->kind != DCGM_FE_GPU) e = find(e->parent_kind, e->parent);
    return e;
}

static int profiles(entity_t *e, unsigned short field) {
    for (int i = 0; e != NULL && i < e->profiling_fields; i++)
        if (e->profiling[i] == field) return 1;
    return 0;
}

// refuses_profiling returns an error if one entity of the group lacks one field (OBSERVED.md#profiling-groups). Another
// profiler holds field 1002.
int refuses_profiling(group_t *g, fields_t *f) {
    if (g == NULL || f == NULL) return DCGM_ST_OK;
    for (int j = 0; j < f->count; j++) {
        if (f->field[j] == 1002) return DCGM_ST_IN_USE;
        if (f->field[j] < 1001 || f->field[j] > 1099) continue;
        for (int i = 0; i < g->count; i++)
            if (!profiles(gpu_of(find((int)g->entity[i].entityGroupId, g->entity[i].entityId)), f->field[j]))
                return DCGM_ST_PROFILING_NOT_SUPPORTED;
    }
    return DCGM_ST_OK;
}

#ifndef LACK_PROFILING
EXPORT dcgmReturn_t dcgmProfGetSupportedMetricGroups(dcgmHandle_t handle, dcgmProfGetMetricGroups_t *groups) {
    ENTER
    entity_t *e = find(DCGM_FE_GPU, groups->gpuId);
    if (e == NULL) return leave(DCGM_ST_BADPARAM);
    if (e->profiling_fields == 0) return leave(DCGM_ST_PROFILING_NOT_SUPPORTED);
    groups->numMetricGroups = (unsigned)e->profiling_fields; // with one field each
    for (int i = 0; i < e->profiling_fields; i++) {
        groups->metricGroups[i].numFieldIds = 1;
        groups->metricGroups[i].fieldIds[0] = e->profiling[i];
    }
    return leave(DCGM_ST_OK);
}
#endif
