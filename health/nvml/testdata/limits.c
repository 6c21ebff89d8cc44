// The scripted libnvidia-ml.so.1: memory limits and the compute mode. Commands:
//
//   used GPU BYTES CGROUP    the memory that the cgroup's processes use
//   limits GPU CGROUP        reply: its soft and its hard limit, or "none"
//   mode GPU MODE            the compute mode, as a number of nvml.h
//   mode GPU                 reply: the compute mode
//
// Limits exist from driver 615 on: see `driver`. The driver keeps them in the cgroup, so they outlive the process and end with the
// cgroup: here they are in a file of the directory that stands for the cgroup. If the environment variable NVML_SCRIPT_STATE names
// a directory, the compute modes are in files there, and other processes see them.

#include "libnvidia-ml.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define FIRST_DRIVER 615
#define TOTAL (80ULL << 30) // nvmlDeviceGetMemoryInfo

typedef struct {
    unsigned long long soft, hard, used;
} limits_t;

static unsigned long long modes[MAX_GPUS];

// path_of writes the path of a file of a GPU.
static void path_of(char path[1024], const char *dir, const char *name, unsigned gpu) {
    snprintf(path, 1024, "%s/.nvml-%s-%u", dir, name, gpu);
}

// read_numbers and write_numbers return whether they could.
static int read_numbers(const char *path, limits_t *n) {
    FILE *f = fopen(path, "re");
    if (f == NULL) return 0;
    int ok = fscanf(f, "%llu %llu %llu", &n->soft, &n->hard, &n->used) == 3;
    fclose(f);
    return ok;
}

static int write_numbers(const char *path, limits_t n) {
    char next[1032];
    snprintf(next, sizeof(next), "%s.next", path);
    FILE *f = fopen(next, "we");
    if (f == NULL) return 0;
    int ok = fprintf(f, "%llu %llu %llu\n", n.soft, n.hard, n.used) > 0;
    return fclose(f) == 0 && ok && rename(next, path) == 0;
}

#ifndef LACK_MEMORY_LIMITS
static int is_directory(const char *path) {
    struct stat info;
    return path != NULL && stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

// OF_CGROUP starts a function of a GPU and a cgroup.
#define OF_CGROUP                                                                                   \
    ENTER;                                                                                          \
    char path[1024];                                                                                \
    if (atoi(state.driver) < FIRST_DRIVER) return leave(NVML_ERROR_FUNCTION_NOT_FOUND);             \
    if (limits == NULL) return leave(NVML_ERROR_INVALID_ARGUMENT);                                  \
    if (mig_of(device) != NULL) return leave(NVML_ERROR_NOT_SUPPORTED);                             \
    if (!is_directory(limits->nameSpace)) return leave(NVML_ERROR_OPERATING_SYSTEM);                \
    path_of(path, limits->nameSpace, "limits", gpu->id)

EXPORT nvmlReturn_t nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t device, nvmlGetMemoryLimits_v1_t *limits) {
    OF_CGROUP;
    limits_t now;
    if (!read_numbers(path, &now)) return leave(NVML_ERROR_NOT_FOUND);
    limits->softLimit = now.soft, limits->hardLimit = now.hard, limits->currentUsed = now.used;
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t device, nvmlSetMemoryLimits_v1_t *limits) {
    OF_CGROUP;
    limits_t now = { 0 };
    int has_hard = limits->hardLimit != ~0ULL; // NVML_DEVICE_MEMORY_LIMIT_MAX
    if (limits->softLimit > limits->hardLimit || limits->softLimit > TOTAL || (has_hard && limits->hardLimit > TOTAL))
        return leave(NVML_ERROR_INVALID_ARGUMENT);
    read_numbers(path, &now);
    now.soft = limits->softLimit, now.hard = limits->hardLimit;
    return leave(write_numbers(path, now) ? result : NVML_ERROR_OPERATING_SYSTEM);
}
#endif

static void mode_path(char path[1024], unsigned gpu) {
    const char *dir = getenv("NVML_SCRIPT_STATE");
    path[0] = 0;
    if (dir != NULL) path_of(path, dir, "compute-mode", gpu);
}

static unsigned long long mode_of(unsigned gpu) {
    char path[1024];
    limits_t n;
    mode_path(path, gpu);
    if (path[0] == 0) return modes[gpu];
    return read_numbers(path, &n) ? n.soft : NVML_COMPUTEMODE_DEFAULT;
}

static int set_mode(unsigned gpu, unsigned long long mode) {
    char path[1024];
    mode_path(path, gpu);
    modes[gpu] = mode;
    return path[0] == 0 || write_numbers(path, (limits_t){ .soft = mode });
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode) {
    ENTER;
    if (is_partitioned(gpu) && mig_of(device) == NULL) return leave(NVML_ERROR_NOT_SUPPORTED); // "device must be MIG device handle"
    *mode = (nvmlComputeMode_t)mode_of(gpu->id);
    return leave(result);
}

EXPORT nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, nvmlComputeMode_t mode) {
    ENTER;
    if (is_partitioned(gpu)) return leave(NVML_ERROR_NOT_SUPPORTED); // EXCLUSIVE_PROCESS: MIG user guide
    if (mode >= NVML_COMPUTEMODE_COUNT || mode == NVML_COMPUTEMODE_EXCLUSIVE_THREAD) return leave(NVML_ERROR_INVALID_ARGUMENT);
    return leave(set_mode(gpu->id, mode) ? result : NVML_ERROR_UNKNOWN);
}

static int command(const char *line, char *reply, size_t room) {
    char cgroup[200], path[1024];
    unsigned gpu;
    unsigned long long n;
    limits_t now = { .hard = ~0ULL };
    if (sscanf(line, "used %u %llu %199s", &gpu, &n, cgroup) == 3) {
        path_of(path, cgroup, "limits", gpu);
        read_numbers(path, &now);
        now.used = n;
        return write_numbers(path, now);
    }
    if (sscanf(line, "limits %u %199s", &gpu, cgroup) == 2) {
        path_of(path, cgroup, "limits", gpu);
        if (read_numbers(path, &now)) snprintf(reply, room, "%llu %llu", now.soft, now.hard);
        else snprintf(reply, room, "none");
        return 1;
    }
    if (sscanf(line, "mode %u %llu", &gpu, &n) == 2 && gpu < MAX_GPUS) return set_mode(gpu, n);
    if (sscanf(line, "mode %u", &gpu) == 1 && gpu < MAX_GPUS) {
        snprintf(reply, room, "%llu", mode_of(gpu));
        return 1;
    }
    return 0;
}

static void reset(void) {
    if (getenv("NVML_SCRIPT_STATE") == NULL) memset(modes, 0, sizeof(modes));
}

__attribute__((constructor)) static void begin(void) {
    add_command(command);
    on_reset(reset);
}
