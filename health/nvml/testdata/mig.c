// The scripted libnvidia-ml.so.1: MIG devices. Commands:
//
//   mig GPU INDEX GI CI    the GPU has the MIG device, of profile 1g.10gb at memory slice GI modulo 7
//   mig off                no GPU has MIG devices

#include "libnvidia-ml.h"

#define MAX_MIG 16

// The values of nvml.h for 1g.10gb, by index; profile IDs are the driver's.
#define GI_PROFILE 19
#define CI_PROFILE 0

static mig_t migs[MAX_LOADS][MAX_MIG]; // only the addresses depend on the load
static int count;

mig_t *mig_of(nvmlDevice_t handle) {
    for (int i = 0; i < count; i++)
        if ((void *)handle.handle == (void *)&migs[state.load % MAX_LOADS][i]) return &migs[0][i];
    return NULL;
}

static void handle_of(int i, nvmlDevice_t *device) { device->handle = (void *)&migs[state.load % MAX_LOADS][i]; }

void mig_uuid(const mig_t *mig, char *uuid, unsigned length) {
    snprintf(uuid, length, "MIG-%08u-%04d-%04d-0000-000000000000", mig->gpu, mig->gi, mig->ci);
}

int mig_by_uuid(const char *uuid, nvmlDevice_t *device) {
    for (int i = 0; i < count; i++) {
        char text[80];
        mig_uuid(&migs[0][i], text, sizeof(text));
        if (strcmp(text, uuid) != 0) continue;
        handle_of(i, device);
        return 1;
    }
    return 0;
}

int is_partitioned(const gpu_t *gpu) {
    for (int i = 0; i < count; i++)
        if (migs[0][i].gpu == gpu->id) return 1;
    return 0;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    ENTER;
    *current = *pending = (unsigned)is_partitioned(gpu);
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is_mig) {
    ENTER;
    *is_mig = mig_of(device) != NULL;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) {
    ENTER;
    const mig_t *mig = mig_of(device);
    *index = 0;
    if (mig != NULL) *index = (unsigned)mig->index;
    else
        for (unsigned i = 0; i < gpu->id; i++) *index += (unsigned)state.gpu[i].present;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *n) {
    ENTER;
    *n = is_partitioned(gpu) ? 7 : 0;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *mig) {
    ENTER;
    for (int i = 0; i < count; i++) {
        if (migs[0][i].gpu != gpu->id || (unsigned)migs[0][i].index != index) continue;
        handle_of(i, mig);
        return leave(result);
    }
    return leave(NVML_ERROR_NOT_FOUND);
}

EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device) {
    char uuid[80];
    gpu_t *gpu;
    nvmlReturn_t result = enter_device(__func__, mig, &gpu);
    if (result == NVML_SUCCESS && mig_of(mig) == NULL) result = NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS) return leave(result);
    uuid_of(gpu, uuid, sizeof(uuid));
    leave(result);
    return nvmlDeviceGetHandleByUUID(uuid, device);
}

// OF_MIG starts a function of a MIG device.
#define OF_MIG                             \
    ENTER;                                 \
    const mig_t *mig = mig_of(device);     \
    if (mig == NULL) return leave(NVML_ERROR_INVALID_ARGUMENT)

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id) {
    OF_MIG;
    *id = (unsigned)mig->gi;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id) {
    OF_MIG;
    *id = (unsigned)mig->ci;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes) {
    OF_MIG;
    memset(attributes, 0, sizeof(*attributes));
    attributes->memorySizeMB = 9856;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    ENTER;
    memset(memory, 0, sizeof(*memory));
    memory->total = 80ULL << 30;
    return leave(result);
}

// A handle of an instance is that of its MIG device. As from the driver, it needs privileges: NVML_ERROR_NO_PERMISSION is a fault
// that a test sets.
static mig_t *instance(const gpu_t *gpu, unsigned gi) {
    for (int i = 0; i < count; i++)
        if (migs[0][i].gpu == gpu->id && (unsigned)migs[0][i].gi == gi) return &migs[0][i];
    return NULL;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *gi) {
    ENTER;
    gi->handle = (void *)instance(gpu, id);
    return leave(gi->handle == NULL ? NVML_ERROR_NOT_FOUND : result);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t gi, nvmlGpuInstanceInfo_t *info) {
    nvmlReturn_t result = enter(__func__, ANY);
    memset(info, 0, sizeof(*info));
    info->id = (unsigned)((mig_t *)(void *)gi.handle)->gi;
    info->profileId = GI_PROFILE;
    info->placement.start = (unsigned)((mig_t *)(void *)gi.handle)->gi % 7;
    info->placement.size = 1;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t gi, unsigned id, nvmlComputeInstance_t *ci) {
    nvmlReturn_t result = enter(__func__, ANY);
    (void)id;
    ci->handle = (void *)gi.handle;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t ci, nvmlComputeInstanceInfo_t *info) {
    nvmlReturn_t result = enter(__func__, ANY);
    memset(info, 0, sizeof(*info));
    info->id = (unsigned)((mig_t *)(void *)ci.handle)->ci;
    info->profileId = CI_PROFILE;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned profile, nvmlGpuInstanceProfileInfo_t *info) {
    ENTER;
    if (profile > NVML_GPU_INSTANCE_PROFILE_2_SLICE_REV1) return leave(NVML_ERROR_INVALID_ARGUMENT); // as a driver that knows no more
    if (profile != NVML_GPU_INSTANCE_PROFILE_1_SLICE) return leave(NVML_ERROR_NOT_SUPPORTED);
    memset(info, 0, sizeof(*info));
    info->id = GI_PROFILE;
    info->multiprocessorCount = 16;
    info->copyEngineCount = info->decoderCount = info->jpegCount = 1;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t gi, unsigned profile, unsigned engine,
                                                                 nvmlComputeInstanceProfileInfo_t *info) {
    nvmlReturn_t result = enter(__func__, ANY);
    (void)gi;
    if (profile != NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE || engine != 0) return leave(NVML_ERROR_NOT_SUPPORTED);
    memset(info, 0, sizeof(*info));
    info->id = CI_PROFILE;
    return leave(result);
}

static int command(const char *line, char *reply, size_t room) {
    (void)reply, (void)room;
    mig_t m;
    if (strcmp(line, "mig off") == 0) {
        count = 0;
        return 1;
    }
    if (sscanf(line, "mig %u %d %d %d", &m.gpu, &m.index, &m.gi, &m.ci) != 4 || m.gpu >= MAX_GPUS || count == MAX_MIG) return 0;
    migs[0][count++] = m;
    return 1;
}

static void reset(void) { count = 0; }

__attribute__((constructor)) static void begin(void) {
    add_command(command);
    on_reset(reset);
}
