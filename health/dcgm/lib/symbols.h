// The functions of symbols.c that Go calls.

#ifndef GNA_SYMBOLS_H
#define GNA_SYMBOLS_H

#include <stdint.h>

// gna_load loads the library for the lifetime of the process and binds DCGM's functions to it. It returns NULL, or an
// error that the caller must free.
char *gna_load(const char *name);

// gna_path returns the path of the loaded library, or "".
const char *gna_path(void);

// gna_has reports whether the loaded library has the function.
int gna_has(const char *symbol);

#define GNA_PEERS 31 // of a GPU (dcgm_structs.h: DCGM_MAX_NUM_DEVICES - 1)

// gna_peer_t is another GPU and the path to it (dcgm_structs.h: dcgmGpuTopologyLevel_t).
typedef struct {
    unsigned gpu;
    unsigned long long path;
} gna_peer_t;

// gna_read_peers reads the peers of a GPU. It returns DCGM's result.
int gna_read_peers(unsigned gpu, gna_peer_t peers[GNA_PEERS], unsigned *count);

// gna_row_t is a sample of field 230 of an entity (dcgm_structs.h: dcgmFieldValue_v1).
typedef struct {
    unsigned kind, id;
    int type, status;
    long long at, value;
} gna_row_t;

// gna_read_rows reads the samples of a group since a time, in microseconds since 1970. It returns DCGM's result. The caller must free
// rows.
int gna_read_rows(uintptr_t group, uintptr_t fields, long long since, gna_row_t **rows, unsigned *count);

#endif
