// Part of a scripted libdcgm.so.4 with eight GPUs. A program outside says what happens to them with lines that it appends to
// a file; up to "ready" they are read before the library is loaded, so that what they say is so from the start.

#define _GNU_SOURCE // pthread_setname_np
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#include "libdcgm.h"

enum { GPU = 1, ALWAYS = -1 }; // dcgm_fields.h

extern script_table_t script_table;
static int blind;
static const char *trap = "none"; // the call that hangs or fails, if it is another than "hung" and "dead" have

static long long now(void) { // no two are the same
    static long long last;
    struct timeval t;
    gettimeofday(&t, NULL);
    long long us = t.tv_sec * 1000000LL + t.tv_usec;
    return last = us > last ? us : last + 1;
}

static void number(unsigned gpu, unsigned field, long long n) {
    script_table.value(GPU, gpu, field, 'i', 0, now(), blind ? 0x7ffffffffffffff0 : n, 0, ""); // DCGM_INT64_BLANK
}
static void text(unsigned gpu, unsigned field, const char *s) {
    script_table.value(GPU, gpu, field, 's', 0, now(), 0, 0, blind ? "<<<NULL>>>" : s); // DCGM_STR_BLANK
}

static void measure(void) {
    static const unsigned health[] = { 67, 395, 396, 1507, 1523 };
    char s[64];
    for (unsigned i = 0; i < 8; i++) {
        snprintf(s, sizeof(s), "GPU-%08u-0000-0000-0000-000000000000", i);
        text(i, 54, s);
        snprintf(s, sizeof(s), "00000000:%02X:00.0", 0x10 + i);
        text(i, 57, s);
        text(i, 50, "NVIDIA H100 80GB HBM3");
        number(i, 52, i);
        number(i, 150, 40 + i);
        for (unsigned f = 0; f < sizeof(health) / sizeof(health[0]); f++) number(i, health[f], 0);
    }
}

static void obey(const char *line) {
    unsigned gpu;
    int n;
    if (sscanf(line, "status %u %d", &gpu, &n) == 2) script_table.entity(GPU, gpu, n);
    else if (sscanf(line, "xid %u %d", &gpu, &n) == 2) {
        long long at = now();
        script_table.row(GPU, gpu, 0, at, n);
        script_table.value(GPU, gpu, 230, 'i', 0, at, n, 0, ""); // DCGM_FI_DEV_XID_ERROR
    } else if (strcmp(line, "dead\n") == 0) script_table.fail("*", -21, ALWAYS); // DCGM_ST_CONNECTION_NOT_VALID
    else if (strcmp(line, "hung\n") == 0) script_table.hang("dcgmEntitiesGetLatestValues");
    else if (strcmp(line, "blind\n") == 0) blind = 1, measure();
    else if (strcmp(line, "detached\n") == 0) state.detached = 1;
    else if (strcmp(line, "refuse\n") == 0) script_table.fail("dcgmDetachDriver", -11, 1), trap = "refuse"; // DCGM_ST_TIMEOUT
    else if (strcmp(line, "trap\n") == 0) script_table.hang("dcgmDetachDriver"), trap = "hang";
    else if (strcmp(line, "up\n") == 0) blind = 0, measure(), script_table.fail("", 0, 0), script_table.release(), trap = "none";
    else fprintf(stderr, "libdcgm: not understood: %s", line), abort();
}

// tell writes what the library is, if that has changed: so others see whether it was let go of.
static void tell(void) {
    static char last[64];
    char text[64], path[300], next[310];
    pthread_mutex_lock(&state.lock);
    snprintf(text, sizeof(text), "connected %d detached %d trap %s\n", state.connected, state.detached, trap);
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
        while (fgets(line, sizeof(line), script) != NULL) obey(line);
        clearerr(script);
        tell();
        if (i % 30 == 0) measure();
        usleep(10000);
    }
    return NULL;
}

__attribute__((constructor)) static void begin(void) {
    char line[64], uuid[64];
    pthread_t thread;
    const char *path = getenv("CHAOS_DCGM");
    FILE *script = path ? fopen(path, "re") : NULL;
    if (script == NULL) perror("CHAOS_DCGM"), abort();
    for (unsigned i = 0; i < 8; i++) {
        snprintf(uuid, sizeof(uuid), "GPU-%08u-0000-0000-0000-000000000000", i); // known of a lost one too
        script_table.instance(GPU, i, 0, 0, uuid, 0, 0);
    }
    measure();
    while (fgets(line, sizeof(line), script) != NULL && strcmp(line, "ready\n") != 0) obey(line);
    if (pthread_create(&thread, NULL, follow, script) == 0) pthread_setname_np(thread, "script"); // e2e/bench leaves it out
}
