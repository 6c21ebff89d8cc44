// The functions of symbols.c that Go calls.

#ifndef GNA_SYMBOLS_H
#define GNA_SYMBOLS_H

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

#endif
