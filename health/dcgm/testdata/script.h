// The functions by which a test controls the scripted libdcgm.so.4. The library exports one object of this type,
// script_table; internal/script calls through it.

#ifndef SCRIPT_H
#define SCRIPT_H

// What tests read of the library's state.
typedef struct {
    int detached;           // the engine has detached the driver
    int initialized;
    int leaked;             // number of groups, watches and registrations at the last disconnection
    char address[256];      // of dcgmConnect_v2
    int is_socket;
    int widest;             // maximum number of values requested in one call
    int live;               // number of live reads
    int most_hanging;       // maximum number of calls blocked at the same time
    unsigned systems;       // of dcgmHealthSet
    char log[300];          // the engine's level and file
    long long nanoseconds;  // spent in calls so far
} script_stats_t;

typedef struct {
    const script_stats_t *stats;
    void (*reset)(void);                                    // remove entities, failures and call counts
    void (*entity)(int kind, unsigned id, int status);      // add an entity or set its status
    void (*drop)(int kind, unsigned id);                    // remove an entity
    void (*instance)(int kind, unsigned id, int parentKind, unsigned parent, const char *gpu, unsigned gi, unsigned ci);
    void (*profile)(int kind, unsigned id, unsigned profile, unsigned slices); // of an instance, by the driver's IDs
    void (*value)(int kind, unsigned id, unsigned field, int type, int status, long long at, long long i, double d, const char *s);
    void (*row)(int kind, unsigned id, int status, long long at, long long xid); // add to the stream of field 230
    void (*xid)(int kind, unsigned id, long long at, long long xid); // the same, and the latest value if no row is later
    void (*clock)(long long offset);                        // µs by which the engine's clock is ahead of the times given here
    void (*hold)(int kind, unsigned id, unsigned field, int samples); // make the next samples of the field blank
    void (*empty)(int is);                                  // list no GPU and return no error
    void (*link)(unsigned gpu, unsigned peer, unsigned long long path);
    void (*incident)(int kind, unsigned id, unsigned system, int health, unsigned code, const char *message);
    void (*refuse)(unsigned systems);                       // refuse these health systems
    void (*profiling)(unsigned gpu, unsigned field);        // make the GPU support a profiling field
    void (*blind)(int is);                                  // make all values blank; the start of an embedded engine ends it
    void (*engine)(const char *version);                    // of the host engine
    void (*library)(const char *version);                   // of the library, and so of an embedded engine
    void (*message)(int bytes);                             // what each read of values allocates in its thread; 0 at first
    int (*arenas)(void);                                    // of glibc in this process; 0 with another C library
    int (*gap)(void);                                       // whether a block allocated beside a message precedes it in the heap
    void (*fail)(const char *function, int code, int times); // "*": every call that needs a connection; times < 0: always
    void (*hang)(const char *function);                     // make its next call block
    void (*wait_hanging)(void);                             // return when it does
    void (*release)(void);
    int (*calls)(const char *function);
    // How a field is watched; returns 0 if it is not.
    int (*watch)(int kind, unsigned id, unsigned field, long long *every, double *age, int *samples);
    int (*handlers)(unsigned long long *handler, int n);    // of this process's signals, from 1
    void (*callers)(int n, int every);                      // threads that read values every 3.2 s; one more begins each so many ms
} script_table_t;

#endif
