/* PyTorch's caching allocator: [Note: The allocator's rules] in sim/memory/allocator.py, whose Python does the same. */

#include <stdlib.h>

#include "blocks.h"

static i64 segment_bytes(i64 size) {
    if (size <= SMALL_BYTES)
        return SMALL_SEGMENT_BYTES;
    return size < OWN_SEGMENT_BYTES ? LARGE_SEGMENT_BYTES : rounded_up(size, SMALL_SEGMENT_BYTES);
}

/* Free what a block has beyond this size, if that is worth it. */
static int split(struct allocator *a, i64 number, i64 size) {
    int is_small = a->blocks[number].is_small;
    i64 rest_bytes = a->blocks[number].size - size;
    if (is_small || a->is_expandable ? rest_bytes < MIN_BLOCK_BYTES : rest_bytes <= SMALL_BYTES)
        return DONE;
    i64 rest = protwin_new_block(a, a->blocks[number].address + size, rest_bytes, is_small);
    if (rest == NONE)
        return OUT_OF_MEMORY;
    protwin_insert_after(a, rest, number);
    a->blocks[number].size = size;
    return protwin_add_free(a, rest);
}

/* -- segments ---------------------------------------------------------------------------------------------------- */

/* Give back every segment that is free from end to end. */
static int empty_cache(struct allocator *a) {
    if (a->is_expandable)
        return protwin_unmap_free(a);
    for (int is_small = 0; is_small < 2; is_small++) {
        struct pool *pool = a->pools + is_small;
        i64 kept = 0;
        for (i64 place = 0; place < pool->count; place++) {
            i64 number = pool->entries[place].block;
            if (a->blocks[number].before == NONE && a->blocks[number].after == NONE) {
                a->level.reserved_bytes -= a->blocks[number].size;
                protwin_forget(a, number);
            } else {
                pool->entries[kept++] = pool->entries[place];
            }
        }
        pool->count = kept;
    }
    return DONE;
}

int protwin_take(struct allocator *a, i64 size) {
    if (a->limit != NONE && a->level.reserved_bytes + size > a->limit)
        return 0;
    a->level.reserved_bytes += size;
    if (a->level.reserved_bytes > a->level.peak_reserved_bytes)
        a->level.peak_reserved_bytes = a->level.reserved_bytes;
    return 1;
}

/* A new segment, or the block at the end of an expandable one. */
static int new_memory(struct allocator *a, i64 size, i64 *number) {
    if (a->is_expandable)
        return protwin_expand(a, size, number);
    i64 wanted = segment_bytes(size);
    if (!protwin_take(a, wanted))
        return DEVICE_FULL;
    *number = protwin_new_block(a, a->next_address, wanted, size <= SMALL_BYTES);
    a->next_address += rounded_up(wanted, SMALL_SEGMENT_BYTES);
    return *number == NONE ? OUT_OF_MEMORY : DONE;
}

/* A block of new memory; what is cached is given back if there is no other way. */
static int fresh(struct allocator *a, i64 size, i64 *number) {
    int status = new_memory(a, size, number);
    if (status != DEVICE_FULL)
        return status;
    status = empty_cache(a);
    a->level.num_retries++;
    if (status == DONE)
        status = new_memory(a, size, number);
    if (status == DEVICE_FULL)
        a->level.wanted_bytes = segment_bytes(size);
    return status;
}

/* -- requests ---------------------------------------------------------------------------------------------------- */

static int make(struct allocator *a, i64 requested) {
    i64 size = rounded_up(requested, MIN_BLOCK_BYTES), number = NONE;
    struct pool *pool = a->pools + (size <= SMALL_BYTES);
    i64 place = protwin_place_of(pool, size, 0);
    int status = DONE;
    if (place < pool->count) {
        place = a->is_expandable ? protwin_preferred(a, pool, place) : place;
        number = pool->entries[place].block;
        protwin_remove_place(pool, place);
    } else {
        status = fresh(a, size, &number);
    }
    if (status == DONE)
        status = split(a, number, size);
    i64 *made = status == DONE ? protwin_grown(a->made, a->num_made, &a->room_made, sizeof *made) : NULL;
    if (!made)
        return status == DONE ? OUT_OF_MEMORY : status;
    a->made = made;
    made[a->num_made++] = number;
    a->blocks[number].is_allocated = 1;
    a->level.allocated_bytes += a->blocks[number].size;
    if (a->level.allocated_bytes > a->level.peak_allocated_bytes)
        a->level.peak_allocated_bytes = a->level.allocated_bytes;
    return DONE;
}

static int is_cached(const struct allocator *a, i64 number) {
    return number != NONE && !a->blocks[number].is_allocated && a->blocks[number].is_mapped;
}

static int let_go(struct allocator *a, i64 number) {
    struct block *block = a->blocks + number;
    block->is_allocated = 0;
    a->level.allocated_bytes -= block->size;
    if (is_cached(a, block->before)) {
        protwin_remove_free(a, block->before);
        protwin_merge_before(a, number);
    }
    if (is_cached(a, block->after)) {
        protwin_remove_free(a, block->after);
        protwin_merge_after(a, number);
    }
    return protwin_add_free(a, number);
}

PUBLIC struct allocator *protwin_allocator_new(i64 limit_bytes, int is_expandable) {
    struct allocator *a = calloc(1, sizeof *a);
    if (a) {
        a->limit = limit_bytes;
        a->is_expandable = is_expandable;
        a->next_address = SMALL_SEGMENT_BYTES;
        a->unused = NONE;
    }
    return a;
}

PUBLIC int protwin_allocator_play(struct allocator *a, i64 num_requests, const i64 *requests, struct allocated *level) {
    int status = DONE;
    for (i64 place = 0; place < num_requests && status == DONE; place++) {
        i64 request = requests[place];
        if (request > 0)
            status = make(a, request);
        else if (request == 0 || a->num_made + request < 0 || !a->blocks[a->made[a->num_made + request]].is_allocated)
            status = STUCK;
        else
            status = let_go(a, a->made[a->num_made + request]);
    }
    *level = a->level;
    return status;
}

PUBLIC void protwin_allocator_free(struct allocator *a) {
    if (a) {
        free(a->blocks);
        free(a->made);
        for (int is_small = 0; is_small < 2; is_small++) {
            free(a->pools[is_small].entries);
            free(a->pools[is_small].unmapped);
        }
    }
    free(a);
}
