// The functions of symbols.c that Go calls.

#ifndef GNA_NVML_SYMBOLS_H
#define GNA_NVML_SYMBOLS_H

// gna_nvml_load loads the library for the lifetime of the process and binds NVML's functions to it. It returns NULL, or an
// error that the caller must free.
char *gna_nvml_load(const char *name);

// gna_nvml_path returns the path of the loaded library, or "".
const char *gna_nvml_path(void);

#endif
