// The scripted libnvidia-ml.so.1: initialization, devices and their values. A test sets what it returns: see script.c.
//
// The rules are those of nvml.h: a function of the driver needs Init; handles end with the driver. LACK_SYSTEM_EVENTS,
// LACK_FIELD_VALUES and LACK_MEMORY_LIMITS omit functions, as in an older library.

#include "libnvidia-ml.h"

#include <stdlib.h>

struct nvmlDevice_st {
    char unused;
};
static struct nvmlDevice_st handles[MAX_LOADS][MAX_GPUS];

// gpu_of returns the GPU of a handle of the loaded driver, of a MIG device its parent, or NULL.
static gpu_t *gpu_of(nvmlDevice_t handle) {
    for (unsigned i = 0; i < MAX_GPUS; i++)
        if (handle.handle == &handles[state.load % MAX_LOADS][i]) return &state.gpu[i];
    const mig_t *mig = mig_of(handle);
    return mig == NULL ? NULL : &state.gpu[mig->gpu];
}

nvmlReturn_t fault_of(const char *function, int gpu) {
    for (int i = 0; i < state.faults; i++) {
        fault_t *f = &state.fault[i];
        if (f->hangs || f->times == 0 || strcmp(f->function, function) != 0 || (f->gpu != ANY && f->gpu != gpu)) continue;
        if (f->times > 0) f->times--;
        return (nvmlReturn_t)f->code;
    }
    return NVML_SUCCESS;
}

static int hangs(const char *function, int gpu) {
    for (int i = 0; i < state.faults; i++) {
        fault_t *f = &state.fault[i];
        if (f->hangs && strcmp(f->function, function) == 0 && (f->gpu == ANY || f->gpu == gpu)) return 1;
    }
    return 0;
}

static long *count_of(const char *function) {
    for (int i = 0; i < state.counts; i++)
        if (strcmp(state.count[i].name, function) == 0) return &state.count[i].calls;
    count_t *c = &state.count[state.counts++];
    snprintf(c->name, sizeof(c->name), "%s", function);
    c->calls = 0; // of before the last reset
    return &c->calls;
}

nvmlReturn_t enter(const char *function, int gpu) {
    pthread_mutex_lock(&state.lock);
    ++*count_of(function);
    pthread_cond_broadcast(&state.changed);
    if (hangs(function, gpu)) {
        state.hanging++;
        while (hangs(function, gpu)) pthread_cond_wait(&state.changed, &state.lock);
        state.hanging--;
        pthread_cond_broadcast(&state.changed);
    }
    nvmlReturn_t result = fault_of(function, gpu);
    if (result != NVML_SUCCESS || strncmp(function, "nvmlInit", 8) == 0) return result;
    if (state.inits == 0) return NVML_ERROR_UNINITIALIZED;
    int keeps_working = strcmp(function, "nvmlShutdown") == 0 || strstr(function, "SetFree") != NULL;
    if ((state.unloaded || state.seen != state.load) && !keeps_working) return NVML_ERROR_UNKNOWN;
    return NVML_SUCCESS;
}

nvmlReturn_t leave(nvmlReturn_t result) {
    pthread_mutex_unlock(&state.lock);
    return result;
}

nvmlReturn_t enter_device(const char *function, nvmlDevice_t handle, gpu_t **gpu) {
    *gpu = gpu_of(handle);
    nvmlReturn_t result = enter(function, *gpu == NULL ? ANY : (int)(*gpu)->id);
    if (result != NVML_SUCCESS) return result;
    *gpu = gpu_of(handle); // the driver may have changed while the call hung
    if (*gpu == NULL || !(*gpu)->present) return NVML_ERROR_INVALID_ARGUMENT;
    return (*gpu)->lost ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

void uuid_of(const gpu_t *gpu, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-%08u-0000-0000-0000-000000000000", gpu->id); // as the scripted libdcgm.so.4
}

EXPORT const char *nvmlErrorString(nvmlReturn_t result) {
    switch (result) {
        case NVML_SUCCESS: return "Success";
        case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
        case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
        case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
        case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
        case NVML_ERROR_NOT_FOUND: return "Not Found";
        case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
        case NVML_ERROR_FUNCTION_NOT_FOUND: return "Function Not Found";
        case NVML_ERROR_OPERATING_SYSTEM: return "Operating System Error";
        case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
        case NVML_ERROR_UNKNOWN: return "Unknown Error";
        default: return "An error of the scripted libnvidia-ml";
    }
}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    nvmlReturn_t result = enter("nvmlInit_v2", ANY);
    if (result == NVML_SUCCESS && state.unloaded) result = NVML_ERROR_DRIVER_NOT_LOADED;
    if (result == NVML_SUCCESS && state.inits++ == 0) state.seen = state.load;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

EXPORT nvmlReturn_t nvmlShutdown(void) {
    nvmlReturn_t result = enter(__func__, ANY);
    if (result == NVML_SUCCESS) state.inits--;
    pthread_cond_broadcast(&state.changed);
    return leave(result);
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    nvmlReturn_t result = enter(__func__, ANY);
    if (result == NVML_SUCCESS) snprintf(version, length, "%s", state.driver);
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    nvmlReturn_t result = enter(__func__, ANY);
    if (result != NVML_SUCCESS) return leave(result);
    *count = 0;
    for (int i = 0; i < MAX_GPUS; i++) *count += (unsigned)state.gpu[i].present;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    int id = -1;
    pthread_mutex_lock(&state.lock);
    for (int i = 0, n = 0; i < MAX_GPUS; i++)
        if (state.gpu[i].present && (unsigned)n++ == index) id = i;
    pthread_mutex_unlock(&state.lock);
    nvmlReturn_t result = enter(__func__, id);
    if (result != NVML_SUCCESS) return leave(result);
    if (id < 0) return leave(NVML_ERROR_INVALID_ARGUMENT);
    if (state.gpu[id].lost) return leave(NVML_ERROR_GPU_IS_LOST);
    device->handle = &handles[state.load % MAX_LOADS][id];
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    nvmlReturn_t result = enter(__func__, ANY);
    if (result != NVML_SUCCESS) return leave(result);
    for (int i = 0; i < MAX_GPUS; i++) {
        char text[80];
        uuid_of(&state.gpu[i], text, sizeof(text));
        if (!state.gpu[i].present || strcmp(text, uuid) != 0) continue;
        device->handle = &handles[state.load % MAX_LOADS][i];
        return leave(NVML_SUCCESS);
    }
    if (mig_by_uuid(uuid, device)) return leave(NVML_SUCCESS);
    return leave(NVML_ERROR_NOT_FOUND);
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length) {
    ENTER;
    const mig_t *mig = mig_of(device);
    if (mig != NULL) mig_uuid(mig, uuid, length);
    else uuid_of(gpu, uuid, length);
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length) {
    ENTER;
    snprintf(name, length, "NVIDIA H100 80GB HBM3");
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *minor) {
    ENTER;
    *minor = gpu->id;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    ENTER;
    memset(pci, 0, sizeof(*pci));
    pci->bus = 0x10 + gpu->id;
    snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), "0000:%02X:00.0", pci->bus);
    snprintf(pci->busId, sizeof(pci->busId), "00000000:%02X:00.0", pci->bus);
    return leave(result);
}

#ifndef LACK_FIELD_VALUES
EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    ENTER;
    for (int i = 0; i < count; i++) {
        values[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
        if (values[i].fieldId != NVML_FI_DEV_GET_GPU_RECOVERY_ACTION) continue;
        values[i].nvmlReturn = NVML_SUCCESS;
        values[i].valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
        values[i].value.uiVal = gpu->recovery_action;
    }
    return leave(result);
}
#endif
