/* Blocks of a modelled allocator: sim/memory/blocks.py does the same. */

#include <stdlib.h>
#include <string.h>

#include "blocks.h"

/* -- free blocks ------------------------------------------------------------------------------------------------- */

void *protwin_grown(void *items, i64 count, i64 *room, size_t bytes) {
    if (count < *room)
        return items;
    i64 wanted = *room ? 2 * *room : 64;
    void *found = realloc(items, (size_t)wanted * bytes);
    if (found)
        *room = wanted;
    return found;
}

i64 protwin_place_of(const struct pool *pool, i64 size, i64 address) {
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

int protwin_add_free(struct allocator *a, i64 number) {
    const struct block *block = a->blocks + number;
    struct pool *pool = a->pools + block->is_small;
    struct entry *entries = protwin_grown(pool->entries, pool->count, &pool->room, sizeof *entries);
    if (!entries)
        return OUT_OF_MEMORY;
    pool->entries = entries;
    i64 place = protwin_place_of(pool, block->size, block->address);
    memmove(entries + place + 1, entries + place, (size_t)(pool->count - place) * sizeof *entries);
    entries[place] = (struct entry){block->size, block->address, number};
    pool->count++;
    return DONE;
}

void protwin_remove_place(struct pool *pool, i64 place) {
    pool->count--;
    memmove(pool->entries + place, pool->entries + place + 1, (size_t)(pool->count - place) * sizeof *pool->entries);
}

void protwin_remove_free(struct allocator *a, i64 number) {
    const struct block *block = a->blocks + number;
    struct pool *pool = a->pools + block->is_small;
    protwin_remove_place(pool, protwin_place_of(pool, block->size, block->address));
}

/* -- blocks ------------------------------------------------------------------------------------------------------ */

i64 protwin_new_block(struct allocator *a, i64 address, i64 size, int is_small) {
    i64 number = a->unused;
    if (number != NONE) {
        a->unused = a->blocks[number].after;
    } else {
        struct block *blocks = protwin_grown(a->blocks, a->num_blocks, &a->room_blocks, sizeof *blocks);
        if (!blocks)
            return NONE;
        a->blocks = blocks;
        number = a->num_blocks++;
    }
    a->blocks[number] = (struct block){address, size, NONE, NONE, is_small, 0, 1};
    return number;
}

void protwin_forget(struct allocator *a, i64 number) {
    a->blocks[number].after = a->unused;
    a->unused = number;
}

void protwin_insert_after(struct allocator *a, i64 number, i64 before) {
    i64 after = a->blocks[before].after;
    a->blocks[number].before = before;
    a->blocks[number].after = after;
    if (after != NONE)
        a->blocks[after].before = number;
    a->blocks[before].after = number;
}

void protwin_merge_after(struct allocator *a, i64 number) {
    struct block *block = a->blocks + number;
    i64 after = block->after;
    block->size += a->blocks[after].size;
    block->after = a->blocks[after].after;
    if (block->after != NONE)
        a->blocks[block->after].before = number;
    protwin_forget(a, after);
}

void protwin_merge_before(struct allocator *a, i64 number) {
    struct block *block = a->blocks + number;
    i64 before = block->before;
    block->address = a->blocks[before].address;
    block->size += a->blocks[before].size;
    block->before = a->blocks[before].before;
    if (block->before != NONE)
        a->blocks[block->before].after = number;
    protwin_forget(a, before);
}
