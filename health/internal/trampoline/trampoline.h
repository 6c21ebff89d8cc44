// Defines C functions of a library that the program loads while it runs.
//
// NVIDIA's Go bindings leave every function of their library undefined, so that the dynamic linker resolves it at the first
// call. That has consequences that Go code cannot handle: a call before the library is loaded, or of a function that an older
// library lacks, ends the process with code 127; a toolchain that links with "-z now" (Ubuntu's) makes a program that does
// not start without the library; and `go build` accepts no "-z lazy" from a package. So FORWARD defines each function as a
// jump through a pointer. It points to the function `missing`, which returns "not found", until the library is loaded; then
// BIND sets it to the library's function. The symbols are hidden, so that the library's own calls stay inside the library.

#ifndef GNA_TRAMPOLINE_H
#define GNA_TRAMPOLINE_H

#include <dlfcn.h> // with _GNU_SOURCE
#include <link.h>
#include <stddef.h>
#include <string.h>

#if defined(__x86_64__)
#define JUMP(name) "\tendbr64\n\tjmp *gna_" #name "(%rip)\n"
#elif defined(__aarch64__) // the ABI reserves x16 for such jumps; hint 34 is "bti c"
#define JUMP(name) "\thint #34\n\tadrp x16, gna_" #name "\n\tldr x16, [x16, #:lo12:gna_" #name "]\n\tbr x16\n"
#else
#error "NVIDIA's libraries exist for amd64 and arm64 only"
#endif

#define FORWARD(name, missing)                                                                           \
    __attribute__((used, visibility("hidden"))) void *gna_##name = (void *)missing;                      \
    __asm__(".text\n\t.balign 16\n\t.globl " #name "\n\t.hidden " #name "\n\t.type " #name               \
            ", %function\n" #name ":\n" JUMP(name) "\t.size " #name ", .-" #name "\n");

#define BIND(library, name)                                                                              \
    {                                                                                                    \
        void *found = dlsym(library, #name);                                                             \
        if (found != NULL) gna_##name = found;                                                           \
    }

// open_library opens a library for the lifetime of the process. It returns NULL, or an error that the caller must free.
static char *open_library(const char *name, void **library) {
    void *opened = dlopen(name, RTLD_LAZY | RTLD_GLOBAL);
    if (opened == NULL) {
        const char *reason = dlerror();
        return strdup(reason != NULL ? reason : name);
    }
    *library = opened;
    return NULL;
}

// library_path returns the path of a library, or "" if it is not open.
static const char *library_path(void *library) {
    struct link_map *map;
    if (library == NULL || dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) return "";
    return map->l_name;
}

#endif
