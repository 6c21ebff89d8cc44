//go:build cgo && linux

#include <stdlib.h> // defines __GLIBC__

#ifdef __GLIBC__
#include <malloc.h>
#include <string.h>

// reserve_gap leaves a free megabyte at the start of the heap, for small allocations. One that is made during a read of values
// would otherwise follow the message at the end of the heap, and others would later use a part of the space that the message has
// left, so that the next message needs as much again. Unused pages of the gap take no memory. glibc maps blocks of 128 KiB and
// more elsewhere.
static void reserve_gap(void) {
    enum { BLOCKS = 9, SIZE = 120 << 10 };
    void *block[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) block[i] = malloc(SIZE);
    // This block stays, or the gap would be part of the heap's end. The compiler may not omit it.
    __asm__ volatile("" : : "r"(malloc(1)));
    for (int i = 0; i < BLOCKS; i++) free(block[i]);
}

// use_one_arena makes glibc serve all threads from one arena, unless the operator has set their number. glibc gives each thread
// an arena, up to 8 per processor. libdcgm allocates a message of megabytes, in the thread that calls it, for each read of
// values (OBSERVED.md#messages), and its arena keeps the memory. Go makes the calls from ever more threads, so memory would grow with the
// processors of the node and with time. The agent's calls follow one another; few threads wait for the one lock.
//
// It is a constructor because Go starts threads before main: an arena that exists stays in use, whatever the limit.
__attribute__((constructor)) static void use_one_arena(void) {
    const char *tunables = getenv("GLIBC_TUNABLES");
    if (getenv("MALLOC_ARENA_MAX") != NULL || (tunables != NULL && strstr(tunables, "glibc.malloc.arena_max=") != NULL)) return;
    mallopt(M_ARENA_MAX, 1);
    reserve_gap();
}
#endif
