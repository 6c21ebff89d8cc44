// Declarations shared by the parts of the scripted libnvidia-ml.so.1.

#ifndef LIBNVIDIA_ML_H
#define LIBNVIDIA_ML_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "nvml.h"

#define EXPORT __attribute__((visibility("default")))
#define HIDDEN __attribute__((visibility("hidden")))

#define MAX_GPUS 16
#define MAX_SETS 64
#define MAX_LOADS 16 // of the driver, with different handles
#define MAX_FAULTS 16
#define ANY (-1) // GPU

// gpu_t is a GPU of the driver.
typedef struct {
    int present, lost;
    unsigned id; // its place in state.gpu, from which UUID, PCI bus ID and minor follow
    unsigned long long supported; // types of events
    unsigned recovery_action;
} gpu_t;

typedef struct {
    unsigned gpu;
    unsigned long long type, data;
    unsigned gi, ci;
} event_t;

// set_t is a set of events, with a queue of its own.
typedef struct {
    int used, unusable, waiting, is_system;
    unsigned load;
    unsigned long long types[MAX_GPUS]; // registered; of a system set the first only
    nvmlDevice_t handle[MAX_GPUS];      // that they were registered with
    event_t *event;
    int head, tail, room;
} set_t;

// fault_t makes a function fail or hang, for one GPU or ANY.
typedef struct {
    char function[64];
    int gpu, code, times; // times < 0: always
    int hangs;
} fault_t;

typedef struct {
    char name[64];
    long calls;
} count_t;

typedef struct {
    pthread_mutex_t lock; // guards everything below
    pthread_cond_t changed;
    int inits;
    unsigned load;    // counts the loads of the driver
    unsigned seen;    // load at the first Init
    int unloaded;
    char driver[32]; // its version
    gpu_t gpu[MAX_GPUS];
    set_t set[MAX_SETS];
    fault_t fault[MAX_FAULTS];
    int faults, hanging;
    count_t count[128];
    int counts;
} state_t;

extern state_t state HIDDEN;

// enter counts a call, blocks if the test makes it hang, and returns the code that it must fail with. It acquires the lock; leave
// releases it. gpu is ANY for calls without a GPU.
nvmlReturn_t enter(const char *function, int gpu) HIDDEN;
nvmlReturn_t fault_of(const char *function, int gpu) HIDDEN;
nvmlReturn_t leave(nvmlReturn_t result) HIDDEN;

// enter_device is enter for a function of a device. It sets *gpu, of a MIG device to its parent, and fails if the handle is invalid or the GPU is lost.
nvmlReturn_t enter_device(const char *function, nvmlDevice_t handle, gpu_t **gpu) HIDDEN;

// ENTER starts a function of `device`.
#define ENTER                                                      \
    gpu_t *gpu;                                                    \
    nvmlReturn_t result = enter_device(__func__, device, &gpu);    \
    if (result != NVML_SUCCESS) return leave(result)

// mig_t is a MIG device: a compute instance.
typedef struct {
    int index, gi, ci;
    unsigned gpu;
} mig_t;

// mig_of returns the MIG device of a handle of the loaded driver, or NULL.
mig_t *mig_of(nvmlDevice_t handle) HIDDEN;
// mig_by_uuid finds the handle of a MIG device.
int mig_by_uuid(const char *uuid, nvmlDevice_t *device) HIDDEN;
void mig_uuid(const mig_t *mig, char *uuid, unsigned length) HIDDEN;
int is_partitioned(const gpu_t *gpu) HIDDEN;

void uuid_of(const gpu_t *gpu, char *uuid, unsigned length) HIDDEN;

// record adds an event to all sets that have registered its type.
void record(event_t event) HIDDEN;
void record_system(event_t event) HIDDEN;

// A command controls the library: see script.c. It returns 0 if the line is not its own; a reply is optional.
typedef int (*command_t)(const char *line, char *reply, size_t room);

// add_command is for the constructors of files that have commands of their own. A command is called with the lock held.
void add_command(command_t command) HIDDEN;
// on_reset is for state of their own that `reset` clears.
void on_reset(void (*reset)(void)) HIDDEN;

#endif
