//go:build cgo && linux

// This file defines the functions of libnvidia-sandboxutils that nvcdi refers to. It leaves them undefined, and a toolchain
// that links with "-z now" (Ubuntu's) makes a program that does not start with them. nvcdi's option for that library is off,
// so nothing calls them. They are hidden, so that no library of the driver finds them.

#define UNUSED(name)                                                                                     \
    __attribute__((visibility("hidden"))) int name(void) { return 7; } // NVSANDBOXUTILS_ERROR_FUNCTION_NOT_FOUND
UNUSED(nvSandboxUtilsGetDriverVersion)
UNUSED(nvSandboxUtilsGetFileContent)
UNUSED(nvSandboxUtilsGetGpuResource)
UNUSED(nvSandboxUtilsInit)
UNUSED(nvSandboxUtilsShutdown)
