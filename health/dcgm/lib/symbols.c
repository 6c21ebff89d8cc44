//go:build cgo && linux

// This file defines DCGM's functions in this program: see trampoline.h.

#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "../../internal/trampoline/trampoline.h"
#include "symbol_list.h" // generated: every function that go-dcgm calls
#include "symbols.h"

static int no_result(void) { return -20; } // DCGM_ST_FUNCTION_NOT_FOUND
static void *no_pointer(void) { return NULL; }
static const char *no_text(void) { return "libdcgm is not loaded"; }

#define FORWARD_INT(name) FORWARD(name, no_result)
#define FORWARD_POINTER(name) FORWARD(name, no_pointer)
#define FORWARD_TEXT(name) FORWARD(name, no_text)
RETURNING_INT(FORWARD_INT)
RETURNING_POINTER(FORWARD_POINTER)
RETURNING_TEXT(FORWARD_TEXT)

static void *library;

// go-dcgm does not export its connection, which the functions below need. So these functions record it.
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
    char *reason = open_library(name, &library);
    if (reason != NULL) return reason;
#define BIND_LOADED(name) BIND(library, name)
    RETURNING_INT(BIND_LOADED)
    RETURNING_POINTER(BIND_LOADED)
    RETURNING_TEXT(BIND_LOADED)
    start_embedded = gna_dcgmStartEmbedded;
    gna_dcgmStartEmbedded = recorded_start_embedded;
    connect_v2 = gna_dcgmConnect_v2;
    gna_dcgmConnect_v2 = recorded_connect_v2;
    return NULL;
}

const char *gna_path(void) { return library_path(library); }

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

// dcgm_structs.h: dcgmFieldValue_v1
typedef struct {
    unsigned version;
    unsigned short field, type;
    int status;
    int64_t at;
    union {
        int64_t number;
        char blob[4096];
    } value;
} field_value_t;

typedef struct {
    gna_row_t *row;
    unsigned count, room;
} rows_t;

static int add_rows(unsigned kind, unsigned id, field_value_t *values, int count, void *to) {
    rows_t *rows = to;
    for (int i = 0; i < count; i++) {
        if (rows->count == rows->room) {
            rows->room = rows->room == 0 ? 64 : 2 * rows->room;
            rows->row = realloc(rows->row, rows->room * sizeof(*rows->row));
            if (rows->row == NULL) abort(); // as Go does
        }
        rows->row[rows->count++] = (gna_row_t){ kind, id, values[i].type, values[i].status, values[i].at, values[i].value.number };
    }
    return 0;
}

int gna_read_rows(uintptr_t group, uintptr_t fields, long long since, gna_row_t **rows, unsigned *count) {
    int (*get)(uintptr_t, uintptr_t, uintptr_t, long long, long long *, void *, void *) = gna_dcgmGetValuesSince_v2;
    rows_t read = { NULL, 0, 0 };
    long long next;
    int result = get(connection, group, fields, since, &next, add_rows, &read);
    *rows = read.row;
    *count = read.count;
    return result;
}
