// The scripted libdcgm.so.4: the library itself, connections and the inventory. A test sets what it returns.
//
// It has the restrictions and errors of DCGM that ../OBSERVED.md describes. LACK_CONNECT, LACK_CONNECT_URL,
// LACK_VALUES_SINCE, LACK_PROFILING and LACK_DETACH omit a function, as in an older library.

#define _GNU_SOURCE
#include "libdcgm.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define CONNECTION ((dcgmHandle_t)0x77)

static long long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

int enter(const char *function, int needs_connection) {
    pthread_mutex_lock(&state.lock);
    state.called[called(function)]++;
    if (strcmp(state.hang, function) == 0) {
        state.hanging++;
        if (state.hanging > state.stats.most_hanging) state.stats.most_hanging = state.hanging;
        pthread_cond_broadcast(&state.changed);
        while (state.hang[0]) pthread_cond_wait(&state.changed, &state.lock);
        state.hanging--;
    }
    state.stats.nanoseconds -= now_ns();
    int hit = strcmp(state.fail, function) == 0 || (needs_connection && strcmp(state.fail, "*") == 0);
    if (hit && state.fail_times != 0) {
        if (state.fail_times > 0) state.fail_times--;
        return state.fail_code;
    }
    if (needs_connection && !state.stats.initialized) return DCGM_ST_UNINITIALIZED;
    if (needs_connection && !state.connected) return DCGM_ST_CONNECTION_NOT_VALID;
    return DCGM_ST_OK;
}

dcgmReturn_t leave(int result) {
    state.stats.nanoseconds += now_ns();
    pthread_mutex_unlock(&state.lock);
    return (dcgmReturn_t)result;
}

EXPORT const char *errorString(dcgmReturn_t result) {
    switch (result) {
        case DCGM_ST_OK: return "Success";
        case DCGM_ST_BADPARAM: return "Bad parameter passed to function";
        case DCGM_ST_INIT_ERROR: return "DCGM initialization error";
        case DCGM_ST_UNINITIALIZED: return "Object is in undefined state";
        case DCGM_ST_TIMEOUT: return "Timeout";
        case DCGM_ST_VER_MISMATCH: return "API version mismatch";
        case DCGM_ST_NOT_WATCHED: return "Field is not being watched";
        case DCGM_ST_CONNECTION_NOT_VALID: return "Host engine connection invalid/disconnected";
        case DCGM_ST_GPU_IS_LOST: return "GPU is lost";
        default: return "An error of the scripted libdcgm";
    }
}

EXPORT dcgmReturn_t dcgmInit(void) {
    int result = enter(__func__, 0);
    if (result == DCGM_ST_OK) state.stats.initialized = 1;
    return leave(result);
}

// disconnected releases everything that the connection has created, as an engine does, and records how much it was.
static void disconnected(void) {
    state.stats.leaked = left();
    memset(state.group, 0, sizeof(state.group));
    memset(state.fields, 0, sizeof(state.fields));
    leak_listeners();
    for (int i = 0; i < state.entities; i++)
        for (int j = 0; j < state.entity[i].values; j++) state.entity[i].value[j].watched = 0;
    state.watches = 0;
    state.stats.systems = 0;
    state.connected = 0;
}

EXPORT dcgmReturn_t dcgmShutdown(void) {
    int result = enter(__func__, 0);
    if (result == DCGM_ST_OK) state.stats.initialized = 0;
    return leave(result);
}

static dcgmReturn_t connected(int result, dcgmHandle_t *handle) {
    if (result == DCGM_ST_OK && !state.stats.initialized) result = DCGM_ST_UNINITIALIZED;
    if (result == DCGM_ST_OK) {
        state.connected = 1;
        *handle = CONNECTION;
    }
    return leave(result);
}

EXPORT dcgmReturn_t dcgmStartEmbedded(dcgmOperationMode_t mode, dcgmHandle_t *handle) {
    (void)mode;
    int result = enter(__func__, 0);
    // DCGM opens its log here (OBSERVED.md#engine-log).
    const char *file = getenv("__DCGM_DBG_FILE"), *level = getenv("__DCGM_DBG_LVL");
    snprintf(state.stats.log, sizeof(state.stats.log), "%s to %s", level ? level : "ERROR", file ? file : "/var/log/nv-hostengine.log");
    if (result == DCGM_ST_OK) state.blind = state.stats.detached = state.empty = 0; // (OBSERVED.md#blind-engine)
    state.embedded = 1;
    return connected(result, handle);
}

#ifndef LACK_CONNECT
EXPORT dcgmReturn_t dcgmConnect_v2(const char *address, dcgmConnectV2Params_t *params, dcgmHandle_t *handle) {
    int result = enter(__func__, 0);
    snprintf(state.stats.address, sizeof(state.stats.address), "%s", address);
    state.stats.is_socket = (int)params->addressIsUnixSocket;
    state.embedded = 0;
    return connected(result, handle);
}
#endif

#ifndef LACK_CONNECT_URL // before 4.5
EXPORT dcgmReturn_t dcgmConnect_v3(const char *url, dcgmConnectV3Params_t *params, dcgmHandle_t *handle) {
    (void)url, (void)params;
    return connected(enter(__func__, 0), handle);
}
#endif

EXPORT dcgmReturn_t dcgmStopEmbedded(dcgmHandle_t handle) {
    int result = enter(__func__, 0);
    (void)handle;
    disconnected();
    return leave(result);
}

EXPORT dcgmReturn_t dcgmDisconnect(dcgmHandle_t handle) {
    int result = enter(__func__, 0); // succeeds with a dead engine too (OBSERVED.md#dead-engine)
    (void)handle;
    disconnected();
    return leave(result);
}

EXPORT dcgmReturn_t dcgmVersionInfo(dcgmVersionInfo_t *info) {
    snprintf(info->rawBuildInfoString, sizeof(info->rawBuildInfoString), "version:%s;arch:x86_64;buildtype:Scripted", library_version());
    return DCGM_ST_OK;
}

EXPORT dcgmReturn_t dcgmHostengineVersionInfo(dcgmHandle_t handle, dcgmVersionInfo_t *info) {
    ENTER
    snprintf(info->rawBuildInfoString, sizeof(info->rawBuildInfoString), "arch:x86_64;version:%s;buildtype:Scripted", engine_version());
    return leave(DCGM_ST_OK);
}

#ifndef LACK_DETACH // before 4.5
// Neither has an effect in that state already (dcgm_agent.h).
EXPORT dcgmReturn_t dcgmDetachDriver(dcgmHandle_t handle) {
    ENTER
    state.stats.detached = 1;
    return leave(DCGM_ST_OK);
}

EXPORT dcgmReturn_t dcgmAttachDriver(dcgmHandle_t handle) {
    ENTER
    state.stats.detached = 0;
    return leave(DCGM_ST_OK);
}
#endif

EXPORT dcgmReturn_t dcgmGetEntityGroupEntities(dcgmHandle_t handle, dcgm_field_entity_group_t kind,
                                               dcgm_field_eid_t *entities, int *count, unsigned int flags) {
    ENTER
    (void)flags;
    if (kind == DCGM_FE_SWITCH && strcmp(state.fail, "nvswitch") == 0) return leave(state.fail_code);
    int n = 0;
    for (int i = 0; i < state.entities; i++)
        if (state.entity[i].kind == (int)kind && n < *count && !state.empty) entities[n++] = state.entity[i].id;
    *count = n;
    return leave(DCGM_ST_OK);
}

EXPORT dcgmReturn_t dcgmGetAllSupportedDevices(dcgmHandle_t handle, unsigned int gpus[DCGM_MAX_NUM_DEVICES], int *count) {
    ENTER
    *count = 0;
    for (int i = 0; i < state.entities; i++)
        if (state.entity[i].kind == DCGM_FE_GPU && state.entity[i].status == DcgmEntityStatusOk && !state.stats.detached) gpus[(*count)++] = state.entity[i].id;
    return leave(DCGM_ST_OK);
}

EXPORT dcgmReturn_t dcgmGetGpuInstanceHierarchy(dcgmHandle_t handle, dcgmMigHierarchy_v2 *h) {
    ENTER
    h->count = 0;
    // Compute instances first: DCGM guarantees no order.
    for (int kind = DCGM_FE_GPU_CI; kind >= DCGM_FE_GPU_I; kind--)
        for (int i = 0; i < state.entities; i++) {
            entity_t *e = &state.entity[i];
            if (!e->in_hierarchy || e->kind != kind || state.empty) continue;
            dcgmMigHierarchyInfo_v2 *in = &h->entityList[h->count++];
            in->entity.entityGroupId = (dcgm_field_entity_group_t)e->kind;
            in->entity.entityId = e->id;
            in->parent.entityGroupId = (dcgm_field_entity_group_t)e->parent_kind;
            in->parent.entityId = e->parent;
            in->info.nvmlInstanceId = e->gi;
            in->info.nvmlComputeInstanceId = e->ci;
            in->info.nvmlMigProfileId = e->profile;
            in->info.nvmlProfileSlices = e->slices;
            snprintf(in->info.gpuUuid, sizeof(in->info.gpuUuid), "%s", e->gpu);
        }
    return leave(DCGM_ST_OK);
}

EXPORT dcgmReturn_t dcgmGetGpuStatus(dcgmHandle_t handle, unsigned int gpu, DcgmEntityStatus_t *status) {
    ENTER
    entity_t *e = find(DCGM_FE_GPU, gpu);
    if (e == NULL) return leave(DCGM_ST_BADPARAM);
    *status = (DcgmEntityStatus_t)(state.stats.detached ? DcgmEntityStatusDetached : e->status);
    return leave(DCGM_ST_OK);
}

EXPORT dcgmReturn_t dcgmGetDeviceAttributes(dcgmHandle_t handle, unsigned int gpu, dcgmDeviceAttributes_t *attributes) {
    ENTER
    allocate_message();
    entity_t *e = find(DCGM_FE_GPU, gpu);
    if (e == NULL) return leave(DCGM_ST_OK); // without a UUID (OBSERVED.md#missing-gpu-attributes)
    snprintf(attributes->identifiers.uuid, sizeof(attributes->identifiers.uuid), "%s", e->gpu);
    snprintf(attributes->identifiers.pciBusId, sizeof(attributes->identifiers.pciBusId), "%s", value_of(e, DCGM_FI_DEV_PCI_BUS_ID)->latest.s);
    snprintf(attributes->identifiers.deviceName, sizeof(attributes->identifiers.deviceName), "%s", DCGM_STR_BLANK);
    return leave(DCGM_ST_OK);
}

EXPORT dcgmReturn_t dcgmGetDeviceTopology(dcgmHandle_t handle, unsigned int gpu, dcgmDeviceTopology_v2 *topology) {
    ENTER
    entity_t *e = find(DCGM_FE_GPU, gpu);
    if (e == NULL) return leave(DCGM_ST_BADPARAM);
    if (version_number(library_version()) < 40600) { // (OBSERVED.md#older-topology)
        dcgmDeviceTopology_v1 *older = (dcgmDeviceTopology_v1 *)topology;
        if (older->version != dcgmDeviceTopology_version1) return leave(DCGM_ST_VER_MISMATCH);
        older->numGpus = (unsigned)e->links;
        for (int i = 0; i < e->links; i++) {
            older->gpuPaths[i].gpuId = e->peer[i];
            older->gpuPaths[i].path = (dcgmGpuTopologyLevel_v1_t)e->path[i];
        }
        return leave(DCGM_ST_OK);
    }
    if (topology->version != dcgmDeviceTopology_version2) return leave(DCGM_ST_VER_MISMATCH);
    topology->numGpus = (unsigned)e->links;
    for (int i = 0; i < e->links; i++) {
        topology->gpuPaths[i].gpuId = e->peer[i];
        topology->gpuPaths[i].path = (dcgmGpuTopologyLevel_t)e->path[i];
    }
    return leave(DCGM_ST_OK);
}
