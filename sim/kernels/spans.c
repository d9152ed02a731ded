/* Stretches that hold what was left out: [Note: Spans] in sim/bounds/spans.py, whose numpy does the same. */

#include <math.h>
#include <string.h>

#include "periods.h"

static i64 length_of(const struct bounded *plans, i64 plan, i64 lane) {
    return plans->lengths[plan * plans->num_lanes + lane];
}

/* Seconds of a lane that were left out; sums_s of its tasks. */
static double left_out_s(const struct bounded *plans, i64 plan, i64 lane, const double *sums_s) {
    const i64 *repeats = plans->repeats + (plan * plans->num_lanes + lane) * 2;
    return (double)plans->num_left_out[plan] * (sums_s[repeats[0] + repeats[1]] - sums_s[repeats[0]]);
}

/* What a lane does until each event and from it on, in begin_s and end_s; sums_s of its tasks. */
static void sum_events(const struct bounded *plans, i64 plan, i64 lane, struct chart *chart) {
    i64 length = length_of(plans, plan, lane);
    for (i64 number = 0; number < chart->num_events; number++) {
        i64 ended = chart->ended[number * plans->num_lanes + lane], after = chart->after[number * plans->num_lanes + lane];
        chart->end_s[number] = ended > -length ? protwin_until(chart->sums_s, length, ended) : 0;
        chart->begin_s[number] = after < NEVER ? protwin_until(chart->sums_s, length, after) : 0;
    }
}

/* Seconds of a lane's tasks in a span, those that were left out included, more_s; begin_s and end_s of the lane. */
static double work_s(const struct bounded *plans, i64 plan, i64 lane, const struct chart *chart, struct span span,
                     double more_s) {
    const i64 *cut = plans->cuts + (plan * plans->num_lanes + lane) * 2;
    i64 length = length_of(plans, plan, lane), wraps = span.begin + span.gap >= chart->num_events;
    i64 end = span.begin + span.gap - wraps * chart->num_events, ended = chart->ended[end * plans->num_lanes + lane];
    i64 first = chart->after[span.begin * plans->num_lanes + lane];
    if (ended <= -length || first >= NEVER || first - span.is_next * length > cut[0] ||
        ended + (wraps - span.is_next) * length <= cut[1])
        return 0;
    double found_s = chart->end_s[end] - chart->begin_s[span.begin] + (double)wraps * chart->sums_s[length] + more_s;
    return found_s > 0 ? found_s : 0;
}

static double *others_of(const struct bounded *plans, const struct chart *chart, struct span span) {
    i64 number = (span.is_next * chart->num_events + span.begin) * chart->num_events + span.gap - 1;
    return chart->spans + number * plans->num_vertices;
}

void protwin_find_spans(const struct bounded *plans, i64 plan, struct chart *chart) {
    i64 num_events = chart->num_events;
    memset(chart->spans, 0, (size_t)(2 * num_events * num_events * plans->num_vertices) * sizeof *chart->spans);
    for (i64 lane = 1; lane < plans->num_lanes; lane++) {
        i64 length = length_of(plans, plan, lane);
        if (!length)
            continue;
        protwin_sum_up(plans->seconds[lane] + plan * plans->rooms[lane], length, chart->sums_s);
        double more_s = left_out_s(plans, plan, lane, chart->sums_s);
        sum_events(plans, plan, lane, chart);
        for (i64 begin = 0; begin < num_events; begin++)
            for (i64 gap = 1; gap <= num_events; gap++)
                for (i64 is_next = 0; is_next <= (begin + gap >= num_events); is_next++) {
                    struct span span = {begin, gap, is_next};
                    double found_s = work_s(plans, plan, lane, chart, span, more_s);
                    double *others = others_of(plans, chart, span);
                    for (i64 vertex = 0; vertex < plans->num_vertices && found_s > 0; vertex++)
                        others[vertex] += plans->weights[vertex * plans->num_lanes + lane] * found_s;
                }
    }
}

/* The least time of a span; more_s of compute was left out. */
static double least_s(const struct bounded *plans, i64 plan, const struct chart *chart, struct span span,
                      double more_s) {
    const double *others = others_of(plans, chart, span);
    double compute_s = work_s(plans, plan, 0, chart, span, more_s), most_s = 0;
    for (i64 vertex = 0; vertex < plans->num_vertices; vertex++)
        most_s = fmax(most_s, plans->weights[vertex * plans->num_lanes] * compute_s + others[vertex]);
    return most_s;
}

double protwin_span_s(const struct bounded *plans, i64 plan, struct chart *chart, struct span span) {
    sum_events(plans, plan, 0, chart);
    return least_s(plans, plan, chart, span, left_out_s(plans, plan, 0, chart->sums_s));
}

struct span protwin_longest_span(const struct bounded *plans, i64 plan, struct chart *chart) {
    i64 num_events = chart->num_events, number = 0;
    double more_s = left_out_s(plans, plan, 0, chart->sums_s), longest_s = 0;
    sum_events(plans, plan, 0, chart);
    for (i64 is_next = 0; is_next < 2; is_next++)
        for (i64 begin = 0; begin < num_events; begin++)
            for (i64 gap = 1; gap <= num_events; gap++, number++) {
                chart->spans_s[number] = 0;
                if (is_next && begin + gap < num_events)
                    continue;
                double span_s = least_s(plans, plan, chart, (struct span){begin, gap, is_next}, more_s);
                i64 end = (begin + gap) % num_events;
                if (span_s > 0 && gap < num_events)
                    span_s += chart->longest_s[end * num_events + num_events - gap - 1];
                chart->spans_s[number] = fmax(span_s, 0);
                longest_s = fmax(longest_s, span_s);
            }
    /* Of chains that are as long up to rounding the first one. */
    for (number = 0; longest_s > 0; number++)
        if (chart->spans_s[number] >= (1 - plans->tie_frac) * longest_s)
            return (struct span){number / num_events % num_events, number % num_events + 1,
                                 number / (num_events * num_events)};
    return (struct span){0, 0, 0};
}
