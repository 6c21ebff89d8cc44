// The scripted libdcgm.so.4: the memory of its messages, and malloc's.

#define _GNU_SOURCE // pthread_setname_np
#include "libdcgm.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

void allocate_message(void) {
    if (state.message == 0) return;
    char *message = malloc((size_t)state.message);
    if (message == NULL) abort();
    memset(message, 0, (size_t)state.message);
    __asm__ volatile("" : : "r"(message) : "memory"); // or the compiler would remove all of it
    free(message);
}

void message(int bytes) {
    pthread_mutex_lock(&state.lock);
    state.message = bytes;
    pthread_mutex_unlock(&state.lock);
}

static void pause_ms(long ms) {
    nanosleep(&(struct timespec){ .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000 }, NULL);
}

static void *caller(void *delay) {
    pause_ms((long)(intptr_t)delay);
    for (;;) {
        pthread_mutex_lock(&state.lock); // the agent's calls follow one another
        allocate_message();
        pthread_mutex_unlock(&state.lock);
        pause_ms(3200);
    }
    return NULL;
}

void callers(int n, int every) {
    for (int i = 0; i < n; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, caller, (void *)((intptr_t)i * every)) != 0) abort();
        pthread_setname_np(thread, "script"); // e2e/agent/bench excludes it
    }
}

int arenas(void) {
    int n = 0;
#ifdef __GLIBC__
    char *xml = NULL;
    size_t length;
    FILE *f = open_memstream(&xml, &length);
    if (f == NULL || malloc_info(0, f) != 0 || fclose(f) != 0) abort();
    for (const char *at = xml; (at = strstr(at, "<heap nr=")) != NULL; at++) n++; // malloc_info(3)
    free(xml);
#endif
    return n;
}

int gap(void) {
    enum { MESSAGE = 8 << 20, BLOCK = 60 << 10 };
    char *volatile message = malloc(MESSAGE);
    free(message); // glibc maps the first one, the others are in the heap (mallopt(3): M_MMAP_THRESHOLD)
    message = malloc(MESSAGE);
    char *volatile block = malloc(BLOCK);
    int precedes = block < message;
    free(block);
    free(message);
    return precedes;
}
