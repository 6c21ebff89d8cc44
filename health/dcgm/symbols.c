//go:build cgo && linux

// This file defines DCGM's functions in this program.
//
// go-dcgm leaves every DCGM function undefined, so that the dynamic linker resolves it at the first call. That has
// consequences that Go code cannot handle: a call before the library is loaded, or of a function that an older library
// lacks, ends the process with code 127; a toolchain that links with "-z now" (Ubuntu's) makes a program that does not
// start without libdcgm; and `go build` accepts no "-z lazy" from a package. So each function here is a jump through a
// pointer. It points to a function that returns "not found" until the library is loaded, then to the library's function.
// The symbols are hidden, so that libdcgm's own calls stay inside libdcgm.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "symbol_list.h" // generated: every function that go-dcgm calls
#include "symbols.h"

static int no_result(void) { return -20; } // DCGM_ST_FUNCTION_NOT_FOUND
static void *no_pointer(void) { return NULL; }
static const char *no_text(void) { return "libdcgm is not loaded"; }

#if defined(__x86_64__)
#define JUMP(name) "\tendbr64\n\tjmp *gna_" #name "(%rip)\n"
#elif defined(__aarch64__) // the ABI reserves x16 for such jumps; hint 34 is "bti c"
#define JUMP(name) "\thint #34\n\tadrp x16, gna_" #name "\n\tldr x16, [x16, #:lo12:gna_" #name "]\n\tbr x16\n"
#else
#error "DCGM exists for amd64 and arm64 only"
#endif

#define FORWARD(name, missing)                                                                           \
    __attribute__((used, visibility("hidden"))) void *gna_##name = (void *)missing;                      \
    __asm__(".text\n\t.balign 16\n\t.globl " #name "\n\t.hidden " #name "\n\t.type " #name               \
            ", %function\n" #name ":\n" JUMP(name) "\t.size " #name ", .-" #name "\n");
#define FORWARD_INT(name) FORWARD(name, no_result)
#define FORWARD_POINTER(name) FORWARD(name, no_pointer)
#define FORWARD_TEXT(name) FORWARD(name, no_text)
RETURNING_INT(FORWARD_INT)
RETURNING_POINTER(FORWARD_POINTER)
RETURNING_TEXT(FORWARD_TEXT)

static void *library;

// go-dcgm does not export its connection, which gna_read_peers needs. So these functions record it.
static uintptr_t connection;
static int (*start_embedded)(int mode, uintptr_t *handle);
static int (*connect_v2)(const char *address, void *params, uintptr_t *handle);

static int recorded_start_embedded(int mode, uintptr_t *handle) {
    int result = start_embedded(mode, handle);
    if (result == 0) connection = *handle;
    return result;
}

static int recorded_connect_v2(const char *address, void *params, uintptr_t *handle) {
    int result = connect_v2(address, params, handle);
    if (result == 0) connection = *handle;
    return result;
}

char *gna_load(const char *name) {
    void *opened = dlopen(name, RTLD_LAZY | RTLD_GLOBAL);
    if (opened == NULL) {
        const char *reason = dlerror();
        return strdup(reason != NULL ? reason : name);
    }
    library = opened;
#define BIND(name)                                                                                       \
    {                                                                                                    \
        void *found = dlsym(library, #name);                                                             \
        if (found != NULL) gna_##name = found;                                                           \
    }
    RETURNING_INT(BIND)
    RETURNING_POINTER(BIND)
    RETURNING_TEXT(BIND)
    start_embedded = gna_dcgmStartEmbedded;
    gna_dcgmStartEmbedded = recorded_start_embedded;
    connect_v2 = gna_dcgmConnect_v2;
    gna_dcgmConnect_v2 = recorded_connect_v2;
    return NULL;
}

const char *gna_path(void) {
    struct link_map *map;
    if (library == NULL || dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) return "";
    return map->l_name;
}

int gna_has(const char *symbol) { return library != NULL && dlsym(library, symbol) != NULL; }

// dcgm_structs.h: dcgmDeviceTopology_v2, and dcgmDeviceTopology_v1 with shorter masks.
#define TOPOLOGY(mask_t)                                                                                 \
    struct {                                                                                             \
        unsigned version;                                                                                \
        unsigned long affinity[8];                                                                       \
        unsigned count;                                                                                  \
        struct {                                                                                         \
            unsigned gpu;                                                                                \
            mask_t path, links;                                                                          \
        } peers[GNA_PEERS];                                                                              \
    }

int gna_read_peers(unsigned gpu, gna_peer_t peers[GNA_PEERS], unsigned *count) {
    TOPOLOGY(uint64_t) topology = { .version = sizeof(topology) | 2 << 24 };
    TOPOLOGY(uint32_t) older = { .version = sizeof(older) | 1 << 24 };
    int (*get)(uintptr_t, unsigned, void *) = gna_dcgmGetDeviceTopology;
    int result = get(connection, gpu, &topology);
    if (result == -12) { // DCGM_ST_VER_MISMATCH (OBSERVED.md#older-topology)
        result = get(connection, gpu, &older);
        topology.count = older.count;
        for (int i = 0; i < GNA_PEERS; i++) {
            topology.peers[i].gpu = older.peers[i].gpu;
            topology.peers[i].path = older.peers[i].path;
        }
    }
    if (result != 0) return result;
    *count = topology.count < GNA_PEERS ? topology.count : GNA_PEERS;
    for (unsigned i = 0; i < *count; i++) peers[i] = (gna_peer_t){ topology.peers[i].gpu, topology.peers[i].path };
    return 0;
}
