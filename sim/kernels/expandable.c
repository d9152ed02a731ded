/* Expandable segments: address space first, memory behind it page by page.  sim/memory/expandable.py does the same. */

#include <stdlib.h>
#include <string.h>

#include "blocks.h"

/* Address space of one segment: never used up. */
#define SPACE_BYTES (LARGE_SEGMENT_BYTES << 24)

static i64 page_bytes(int is_small) { return is_small ? SMALL_SEGMENT_BYTES : LARGE_SEGMENT_BYTES; }

static int is_unmapped(const struct allocator *a, i64 number) { return number != NONE && !a->blocks[number].is_mapped; }

/* -- address space ----------------------------------------------------------------------------------------------- */

static int add_unmapped(struct allocator *a, i64 number) {
    struct pool *pool = a->pools + a->blocks[number].is_small;
    i64 *unmapped = protwin_grown(pool->unmapped, pool->num_unmapped, &pool->room_unmapped, sizeof *unmapped);
    if (!unmapped)
        return OUT_OF_MEMORY;
    pool->unmapped = unmapped;
    i64 place = pool->num_unmapped++;
    for (; place > 0 && a->blocks[unmapped[place - 1]].address > a->blocks[number].address; place--)
        unmapped[place] = unmapped[place - 1];
    unmapped[place] = number;
    return DONE;
}

static void remove_unmapped(struct allocator *a, i64 number) {
    struct pool *pool = a->pools + a->blocks[number].is_small;
    i64 place = 0;
    while (pool->unmapped[place] != number)
        place++;
    pool->num_unmapped--;
    memmove(pool->unmapped + place, pool->unmapped + place + 1,
            (size_t)(pool->num_unmapped - place) * sizeof *pool->unmapped);
}

/* Whether so many bytes are free or unmapped from a block on. */
static int has_room(const struct allocator *a, i64 number, i64 size) {
    i64 found = 0;
    for (; found < size && number != NONE && !a->blocks[number].is_allocated; number = a->blocks[number].after)
        found += a->blocks[number].size;
    return found >= size;
}

/* A new address space without memory; before it stands a block of no size that is never free. */
static int new_space(struct allocator *a, int is_small, i64 *number) {
    i64 page = page_bytes(is_small), address = rounded_up(a->next_address, page);
    a->next_address += rounded_up(SPACE_BYTES + page, SMALL_SEGMENT_BYTES);
    i64 head = protwin_new_block(a, 0, 0, is_small);
    if (head == NONE)
        return OUT_OF_MEMORY;
    a->blocks[head].is_allocated = 1;
    *number = protwin_new_block(a, address, SPACE_BYTES, is_small);
    if (*number == NONE)
        return OUT_OF_MEMORY;
    a->blocks[*number].is_mapped = 0;
    protwin_insert_after(a, *number, head);
    return add_unmapped(a, *number);
}

/* The lowest block from which on so many bytes are free or unmapped; a new address space if there is none. */
static int lowest_room(struct allocator *a, i64 size, i64 *number) {
    int is_small = size <= SMALL_BYTES;
    const struct pool *pool = a->pools + is_small;
    for (i64 place = 0; place < pool->num_unmapped; place++) {
        i64 found = pool->unmapped[place], before = a->blocks[found].before;
        if (before != NONE && !a->blocks[before].is_allocated)
            found = before;
        if (has_room(a, found, size)) {
            *number = found;
            return DONE;
        }
    }
    return new_space(a, is_small, number);
}

/* -- pages ------------------------------------------------------------------------------------------------------- */

/* Map the pages of the first so many bytes of an unmapped block, which is free then; DEVICE_FULL if there are none. */
static int map(struct allocator *a, i64 number, i64 size) {
    int is_small = a->blocks[number].is_small;
    i64 mapped = rounded_up(size, page_bytes(is_small));
    if (!protwin_take(a, mapped))
        return DEVICE_FULL;
    remove_unmapped(a, number);
    a->blocks[number].is_mapped = 1;
    if (mapped < a->blocks[number].size) {
        i64 address = a->blocks[number].address + mapped, rest_bytes = a->blocks[number].size - mapped;
        i64 rest = protwin_new_block(a, address, rest_bytes, is_small);
        if (rest == NONE)
            return OUT_OF_MEMORY;
        a->blocks[rest].is_mapped = 0;
        protwin_insert_after(a, rest, number);
        a->blocks[number].size = mapped;
        if (add_unmapped(a, rest) != DONE)
            return OUT_OF_MEMORY;
    }
    i64 before = a->blocks[number].before, after = a->blocks[number].after;
    if (before != NONE && !a->blocks[before].is_allocated && a->blocks[before].is_mapped) {
        protwin_remove_free(a, before);
        protwin_merge_before(a, number);
    }
    if (after != NONE && !a->blocks[after].is_allocated && a->blocks[after].is_mapped) {
        protwin_remove_free(a, after);
        protwin_merge_after(a, number);
    }
    return protwin_add_free(a, number);
}

int protwin_expand(struct allocator *a, i64 size, i64 *number) {
    int status = lowest_room(a, size, number);
    if (status == DONE && !a->blocks[*number].is_mapped) {
        i64 room = a->blocks[*number].size;
        status = map(a, *number, room < size ? room : size);
    }
    while (status == DONE && a->blocks[*number].size < size) {
        i64 beyond = a->blocks[*number].after, missing = size - a->blocks[*number].size;
        i64 room = a->blocks[beyond].size;
        status = map(a, beyond, room < missing ? room : missing);
        *number = beyond; /* which has swallowed the block before it */
    }
    if (status == DONE)
        protwin_remove_free(a, *number);
    return status;
}

static i64 could_grow_to(const struct allocator *a, i64 number) {
    i64 after = a->blocks[number].after;
    return a->blocks[number].size + (is_unmapped(a, after) ? a->blocks[after].size : 0);
}

i64 protwin_preferred(const struct allocator *a, const struct pool *pool, i64 place) {
    const struct entry *entries = pool->entries;
    while (place + 1 < pool->count &&
           could_grow_to(a, entries[place + 1].block) < could_grow_to(a, entries[place].block))
        place++;
    return place;
}

/* Give the whole pages of a free block back. */
static int unmap(struct allocator *a, i64 number) {
    int is_small = a->blocks[number].is_small;
    i64 page = page_bytes(is_small), address = a->blocks[number].address, stop = address + a->blocks[number].size;
    i64 begin = rounded_up(address, page), end = stop / page * page;
    if (begin >= end)
        return DONE;
    protwin_remove_free(a, number);
    if (begin > address) {
        i64 rest = protwin_new_block(a, address, begin - address, is_small);
        if (rest == NONE)
            return OUT_OF_MEMORY;
        /* An expandable segment begins with a block that is never free. */
        protwin_insert_after(a, rest, a->blocks[number].before);
        if (protwin_add_free(a, rest) != DONE)
            return OUT_OF_MEMORY;
    }
    if (end < stop) {
        i64 rest = protwin_new_block(a, end, stop - end, is_small);
        if (rest == NONE)
            return OUT_OF_MEMORY;
        protwin_insert_after(a, rest, number);
        if (protwin_add_free(a, rest) != DONE)
            return OUT_OF_MEMORY;
    }
    a->blocks[number].address = begin;
    a->blocks[number].size = end - begin;
    a->blocks[number].is_mapped = 0;
    a->level.reserved_bytes -= end - begin;
    i64 before = a->blocks[number].before, after = a->blocks[number].after;
    if (is_unmapped(a, before)) {
        remove_unmapped(a, before);
        protwin_merge_before(a, number);
    }
    if (is_unmapped(a, after)) {
        remove_unmapped(a, after);
        protwin_merge_after(a, number);
    }
    return add_unmapped(a, number);
}

int protwin_unmap_free(struct allocator *a) {
    int status = DONE;
    for (int is_small = 0; is_small < 2 && status == DONE; is_small++) {
        /* Rests become free meanwhile. */
        const struct pool *pool = a->pools + is_small;
        i64 count = pool->count;
        i64 *numbers = malloc((size_t)(count ? count : 1) * sizeof *numbers);
        if (!numbers)
            return OUT_OF_MEMORY;
        for (i64 place = 0; place < count; place++)
            numbers[place] = pool->entries[place].block;
        for (i64 place = 0; place < count && status == DONE; place++)
            status = unmap(a, numbers[place]);
        free(numbers);
    }
    return status;
}
