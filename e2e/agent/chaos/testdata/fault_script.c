// Part of a scripted libdcgm.so.4 with eight GPUs. Another program appends lines to a file to control the GPUs. The library
// reads the lines up to "ready" when it is loaded, so that they apply from the start.

#define _GNU_SOURCE // pthread_setname_np
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "libdcgm.h"

enum { GPU = 1, GPUS = 8, XID = 230, ALWAYS = -1 }; // dcgm_fields.h: DCGM_FI_DEV_XID_ERROR

extern script_table_t script_table;
static const char *trap = "none"; // whether a detach hangs or fails

// The pace of an engine that measures by itself, once DCGM_PACE has set it. Times are of the monotonic clock in microseconds.
static const long long SECOND = 1000000, JITTER = 50000, LATE = 200; // LATE: by which each period begins later, as threads that sleep do
static unsigned short dice[3]; // seed of erand48
static int paced, apart;       // whether the thread that reads events has a phase of its own
static long long measure_phase, event_phase, measure_at, event_at; // the latest phases, and when each is due next
static struct { unsigned gpu; int xid; } event[64];                 // that the driver has and the engine has not read
static int events;
static FILE *record; // of rows and reads

static long long ahead; // offset of the engine's clock in microseconds
static int empty;       // the list has no GPU
static int lines;       // read so far

static long long now(void) { // increasing, except after a step of the engine's clock
    static long long last;
    struct timeval t;
    gettimeofday(&t, NULL);
    long long us = t.tv_sec * 1000000LL + t.tv_usec;
    return (last = us > last ? us : last + 1) + ahead;
}

static void number(unsigned gpu, unsigned field, long long n) {
    script_table.value(GPU, gpu, field, 'i', 0, now(), n, 0, "");
}
static void real(unsigned gpu, unsigned field, double d) {
    script_table.value(GPU, gpu, field, 'd', 0, now(), 0, d, "");
}
static void text(unsigned gpu, unsigned field, const char *s) {
    script_table.value(GPU, gpu, field, 's', 0, now(), 0, 0, s);
}

// measure_twice samples what DCGM 4.6.1 and 4.7 measure in base units too.
static void measure_twice(unsigned gpu) {
    static const struct {
        unsigned older, base;
        long long value, factor;
    } integers[] = {
        { 100, 1603, 1980, 1000000 }, { 101, 1604, 2619, 1000000 }, // clocks
        { 250, 1625, 81559, 1 << 20 }, { 251, 1626, 500, 1 << 20 }, { 252, 1627, 80508, 1 << 20 }, { 253, 1628, 551, 1 << 20 }, // framebuffer
    };
    for (unsigned i = 0; i < sizeof(integers) / sizeof(integers[0]); i++) {
        number(gpu, integers[i].older, integers[i].value);
        number(gpu, integers[i].base, integers[i].value * integers[i].factor);
    }
    number(gpu, 156, 123456789 + gpu), number(gpu, 1611, (123456789 + gpu) / 1000); // energy
    for (unsigned f = 0; f < 4; f++) { // utilization
        static const unsigned older[] = { 203, 204, 206, 207 };
        number(gpu, older[f], 7 * f + gpu), real(gpu, 1613 + f, (7 * f + gpu) / 100.0);
    }
    number(gpu, 449, 77), number(gpu, 1648, 78848); // NVLink
}

static void measure(void) {
    static const unsigned health[] = { 67, 395, 396, 1507, 1523 };
    char s[64];
    for (unsigned i = 0; i < GPUS && !empty; i++) {
        snprintf(s, sizeof(s), "GPU-%08u-0000-0000-0000-000000000000", i);
        text(i, 54, s);
        snprintf(s, sizeof(s), "00000000:%02X:00.0", 0x10 + i);
        text(i, 57, s);
        text(i, 50, "NVIDIA H100 80GB HBM3");
        number(i, 52, i);
        number(i, 55, i);
        number(i, 63, 9 << 16); // compute capability 9.0
        for (unsigned f = 86; f <= 89; f++) number(i, f, f == 86); // NUMA node 0
        number(i, 150, 40 + i);
        measure_twice(i);
        for (unsigned f = 0; f < sizeof(health) / sizeof(health[0]); f++) number(i, health[f], 0);
    }
}

static void list(void) {
    char uuid[64];
    for (unsigned i = 0; i < GPUS; i++) {
        snprintf(uuid, sizeof(uuid), "GPU-%08u-0000-0000-0000-000000000000", i); // also of a lost GPU
        script_table.instance(GPU, i, 0, 0, uuid, 0, 0);
    }
    empty = 0;
    measure();
}

static void unlist(void) {
    for (unsigned i = 0; i < GPUS; i++) script_table.drop(GPU, i);
    empty = 1;
}

// xid records an XID in the stream, and as the latest value unless that is newer, as after a step back of the clock.
static void xid(unsigned gpu, int n) {
    static long long newest[GPUS];
    long long at = now();
    script_table.row(GPU, gpu, 0, at, n);
    if (at < newest[gpu]) return;
    newest[gpu] = at;
    script_table.value(GPU, gpu, XID, 'i', 0, at, n, 0, "");
}

static long long time_of(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * SECOND + t.tv_nsec / 1000;
}
static long long monotonic(void) { return time_of(CLOCK_MONOTONIC); }

static long long jitter(void) { return (long long)(erand48(dice) * JITTER); }

// move changes the phases, as new watches and a step of the clock do.
static void move(void) {
    measure_phase = event_phase = monotonic() + (long long)(erand48(dice) * SECOND);
    if (apart) event_phase += (long long)(erand48(dice) * SECOND);
    measure_at = measure_phase + jitter();
    event_at = apart ? event_phase + jitter() : measure_at;
}

// read_event reads one event of all GPUs, as the engine's thread does (OBSERVED.md#xid-rate). The record has when the row was there, by
// the machine's clock.
static void read_event(void) {
    if (events == 0) return;
    xid(event[0].gpu, event[0].xid);
    fprintf(record, "row %u %lld\n", event[0].gpu, time_of(CLOCK_REALTIME));
    events--;
    memmove(&event[0], &event[1], (size_t)events * sizeof(event[0]));
}

// keep_pace measures and reads an event when they are due. It returns how long until the next is due.
static long long keep_pace(void) {
    long long now = monotonic();
    if (now >= measure_at) {
        measure();
        measure_phase += SECOND + LATE;
        measure_at = measure_phase + jitter();
    }
    if (now >= event_at) {
        read_event();
        event_phase += SECOND + 2 * LATE;
        event_at = apart ? event_phase + jitter() : measure_at;
    }
    static int calls;
    int n = script_table.calls("dcgmEntitiesGetLatestValues");
    if (n != calls) fprintf(record, "read 0 %lld\n", now);
    calls = n;
    fflush(record);
    long long due = measure_at < event_at ? measure_at : event_at;
    return due > now ? due - now : 0;
}

// set_pace starts the pace: "SEED together" or "SEED apart".
static void set_pace(const char *pace) {
    char path[300];
    int seed = atoi(pace);
    apart = strstr(pace, "apart") != NULL;
    dice[0] = (unsigned short)seed, dice[1] = (unsigned short)(seed >> 16), dice[2] = 0x330e;
    snprintf(path, sizeof(path), "%s.record", getenv("CHAOS_DCGM"));
    record = fopen(path, "we");
    if (record == NULL) perror(path), abort();
    paced = 1;
    move();
}

static void apply_line(const char *line) {
    unsigned gpu;
    int n;
    long long seconds;
    int every;
    lines++;
    if (sscanf(line, "status %u %d", &gpu, &n) == 2) script_table.entity(GPU, gpu, n);
    else if (sscanf(line, "xid %u %d", &gpu, &n) == 2 && gpu < GPUS && !paced) xid(gpu, n);
    else if (sscanf(line, "xid %u %d", &gpu, &n) == 2 && gpu < GPUS && events < 64) event[events].gpu = gpu, event[events++].xid = n;
    else if (strcmp(line, "move\n") == 0) move();
    else if (sscanf(line, "clock %lld", &seconds) == 1) ahead = seconds * 1000000;
    else if (strcmp(line, "empty\n") == 0) unlist();
    else if (strcmp(line, "listed\n") == 0) list();
    else if (strcmp(line, "dead\n") == 0) script_table.fail("*", -21, ALWAYS); // DCGM_ST_CONNECTION_NOT_VALID
    else if (strcmp(line, "hung\n") == 0) script_table.hang("dcgmEntitiesGetLatestValues");
    else if (strcmp(line, "blind\n") == 0) script_table.blind(1);
    else if (strcmp(line, "detached\n") == 0) state.stats.detached = 1;
    else if (strcmp(line, "checksDown\n") == 0) script_table.fail("dcgmHealthCheck", -12, ALWAYS); // DCGM_ST_VER_MISMATCH
    else if (strcmp(line, "refuse\n") == 0) script_table.fail("dcgmDetachDriver", -11, 1), trap = "refuse"; // DCGM_ST_TIMEOUT
    else if (strcmp(line, "trap\n") == 0) script_table.hang("dcgmDetachDriver"), trap = "hang";
    else if (strcmp(line, "up\n") == 0) script_table.blind(0), script_table.fail("", 0, 0), script_table.release(), trap = "none";
    else if (sscanf(line, "message %d", &n) == 1) script_table.message(n);
    else if (sscanf(line, "callers %d %d", &n, &every) == 2) script_table.callers(n, every);
    else fprintf(stderr, "libdcgm: unknown line: %s", line), abort();
}

// write_state writes the library's state to a file if it has changed.
static void write_state(void) {
    static char last[64];
    char text[64], path[300], next[310];
    pthread_mutex_lock(&state.lock);
    snprintf(text, sizeof(text), "connected %d detached %d trap %s lines %d\n", state.connected, state.stats.detached, trap, lines);
    pthread_mutex_unlock(&state.lock);
    if (strcmp(text, last) == 0) return;
    strcpy(last, text);
    snprintf(path, sizeof(path), "%s.is", getenv("CHAOS_DCGM"));
    snprintf(next, sizeof(next), "%s.next", path);
    FILE *f = fopen(next, "we");
    if (f == NULL || fputs(text, f) < 0 || fclose(f) != 0 || rename(next, path) != 0) perror(path), abort();
}

static void *follow(void *script) {
    char line[64];
    for (int i = 0;; i++) {
        while (fgets(line, sizeof(line), script) != NULL) apply_line(line);
        clearerr(script);
        write_state();
        if (paced) {
            long long left = keep_pace();
            usleep((useconds_t)(left < 5000 ? left : 5000));
            continue;
        }
        if (i % 30 == 0) measure();
        usleep(10000);
    }
    return NULL;
}

__attribute__((constructor)) static void begin(void) {
    char line[64];
    pthread_t thread;
    if (getenv("CHAOS_DCGM_VERSION")) script_table.library(getenv("CHAOS_DCGM_VERSION"));
    const char *path = getenv("CHAOS_DCGM");
    FILE *script = path ? fopen(path, "re") : NULL;
    if (script == NULL) perror("CHAOS_DCGM"), abort();
    if (getenv("DCGM_PACE")) set_pace(getenv("DCGM_PACE"));
    list();
    while (fgets(line, sizeof(line), script) != NULL && strcmp(line, "ready\n") != 0) apply_line(line);
    if (pthread_create(&thread, NULL, follow, script) == 0) pthread_setname_np(thread, "script"); // e2e/agent/bench excludes it
}
