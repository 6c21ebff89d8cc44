//go:build cgo && linux

// This file defines NVML's functions in this program: see trampoline.h.

#define _GNU_SOURCE
#include <stddef.h>

#include "../internal/trampoline/trampoline.h"
#include "symbol_list.h" // generated: every function that go-nvml calls
#include "symbols.h"

static int no_result(void) { return 13; } // NVML_ERROR_FUNCTION_NOT_FOUND
static const char *no_text(void) { return "libnvidia-ml is not loaded"; }

#define FORWARD_INT(name) FORWARD(name, no_result)
#define FORWARD_TEXT(name) FORWARD(name, no_text)
RETURNING_INT(FORWARD_INT)
RETURNING_TEXT(FORWARD_TEXT)

static void *library;

char *gna_nvml_load(const char *name) {
    char *reason = open_library(name, &library);
    if (reason != NULL) return reason;
#define BIND_LOADED(name) BIND(library, name)
    RETURNING_INT(BIND_LOADED)
    RETURNING_TEXT(BIND_LOADED)
    return NULL;
}

const char *gna_nvml_path(void) { return library_path(library); }
