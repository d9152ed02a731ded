/* PyTorch's caching allocator, without expandable segments: [Note: The allocator's rules] in sim/memory/allocator.py,
 * whose Python does the same. */

#include <stdlib.h>
#include <string.h>

#include "allocator.h"

#define NONE (-1)
#define MIN_BLOCK_BYTES ((i64)512)
#define SMALL_BYTES ((i64)1 << 20)
#define SMALL_SEGMENT_BYTES ((i64)2 << 20)
#define LARGE_SEGMENT_BYTES ((i64)20 << 20)
#define OWN_SEGMENT_BYTES ((i64)10 << 20)

/* A stretch of one segment; blocks are numbers. */
struct block {
    i64 address, size;
    i64 before, after; /* neighbours; of a number that is not in use, the next such number */
    int is_small, is_allocated;
};

struct entry {
    i64 size, address, block;
};

/* The free blocks: smallest first, of equal ones the lowest address. */
struct pool {
    struct entry *entries;
    i64 count, room;
};

struct allocator {
    struct allocated level;
    i64 limit; /* NONE: a device without end */
    i64 next_address;
    struct block *blocks;
    i64 num_blocks, room_blocks, unused;
    i64 *made; /* the block of every tensor so far */
    i64 num_made, room_made;
    struct pool pools[2]; /* of large sizes, and of small ones */
};

static i64 rounded_up(i64 size, i64 unit) { return (size + unit - 1) / unit * unit; }

static i64 segment_bytes(i64 size) {
    if (size <= SMALL_BYTES)
        return SMALL_SEGMENT_BYTES;
    return size < OWN_SEGMENT_BYTES ? LARGE_SEGMENT_BYTES : rounded_up(size, SMALL_SEGMENT_BYTES);
}

/* Room for one more; NULL if there is none. */
static void *grown(void *items, i64 count, i64 *room, size_t bytes) {
    if (count < *room)
        return items;
    i64 wanted = *room ? 2 * *room : 64;
    void *found = realloc(items, (size_t)wanted * bytes);
    if (found)
        *room = wanted;
    return found;
}

/* -- free blocks ------------------------------------------------------------------------------------------------- */

/* The first place whose block is no less than one of this size at this address. */
static i64 place_of(const struct pool *pool, i64 size, i64 address) {
    i64 low = 0, high = pool->count;
    while (low < high) {
        i64 middle = (low + high) / 2;
        const struct entry *entry = pool->entries + middle;
        if (entry->size < size || (entry->size == size && entry->address < address))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int add_free(struct allocator *a, i64 number) {
    const struct block *block = a->blocks + number;
    struct pool *pool = a->pools + block->is_small;
    struct entry *entries = grown(pool->entries, pool->count, &pool->room, sizeof *entries);
    if (!entries)
        return OUT_OF_MEMORY;
    pool->entries = entries;
    i64 place = place_of(pool, block->size, block->address);
    memmove(entries + place + 1, entries + place, (size_t)(pool->count - place) * sizeof *entries);
    entries[place] = (struct entry){block->size, block->address, number};
    pool->count++;
    return DONE;
}

static void remove_place(struct pool *pool, i64 place) {
    pool->count--;
    memmove(pool->entries + place, pool->entries + place + 1, (size_t)(pool->count - place) * sizeof *pool->entries);
}

static void remove_free(struct allocator *a, i64 number) {
    const struct block *block = a->blocks + number;
    struct pool *pool = a->pools + block->is_small;
    remove_place(pool, place_of(pool, block->size, block->address));
}

/* -- blocks ------------------------------------------------------------------------------------------------------ */

/* The number of a new block without neighbours; NONE if there is no memory. */
static i64 new_block(struct allocator *a, i64 address, i64 size, int is_small) {
    i64 number = a->unused;
    if (number != NONE) {
        a->unused = a->blocks[number].after;
    } else {
        struct block *blocks = grown(a->blocks, a->num_blocks, &a->room_blocks, sizeof *blocks);
        if (!blocks)
            return NONE;
        a->blocks = blocks;
        number = a->num_blocks++;
    }
    a->blocks[number] = (struct block){address, size, NONE, NONE, is_small, 0};
    return number;
}

static void forget(struct allocator *a, i64 number) {
    a->blocks[number].after = a->unused;
    a->unused = number;
}

/* Let a block swallow the free one behind it. */
static void merge_after(struct allocator *a, i64 number) {
    struct block *block = a->blocks + number;
    i64 after = block->after;
    block->size += a->blocks[after].size;
    block->after = a->blocks[after].after;
    if (block->after != NONE)
        a->blocks[block->after].before = number;
    forget(a, after);
}

/* Let a block swallow the free one before it. */
static void merge_before(struct allocator *a, i64 number) {
    struct block *block = a->blocks + number;
    i64 before = block->before;
    block->address = a->blocks[before].address;
    block->size += a->blocks[before].size;
    block->before = a->blocks[before].before;
    if (block->before != NONE)
        a->blocks[block->before].after = number;
    forget(a, before);
}

/* Free what a block has beyond this size, if that is worth it. */
static int split(struct allocator *a, i64 number, i64 size) {
    int is_small = a->blocks[number].is_small;
    i64 rest_bytes = a->blocks[number].size - size;
    if (is_small ? rest_bytes < MIN_BLOCK_BYTES : rest_bytes <= SMALL_BYTES)
        return DONE;
    i64 rest = new_block(a, a->blocks[number].address + size, rest_bytes, is_small);
    if (rest == NONE)
        return OUT_OF_MEMORY;
    struct block *block = a->blocks + number;
    a->blocks[rest].before = number;
    a->blocks[rest].after = block->after;
    if (block->after != NONE)
        a->blocks[block->after].before = rest;
    block->after = rest;
    block->size = size;
    return add_free(a, rest);
}

/* -- segments ---------------------------------------------------------------------------------------------------- */

/* Give back every segment that is free from end to end. */
static void empty_cache(struct allocator *a) {
    for (int is_small = 0; is_small < 2; is_small++) {
        struct pool *pool = a->pools + is_small;
        i64 kept = 0;
        for (i64 place = 0; place < pool->count; place++) {
            i64 number = pool->entries[place].block;
            if (a->blocks[number].before == NONE && a->blocks[number].after == NONE) {
                a->level.reserved_bytes -= a->blocks[number].size;
                forget(a, number);
            } else {
                pool->entries[kept++] = pool->entries[place];
            }
        }
        pool->count = kept;
    }
}

static int has_room(const struct allocator *a, i64 wanted) {
    return a->limit == NONE || a->level.reserved_bytes + wanted <= a->limit;
}

/* A block of a new segment; cached segments are given back if there is no other way. */
static int fresh(struct allocator *a, i64 size, i64 *number) {
    i64 wanted = segment_bytes(size);
    if (!has_room(a, wanted)) {
        empty_cache(a);
        a->level.num_retries++;
        if (!has_room(a, wanted)) {
            a->level.wanted_bytes = wanted;
            return DEVICE_FULL;
        }
    }
    *number = new_block(a, a->next_address, wanted, size <= SMALL_BYTES);
    if (*number == NONE)
        return OUT_OF_MEMORY;
    a->next_address += rounded_up(wanted, SMALL_SEGMENT_BYTES);
    a->level.reserved_bytes += wanted;
    if (a->level.reserved_bytes > a->level.peak_reserved_bytes)
        a->level.peak_reserved_bytes = a->level.reserved_bytes;
    return DONE;
}

/* -- requests ---------------------------------------------------------------------------------------------------- */

static int make(struct allocator *a, i64 requested) {
    i64 size = rounded_up(requested, MIN_BLOCK_BYTES), number = NONE;
    struct pool *pool = a->pools + (size <= SMALL_BYTES);
    i64 place = place_of(pool, size, 0);
    int status = DONE;
    if (place < pool->count) {
        number = pool->entries[place].block;
        remove_place(pool, place);
    } else {
        status = fresh(a, size, &number);
    }
    if (status == DONE)
        status = split(a, number, size);
    i64 *made = status == DONE ? grown(a->made, a->num_made, &a->room_made, sizeof *made) : NULL;
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

static int let_go(struct allocator *a, i64 number) {
    struct block *block = a->blocks + number;
    block->is_allocated = 0;
    a->level.allocated_bytes -= block->size;
    if (block->before != NONE && !a->blocks[block->before].is_allocated) {
        remove_free(a, block->before);
        merge_before(a, number);
    }
    if (block->after != NONE && !a->blocks[block->after].is_allocated) {
        remove_free(a, block->after);
        merge_after(a, number);
    }
    return add_free(a, number);
}

PUBLIC struct allocator *protwin_allocator_new(i64 limit_bytes) {
    struct allocator *a = calloc(1, sizeof *a);
    if (a) {
        a->limit = limit_bytes;
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
        free(a->pools[0].entries);
        free(a->pools[1].entries);
    }
    free(a);
}
