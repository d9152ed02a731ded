/* What is found out about a plan while its period is bounded; used within this folder alone.
 *
 * E events, L lanes, V vertices.  A stretch begins with an event and ends with one that follows it, gap events later, up
 * to the first one's counterpart an iteration later: entry begin * E + gap - 1.
 */

#ifndef PROTWIN_PERIODS_H
#define PROTWIN_PERIODS_H

#include "lanes.h"

/* The moment when so many tasks of a lane, 1 to all of an iteration, have ended. */
struct event {
    i64 key; /* events are in its order */
    i64 lane, count;
};

/* A stretch that holds what was left out; is_next: in the iteration behind the one in which it begins. */
struct span {
    i64 begin, gap, is_next;
};

/* A stretch of a chain, and how often the chain passes it. */
struct hop {
    i64 begin, gap, times;
};

struct chart {
    i64 num_events;
    struct event *events;
    i64 *ended, *after;     /* (E, L) tasks that have ended by each event, and the first one that starts after it */
    double *begin_s, *end_s; /* (E) a lane's seconds until the first task after each event, and until the last before */
    double *others;         /* (E, E, V) weighed work of all lanes but compute */
    double *together;       /* (E, E, V) slack of work that is done side by side */
    char *is_stretch;       /* (E, E) whether the end is guaranteed not to come before the beginning */
    double *spans;          /* (2, E, E, V) weighed work of all lanes but compute in spans, by the iteration of the cut */
    double *spans_s;        /* (2, E, E) the longest chains with each span */
    double *least_s;        /* (E, E) the least time of stretches */
    double *longest_s;      /* (E, E) of chains of them */
    struct hop *hops;       /* (E) */
    double *sums_s;         /* seconds of a lane's first tasks */
    double *released_s;     /* (2, compute tasks) seconds of two lanes that the end of each compute task releases */
    double *until_s;        /* (compute tasks + 1) guaranteed side by side, of the first releases */
    i64 *next;              /* compute tasks that have ended when the next task from each place on is released */
    i64 *stops;             /* (E) the last release that counts at each event */
    i64 *carried;           /* (L) what a lane's tasks have waited for so far */
};

/* Raise the slack of all stretches to what two lanes offer that work side by side; side_by_side.c. */
void protwin_add_together(const struct bounded *plans, i64 plan, i64 pair, struct chart *chart);

/* The weighed work of all spans of a plan, but of compute; spans.c. */
void protwin_find_spans(const struct bounded *plans, i64 plan, struct chart *chart);

/* The span that makes the longest chain around an iteration, for the row of compute in sums_s; gap is 0 for none. */
struct span protwin_longest_span(const struct bounded *plans, i64 plan, struct chart *chart);

/* The least time of a span for the row of compute in sums_s. */
double protwin_span_s(const struct bounded *plans, i64 plan, struct chart *chart, struct span span);

/* The seconds of an endless program's first so many tasks; sums_s: (length + 1). */
static inline double protwin_until(const double *sums_s, i64 length, i64 count) {
    i64 iteration = floor_div(count, length);
    return sums_s[count - iteration * length] + (double)iteration * sums_s[length];
}

/* The sums of a lane's first tasks; sums_s: (length + 1). */
static inline void protwin_sum_up(const double *seconds, i64 length, double *sums_s) {
    sums_s[0] = 0;
    for (i64 task = 0; task < length; task++)
        sums_s[task + 1] = sums_s[task] + seconds[task];
}

#endif
