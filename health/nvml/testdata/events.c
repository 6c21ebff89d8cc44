// The scripted libnvidia-ml.so.1: sets of events.
//
// Each set has a queue of its own and gets all events from the moment of their registration. An unsupported bit refuses the whole
// mask. An UNKNOWN from RegisterEvents makes the set unusable. While a GPU of a set is lost, Wait on the set returns GPU_IS_LOST at
// once. A set ends with the driver that it was created with.

#include "libnvidia-ml.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

// set_of returns the set of a handle, or NULL.
static set_t *set_of(const void *handle, int is_system) {
    for (int i = 0; i < MAX_SETS; i++)
        if (handle == (const void *)&state.set[i] && state.set[i].used && state.set[i].is_system == is_system) return &state.set[i];
    return NULL;
}

static set_t *create(int is_system) {
    for (int i = 0; i < MAX_SETS; i++) {
        set_t *s = &state.set[i];
        if (s->used) continue;
        memset(s, 0, sizeof(*s));
        s->used = 1;
        s->is_system = is_system;
        s->load = state.load;
        return s;
    }
    return NULL;
}

static void destroy(set_t *s) {
    if (s->waiting) fprintf(stderr, "libnvidia-ml: a set is freed while a call waits for it\n"), abort();
    free(s->event);
    s->event = NULL;
    s->used = 0;
    pthread_cond_broadcast(&state.changed);
}

static void append(set_t *s, event_t event) {
    if (s->tail == s->room) {
        s->room = s->room == 0 ? 64 : 2 * s->room;
        s->event = realloc(s->event, (size_t)s->room * sizeof(*s->event));
        if (s->event == NULL) abort();
    }
    s->event[s->tail++] = event;
}

static void record_in(event_t event, int is_system) {
    for (int i = 0; i < MAX_SETS; i++) {
        set_t *s = &state.set[i];
        if (s->used && s->is_system == is_system && s->load == state.load && (s->types[is_system ? 0 : event.gpu] & event.type))
            append(s, event);
    }
    pthread_cond_broadcast(&state.changed);
}

void record(event_t event) { record_in(event, 0); }
void record_system(event_t event) { record_in(event, 1); }

// wait_for waits until the set has an event, and returns why there is none.
static nvmlReturn_t wait_for(set_t *s, unsigned timeout_ms) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += timeout_ms % 1000 * 1000000L;
    if (until.tv_nsec >= 1000000000L) until.tv_sec++, until.tv_nsec -= 1000000000L;
    for (;;) {
        if (s->unusable || s->load != state.load || state.unloaded) return NVML_ERROR_UNKNOWN;
        for (int i = 0; i < MAX_GPUS && !s->is_system; i++)
            if (s->types[i] && state.gpu[i].lost) return NVML_ERROR_GPU_IS_LOST;
        if (s->head < s->tail) return NVML_SUCCESS;
        if (timeout_ms > 0 && fault_of("waiting", ANY)) return NVML_ERROR_GPU_IS_LOST; // only of sets that are used for long
        if (timeout_ms == 0) return NVML_ERROR_TIMEOUT;
        s->waiting++;
        int timed_out = pthread_cond_timedwait(&state.changed, &state.lock, &until) == ETIMEDOUT;
        s->waiting--;
        if (timed_out && s->head == s->tail) return NVML_ERROR_TIMEOUT;
    }
}

static event_t take(set_t *s) {
    event_t event = s->event[s->head++];
    if (s->head == s->tail) s->head = s->tail = 0;
    return event;
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    ENTER;
    *types = gpu->supported;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    nvmlReturn_t result = enter(__func__, ANY);
    if (result != NVML_SUCCESS) return leave(result);
    set->handle = (void *)create(0);
    return leave(set->handle == NULL ? NVML_ERROR_INSUFFICIENT_RESOURCES : result);
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    gpu_t *gpu;
    nvmlReturn_t result = enter_device(__func__, device, &gpu);
    set_t *s = set_of(set.handle, 0);
    if (s == NULL) return leave(NVML_ERROR_INVALID_ARGUMENT);
    if (result == NVML_ERROR_UNKNOWN) s->unusable = 1;
    if (result != NVML_SUCCESS) return leave(result);
    if (types & ~gpu->supported) return leave(NVML_ERROR_NOT_SUPPORTED);
    s->types[gpu->id] |= types;
    s->handle[gpu->id] = device;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms) {
    nvmlReturn_t result = enter(__func__, ANY);
    if (result != NVML_SUCCESS) return leave(result);
    set_t *s = set_of(set.handle, 0);
    if (s == NULL) return leave(NVML_ERROR_INVALID_ARGUMENT);
    result = wait_for(s, timeout_ms);
    memset(data, 0, sizeof(*data));
    if (result != NVML_SUCCESS) return leave(result);
    event_t event = take(s);
    data->device = s->handle[event.gpu];
    data->eventType = event.type;
    data->eventData = event.data;
    data->gpuInstanceId = event.gi;
    data->computeInstanceId = event.ci;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    nvmlReturn_t result = enter(__func__, ANY);
    if (result != NVML_SUCCESS) return leave(result);
    set_t *s = set_of(set.handle, 0);
    if (s == NULL) return leave(NVML_ERROR_INVALID_ARGUMENT);
    destroy(s);
    return leave(result);
}

#ifndef LACK_SYSTEM_EVENTS
EXPORT nvmlReturn_t nvmlSystemEventSetCreate(nvmlSystemEventSetCreateRequest_t *request) {
    nvmlReturn_t result = enter(__func__, ANY);
    if (result != NVML_SUCCESS) return leave(result);
    if (request->version != nvmlSystemEventSetCreateRequest_v1) return leave(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    request->set.handle = (void *)create(1);
    return leave(request->set.handle == NULL ? NVML_ERROR_INSUFFICIENT_RESOURCES : result);
}

EXPORT nvmlReturn_t nvmlSystemRegisterEvents(nvmlSystemRegisterEventRequest_t *request) {
    nvmlReturn_t result = enter(__func__, ANY);
    if (result != NVML_SUCCESS) return leave(result);
    if (request->version != nvmlSystemRegisterEventRequest_v1) return leave(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    set_t *s = set_of(request->set.handle, 1);
    if (s == NULL) return leave(NVML_ERROR_INVALID_ARGUMENT);
    s->types[0] |= request->eventTypes;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlSystemEventSetWait(nvmlSystemEventSetWaitRequest_t *request) {
    nvmlReturn_t result = enter(__func__, ANY);
    if (result != NVML_SUCCESS) return leave(result);
    if (request->version != nvmlSystemEventSetWaitRequest_v1) return leave(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    set_t *s = set_of(request->set.handle, 1);
    if (s == NULL) return leave(NVML_ERROR_INVALID_ARGUMENT);
    request->numEvent = 0;
    result = wait_for(s, request->timeoutms);
    while (result == NVML_SUCCESS && s->head < s->tail && request->numEvent < request->dataSize) {
        event_t event = take(s);
        request->data[request->numEvent++] = (nvmlSystemEventData_v1_t){ .eventType = event.type, .gpuId = event.gpu };
    }
    return leave(result);
}

EXPORT nvmlReturn_t nvmlSystemEventSetFree(nvmlSystemEventSetFreeRequest_t *request) {
    nvmlReturn_t result = enter(__func__, ANY);
    if (result != NVML_SUCCESS) return leave(result);
    if (request->version != nvmlSystemEventSetFreeRequest_v1) return leave(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    set_t *s = set_of(request->set.handle, 1);
    if (s == NULL) return leave(NVML_ERROR_INVALID_ARGUMENT);
    destroy(s);
    return leave(result);
}
#endif
