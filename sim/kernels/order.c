/* What is guaranteed to have ended when a task starts: sim/space/lane_order.py, whose numpy does the same. */

#include <stdlib.h>

#include "lanes.h"

/* Where each task's wait lies: the place of the last task that it waits for, and that task's iteration. */
struct awaited {
    i64 *place, *iteration; /* (tasks) */
};

static void locate(const i64 *waits, i64 length, i64 other_length, struct awaited *found) {
    for (i64 task = 0; task < length; task++) {
        i64 count = waits[task] > -other_length ? waits[task] : -other_length;
        found->iteration[task] = floor_div(count - 1, other_length);
        found->place[task] = count - 1 - found->iteration[task] * other_length;
    }
}

/* What tasks know, with what the tasks before them knew, those of the iteration before included. */
static void carry(i64 *known, i64 length, i64 per_iteration) {
    i64 most = -per_iteration;
    for (i64 task = 0; task < length; task++) {
        most = known[task] > most ? known[task] : most;
        known[task] = most;
    }
    for (i64 task = 0; task < length && known[task] < most - per_iteration; task++)
        known[task] = most - per_iteration;
}

/* Let the tasks of a lane learn what those that they wait for know; whether anything was new. */
static int learn(i64 *known, const i64 *of_other, const i64 *waits, const struct awaited *awaited, i64 length,
                 i64 per_iteration) {
    int is_new = 0;
    for (i64 task = 0; task < length; task++) {
        i64 found = of_other[awaited->place[task]] + awaited->iteration[task] * per_iteration;
        if (waits[task] > NOTHING && found > known[task]) {
            known[task] = found;
            is_new = 1;
        }
    }
    return is_new;
}

/* One prefetch depth: waits (lanes, lanes) and known (lanes) are of this depth. */
struct depth {
    i64 num_lanes;
    const i64 *lengths;
    const i64 **waits;
    i64 **known;
    struct awaited *awaited; /* (lanes, lanes) */
    char *news;              /* (lanes, lanes) whether the other lane has learnt since the lane looked */
};

static void begin(const struct depth *depth) {
    i64 num_lanes = depth->num_lanes;
    for (i64 lane = 0; lane < num_lanes; lane++)
        for (i64 other = 0; other < num_lanes; other++) {
            i64 pair = lane * num_lanes + other, length = depth->lengths[lane];
            i64 *known = depth->known[lane] + other * length;
            const i64 *waits = depth->waits[pair];
            for (i64 task = 0; task < length; task++)
                known[task] = other == lane ? task : waits ? waits[task] : NOTHING;
            carry(known, length, depth->lengths[other]);
            depth->news[pair] = waits && length && depth->lengths[other];
            if (depth->news[pair])
                locate(waits, length, depth->lengths[other], depth->awaited + pair);
        }
}

/* Let a lane look at all that others have learnt; whether it has learnt something itself. */
static int look(const struct depth *depth, i64 lane) {
    i64 num_lanes = depth->num_lanes, length = depth->lengths[lane];
    int has_learnt = 0;
    for (i64 other = 0; other < num_lanes; other++) {
        i64 pair = lane * num_lanes + other;
        if (!depth->news[pair])
            continue;
        depth->news[pair] = 0;
        for (i64 of = 0; of < num_lanes; of++)
            has_learnt |= learn(depth->known[lane] + of * length, depth->known[other] + of * depth->lengths[other],
                                depth->waits[pair], depth->awaited + pair, length, depth->lengths[of]);
    }
    for (i64 of = 0; of < num_lanes && has_learnt; of++)
        carry(depth->known[lane] + of * length, length, depth->lengths[of]);
    return has_learnt;
}

static int follow(const struct depth *depth) {
    i64 num_lanes = depth->num_lanes;
    for (int is_new = 1; is_new;) {
        is_new = 0;
        for (i64 lane = 0; lane < num_lanes; lane++) {
            const i64 *own = depth->known[lane] + lane * depth->lengths[lane];
            if (!look(depth, lane))
                continue;
            is_new = 1;
            for (i64 task = 0; task < depth->lengths[lane]; task++)
                if (own[task] > task)
                    return STUCK;
            for (i64 listener = 0; listener < num_lanes; listener++)
                if (depth->waits[listener * num_lanes + lane] && depth->lengths[listener] && depth->lengths[lane])
                    depth->news[listener * num_lanes + lane] = 1;
        }
    }
    return DONE;
}

/* Fills known; out of memory, it is left as it was. */
PUBLIC int protwin_known_before(const struct ordered *lanes) {
    i64 num_lanes = lanes->num_lanes, num_pairs = num_lanes * num_lanes, room = 0, used = 0;
    for (i64 lane = 0; lane < num_lanes; lane++)
        room += 2 * num_lanes * lanes->lengths[lane];
    struct depth depth = {num_lanes, lanes->lengths, NULL, NULL, NULL, NULL};
    i64 *places = calloc((size_t)room + 1, sizeof *places);
    depth.waits = calloc((size_t)num_pairs, sizeof *depth.waits);
    depth.known = calloc((size_t)num_lanes, sizeof *depth.known);
    depth.awaited = calloc((size_t)num_pairs, sizeof *depth.awaited);
    depth.news = calloc((size_t)num_pairs, 1);
    int status = places && depth.waits && depth.known && depth.awaited && depth.news ? DONE : OUT_OF_MEMORY;
    for (i64 pair = 0; pair < num_pairs && status == DONE; pair++) {
        depth.awaited[pair].place = places + used;
        depth.awaited[pair].iteration = places + used + lanes->lengths[pair / num_lanes];
        used += 2 * lanes->lengths[pair / num_lanes];
    }
    for (i64 number = 0; number < lanes->num_depths && status == DONE; number++) {
        for (i64 pair = 0; pair < num_pairs; pair++) {
            const i64 *waits = lanes->waits[pair];
            depth.waits[pair] = waits ? waits + number * lanes->lengths[pair / num_lanes] : NULL;
        }
        for (i64 lane = 0; lane < num_lanes; lane++)
            depth.known[lane] = lanes->known[lane] + number * num_lanes * lanes->lengths[lane];
        begin(&depth);
        status = follow(&depth);
    }
    free(depth.news);
    free(depth.awaited);
    free(depth.known);
    free(depth.waits);
    free(places);
    return status;
}
