// The scripted libnvidia-ml.so.1: processes. Commands:
//
//   process GPU MIG KIND PID MEMORY    a process on the GPU, or on its MIG device with that index; MIG is -1 for none. KIND is
//                                      compute, graphics or mps; MEMORY is in bytes, -1 if the driver does not report it
//   end PID                            the process ends
//   sample GPU PID TIME SM             a sample of utilization; TIME is in microseconds
//   grow                               there is one more sample after each question for their number

#include "libnvidia-ml.h"

#define MAX 64

static struct {
    unsigned gpu, pid;
    int mig;
    char kind[16];
    unsigned long long memory;
} process[MAX];
static struct {
    unsigned gpu, pid, sm;
    unsigned long long time;
} sample[MAX];
static int processes, samples, grows;

// list lists the processes of a GPU, with those of its MIG devices, or of a MIG device.
static nvmlReturn_t list(const char *function, const char *kind, nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos) {
    gpu_t *gpu;
    nvmlReturn_t result = enter_device(function, device, &gpu);
    if (result != NVML_SUCCESS) return leave(result);
    const mig_t *mig = mig_of(device);
    unsigned n = 0;
    for (int i = 0; i < processes; i++) {
        if (process[i].gpu != gpu->id || strcmp(process[i].kind, kind) != 0 || (mig != NULL && process[i].mig != mig->index)) continue;
        if (n < *count)
            infos[n] = (nvmlProcessInfo_t){ .pid = process[i].pid, .usedGpuMemory = process[i].memory,
                                            .gpuInstanceId = 0xFFFFFFFF, .computeInstanceId = 0xFFFFFFFF };
        n++;
    }
    if (n > *count) result = NVML_ERROR_INSUFFICIENT_SIZE;
    *count = n;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos) {
    return list(__func__, "compute", device, count, infos);
}

EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos) {
    return list(__func__, "graphics", device, count, infos);
}

EXPORT nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos) {
    return list(__func__, "mps", device, count, infos);
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *out, unsigned *count,
                                                    unsigned long long since) {
    ENTER;
    if (is_partitioned(gpu)) return leave(NVML_ERROR_NOT_SUPPORTED);
    unsigned n = 0;
    for (int i = 0; i < samples; i++) {
        if (sample[i].gpu != gpu->id || sample[i].time <= since) continue;
        if (out != NULL && n < *count)
            out[n] = (nvmlProcessUtilizationSample_t){ .pid = sample[i].pid, .timeStamp = sample[i].time, .smUtil = sample[i].sm };
        n++;
    }
    if (n == 0) return leave(NVML_ERROR_NOT_FOUND);
    unsigned room = out == NULL ? 0 : *count;
    *count = n - (unsigned)(out == NULL && grows);
    return leave(n > room ? NVML_ERROR_INSUFFICIENT_SIZE : result);
}

static int command(const char *line, char *reply, size_t room) {
    (void)reply, (void)room;
    unsigned pid;
    long long memory;
    if (processes == MAX || samples == MAX) return 0;
    if (sscanf(line, "process %u %d %15s %u %lld", &process[processes].gpu, &process[processes].mig, process[processes].kind,
               &process[processes].pid, &memory) == 5)
        process[processes++].memory = (unsigned long long)memory;
    else if (sscanf(line, "sample %u %u %llu %u", &sample[samples].gpu, &sample[samples].pid, &sample[samples].time,
                    &sample[samples].sm) == 4)
        samples++;
    else if (sscanf(line, "end %u", &pid) == 1) {
        int n = 0;
        for (int i = 0; i < processes; i++)
            if (process[i].pid != pid) process[n++] = process[i];
        processes = n;
    } else if (strcmp(line, "grow") == 0) grows = 1;
    else return 0;
    return 1;
}

static void reset(void) { processes = samples = grows = 0; }

__attribute__((constructor)) static void begin(void) {
    add_command(command);
    on_reset(reset);
}
