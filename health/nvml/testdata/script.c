// The scripted libnvidia-ml.so.1: the commands that control it. A test in the same process calls nvml_script; another process sends
// lines to the unix socket $NVML_SCRIPT and reads one line of reply to each, "ok" if the command has none. The library starts with
// $NVML_SCRIPT_GPUS GPUs, or 8, and with driver $NVML_SCRIPT_DRIVER, or 580.95.05.
//
//   reset                                 the state at the start, except for the initialization
//   gpus N                                the driver has the GPUs 0 to N-1
//   absent GPU | present GPU              the driver does not list, or lists, the GPU
//   lost GPU | back GPU
//   supports GPU MASK                     the types of events that it supports
//   action GPU N                          its recovery action
//   event GPU TYPE DATA GI CI [TIMES]     GI and CI are -1 for none
//   system TYPE ID                        a system event
//   unload | load                         the driver
//   driver VERSION                        its version
//   fail FUNCTION GPU CODE TIMES          GPU is -1 for any; TIMES is -1 for always
//   hang FUNCTION GPU                     its calls block until `release`
//   release                               end all hangs and failures
//   calls FUNCTION                        reply: their number
//   inits | sets | hanging                reply: their number
//   await COMMAND... N                    wait until the reply of a command is at least N
//   await0 COMMAND...                     wait until the reply of a command is 0

#define _GNU_SOURCE // pthread_setname_np
#include "libnvidia-ml.h"

#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

// The types of nvml.h's nvmlEventTypeAll that a Hopper GPU with a driver of 2026 may support.
#define ALL_TYPES 0xffffULL

state_t state = { .lock = PTHREAD_MUTEX_INITIALIZER };

static command_t added[8];
static void (*resets[8])(void);

void add_command(command_t command) {
    for (int i = 0; i < 8; i++)
        if (added[i] == NULL) {
            added[i] = command;
            return;
        }
    abort();
}

void on_reset(void (*reset)(void)) {
    for (int i = 0; i < 8; i++)
        if (resets[i] == NULL) {
            resets[i] = reset;
            return;
        }
    abort();
}

static void set_gpus(int n) {
    for (int i = 0; i < MAX_GPUS; i++)
        state.gpu[i] = (gpu_t){ .present = i < n, .id = (unsigned)i, .supported = ALL_TYPES };
}

static void reset(void) {
    const char *gpus = getenv("NVML_SCRIPT_GPUS");
    set_gpus(gpus != NULL ? atoi(gpus) : 8);
    const char *driver = getenv("NVML_SCRIPT_DRIVER");
    snprintf(state.driver, sizeof(state.driver), "%s", driver != NULL ? driver : "580.95.05");
    state.unloaded = state.faults = state.counts = 0;
    for (int i = 0; i < 8 && resets[i] != NULL; i++) resets[i]();
}

static void add_fault(fault_t fault) {
    if (state.faults == MAX_FAULTS) abort();
    state.fault[state.faults++] = fault;
}

static int count_sets(void) {
    int n = 0;
    for (int i = 0; i < MAX_SETS; i++) n += state.set[i].used;
    return n;
}

static int apply(const char *line, char *reply, size_t room);

// await waits until the reply of a command is at least n, or 0 if n is 0.
static int await(const char *command, long n, char *reply, size_t room) {
    for (;;) {
        if (!apply(command, reply, room)) return 0;
        if (n == 0 ? atol(reply) == 0 : atol(reply) >= n) return 1;
        pthread_cond_wait(&state.changed, &state.lock);
    }
}

static int apply(const char *line, char *reply, size_t room) {
    fault_t fault = { 0 };
    event_t event;
    unsigned gpu, number;
    unsigned long long mask;
    int n, gi, ci, times = 1;
    char text[128];
    if (strcmp(line, "reset") == 0) reset();
    else if (sscanf(line, "gpus %d", &n) == 1 && n <= MAX_GPUS) set_gpus(n);
    else if (sscanf(line, "absent %u", &gpu) == 1 && gpu < MAX_GPUS) state.gpu[gpu].present = 0;
    else if (sscanf(line, "present %u", &gpu) == 1 && gpu < MAX_GPUS) state.gpu[gpu].present = 1;
    else if (sscanf(line, "lost %u", &gpu) == 1 && gpu < MAX_GPUS) state.gpu[gpu].lost = 1;
    else if (sscanf(line, "back %u", &gpu) == 1 && gpu < MAX_GPUS) state.gpu[gpu].lost = 0;
    else if (sscanf(line, "supports %u %lli", &gpu, (long long *)&mask) == 2 && gpu < MAX_GPUS) state.gpu[gpu].supported = mask;
    else if (sscanf(line, "action %u %u", &gpu, &number) == 2 && gpu < MAX_GPUS) state.gpu[gpu].recovery_action = number;
    else if (sscanf(line, "event %u %lli %llu %d %d %d", &event.gpu, (long long *)&event.type, &event.data, &gi, &ci, &times) >= 5 &&
             event.gpu < MAX_GPUS)
        for (event.gi = (unsigned)gi, event.ci = (unsigned)ci; times > 0; times--) record(event);
    else if (sscanf(line, "system %lli %u", (long long *)&event.type, &event.gpu) == 2) record_system(event);
    else if (sscanf(line, "driver %31s", state.driver) == 1) return 1;
    else if (strcmp(line, "unload") == 0) state.unloaded = 1;
    else if (strcmp(line, "load") == 0) state.unloaded = 0, state.load++;
    else if (sscanf(line, "fail %63s %d %d %d", fault.function, &fault.gpu, &fault.code, &fault.times) == 4) add_fault(fault);
    else if (sscanf(line, "hang %63s %d", fault.function, &fault.gpu) == 2) fault.hangs = 1, add_fault(fault);
    else if (strcmp(line, "release") == 0) state.faults = 0;
    else if (sscanf(line, "calls %63s", text) == 1) {
        long calls = 0;
        for (int i = 0; i < state.counts; i++)
            if (strcmp(state.count[i].name, text) == 0) calls = state.count[i].calls;
        snprintf(reply, room, "%ld", calls);
    } else if (strcmp(line, "inits") == 0) snprintf(reply, room, "%d", state.inits);
    else if (strcmp(line, "sets") == 0) snprintf(reply, room, "%d", count_sets());
    else if (strcmp(line, "hanging") == 0) snprintf(reply, room, "%d", state.hanging);
    else if (strncmp(line, "await ", 6) == 0 && strrchr(line, ' ') > line + 6) {
        snprintf(text, sizeof(text), "%.*s", (int)(strrchr(line, ' ') - line - 6), line + 6);
        return await(text, atol(strrchr(line, ' ')), reply, room);
    } else if (strncmp(line, "await0 ", 7) == 0) return await(line + 7, 0, reply, room);
    else {
        for (int i = 0; i < 8 && added[i] != NULL; i++)
            if (added[i](line, reply, room)) return 1;
        return 0;
    }
    return 1;
}

// nvml_script runs a command. It returns 0 if there is no such command.
EXPORT int nvml_script(const char *line, char *reply, size_t room) {
    pthread_mutex_lock(&state.lock);
    snprintf(reply, room, "ok");
    int ok = apply(line, reply, room);
    pthread_cond_broadcast(&state.changed);
    pthread_mutex_unlock(&state.lock);
    return ok;
}

static void *serve(void *listener) {
    char line[256], reply[256];
    for (;;) {
        int connection = accept((int)(long)listener, NULL, NULL);
        FILE *f = connection < 0 ? NULL : fdopen(connection, "r+");
        if (f == NULL) continue;
        while (fgets(line, sizeof(line), f) != NULL) {
            line[strcspn(line, "\n")] = 0;
            if (!nvml_script(line, reply, sizeof(reply))) fprintf(stderr, "libnvidia-ml: unknown command: %s\n", line), abort();
            if (dprintf(connection, "%s\n", reply) < 0) break;
        }
        fclose(f);
    }
    return NULL;
}

__attribute__((constructor(101))) static void begin(void) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&state.changed, &monotonic);
    reset();
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    const char *path = getenv("NVML_SCRIPT");
    if (path == NULL) return;
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    unlink(path);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof(address)) != 0 || listen(listener, 8) != 0) perror(path), abort();
    pthread_t thread;
    if (pthread_create(&thread, NULL, serve, (void *)(long)listener) == 0) pthread_setname_np(thread, "script"); // e2e/agent/bench excludes it
}
