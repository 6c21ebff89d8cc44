// The functions of symbols.c that library.go calls.

#ifndef GNA_SYMBOLS_H
#define GNA_SYMBOLS_H

// gna_load loads the library for the lifetime of the process and binds DCGM's functions to it. It returns NULL, or an
// error that the caller must free.
char *gna_load(const char *name);

// gna_path returns the path of the loaded library, or "".
const char *gna_path(void);

// gna_has reports whether the loaded library has the function.
int gna_has(const char *symbol);

#endif
