// The scripted libnvidia-ml.so.1: what is fixed. Commands:
//
//   brand GPU N            an nvmlBrandType_t; 14 at the start, NVML_BRAND_NVIDIA
//   addressing GPU N       an nvmlDeviceAddressingModeType_t; 1 at the start, HMM. Drivers before 575 have no such function.
//   fabric GPU N           an nvmlGpuFabricState_t; 0 at the start, not supported. The cluster of a complete one is that of TestProperties, the
//                          clique the number of the GPU.

#include "libnvidia-ml.h"

#include <stdlib.h>

static unsigned brand[MAX_GPUS], addressing[MAX_GPUS], fabric[MAX_GPUS];

EXPORT nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, nvmlBrandType_t *type) {
    ENTER;
    *type = (nvmlBrandType_t)brand[gpu->id];
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceGetAddressingMode(nvmlDevice_t device, nvmlDeviceAddressingMode_t *mode) {
    ENTER;
    if (atoi(state.driver) < 575) return leave(NVML_ERROR_FUNCTION_NOT_FOUND);
    if (mode->version != nvmlDeviceAddressingMode_v1) return leave(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    mode->value = addressing[gpu->id];
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned length) {
    ENTER;
    snprintf(serial, length, "165%010u", gpu->id);
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info) {
    ENTER;
    if (fabric[gpu->id] == NVML_GPU_FABRIC_STATE_NOT_SUPPORTED) return leave(NVML_ERROR_NOT_SUPPORTED);
    for (int i = 0; i < NVML_GPU_FABRIC_UUID_LEN; i++) info->clusterUuid[i] = (unsigned char)(16 * (i % 10) + i % 10);
    info->status = NVML_SUCCESS, info->state = (unsigned char)fabric[gpu->id], info->cliqueId = gpu->id;
    return leave(result);
}

static int command(const char *line, char *reply, size_t room) {
    (void)reply, (void)room;
    unsigned gpu, n;
    if (sscanf(line, "brand %u %u", &gpu, &n) == 2 && gpu < MAX_GPUS) brand[gpu] = n;
    else if (sscanf(line, "addressing %u %u", &gpu, &n) == 2 && gpu < MAX_GPUS) addressing[gpu] = n;
    else if (sscanf(line, "fabric %u %u", &gpu, &n) == 2 && gpu < MAX_GPUS) fabric[gpu] = n;
    else return 0;
    return 1;
}

static void reset(void) {
    for (int i = 0; i < MAX_GPUS; i++) brand[i] = NVML_BRAND_NVIDIA, addressing[i] = NVML_DEVICE_ADDRESSING_MODE_HMM, fabric[i] = 0;
}

__attribute__((constructor)) static void begin(void) {
    add_command(command);
    on_reset(reset);
}
