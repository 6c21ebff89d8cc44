// A thread that waits for events and writes them to a pipe.

#ifndef GNA_NVML_WAITER_H
#define GNA_NVML_WAITER_H

// gna_nvml_event_t is nvml.h's nvmlEventData_t.
typedef struct {
    void *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} gna_nvml_event_t;

// gna_nvml_result_t is what one call returned.
typedef struct {
    gna_nvml_event_t event;
    int result;
} gna_nvml_result_t;

typedef struct gna_nvml_waiter gna_nvml_waiter_t;

// gna_nvml_wait starts a thread that waits for the events of a set and writes each result to fd, also that none arrived within
// timeout_ms. The thread ends after gna_nvml_stop or a failure, and closes fd as its last action; then the caller frees the waiter.
// It returns NULL if no thread starts; fd is closed then too.
gna_nvml_waiter_t *gna_nvml_wait(void *set, unsigned timeout_ms, int fd);

// gna_nvml_stop makes the thread end once its call has returned.
void gna_nvml_stop(gna_nvml_waiter_t *w);

#endif
