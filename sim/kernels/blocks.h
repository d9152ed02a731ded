/* The blocks of a modelled allocator, and the free ones in the order in which a request looks through them; blocks.c. */

#ifndef PROTWIN_BLOCKS_H
#define PROTWIN_BLOCKS_H

#include <stddef.h>

#include "allocator.h"

#define NONE (-1)
#define MIN_BLOCK_BYTES ((i64)512)
#define SMALL_BYTES ((i64)1 << 20)
#define SMALL_SEGMENT_BYTES ((i64)2 << 20)
#define LARGE_SEGMENT_BYTES ((i64)20 << 20)
#define OWN_SEGMENT_BYTES ((i64)10 << 20)

/* A stretch of one segment, or of the address space of an expandable one; blocks are numbers. */
struct block {
    i64 address, size;
    i64 before, after; /* neighbours; of a number that is not in use, the next such number */
    int is_small, is_allocated;
    int is_mapped; /* whether memory lies behind it: not behind all of the space of expandable segments */
};

struct entry {
    i64 size, address, block;
};

/* The free blocks: smallest first, of equal ones the lowest address. */
struct pool {
    struct entry *entries;
    i64 count, room;
    i64 *unmapped; /* address space without memory, by address */
    i64 num_unmapped, room_unmapped;
};

struct allocator {
    struct allocated level;
    i64 limit; /* NONE: a device without end */
    int is_expandable;
    i64 next_address;
    struct block *blocks;
    i64 num_blocks, room_blocks, unused;
    i64 *made; /* the block of every tensor so far */
    i64 num_made, room_made;
    struct pool pools[2]; /* of large sizes, and of small ones */
};

static inline i64 rounded_up(i64 size, i64 unit) { return (size + unit - 1) / unit * unit; }

/* Room for one more; NULL if there is none. */
void *protwin_grown(void *items, i64 count, i64 *room, size_t bytes);

/* The first place whose block is no less than one of this size at this address. */
i64 protwin_place_of(const struct pool *pool, i64 size, i64 address);

/* A block becomes free. */
int protwin_add_free(struct allocator *a, i64 number);

/* A block is free no more, or about to change its size. */
void protwin_remove_free(struct allocator *a, i64 number);

/* The same of the block at a place of its pool. */
void protwin_remove_place(struct pool *pool, i64 place);

/* The number of a new block without neighbours; NONE if there is no memory. */
i64 protwin_new_block(struct allocator *a, i64 address, i64 size, int is_small);

/* A number is not in use any more. */
void protwin_forget(struct allocator *a, i64 number);

/* Let a block take the place behind another one. */
void protwin_insert_after(struct allocator *a, i64 number, i64 before);

/* Let a block swallow the one behind it, or the one before it. */
void protwin_merge_after(struct allocator *a, i64 number);
void protwin_merge_before(struct allocator *a, i64 number);

/* Ask the driver for memory; whether it has some. */
int protwin_take(struct allocator *a, i64 size);

/* Of the free blocks from a place on, the place of the first whose successor could not grow to less; expandable.c. */
i64 protwin_preferred(const struct allocator *a, const struct pool *pool, i64 place);

/* A block of at least this size at the end of an expandable segment, which is in no pool.  DEVICE_FULL leaves what was
 * mapped until then free. */
int protwin_expand(struct allocator *a, i64 size, i64 *number);

/* Give back the pages that are free from end to end. */
int protwin_unmap_free(struct allocator *a);

#endif
