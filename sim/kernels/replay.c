/* One plan under the simulator's rules: [Note: Replay] in sim/bounds/replay.py, whose numpy does the same. */

#include <math.h>
#include <stdlib.h>

#include "lanes.h"

#define SIMULTANEOUS (1 + 1e-12)
#define FOREVER_S 1e300

struct lane {
    i64 length;
    i64 ended;     /* tasks since the beginning */
    i64 iteration; /* of the next task, or of the one that runs */
    i64 place;     /* of the same task in its iteration */
    i64 first_end; /* where the lane's ends are noted in every iteration */
    double left_s; /* progress that the running task still needs */
    int is_running;
};

PUBLIC int protwin_kernels_version(void) { return PROTWIN_KERNELS_VERSION; }

static int may_start(const struct replayed *plan, const struct lane *lanes, i64 number) {
    const struct lane *lane = lanes + number;
    const i64 *const *waits = plan->waits + number * plan->num_lanes;
    /* Lanes run one iteration ahead at most. */
    if (lane->is_running || !lane->length || lane->iteration > plan->num_iterations)
        return 0;
    for (i64 other = 0; other < plan->num_lanes; other++)
        if (waits[other] && waits[other][lane->place] + lane->iteration * lanes[other].length > lanes[other].ended)
            return 0;
    return 1;
}

/* Start what may start; the lanes that run, as bits. */
static size_t start(const struct replayed *plan, struct lane *lanes) {
    size_t active = 0;
    for (i64 number = 0; number < plan->num_lanes; number++) {
        struct lane *lane = lanes + number;
        if (may_start(plan, lanes, number)) {
            lane->is_running = 1;
            lane->left_s = plan->seconds[number][lane->place];
        }
        active |= (size_t)lane->is_running << number;
    }
    return active;
}

/* Let a task end and the next one be due. */
static void end_task(struct lane *lane) {
    lane->is_running = 0;
    lane->ended++;
    if (++lane->place == lane->length) {
        lane->place = 0;
        lane->iteration++;
    }
}

/* Let time pass to the next end of a task among the lanes active, and note the ends; how many there were. */
static int step(const struct replayed *plan, struct lane *lanes, size_t active, i64 num_tasks, double *now_s,
                double *ends_s) {
    const double *slowdown = plan->slowdowns + active * (size_t)plan->num_lanes;
    double step_s = FOREVER_S;
    int num_ended = 0;
    for (i64 number = 0; number < plan->num_lanes; number++)
        if (lanes[number].is_running && lanes[number].left_s * slowdown[number] < step_s)
            step_s = lanes[number].left_s * slowdown[number];
    *now_s += step_s;
    for (i64 number = 0; number < plan->num_lanes; number++) {
        struct lane *lane = lanes + number;
        double remaining_s = lane->left_s * slowdown[number];
        if (!lane->is_running)
            continue;
        if (remaining_s <= step_s * SIMULTANEOUS) {
            if (lane->iteration < plan->num_iterations)
                ends_s[lane->iteration * num_tasks + lane->first_end + lane->place] = *now_s;
            end_task(lane);
            num_ended++;
        } else {
            lane->left_s = (remaining_s - step_s) / slowdown[number];
        }
    }
    return num_ended;
}

/* Let every lane end so many tasks, all its iterations if targets is NULL; ends_s: (iterations, tasks). */
static int run(const struct replayed *plan, struct lane *lanes, const i64 *targets, i64 num_tasks, double *ends_s) {
    double now_s = 0;
    for (int is_busy = 1; is_busy;) {
        size_t active = start(plan, lanes);
        if (!active || !step(plan, lanes, active, num_tasks, &now_s, ends_s))
            return STUCK;
        is_busy = 0;
        for (i64 number = 0; number < plan->num_lanes; number++)
            is_busy |= lanes[number].ended < (targets ? targets[number] : plan->num_iterations * lanes[number].length);
    }
    return DONE;
}

/* The rule of steady_period_s in sim/engine/timing.py: every task ends one and the same period after its counterpart. */
static double steady_period_s(const double *ends_s, i64 num_tasks, i64 last_compute, const struct replayed *plan) {
    const double *latest_s = ends_s + (plan->num_iterations - 1) * num_tasks;
    for (i64 cycle = 1; cycle < plan->num_iterations; cycle++) {
        const double *earlier_s = latest_s - cycle * num_tasks;
        double shift_s = latest_s[last_compute] - earlier_s[last_compute], most_s = 0;
        for (i64 task = 0; task < num_tasks; task++) {
            double deviation_s = fabs(latest_s[task] - earlier_s[task] - shift_s);
            most_s = deviation_s > most_s ? deviation_s : most_s;
        }
        if (most_s <= plan->steady_frac * (shift_s / (double)cycle))
            return shift_s / (double)cycle;
    }
    return NAN;
}

/* The lanes of a plan before the first task; NULL if there is no memory. */
static struct lane *new_lanes(const struct replayed *plan, i64 *num_tasks) {
    struct lane *lanes = calloc((size_t)plan->num_lanes, sizeof *lanes);
    *num_tasks = 0;
    for (i64 number = 0; lanes && number < plan->num_lanes; number++) {
        lanes[number].length = plan->lengths[number];
        lanes[number].first_end = *num_tasks;
        *num_tasks += plan->lengths[number];
    }
    return lanes;
}

/* The ends of all tasks, (iterations, tasks), until every lane has ended so many; those that have not are infinite. */
PUBLIC int protwin_ends(const struct replayed *plan, const i64 *targets, double *ends_s) {
    i64 num_tasks;
    struct lane *lanes = new_lanes(plan, &num_tasks);
    int status = OUT_OF_MEMORY;
    if (lanes) {
        for (i64 place = 0; place < plan->num_iterations * num_tasks; place++)
            ends_s[place] = INFINITY;
        status = run(plan, lanes, targets, num_tasks, ends_s);
    }
    free(lanes);
    return status;
}

/* The period of a plan, NaN where it is not periodic after its iterations. */
PUBLIC int protwin_replay(const struct replayed *plan, double *period_s) {
    i64 num_tasks;
    struct lane *lanes = new_lanes(plan, &num_tasks);
    double *ends_s = lanes ? calloc((size_t)(plan->num_iterations * num_tasks), sizeof *ends_s) : NULL;
    int status = ends_s ? run(plan, lanes, NULL, num_tasks, ends_s) : OUT_OF_MEMORY;
    if (status == DONE)
        *period_s = steady_period_s(ends_s, num_tasks, plan->lengths[0] - 1, plan);
    free(ends_s);
    free(lanes);
    return status;
}
