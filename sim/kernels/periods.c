/* Lower bounds of periods: [Note: Stretches] in sim/bounds/stretches.py, whose numpy does the same. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "periods.h"

static i64 larger(i64 a, i64 b) { return a > b ? a : b; }

/* -- one plan of several -------------------------------------------------------------------------------------------- */

/* Events that are spread over a lane: of a short one, all. */
static i64 num_spread(const struct bounded *plans, i64 lane, i64 length) {
    i64 usual = plans->spread[lane];
    return length <= 2 * usual ? 2 * usual : usual;
}

/* Room for everything that is found out about one plan, used again for the next one. */
static int allocate(struct chart *chart, const struct bounded *plans) {
    i64 num_lanes = plans->num_lanes, most = (num_lanes - 1) * (num_lanes + 1), sums = 0;
    for (i64 lane = 0; lane < num_lanes; lane++) {
        /* Besides those that are spread, and those at which lanes hand over: those that micro-batches share. */
        most += 2 * plans->spread[lane] + 4;
        sums += plans->rooms[lane] + 1;
    }
    size_t events = (size_t)larger(most, 1), stretches = events * events;
    chart->events = calloc(events, sizeof *chart->events);
    chart->ended = calloc(events * (size_t)num_lanes, sizeof *chart->ended);
    chart->after = calloc(events * (size_t)num_lanes, sizeof *chart->after);
    chart->begin_s = calloc(events, sizeof *chart->begin_s);
    chart->end_s = calloc(events, sizeof *chart->end_s);
    chart->others = calloc(stretches * (size_t)plans->num_vertices, sizeof *chart->others);
    chart->together = calloc(stretches * (size_t)plans->num_vertices, sizeof *chart->together);
    chart->least_s = calloc(stretches, sizeof *chart->least_s);
    chart->longest_s = calloc(stretches, sizeof *chart->longest_s);
    chart->spans = calloc(2 * stretches * (size_t)plans->num_vertices, sizeof *chart->spans);
    chart->spans_s = calloc(2 * stretches, sizeof *chart->spans_s);
    chart->is_stretch = calloc(stretches, 1);
    chart->sums_s = calloc((size_t)sums, sizeof *chart->sums_s);
    chart->hops = calloc(events, sizeof *chart->hops);
    chart->released_s = calloc(2 * (size_t)plans->rooms[0], sizeof *chart->released_s);
    chart->until_s = calloc((size_t)plans->rooms[0] + 1, sizeof *chart->until_s);
    i64 longest = 1;
    for (i64 lane = 0; lane < num_lanes; lane++)
        longest = larger(longest, plans->rooms[lane]);
    chart->next = calloc((size_t)longest, sizeof *chart->next);
    chart->stops = calloc(events, sizeof *chart->stops);
    chart->carried = calloc((size_t)num_lanes, sizeof *chart->carried);
    return chart->events && chart->ended && chart->after && chart->begin_s && chart->end_s && chart->others &&
           chart->together && chart->least_s && chart->longest_s && chart->is_stretch && chart->sums_s && chart->hops &&
           chart->spans && chart->spans_s && chart->released_s &&
           chart->until_s && chart->next && chart->stops && chart->carried;
}

static void release(struct chart *chart) {
    void *all[] = {chart->events,    chart->ended,      chart->after,  chart->begin_s,    chart->end_s,   chart->others,
                   chart->together,  chart->least_s,    chart->sums_s, chart->longest_s,  chart->hops,    chart->stops,
                   chart->is_stretch, chart->released_s, chart->next,   chart->until_s, chart->carried,
                   chart->spans,     chart->spans_s};
    for (size_t number = 0; number < sizeof all / sizeof *all; number++)
        free(all[number]);
}

/* Tasks of another lane that have ended before each task of a lane starts. */
static const i64 *known(const struct bounded *plans, i64 plan, i64 lane, i64 other) {
    return plans->known[lane] + (plan * plans->num_lanes + other) * plans->rooms[lane];
}

static i64 length_of(const struct bounded *plans, i64 plan, i64 lane) {
    return plans->lengths[plan * plans->num_lanes + lane];
}

/* -- events --------------------------------------------------------------------------------------------------------- */

/* Tasks of every lane that are guaranteed to have ended by an event. */
static void ended_before(const struct bounded *plans, i64 plan, const struct event *event, i64 *ended) {
    for (i64 lane = 0; lane < plans->num_lanes; lane++)
        ended[lane] = known(plans, plan, event->lane, lane)[event->count - 1];
    ended[event->lane] = event->count;
}

/* The first task of a lane that is guaranteed to start after an event of another one. */
static i64 first_after(const i64 *known, i64 length, const struct event *event, i64 per_iteration) {
    for (i64 iteration = -1; length && iteration <= 1; iteration++) {
        i64 count = event->count - iteration * per_iteration, low = 0, high = length - 1;
        if (known[high] < count)
            continue;
        while (low < high) {
            i64 middle = (low + high) / 2;
            if (known[middle] >= count)
                high = middle;
            else
                low = middle + 1;
        }
        return low + iteration * length;
    }
    return NEVER;
}

static void starts_after(const struct bounded *plans, i64 plan, const struct event *event, i64 *after) {
    i64 per_iteration = length_of(plans, plan, event->lane);
    for (i64 lane = 0; lane < plans->num_lanes; lane++)
        after[lane] = first_after(known(plans, plan, lane, event->lane), length_of(plans, plan, lane), event, per_iteration);
    after[event->lane] = event->count;
}

static int by_key(const void *one, const void *other) {
    const struct event *a = one, *b = other;
    if (a->key != b->key)
        return a->key < b->key ? -1 : 1;
    if (a->lane != b->lane)
        return a->lane < b->lane ? -1 : 1;
    return (a->count > b->count) - (a->count < b->count);
}

static void add_event(struct chart *chart, i64 lane, i64 count, i64 length) {
    count = count - 1 - floor_div(count - 1, length) * length + 1;
    for (i64 number = 0; number < chart->num_events; number++)
        if (chart->events[number].lane == lane && chart->events[number].count == count)
            return;
    chart->events[chart->num_events++] = (struct event){0, lane, count};
}

/* Events spread over the lanes, and those at which lanes hand over. */
static void choose_events(const struct bounded *plans, i64 plan, struct chart *chart) {
    chart->num_events = 0;
    for (i64 lane = 0; lane < plans->num_lanes; lane++) {
        i64 length = length_of(plans, plan, lane), num_events = num_spread(plans, lane, length);
        for (i64 number = 1; length && number <= num_events; number++)
            add_event(chart, lane, (i64)rint((double)length * ((double)number / (double)num_events)), length);
    }
    for (i64 lane = 1; lane < plans->num_lanes; lane++) {
        struct event last = {0, lane, length_of(plans, plan, lane)};
        if (!last.count)
            continue;
        starts_after(plans, plan, &last, chart->after);
        for (i64 other = 0; other < plans->num_lanes; other++) {
            i64 length = length_of(plans, plan, other), first = chart->after[other] < NEVER ? chart->after[other] : 0;
            if (length && !other)
                add_event(chart, other, first, length);
            if (length)
                add_event(chart, other, first + 1, length);
        }
    }
}

/* Where a micro-batch that repeats begins in a lane, and how many tasks it has there. */
static const i64 *repeats(const struct bounded *plans, i64 plan, i64 lane) {
    return plans->repeats + (plan * plans->num_lanes + lane) * 2;
}

/* Events within a micro-batch that repeats, and their counterparts in the next one. */
static void share_events(const struct bounded *plans, i64 plan, struct chart *chart) {
    for (i64 lane = 0; lane < plans->num_lanes; lane++) {
        i64 begin = repeats(plans, plan, lane)[0], num_tasks = repeats(plans, plan, lane)[1];
        i64 length = length_of(plans, plan, lane);
        for (i64 half = 0; num_tasks && begin > 0 && half < 2; half++) {
            add_event(chart, lane, begin + half * (num_tasks / 2), length);
            add_event(chart, lane, begin + half * (num_tasks / 2) + num_tasks, length);
        }
    }
}

/* What events know, in an order that no guarantee contradicts: whatever comes later knows more. */
static void order_events(const struct bounded *plans, i64 plan, struct chart *chart) {
    i64 num_lanes = plans->num_lanes;
    for (i64 number = 0; number < chart->num_events; number++) {
        struct event *event = chart->events + number;
        ended_before(plans, plan, event, chart->ended);
        event->key = 0;
        for (i64 lane = 0; lane < num_lanes; lane++)
            event->key += larger(chart->ended[lane], -2 * length_of(plans, plan, lane));
    }
    qsort(chart->events, (size_t)chart->num_events, sizeof *chart->events, by_key);
    for (i64 number = 0; number < chart->num_events; number++) {
        ended_before(plans, plan, chart->events + number, chart->ended + number * num_lanes);
        starts_after(plans, plan, chart->events + number, chart->after + number * num_lanes);
    }
}

/* -- work of stretches: from each event on, over each number of events ---------------------------------------------- */

/* Add a lane's work, weighed, to all stretches; seconds until each event and from it on are in end_s and begin_s. */
static void add_work(const struct bounded *plans, i64 plan, i64 lane, struct chart *chart) {
    i64 num_events = chart->num_events, num_lanes = plans->num_lanes, length = length_of(plans, plan, lane);
    const double *sums_s = chart->sums_s;
    protwin_sum_up(plans->seconds[lane] + plan * plans->rooms[lane], length, chart->sums_s);
    for (i64 number = 0; number < num_events; number++) {
        i64 ended = chart->ended[number * num_lanes + lane], after = chart->after[number * num_lanes + lane];
        chart->end_s[number] = ended > -length ? protwin_until(sums_s, length, ended) : -INFINITY;
        chart->begin_s[number] = after < NEVER ? protwin_until(sums_s, length, after) : INFINITY;
    }
    for (i64 begin = 0; begin < num_events; begin++)
        for (i64 gap = 1; gap <= num_events; gap++) {
            i64 wraps = begin + gap >= num_events, end = begin + gap - wraps * num_events;
            double work_s = chart->end_s[end] + (double)wraps * sums_s[length] - chart->begin_s[begin];
            double *others = chart->others + (begin * num_events + gap - 1) * plans->num_vertices;
            for (i64 vertex = 0; vertex < plans->num_vertices && work_s > 0; vertex++)
                others[vertex] += plans->weights[vertex * num_lanes + lane] * work_s;
        }
}

/* Compute in the stretch from one event to another: sums_s of compute. */
static double compute_s(const struct bounded *plans, i64 plan, const struct chart *chart, i64 begin, i64 gap) {
    i64 length = length_of(plans, plan, 0), wraps = begin + gap >= chart->num_events;
    i64 ended = chart->ended[(begin + gap - wraps * chart->num_events) * plans->num_lanes];
    i64 after = chart->after[begin * plans->num_lanes];
    if (ended <= -length || after >= NEVER)
        return 0;
    double found_s = protwin_until(chart->sums_s, length, ended) + (double)wraps * chart->sums_s[length] -
                     protwin_until(chart->sums_s, length, after);
    return found_s > 0 ? found_s : 0;
}

/* The least time of work: the largest of its weighted sums; others: (vertices). */
static double least(const struct bounded *plans, const double *others, double work_s) {
    double most_s = 0;
    for (i64 vertex = 0; vertex < plans->num_vertices; vertex++) {
        double found_s = plans->weights[vertex * plans->num_lanes] * work_s + others[vertex];
        most_s = found_s > most_s ? found_s : most_s;
    }
    return most_s;
}

static void find_stretches(const struct bounded *plans, i64 plan, struct chart *chart) {
    i64 num_events = chart->num_events, num_lanes = plans->num_lanes;
    size_t num_values = (size_t)(num_events * num_events * plans->num_vertices);
    memset(chart->others, 0, num_values * sizeof *chart->others);
    memset(chart->together, 0, num_values * sizeof *chart->together);
    for (i64 begin = 0; begin < num_events; begin++)
        for (i64 gap = 1; gap <= num_events; gap++) {
            i64 lane = chart->events[begin].lane, wraps = begin + gap >= num_events;
            i64 reached = chart->ended[(begin + gap - wraps * num_events) * num_lanes + lane];
            reached += wraps * length_of(plans, plan, lane);
            chart->is_stretch[begin * num_events + gap - 1] = reached >= chart->events[begin].count;
        }
    for (i64 lane = 1; lane < num_lanes; lane++)
        if (length_of(plans, plan, lane))
            add_work(plans, plan, lane, chart);
    for (i64 pair = 0; pair < plans->num_pairs; pair++)
        protwin_add_together(plans, plan, pair, chart);
    /* Slack is there once: for the pair of lanes for which it counts most. */
    for (size_t value = 0; value < num_values; value++)
        chart->others[value] += chart->together[value];
}

/* -- chains --------------------------------------------------------------------------------------------------------- */

/* The longest chains from each event over each number of events, for one row of compute. */
static void find_longest(const struct bounded *plans, i64 plan, struct chart *chart) {
    i64 num_events = chart->num_events;
    for (i64 begin = 0; begin < num_events; begin++)
        for (i64 gap = 1; gap <= num_events; gap++) {
            i64 at = begin * num_events + gap - 1;
            double work_s = chart->is_stretch[at] ? compute_s(plans, plan, chart, begin, gap) : 0;
            const double *others = chart->others + at * plans->num_vertices;
            chart->least_s[at] = chart->is_stretch[at] ? least(plans, others, work_s) : -INFINITY;
        }
    for (i64 begin = 0; begin < num_events; begin++) {
        double *restrict longest_s = chart->longest_s + begin * num_events;
        memcpy(longest_s, chart->least_s + begin * num_events, (size_t)num_events * sizeof *longest_s);
        for (i64 hop = 1; hop < num_events; hop++) {
            const double *restrict onward_s = chart->least_s + (begin + hop) % num_events * num_events;
            double until_s = longest_s[hop - 1];
            for (i64 gap = hop; gap < num_events; gap++) {
                double through_s = until_s + onward_s[gap - hop];
                longest_s[gap] = through_s > longest_s[gap] ? through_s : longest_s[gap];
            }
        }
    }
}

/* Add the stretches of the longest chain from an event over a number of events; how many there are then.
 *
 * Among chains that are as long up to rounding, the first one with the longest last stretch. */
static i64 follow(const struct bounded *plans, struct chart *chart, struct hop leg, i64 num_hops) {
    i64 num_events = chart->num_events, begin = leg.begin;
    const double *longest_s = chart->longest_s + begin * num_events;
    while (leg.gap > 0) {
        double equal_s = longest_s[leg.gap - 1] * (1 - plans->tie_frac);
        i64 last = 0;
        if (chart->least_s[begin * num_events + leg.gap - 1] < equal_s) {
            last = 1;
            while (last < leg.gap - 1 && longest_s[last - 1] + chart->least_s[(begin + last) % num_events * num_events +
                                                                              leg.gap - 1 - last] < equal_s)
                last++;
        }
        chart->hops[num_hops++] = (struct hop){(begin + last) % num_events, leg.gap - last, leg.times};
        leg.gap = last;
    }
    return num_hops;
}

/* The counterpart of an event in the next micro-batch, if its own one repeats; 0 if there is none. */
static i64 counterpart(const struct bounded *plans, i64 plan, const struct chart *chart, i64 number) {
    const struct event *event = chart->events + number;
    i64 begin = repeats(plans, plan, event->lane)[0], num_tasks = repeats(plans, plan, event->lane)[1];
    if (event->count < begin || event->count > begin + num_tasks)
        return 0;
    for (i64 later = number + 1; later < chart->num_events; later++)
        if (chart->events[later].lane == event->lane && chart->events[later].count == event->count + num_tasks)
            return later;
    return 0;
}

/* The stretches of the longest chain around an iteration, all micro-batches of it included; their number. */
static i64 follow_around(const struct bounded *plans, i64 plan, struct chart *chart) {
    i64 num_events = chart->num_events, begin = 0, again = plans->num_left_out[plan] + 1;
    const double *longest_s = chart->longest_s;
    double most_s = 0;
    for (i64 number = 0; number < num_events; number++)
        most_s = fmax(most_s, longest_s[number * num_events + num_events - 1]);
    while (longest_s[begin * num_events + num_events - 1] < most_s * (1 - plans->tie_frac))
        begin++;
    /* Two legs: once around, and none. */
    struct hop around = {begin, num_events, 1}, repeated = {begin, 0, 0};
    double around_s = longest_s[begin * num_events + num_events - 1];
    for (i64 number = 0; again > 1 && number < num_events; number++) {
        i64 following = counterpart(plans, plan, chart, number), gap = following - number;
        if (!following)
            continue;
        double once_s = longest_s[number * num_events + gap - 1];
        double rest_s = longest_s[following * num_events + num_events - gap - 1];
        if (rest_s + (double)again * once_s > around_s) {
            around_s = rest_s + (double)again * once_s;
            around = (struct hop){following, num_events - gap, 1};
            repeated = (struct hop){number, gap, again};
        }
    }
    return follow(plans, chart, repeated, follow(plans, chart, around, 0));
}

/* Raise the bounds of all rows of a plan to the chain in hops, with a span unless its gap is 0. */
static void raise_rows(const struct bounded *plans, i64 plan, i64 num_hops, struct span span, struct chart *chart) {
    i64 room = plans->rooms[0], length = length_of(plans, plan, 0);
    const double *rows = plans->compute_s + plan * plans->num_rows * room;
    double *bounds_s = plans->bounds_s + plan * plans->num_rows;
    for (i64 row = 0; row < plans->num_rows; row++) {
        double around_s = 0, span_s = 0;
        protwin_sum_up(rows + row * room, length, chart->sums_s);
        if (span.gap)
            span_s = protwin_span_s(plans, plan, chart, span);
        for (i64 number = 0; number < num_hops; number++) {
            i64 begin = chart->hops[number].begin, gap = chart->hops[number].gap;
            const double *others = chart->others + (begin * chart->num_events + gap - 1) * plans->num_vertices;
            double least_s = least(plans, others, compute_s(plans, plan, chart, begin, gap));
            around_s += (double)chart->hops[number].times * least_s;
        }
        if (!span.gap || span_s > 0)
            bounds_s[row] = fmax(bounds_s[row], around_s + span_s);
    }
}

/* The bounds of all rows of a plan, by the chain that is the longest for one of them. */
static void bound_rows(const struct bounded *plans, i64 plan, i64 extreme, struct chart *chart) {
    i64 room = plans->rooms[0], length = length_of(plans, plan, 0);
    const double *rows = plans->compute_s + plan * plans->num_rows * room;
    protwin_sum_up(rows + extreme * room, length, chart->sums_s);
    find_longest(plans, plan, chart);
    i64 num_hops = follow_around(plans, plan, chart);
    raise_rows(plans, plan, num_hops, (struct span){0, 0, 0}, chart);
    if (!plans->num_left_out[plan])
        return;
    protwin_sum_up(rows + extreme * room, length, chart->sums_s);
    struct span span = protwin_longest_span(plans, plan, chart);
    i64 num_events = chart->num_events;
    if (span.gap) {
        num_hops = follow(plans, chart, (struct hop){(span.begin + span.gap) % num_events, num_events - span.gap, 1}, 0);
        raise_rows(plans, plan, num_hops, span, chart);
    }
}

PUBLIC int protwin_least_periods(const struct bounded *plans) {
    struct chart chart = {0};
    int status = allocate(&chart, plans) ? DONE : OUT_OF_MEMORY;
    memset(plans->bounds_s, 0, (size_t)(plans->num_plans * plans->num_rows) * sizeof *plans->bounds_s);
    for (i64 plan = 0; plan < plans->num_plans && status == DONE; plan++) {
        choose_events(plans, plan, &chart);
        if (plans->num_left_out[plan])
            share_events(plans, plan, &chart);
        order_events(plans, plan, &chart);
        find_stretches(plans, plan, &chart);
        if (plans->num_left_out[plan])
            protwin_find_spans(plans, plan, &chart);
        for (i64 number = 0; number < plans->num_extremes; number++)
            bound_rows(plans, plan, plans->extremes[plan * plans->num_extremes + number], &chart);
    }
    release(&chart);
    return status;
}
