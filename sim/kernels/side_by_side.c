/* Work of two lanes that is guaranteed to run side by side: [Note: Released together] in sim/bounds/side_by_side.py. */

#include <string.h>

#include "periods.h"

/* What is asked of the waits of one lane. */
struct lane_waits {
    const struct bounded *plans;
    i64 plan, lane;
};

static i64 length_of(const struct lane_waits *of, i64 lane) {
    return of->plans->lengths[of->plan * of->plans->num_lanes + lane];
}

static const i64 *waits_for(const struct lane_waits *of, i64 other) {
    const i64 *waits = of->plans->waits[of->lane * of->plans->num_lanes + other];
    return waits ? waits + of->plan * of->plans->rooms[of->lane] : NULL;
}

/* The most that a lane waits for of another one in an iteration: carried into the next one, it is over there. */
static i64 most_awaited(const struct lane_waits *of, i64 other) {
    const i64 *waits = waits_for(of, other);
    i64 most = NOTHING;
    for (i64 task = 0; task < length_of(of, of->lane); task++)
        most = waits[task] > most ? waits[task] : most;
    return most;
}

/* Whether all that a task or one before it waits for, but compute, is over when a compute task starts. */
static int is_over(const struct lane_waits *of, const i64 *carried, i64 count) {
    i64 num_compute = length_of(of, 0), room = of->plans->rooms[0];
    i64 iteration = floor_div(count - 1, num_compute), place = count - 1 - iteration * num_compute;
    for (i64 other = 1; other < of->plans->num_lanes; other++) {
        const i64 *known = of->plans->known[0] + (of->plan * of->plans->num_lanes + other) * room;
        if (waits_for(of, other) && carried[other] > known[place] + iteration * length_of(of, other))
            return 0;
    }
    return 1;
}

/* Seconds of a lane that the end of each compute task releases; next, if any: after how many each task is released. */
static void find_releases(const struct lane_waits *of, double *released_s, i64 *carried, i64 *next) {
    i64 num_compute = length_of(of, 0), num_lanes = of->plans->num_lanes;
    const double *seconds = of->plans->seconds[of->lane] + of->plan * of->plans->rooms[of->lane];
    memset(released_s, 0, (size_t)num_compute * sizeof *released_s);
    for (i64 other = 0; other < num_lanes; other++)
        carried[other] = waits_for(of, other) ? most_awaited(of, other) - length_of(of, other) : NOTHING;
    for (i64 task = 0; task < length_of(of, of->lane); task++) {
        for (i64 other = 0; other < num_lanes; other++) {
            const i64 *waits = waits_for(of, other);
            if (waits && waits[task] > carried[other])
                carried[other] = waits[task];
        }
        i64 count = carried[0];
        int is_known = count > UNKNOWN && is_over(of, carried, count);
        if (is_known)
            released_s[count - 1 - floor_div(count - 1, num_compute) * num_compute] += seconds[task];
        if (next)
            next[task] = is_known ? count : NEVER;
    }
}

/* From after how many compute tasks on, counted from each place of the lane, a task of it is released. */
static void look_ahead(i64 *next, i64 length, i64 num_compute) {
    i64 following = NEVER;
    for (i64 task = 0; task < length; task++)
        following = next[task] < following ? next[task] : following;
    following = following < NEVER ? following + num_compute : NEVER;
    following = following < 2 * num_compute ? following : 2 * num_compute;
    for (i64 task = length - 1; task >= 0; task--) {
        following = next[task] < following ? next[task] : following;
        next[task] = following;
    }
}

/* The guaranteed seconds of releases by the first so many compute tasks. */
static double until(const double *until_s, i64 num_compute, i64 count) {
    i64 iteration = floor_div(count, num_compute);
    return until_s[count - iteration * num_compute] + (double)iteration * until_s[num_compute];
}

/* Raise the slack of all stretches by what is guaranteed side by side in each. */
static void raise_slack(const struct bounded *plans, i64 plan, i64 pair, struct chart *chart) {
    i64 num_lanes = plans->num_lanes, num_events = chart->num_events, beside = plans->pairs[2 * pair + 1];
    i64 num_compute = plans->lengths[plan * num_lanes], num_beside = plans->lengths[plan * num_lanes + beside];
    const double *slack = plans->slack + pair * plans->num_vertices;
    for (i64 number = 0; number < num_events; number++) {
        i64 ended = chart->ended[number * num_lanes + beside], iteration = floor_div(ended, num_beside);
        int is_known = ended > -num_beside;
        chart->stops[number] = is_known ? chart->next[ended - iteration * num_beside] + iteration * num_compute - 1 : -NEVER;
        chart->end_s[number] = is_known ? until(chart->until_s, num_compute, chart->stops[number]) : 0;
    }
    for (i64 begin = 0; begin < num_events; begin++) {
        i64 first = chart->after[begin * num_lanes];
        if (first >= NEVER)
            continue;
        /* The end of a task is a moment of release, and of an event; what starts after an event ends later. */
        i64 after = chart->events[begin].lane == 0 ? chart->events[begin].count : first + 1;
        double before_s = until(chart->until_s, num_compute, after - 1);
        for (i64 gap = 1; gap <= num_events; gap++) {
            i64 wraps = begin + gap >= num_events, end = begin + gap - wraps * num_events;
            double found_s = chart->end_s[end] + (double)wraps * chart->until_s[num_compute] - before_s;
            double *together = chart->together + (begin * num_events + gap - 1) * plans->num_vertices;
            if (chart->stops[end] + wraps * num_compute < after)
                continue;
            for (i64 vertex = 0; vertex < plans->num_vertices; vertex++)
                if (found_s * slack[vertex] > together[vertex])
                    together[vertex] = found_s * slack[vertex];
        }
    }
}

void protwin_add_together(const struct bounded *plans, i64 plan, i64 pair, struct chart *chart) {
    struct lane_waits own = {plans, plan, plans->pairs[2 * pair]}, beside = {plans, plan, plans->pairs[2 * pair + 1]};
    i64 num_compute = length_of(&own, 0);
    double *own_s = chart->released_s, *other_s = own_s + num_compute;
    if (!length_of(&own, own.lane) || !length_of(&own, beside.lane) || !waits_for(&own, 0) || !waits_for(&beside, 0))
        return;
    find_releases(&own, own_s, chart->carried, NULL);
    find_releases(&beside, other_s, chart->carried, chart->next);
    chart->until_s[0] = 0;
    for (i64 task = 0; task < num_compute; task++) {
        double least_s = plans->ratios[pair] * other_s[task];
        chart->until_s[task + 1] = chart->until_s[task] + (own_s[task] < least_s ? own_s[task] : least_s);
    }
    look_ahead(chart->next, length_of(&beside, beside.lane), num_compute);
    if (chart->until_s[num_compute] > 0)
        raise_slack(plans, plan, pair, chart);
}
