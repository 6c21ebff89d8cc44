// What library.go calls of symbols.c.

#ifndef GNA_SYMBOLS_H
#define GNA_SYMBOLS_H

// gna_load loads the library called name for the life of the process and binds DCGM's functions to it.
// It returns NULL, or why it cannot: a string for the caller to free.
char *gna_load(const char *name);

// gna_path is the file that was loaded, or "".
const char *gna_path(void);

// gna_has reports whether the loaded library has the function.
int gna_has(const char *symbol);

#endif
