/* PyTorch's caching allocator, as sim/kernels/allocator.py plays requests to it. */

#ifndef PROTWIN_ALLOCATOR_H
#define PROTWIN_ALLOCATOR_H

#include "lanes.h"

/* What an allocator holds, and has held. */
struct allocated {
    i64 reserved_bytes, allocated_bytes;
    i64 peak_reserved_bytes, peak_allocated_bytes;
    i64 num_retries;
    i64 wanted_bytes; /* of the segment that the device had no room for */
};

struct allocator;

/* limit_bytes: the most that the driver hands out; -1 for a device without end.  is_expandable: whether it has expandable
 * segments, and no others.  NULL if there is no memory. */
PUBLIC struct allocator *protwin_allocator_new(i64 limit_bytes, int is_expandable);

/* Make a tensor of each number of bytes; a negative number frees the tensor that was made so many ago. */
PUBLIC int protwin_allocator_play(struct allocator *a, i64 num_requests, const i64 *requests, struct allocated *level);

PUBLIC void protwin_allocator_free(struct allocator *a);

#endif
