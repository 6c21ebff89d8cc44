//go:build cgo && linux

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "waiter.h"

enum { SUCCESS = 0, TIMEOUT = 10 }; // nvml.h: nvmlReturn_t

int nvmlEventSetWait_v2(void *set, gna_nvml_event_t *data, unsigned timeout_ms); // symbols.c defines it

struct gna_nvml_waiter {
    void *set;
    unsigned timeout_ms;
    int fd;
    atomic_int stop;
};

static void *wait_for_events(void *arg) {
    gna_nvml_waiter_t *w = arg;
    int fd = w->fd;
    gna_nvml_result_t r;
    do {
        memset(&r, 0, sizeof(r));
        r.result = nvmlEventSetWait_v2(w->set, &r.event, w->timeout_ms);
        ssize_t n;
        while ((n = write(fd, &r, sizeof(r))) < 0 && errno == EINTR) {} // at most PIPE_BUF, so it is written whole
        if (n < 0) break;
    } while (!atomic_load(&w->stop) && (r.result == SUCCESS || r.result == TIMEOUT));
    close(fd); // from here on the caller may free w
    return NULL;
}

gna_nvml_waiter_t *gna_nvml_wait(void *set, unsigned timeout_ms, int fd) {
    gna_nvml_waiter_t *w = calloc(1, sizeof(*w));
    if (w == NULL) {
        close(fd);
        return NULL;
    }
    w->set = set;
    w->timeout_ms = timeout_ms;
    w->fd = fd;
    sigset_t all, before; // signals are for Go's threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    int failed = pthread_create(&thread, NULL, wait_for_events, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        close(fd);
        free(w);
        return NULL;
    }
    pthread_detach(thread);
    return w;
}

void gna_nvml_stop(gna_nvml_waiter_t *w) { atomic_store(&w->stop, 1); }
