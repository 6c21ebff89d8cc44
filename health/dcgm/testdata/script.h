// How a test says what the scripted libdcgm.so.4 is to answer. The library exports one object of this
// type, script_table; internal/script calls through it.

#ifndef SCRIPT_H
#define SCRIPT_H

typedef struct {
    void (*reset)(void);                                    // no entities, no failures, no calls counted
    void (*entity)(int kind, unsigned id, int status);      // there is one, in this state
    void (*drop)(int kind, unsigned id);                    // it is not there any more
    void (*instance)(int kind, unsigned id, int parentKind, unsigned parent, const char *gpu, unsigned gi, unsigned ci);
    void (*profile)(int kind, unsigned id, unsigned profile, unsigned slices); // of an instance, as the driver numbers it
    void (*value)(int kind, unsigned id, unsigned field, int type, int status, long long at, long long i, double d, const char *s);
    void (*row)(int kind, unsigned id, int status, long long at, long long xid); // into the stream of field 230
    void (*xid)(int kind, unsigned id, long long at, long long xid); // the same, and the latest value if no row is later
    void (*clock)(long long offset);                        // the engine's clock is so many µs ahead of the times given here
    void (*hold)(int kind, unsigned id, unsigned field, int samples); // the field is blank for so many samples more
    void (*empty)(int is);                                  // the engine lists no GPU, and reports no error
    void (*link)(unsigned gpu, unsigned peer, unsigned long long path);
    void (*incident)(int kind, unsigned id, unsigned system, int health, unsigned code, const char *message);
    void (*profiling)(unsigned gpu, unsigned field);        // the GPU has this profiling field
    void (*blind)(void);                                    // all values are blank until an engine is started here
    int (*detached)(void);                                  // the engine has let go of the driver
    void (*engine)(const char *version);                    // of the host engine
    void (*fail)(const char *function, int code, int times); // "*": whatever needs a connection; times < 0: always
    void (*hang)(const char *function);                     // its next call waits
    void (*wait_hanging)(void);                             // returns when it does
    void (*release)(void);
    int (*calls)(const char *function);
    int (*left)(void);                                      // groups, watches, registrations now
    int (*leaked)(void);                                    // the same, at the last disconnection
    int (*initialized)(void);
    const char *(*address)(void);                           // what dcgmConnect_v2 was given
    int (*is_socket)(void);
    int (*widest)(void);                                    // most values asked for in one call
    int (*live)(void);                                      // reads that asked the driver
    int (*most_hanging)(void);                              // calls that hung at the same time, at most
    unsigned (*systems)(void);                              // that the health check was asked for
    const char *(*log)(void);                               // the engine's level and file
    // How a field is watched; returns 0 if it is not.
    int (*watch)(int kind, unsigned id, unsigned field, long long *every, double *age, int *samples);
    int (*handlers)(unsigned long long *handler, int n);    // what this process does at each signal from 1 up
    long long (*nanoseconds)(void);                         // spent in calls so far
} script_table_t;

#endif
