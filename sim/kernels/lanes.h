/* Lanes of tasks, as the functions of this folder read them.
 *
 * Lanes are numbered, compute first.  waits[lane * num_lanes + other] tells, for every task of the lane, how many of the
 * other lane's tasks must have ended before the task starts: counted within the iteration, below 1 for tasks of earlier
 * iterations, NOTHING for no wait.  The pointer is NULL where the lane never waits for the other one.
 *
 * sim/kernels/lanes.py checks all sizes, types and layouts before it calls these functions.
 */

#ifndef PROTWIN_LANES_H
#define PROTWIN_LANES_H

#include <stdint.h>

/* Counts up whenever a structure or a function of this header changes: sim/kernels/library.py refuses any other. */
#define PROTWIN_KERNELS_VERSION 4

#define NOTHING (-((int64_t)1 << 40))
#define UNKNOWN (NOTHING / 2)
#define NEVER ((int64_t)1 << 40)

typedef int64_t i64;

enum {
    DONE = 0,
    OUT_OF_MEMORY = 1,
    STUCK = 2,      /* lanes wait for each other, a task never ends, or what is freed is not in use */
    DEVICE_FULL = 3 /* the modelled device has no room */
};

#ifdef _WIN32
#define PUBLIC __declspec(dllexport)
#else
#define PUBLIC
#endif

/* Rounds down; b is above 0. */
static inline i64 floor_div(i64 a, i64 b) {
    i64 quotient = a / b;
    return quotient - (a % b < 0);
}

/* A plan to replay. */
struct replayed {
    i64 num_lanes;
    const i64 *lengths;           /* (lanes) */
    const i64 *const *waits;      /* (lanes, lanes), each (tasks) */
    const double *const *seconds; /* (lanes), each (tasks) */
    const double *slowdowns;      /* (2**lanes, lanes) by the set of lanes that run, as bits */
    i64 num_iterations;
    double steady_frac; /* how far tasks may be from periodic, as a share of the period */
};

/* Lanes whose order is looked for. */
struct ordered {
    i64 num_depths, num_lanes;
    const i64 *lengths;      /* (lanes) */
    const i64 *const *waits; /* (lanes, lanes), each (depths, tasks) */
    i64 *const *known;       /* (lanes), each (depths, lanes, tasks): the result */
};

/* Plans whose periods are bounded.  Lanes have room for as many tasks as the longest program has. */
struct bounded {
    i64 num_plans, num_lanes, num_rows;
    const i64 *rooms;             /* (lanes) */
    const i64 *lengths;           /* (plans, lanes) */
    const i64 *const *waits;      /* (lanes, lanes), each (plans, room) */
    const i64 *const *known;      /* (lanes), each (plans, lanes, room) */
    const double *const *seconds; /* (lanes), each (plans, room); NULL for compute */
    const double *compute_s;      /* (plans, rows, room) */
    const i64 *num_left_out;      /* (plans) micro-batches that a program stands for and does not have */
    const i64 *repeats;           /* (plans, lanes, 2) the first task of one that repeats, and how many it has */
    const i64 *cuts;              /* (plans, lanes, 2) tasks before the last micro-batch, and up to the second one's end */
    const i64 *extremes;          /* (plans, extremes) rows for which chains are looked for */
    i64 num_extremes;
    i64 num_vertices, num_pairs;
    const double *weights; /* (vertices, lanes) */
    const i64 *pairs;      /* (pairs, 2) lanes, and lanes beside them */
    const double *ratios;  /* (pairs) */
    const double *slack;   /* (pairs, vertices) */
    const i64 *spread;     /* (lanes) */
    double tie_frac;
    double *bounds_s; /* (plans, rows): the result */
};

PUBLIC int protwin_kernels_version(void);
PUBLIC int protwin_replay(const struct replayed *plan, double *period_s);
PUBLIC int protwin_ends(const struct replayed *plan, const i64 *targets, double *ends_s);
PUBLIC int protwin_known_before(const struct ordered *lanes);
PUBLIC int protwin_least_periods(const struct bounded *plans);

#endif
