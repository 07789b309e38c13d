/* torch's caching allocator, replayed: the rules of memplan/memory/replaying/allocator.py and
 * memplan/memory/replaying/expandable.py, which say where they come from, and give the same answers.
 *
 * Sizes and addresses are counted in units of 512 bytes. A run is a list of events: a positive one
 * allocates so many units, ~n frees what event n allocated, 0 gives the cache back. What follows the
 * event `cycle` is a step that recurs: its copy frees what its own events allocated, or what the step
 * before it left (events `before` to `cycle` of the list).
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    UNIT = 512,
    SMALL_REQUEST = 2048,     /* 1 MiB: up to here the small pool serves (kSmallSize) */
    SMALL_SEGMENT = 4096,     /* 2 MiB (kSmallBuffer) */
    MEDIUM_SEGMENT = 40960,   /* 20 MiB (kLargeBuffer) */
    MEDIUM_REQUEST = 20480,   /* 10 MiB (kMinLargeAlloc) */
    SEGMENT_ROUNDING = 4096,  /* 2 MiB (kRoundLarge) */
    CHUNK = 512               /* blocks that are had at once */
};
#define ENDLESS (INT64_MAX / 4)
#define LARGEST (INT64_C(1) << 39) /* of one block: sums of them stay below ENDLESS */
#define FIRST_STAND_IN (INT64_C(1) << 62) /* memplan/memory/replaying/ledger.py */

typedef struct Block { /* one line of a cache */
    int64_t address, size, request;
    struct Block *before, *after;         /* neighbours in its segment or range */
    struct Block *earlier, *later;        /* segments of its pool, of a segment's first block */
    int32_t number;                       /* of the event that asked for it */
    int16_t pool;
    char used, mapped;
} Block;

typedef struct { int64_t size, address; Block *block; } Key;

typedef struct {               /* free blocks of about one size */
    Key *keys;                 /* by size, then address */
    Key *held;                 /* the memory in which they lie, with room before and behind them */
    int32_t count, room;
} Bin;

enum { STEPS = 3, BINS = 328, WORDS = BINS / 64 + 1 }; /* 2^STEPS bins to each doubling, up to 2^43 units */

typedef struct {
    Bin bins[BINS];
    uint64_t filled[WORDS];    /* a bit of each bin that has keys */
    Block *first, *last;       /* segments in the order of their addresses; the range's blocks */
    int64_t page;              /* of an expandable range */
} Pool;

typedef struct { int bin; Py_ssize_t at; } Spot; /* of a key; bin -1: of none */

typedef struct { Block blocks[CHUNK]; } Chunk;

typedef struct {
    int expandable;
    int failed;                /* 1: no memory for the replay itself; 2: freed twice */
    int64_t capacity, next, reserved, allocated, requested;
    int64_t peak_reserved, peak_allocated, peak_requested, mallocs, flushes;
    int64_t lacked;            /* the least capacity with which something else would have happened */
    int64_t pressed;           /* the most that was reserved with what a cache was given back for */
    int pressing;              /* the cache has been given back for what is asked for now */
    Pool *pools;
    int num_pools;
    Block *spare;
    Chunk **chunks;
    Py_ssize_t num_chunks, used_chunks, taken; /* blocks of the last chunk in use */
} State;

static int add_chunk(State *state) {
    Chunk **chunks = realloc(state->chunks, (size_t)(state->num_chunks + 1) * sizeof(Chunk *));
    if (!chunks) return 0;
    state->chunks = chunks;
    chunks[state->num_chunks] = malloc(sizeof(Chunk));
    if (!chunks[state->num_chunks]) return 0;
    state->num_chunks++;
    return 1;
}

static Block *fresh(State *state) {
    Block *block = state->spare;
    if (block) {
        state->spare = block->after;
    } else {
        if (state->taken == CHUNK) {
            if (state->used_chunks == state->num_chunks && !add_chunk(state)) {
                state->failed = 1;
                return NULL;
            }
            state->used_chunks++;
            state->taken = 0;
        }
        block = &state->chunks[state->used_chunks - 1]->blocks[state->taken++];
    }
    *block = (Block){0};
    return block;
}

static void drop(State *state, Block *block) {
    block->after = state->spare;
    state->spare = block;
}

#ifdef _MSC_VER
#include <intrin.h>
static int highest_bit(uint64_t word) { unsigned long bit; _BitScanReverse64(&bit, word); return (int)bit; }
static int lowest_bit(uint64_t word) { unsigned long bit; _BitScanForward64(&bit, word); return (int)bit; }
#else
static int highest_bit(uint64_t word) { return 63 - __builtin_clzll(word); }
static int lowest_bit(uint64_t word) { return __builtin_ctzll(word); }
#endif

/* Larger sizes never lie in an earlier bin. */
static int bin_of(int64_t size) {
    if (size < 1 << STEPS) return (int)size;
    int doublings = highest_bit((uint64_t)size) - STEPS;
    return ((doublings + 1) << STEPS) + (int)((size >> doublings) & ((1 << STEPS) - 1));
}

/* The first bin from one on that has keys, or -1. */
static int filled_from(const Pool *pool, int bin) {
    int word = bin >> 6;
    uint64_t bits = pool->filled[word] & (~UINT64_C(0) << (bin & 63));
    while (!bits) {
        if (++word == WORDS) return -1;
        bits = pool->filled[word];
    }
    return (word << 6) + lowest_bit(bits);
}

static int comes_before(const Key *key, int64_t size, int64_t address) {
    return (key->size < size) | ((key->size == size) & (key->address < address));
}

/* Of the keys from `low` to `high` the first that does not come before a size and an address. */
static Py_ssize_t between(const Bin *bin, Py_ssize_t low, Py_ssize_t high, int64_t size, int64_t address) {
    Py_ssize_t count = high - low;
    const Key *keys = bin->keys + low;
    while (count > 0) { /* without a branch on what is compared, which nobody foresees */
        Py_ssize_t half = count >> 1;
        const Key *middle = keys + half;
        int is_before = comes_before(middle, size, address);
        keys = is_before ? middle + 1 : keys;
        count = is_before ? count - half - 1 : half;
    }
    return keys - bin->keys;
}

/* The same of all keys: four of five times it is at one of the ends. */
static Py_ssize_t among(const Bin *bin, int64_t size, int64_t address) {
    Py_ssize_t count = bin->count;
    if (!count || !comes_before(bin->keys, size, address)) return 0;
    if (comes_before(bin->keys + count - 1, size, address)) return count;
    return between(bin, 1, count - 1, size, address);
}

/* The first key of at least a size. */
static Spot fit(const Pool *pool, int64_t size) {
    int number = bin_of(size);
    const Bin *bin = &pool->bins[number];
    Py_ssize_t at = among(bin, size, -1);
    if (at < bin->count) return (Spot){number, at};
    return (Spot){filled_from(pool, number + 1), 0};
}

static Spot following(const Pool *pool, Spot spot) {
    if (spot.at + 1 < pool->bins[spot.bin].count) return (Spot){spot.bin, spot.at + 1};
    return (Spot){filled_from(pool, spot.bin + 1), 0};
}

static Block *block_at(const Pool *pool, Spot spot) { return pool->bins[spot.bin].keys[spot.at].block; }

static Spot place(const Pool *pool, const Block *block) {
    int number = bin_of(block->size);
    const Bin *bin = &pool->bins[number];
    return (Spot){number, among(bin, block->size, block->address)};
}

/* Lay the keys into the middle of their memory; where that is half full, of twice as much. */
static void spread(State *state, Bin *bin) {
    int32_t room = bin->room ? bin->room : 8;
    if (2 * bin->count >= room) room *= 2;
    Key *held = malloc((size_t)room * sizeof(Key));
    if (!held) { state->failed = 1; return; }
    Key *keys = held + (room - bin->count) / 2;
    if (bin->count) memcpy(keys, bin->keys, (size_t)bin->count * sizeof(Key));
    free(bin->held);
    bin->held = held;
    bin->keys = keys;
    bin->room = room;
}

/* Of the keys on both sides of a place the fewer ones move. */
static void put(State *state, Block *block) {
    Pool *pool = &state->pools[block->pool];
    int number = bin_of(block->size);
    Bin *bin = &pool->bins[number];
    Py_ssize_t at = among(bin, block->size, block->address);
    int forward = at >= bin->count - at;
    if (bin->keys == (forward ? bin->held + bin->room - bin->count : bin->held)) {
        spread(state, bin);
        if (state->failed) return;
    }
    if (forward) {
        for (Key *each = bin->keys + bin->count; each > bin->keys + at; each--) *each = each[-1];
    } else {
        bin->keys--;
        for (Key *each = bin->keys; each < bin->keys + at; each++) *each = each[1];
    }
    bin->count++;
    bin->keys[at] = (Key){block->size, block->address, block};
    pool->filled[number >> 6] |= UINT64_C(1) << (number & 63);
    block->used = 0;
}

static void take_at(Pool *pool, Spot spot) {
    Bin *bin = &pool->bins[spot.bin];
    Py_ssize_t at = spot.at;
    bin->count--;
    if (at < bin->count - at) {
        for (Key *each = bin->keys + at; each > bin->keys; each--) *each = each[-1];
        bin->keys++;
    } else {
        for (Key *each = bin->keys + at; each < bin->keys + bin->count; each++) *each = each[1];
    }
    if (!bin->count) pool->filled[spot.bin >> 6] &= ~(UINT64_C(1) << (spot.bin & 63));
}

static void take(State *state, Block *block) {
    Pool *pool = &state->pools[block->pool];
    take_at(pool, place(pool, block));
}

enum { NEAR = 256 }; /* keys that move faster than two places are made anew */

/* A block of another size takes the place of a key: of one bin, those between move by one, where they are few. */
static void put_for(State *state, Pool *pool, Spot spot, Block *block) {
    Bin *bin = &pool->bins[spot.bin];
    Py_ssize_t at = spot.at, to = at;
    if (bin_of(block->size) == spot.bin) {
        int is_less = block->size < bin->keys[at].size;
        to = is_less ? between(bin, 0, at, block->size, block->address)
                     : between(bin, at + 1, bin->count, block->size, block->address) - 1;
        if (at - to <= NEAR && to - at <= NEAR) {
            for (; at > to; at--) bin->keys[at] = bin->keys[at - 1];
            for (; at < to; at++) bin->keys[at] = bin->keys[at + 1];
            bin->keys[to] = (Key){block->size, block->address, block};
            return;
        }
    }
    take_at(pool, spot);
    put(state, block);
}

static void link_after(Block *block, Block *other) {
    other->before = block;
    other->after = block->after;
    if (block->after) block->after->before = other;
    block->after = other;
}

/* `following` becomes a part of `block`. */
static void absorb(State *state, Block *block, Block *following) {
    block->size += following->size;
    block->after = following->after;
    if (following->after) following->after->before = block;
    drop(state, following);
}

/* -- default settings ------------------------------------------------------------------------ */

static void release_bin(State *state, Pool *pool, int number) {
    Bin *bin = &pool->bins[number];
    int32_t kept = 0;
    for (int32_t at = 0; at < bin->count; at++) {
        Block *block = bin->keys[at].block;
        if (block->before || block->after) {
            bin->keys[kept++] = bin->keys[at];
            continue;
        }
        state->reserved -= block->size;
        if (block->earlier) block->earlier->later = block->later; else pool->first = block->later;
        if (block->later) block->later->earlier = block->earlier; else pool->last = block->earlier;
        drop(state, block);
    }
    bin->count = kept;
    if (!kept) pool->filled[number >> 6] &= ~(UINT64_C(1) << (number & 63));
}

static void release_segments(State *state) {
    for (int number = 0; number < state->num_pools; number++) {
        Pool *pool = &state->pools[number];
        for (int bin = filled_from(pool, 0); bin >= 0; bin = filled_from(pool, bin + 1))
            release_bin(state, pool, bin);
    }
}

static int64_t segment_size(int64_t request) {
    if (request <= SMALL_REQUEST) return SMALL_SEGMENT;
    if (request < MEDIUM_REQUEST) return MEDIUM_SEGMENT;
    return (request + SEGMENT_ROUNDING - 1) / SEGMENT_ROUNDING * SEGMENT_ROUNDING;
}

/* Whether so much more is more than there is; if so, with which capacity it would not be. */
static int lacks(State *state, int64_t size) {
    int64_t needed = state->reserved + size;
    if (needed <= state->capacity) return 0;
    if (needed < state->lacked) state->lacked = needed;
    return 1;
}

static void reserve(State *state, int64_t size) {
    state->reserved += size;
    if (state->pressing && state->reserved > state->pressed) state->pressed = state->reserved;
    if (state->reserved > state->peak_reserved) state->peak_reserved = state->reserved;
}

static Block *new_segment(State *state, int64_t request, int32_t number) {
    Pool *pool = &state->pools[number];
    int64_t size = segment_size(request);
    if (lacks(state, size)) {
        state->flushes++;
        release_segments(state);
        if (lacks(state, size)) return NULL;
        state->pressing = 1;
    }
    Block *block = fresh(state);
    if (!block) return NULL;
    state->mallocs++;
    reserve(state, size);
    state->pressing = 0;
    block->address = state->next;
    block->size = size;
    block->pool = (int16_t)number;
    block->earlier = pool->last;
    if (pool->last) pool->last->later = block; else pool->first = block;
    pool->last = block;
    state->next += size;
    return block;
}

static Block *allocate_cached(State *state, int64_t request, int32_t number) {
    Pool *pool = &state->pools[number];
    Spot spot = fit(pool, request);
    int is_new = spot.bin < 0;
    Block *block = is_new ? new_segment(state, request, number) : block_at(pool, spot);
    if (!block) return NULL;
    int64_t rest = block->size - request;
    if (rest > (request <= SMALL_REQUEST ? 0 : SMALL_REQUEST)) {
        Block *other = fresh(state);
        if (!other) return NULL;
        other->address = block->address + request;
        other->size = rest;
        other->pool = (int16_t)number;
        link_after(block, other);
        block->size = request;
        if (is_new) put(state, other); else put_for(state, pool, spot, other);
    } else if (!is_new) {
        take_at(pool, spot);
    }
    return block;
}

static void free_cached(State *state, Block *block) {
    Pool *pool = &state->pools[block->pool];
    Block *before = block->before, *after = block->after;
    Spot spot = {-1, 0}; /* of the key of which the joined block takes the place */
    if (after && !after->used) {
        spot = place(pool, after);
        absorb(state, block, after);
    }
    if (before && !before->used) {
        if (spot.bin >= 0) take_at(pool, spot);
        spot = place(pool, before);
        absorb(state, before, block);
        block = before;
    }
    if (spot.bin >= 0) put_for(state, pool, spot, block); else put(state, block);
}

/* -- expandable segments --------------------------------------------------------------------- */

static void begin_range(State *state, int32_t number) {
    Pool *pool = &state->pools[number];
    Block *tail = fresh(state);
    if (!tail) return;
    tail->size = ENDLESS;
    tail->pool = (int16_t)number;
    pool->page = number & 1 ? SMALL_SEGMENT : MEDIUM_SEGMENT;
    pool->first = tail;
}

static int64_t growth(const Block *block) {
    const Block *after = block->after;
    return block->size + (after && !after->mapped ? after->size : 0);
}

/* The best fit, a block at an edge counting as large as it can grow. */
static Block *fitting(const Pool *pool, int64_t size) {
    Spot spot = fit(pool, size);
    if (spot.bin < 0) return NULL;
    Block *block = block_at(pool, spot);
    for (spot = following(pool, spot); spot.bin >= 0; spot = following(pool, spot)) {
        Block *other = block_at(pool, spot);
        if (growth(other) >= growth(block)) break;
        block = other;
    }
    return block;
}

/* The lowest free or unmapped block from which there is room for a request. */
static Block *growing(const Pool *pool, int64_t size) {
    for (Block *unmapped = pool->first; unmapped; unmapped = unmapped->after) {
        if (unmapped->mapped) continue;
        Block *block = unmapped;
        if (block->before && !block->before->used && block->before->mapped) block = block->before;
        int64_t room = 0;
        for (Block *each = block; each && !each->used && room < size; each = each->after)
            room += each->size;
        if (room >= size) return block;
    }
    return NULL; /* not reached: the last block of a range is endless */
}

/* A free block joins its free mapped neighbours. */
static Block *join(State *state, Block *block) {
    Block *before = block->before, *after = block->after;
    if (before && before->mapped && !before->used) {
        take(state, before);
        absorb(state, before, block);
        block = before;
    }
    if (after && after->mapped && !after->used) {
        take(state, after);
        absorb(state, block, after);
    }
    put(state, block);
    return block;
}

/* Map pages at the beginning of an unmapped block; NULL: there are none. */
static Block *map_pages(State *state, Block *block, int64_t size) {
    int64_t page = state->pools[block->pool].page;
    int64_t end = (block->address + size + page - 1) / page * page;
    size = end - block->address < block->size ? end - block->address : block->size;
    if (lacks(state, size)) return NULL;
    state->mallocs += size / page;
    reserve(state, size);
    if (size < block->size) {
        Block *rest = fresh(state);
        if (!rest) return NULL;
        rest->address = block->address + size;
        rest->size = block->size - size;
        rest->pool = block->pool;
        link_after(block, rest);
        block->size = size;
    }
    block->mapped = 1;
    return join(state, block);
}

static Block *grow(State *state, int32_t number, int64_t size) {
    Block *block = growing(&state->pools[number], size);
    if (!block->mapped) {
        block = map_pages(state, block, block->size < size ? block->size : size);
        if (!block) return NULL;
    }
    while (block->size < size) {
        Block *after = block->after;
        int64_t more = size - block->size < after->size ? size - block->size : after->size;
        block = map_pages(state, after, more);
        if (!block) return NULL;
    }
    take(state, block);
    return block;
}

static void unmap(State *state, Block *block) {
    int64_t page = state->pools[block->pool].page, stop = block->address + block->size;
    int64_t start = (block->address + page - 1) / page * page, end = stop / page * page;
    if (end <= start) return;
    take(state, block);
    state->reserved -= end - start;
    if (stop > end) {
        Block *rest = fresh(state);
        if (!rest) return;
        rest->address = end;
        rest->size = stop - end;
        rest->pool = block->pool;
        rest->mapped = 1;
        link_after(block, rest);
        put(state, rest);
    }
    if (block->address < start) {
        Block *middle = fresh(state);
        if (!middle) return;
        middle->address = start;
        middle->pool = block->pool;
        link_after(block, middle);
        block->size = start - block->address;
        put(state, block);
        block = middle;
    }
    block->size = end - start;
    block->mapped = 0;
    if (block->after && !block->after->mapped) absorb(state, block, block->after);
    if (block->before && !block->before->mapped) absorb(state, block->before, block);
}

static Py_ssize_t num_keys(const Pool *pool) {
    Py_ssize_t found = 0;
    for (int bin = filled_from(pool, 0); bin >= 0; bin = filled_from(pool, bin + 1))
        found += pool->bins[bin].count;
    return found;
}

static void release_pages(State *state) {
    for (int number = 0; number < state->num_pools; number++) {
        Pool *pool = &state->pools[number];
        Py_ssize_t count = num_keys(pool), at = 0;
        if (!count) continue;
        Block **found = malloc(count * sizeof(Block *));
        if (!found) { state->failed = 1; return; }
        for (Spot spot = fit(pool, 0); spot.bin >= 0; spot = following(pool, spot))
            found[at++] = block_at(pool, spot);
        for (at = 0; at < count && !state->failed; at++) unmap(state, found[at]);
        free(found);
    }
}

static Block *allocate_expandable(State *state, int64_t request, int32_t number) {
    Pool *pool = &state->pools[number];
    if (!pool->first) begin_range(state, number);
    if (state->failed) return NULL;
    Block *block = fitting(pool, request);
    if (block) {
        take(state, block);
    } else {
        block = grow(state, number, request);
        if (!block && !state->failed) {
            state->flushes++;
            release_pages(state);
            state->pressing = 1;
            if (!state->failed) block = grow(state, number, request);
            state->pressing = 0;
        }
        if (!block) return NULL;
    }
    if (block->size > request) {
        Block *other = fresh(state);
        if (!other) return NULL;
        other->address = block->address + request;
        other->size = block->size - request;
        other->pool = (int16_t)number;
        other->mapped = 1;
        link_after(block, other);
        block->size = request;
        put(state, other);
    }
    return block;
}

/* -- a run ----------------------------------------------------------------------------------- */

typedef struct {
    int64_t *events;
    int16_t *pools;
    Py_ssize_t count, before, cycle;
} Run;

static Block *allocate(State *state, int64_t request, int32_t pool) {
    Block *block = state->expandable ? allocate_expandable(state, request, pool)
                                     : allocate_cached(state, request, pool);
    if (!block) return NULL;
    block->used = 1;
    block->request = request;
    state->requested += request;
    state->allocated += block->size;
    if (state->requested > state->peak_requested) state->peak_requested = state->requested;
    if (state->allocated > state->peak_allocated) state->peak_allocated = state->allocated;
    return block;
}

static void give_back(State *state, Block *block) {
    state->requested -= block->request;
    state->allocated -= block->size;
    block->used = 0;
    if (state->expandable) join(state, block);
    else free_cached(state, block);
}

static void release_cached(State *state) {
    if (state->expandable) release_pages(state);
    else release_segments(state);
}

/* Follow the events `from` to `until`; what event n allocated is noted at made[n - base], and what
 * events before `base` did at earlier[n - first]. Returns the event at which memory ran out, or -1. */
static Py_ssize_t follow(State *state, const Run *run, Py_ssize_t from, Py_ssize_t until, Py_ssize_t base,
                         Block **made, Py_ssize_t first, Block **earlier) {
    for (Py_ssize_t number = from; number < until; number++) {
        int64_t event = run->events[number];
        if (event < 0) {
            Py_ssize_t freed = (Py_ssize_t)~event;
            Block *block = freed >= base ? made[freed - base] : earlier[freed - first];
            if (!block || !block->used) { state->failed = 2; return number; }
            give_back(state, block);
        } else if (event == 0) {
            release_cached(state);
        } else {
            Block *block = allocate(state, event, run->pools[number]);
            if (!block) return number;
            block->number = (int32_t)number;
            made[number - base] = block;
        }
        if (state->failed) return number;
    }
    return -1;
}

/* Whether every event names something that is there, so that no input can make this go astray. */
static int is_sound(const Run *run, int num_pools) {
    Py_ssize_t cycle = run->cycle;
    if (run->before < 0 || run->before > cycle || cycle > run->count || run->count > INT32_MAX) return 0;
    for (Py_ssize_t number = 0; number < run->count; number++) {
        int64_t event = run->events[number], freed = ~event;
        if (event > LARGEST) return 0;
        if (event > 0 && (run->pools[number] < 0 || run->pools[number] >= num_pools)) return 0;
        if (event >= 0) continue;
        if (freed >= number || run->events[freed] <= 0) return 0;
        if (number < cycle || freed >= cycle) continue;
        freed -= run->before;
        if (freed < 0 || freed >= run->count - cycle || run->events[cycle + freed] <= 0) return 0;
    }
    return 1;
}

/* -- a run that is kept, and the places where it was --------------------------------------------- */

/* All that later decisions depend on, as a row of numbers: of each pool, each segment's blocks in order, and whose
 * they are; 0 ends a segment, and a pool. A number takes as many bytes as it needs. */
typedef struct { unsigned char *bytes; Py_ssize_t count, room; } Picture;

enum { LOOSE, MAPPED, LASTING, NAMED }; /* whose: nobody's; of before the step that recurs; from here on an event's */

static void note(State *state, Picture *picture, uint64_t number) {
    if (picture->room - picture->count < 10) {
        Py_ssize_t room = picture->room ? 2 * picture->room : 4096;
        unsigned char *bytes = realloc(picture->bytes, (size_t)room);
        if (!bytes) { state->failed = 1; return; }
        picture->bytes = bytes;
        picture->room = room;
    }
    unsigned char *to = picture->bytes + picture->count;
    for (; number > 127; number >>= 7) *to++ = (unsigned char)(number | 128);
    *to++ = (unsigned char)number;
    picture->count = to - picture->bytes;
}

static uint64_t noted(const unsigned char **from) {
    uint64_t number = 0;
    int bits = 0;
    for (; **from > 127; bits += 7) number |= (uint64_t)(*(*from)++ & 127) << bits;
    return number | (uint64_t)*(*from)++ << bits;
}

/* Blocks of events before `base` last. */
static void draw(State *state, Py_ssize_t base, Picture *picture) {
    picture->count = 0;
    for (int number = 0; number < state->num_pools && !state->failed; number++) {
        for (Block *head = state->pools[number].first; head; head = head->later) {
            for (Block *block = head; block && !state->failed; block = block->after) {
                note(state, picture, (uint64_t)block->size);
                if (!block->used) note(state, picture, block->mapped ? MAPPED : LOOSE);
                else if (block->number < base) note(state, picture, LASTING);
                else note(state, picture, (uint64_t)(NAMED + block->number - base));
            }
            note(state, picture, 0);
        }
        note(state, picture, 0);
    }
}

/* What became of the run from one place to the next; every card with so much reserved, and less than lacked, finds
 * the same. */
typedef struct Way {
    int64_t requested, allocated, reserved, mallocs, flushes, lacked, pressed;
    Py_ssize_t died_at;
    struct Place *end;             /* NULL: it died */
    struct Way *other;
} Way;

/* Between two stretches of the run: of the events that are played once, and then of steps that recur. */
typedef struct Place {
    Picture picture;
    int64_t requested, allocated, reserved;
    int stretch;                   /* the next one */
    Way *ways;
    struct Place *other;
} Place;

enum { STRETCHES = 8, CUTS = STRETCHES + 4, KEPT_BYTES = 4 << 20 };

typedef struct {
    Run run;
    State state;
    Block **made, **spare;         /* what the events allocated; room for another step's */
    Block **last, **next;          /* what the last step did, and where the next one notes it */
    Py_ssize_t cuts[CUTS];         /* where stretches begin that are played once, and their end */
    int num_stretches;
    Place *beginning;
    Place *places;                 /* the latest first */
    Place *stands;                 /* the one in which the state is; NULL: in none */
    Picture drawn;
    Py_ssize_t kept_bytes;
} Kept;

/* From which event on a place's blocks have names: where all that comes is the step that recurs, from its first one. */
static Py_ssize_t base_of(const Kept *kept, int stretch) {
    return stretch < kept->num_stretches ? 0 : kept->run.cycle;
}

static void forget_places(Kept *kept) {
    while (kept->places) {
        Place *place = kept->places;
        kept->places = place->other;
        while (place->ways) {
            Way *way = place->ways;
            place->ways = way->other;
            free(way);
        }
        free(place->picture.bytes);
        free(place);
    }
    kept->stands = NULL;
    kept->kept_bytes = 0;
}

/* The place in which the state is: one that was reached before, or a new one. NULL: no memory. */
static Place *arrive(Kept *kept, int stretch) {
    State *state = &kept->state;
    Picture *drawn = &kept->drawn;
    draw(state, base_of(kept, stretch), drawn);
    if (state->failed) return NULL;
    for (Place *place = kept->places; place; place = place->other)
        if (place->stretch == stretch && place->picture.count == drawn->count
            && !memcmp(place->picture.bytes, drawn->bytes, (size_t)drawn->count))
            return place;
    Place *place = calloc(1, sizeof(Place));
    unsigned char *bytes = malloc((size_t)drawn->count);
    if (!place || !bytes) { free(place); free(bytes); state->failed = 1; return NULL; }
    memcpy(bytes, drawn->bytes, (size_t)drawn->count);
    *place = (Place){{bytes, drawn->count, drawn->count}, state->requested, state->allocated, state->reserved,
                     stretch, NULL, kept->places};
    kept->places = place;
    kept->kept_bytes += drawn->count + (Py_ssize_t)sizeof(Place);
    return place;
}

static void clear(State *state) {
    for (int number = 0; number < state->num_pools; number++) {
        Pool *pool = &state->pools[number];
        for (int bin = filled_from(pool, 0); bin >= 0; bin = filled_from(pool, bin + 1)) {
            pool->bins[bin].count = 0;
            pool->bins[bin].keys = pool->bins[bin].held + pool->bins[bin].room / 2;
        }
        memset(pool->filled, 0, sizeof(pool->filled));
        pool->first = pool->last = NULL;
    }
    state->requested = state->allocated = state->reserved = 0;
    state->next = 0;
    state->spare = NULL;
    state->used_chunks = 0;
    state->taken = CHUNK;
}

/* One block of a picture, behind another of its segment. */
static Block *lay(Kept *kept, const unsigned char **from, int number, Block *before, Py_ssize_t base) {
    State *state = &kept->state;
    Block *block = fresh(state);
    if (!block) return NULL;
    block->address = state->next;
    block->size = (int64_t)noted(from);
    state->next += block->size;
    block->pool = (int16_t)number;
    if (before) link_after(before, block);
    uint64_t whose = noted(from);
    block->used = whose >= LASTING;
    block->mapped = state->expandable && whose != LOOSE;
    block->number = -1;
    if (whose >= NAMED) {
        block->number = (int32_t)(base + (Py_ssize_t)(whose - NAMED));
        block->request = kept->run.events[block->number];
        kept->made[block->number] = block;
    }
    if (!block->used && (block->mapped || !state->expandable)) put(state, block);
    return block;
}

/* Bring the state to a place. Addresses are others, in the same order. */
static void set_up(Kept *kept, const Place *place) {
    State *state = &kept->state;
    const unsigned char *from = place->picture.bytes;
    clear(state);
    for (int number = 0; number < state->num_pools; number++) {
        Pool *pool = &state->pools[number];
        for (; *from; from++) {
            Block *head = NULL;
            if (state->expandable) state->next = 0; /* each range has its own addresses */
            for (Block *block = NULL; *from; head = head ? head : block) {
                block = lay(kept, &from, number, block, base_of(kept, place->stretch));
                if (state->failed) return;
            }
            head->earlier = pool->last;
            if (pool->last) pool->last->later = head; else pool->first = head;
            pool->last = head;
        }
        from++;
    }
    state->requested = place->requested;
    state->allocated = place->allocated;
    state->reserved = place->reserved;
    kept->last = kept->made + kept->run.cycle;
    kept->next = kept->spare;
}

/* What a card of this capacity does from a place on, if that is known. */
static Way *known(const Place *place, int64_t capacity) {
    Way *way = place->ways;
    while (way && (capacity < way->reserved || capacity >= way->lacked)) way = way->other;
    return way;
}

/* Follow the next stretch; the number of the one after it. */
static int follow_stretch(Kept *kept, int stretch, Py_ssize_t *died_at) {
    const Run *run = &kept->run;
    State *state = &kept->state;
    Block **last = kept->last, **next = kept->next;
    if (stretch < kept->num_stretches) {
        Py_ssize_t from = kept->cuts[stretch], until = kept->cuts[stretch + 1];
        *died_at = follow(state, run, from, until, 0, kept->made, 0, NULL);
        kept->last = kept->made + run->cycle;
        kept->next = kept->spare;
        return stretch + 1;
    }
    *died_at = follow(state, run, run->cycle, run->count, run->cycle, next, run->before, last);
    kept->last = next;
    kept->next = last;
    return stretch;
}

/* Follow the run from a place to the next one. NULL: no memory, or no run. */
static Way *explore(Kept *kept, Place *place, int64_t capacity) {
    State *state = &kept->state;
    if (kept->stands != place) set_up(kept, place);
    kept->stands = NULL;
    Way *way = state->failed ? NULL : calloc(1, sizeof(Way));
    if (!way) { state->failed = 1; return NULL; }
    way->other = place->ways;
    place->ways = way;
    kept->kept_bytes += (Py_ssize_t)sizeof(Way);
    state->capacity = capacity;
    state->peak_requested = state->requested;
    state->peak_allocated = state->allocated;
    state->peak_reserved = state->reserved;
    state->mallocs = state->flushes = state->pressed = 0;
    state->lacked = ENDLESS;
    int after = follow_stretch(kept, place->stretch, &way->died_at);
    if (!state->failed && way->died_at < 0) way->end = kept->stands = arrive(kept, after);
    way->requested = state->peak_requested;
    way->allocated = state->peak_allocated;
    way->reserved = state->peak_reserved;
    way->mallocs = state->mallocs;
    way->flushes = state->flushes;
    way->lacked = state->lacked;
    way->pressed = state->pressed;
    return state->failed ? NULL : way;
}

typedef struct {
    Way sum;                       /* of all ways so far */
    Place *at;                     /* NULL: the run has died */
    Py_ssize_t cycles;
    int settled, flushing;         /* flushing: the cache was given back in the last cycle too */
} Outcome;

static int64_t most(int64_t one, int64_t other) { return one > other ? one : other; }

/* One stretch further. Whether the run lives. */
static int advance(Kept *kept, int64_t capacity, Outcome *outcome) {
    Way *sum = &outcome->sum, *way = known(outcome->at, capacity);
    if (!way) way = explore(kept, outcome->at, capacity);
    if (!way) return 0;
    sum->requested = most(sum->requested, way->requested);
    sum->allocated = most(sum->allocated, way->allocated);
    sum->reserved = most(sum->reserved, way->reserved);
    sum->pressed = most(sum->pressed, way->pressed);
    sum->lacked = way->lacked < sum->lacked ? way->lacked : sum->lacked;
    sum->mallocs += way->mallocs;
    sum->flushes += way->flushes;
    sum->died_at = way->died_at;
    outcome->at = way->end;
    return way->end != NULL;
}

/* The run, and the step that recurs until the state has been there before: then every later step has been too. */
static void play(Kept *kept, int64_t capacity, Py_ssize_t max_cycles, Outcome *outcome) {
    if (!kept->places) {
        clear(&kept->state);
        kept->stands = kept->beginning = arrive(kept, 0);
        if (!kept->beginning) return;
    }
    outcome->at = kept->beginning;
    for (int stretch = 0; stretch < kept->num_stretches; stretch++)
        if (!advance(kept, capacity, outcome)) return;
    Place *stays = outcome->at;
    Py_ssize_t until = 1;
    while (kept->run.cycle < kept->run.count && outcome->cycles < max_cycles && !outcome->settled) {
        int64_t flushes = outcome->sum.flushes;
        int lives = advance(kept, capacity, outcome);
        outcome->cycles++;
        outcome->flushing = outcome->sum.flushes > flushes;
        if (!lives) return;
        outcome->settled = outcome->at == stays;
        if (outcome->cycles == until) { /* Brent: states may come back after several steps */
            stays = outcome->at;
            until *= 2;
        }
    }
}

/* Stretches of about one length, none of which goes beyond a step. */
static void cut(Kept *kept) {
    const Run *run = &kept->run;
    const Py_ssize_t borders[] = {run->before, run->cycle, run->count};
    Py_ssize_t at = 0, length = run->count / STRETCHES + 1;
    for (int next = 0; at < run->count; kept->cuts[++kept->num_stretches] = at) {
        while (borders[next] <= at) next++;
        at = borders[next] < at + length ? borders[next] : at + length;
    }
}

static const char NAME[] = "memplan.memory._replay.run";

static void discard(Kept *kept) {
    State *state = &kept->state;
    forget_places(kept);
    if (state->pools)
        for (int number = 0; number < state->num_pools; number++)
            for (int bin = 0; bin < BINS; bin++) free(state->pools[number].bins[bin].held);
    free(state->pools);
    for (Py_ssize_t number = 0; number < state->num_chunks; number++) free(state->chunks[number]);
    free(state->chunks);
    free(kept->drawn.bytes);
    free(kept->run.events);
    free(kept->run.pools);
    free(kept->made);
    free(kept->spare);
    free(kept);
}

static void discard_capsule(PyObject *capsule) {
    Kept *kept = PyCapsule_GetPointer(capsule, NAME);
    if (kept) discard(kept);
}

PyDoc_STRVAR(replay_doc,
"replay(run, max_cycles, capacity)\n"
"-> (requested, allocated, reserved, mallocs, flushes, died_at, cycles, settled, lacked, pressed, flushing), in units.\n"
"`capacity` is -1 where there is room.");

static PyObject *replay(PyObject *module, PyObject *args) {
    PyObject *capsule;
    Py_ssize_t max_cycles;
    long long capacity;
    (void)module;
    if (!PyArg_ParseTuple(args, "OnL", &capsule, &max_cycles, &capacity)) return NULL;
    Kept *kept = PyCapsule_GetPointer(capsule, NAME);
    if (!kept) return NULL;
    State *state = &kept->state;
    Outcome outcome = {{0}, NULL, 0, 0, 0};
    const Way *sum = &outcome.sum;
    outcome.sum.lacked = ENDLESS;
    outcome.sum.died_at = -1;
    state->failed = 0;
    /* Other threads wait: the state is the run's own. */
    if (kept->kept_bytes > KEPT_BYTES) forget_places(kept);
    play(kept, capacity < 0 || capacity >= ENDLESS ? ENDLESS - 1 : capacity, max_cycles, &outcome);
    if (state->failed == 1) return PyErr_NoMemory();
    if (state->failed) {
        PyErr_SetString(PyExc_ValueError, "a block is freed twice");
        return NULL;
    }
    return Py_BuildValue("(LLLLLnniLLi)", (long long)sum->requested, (long long)sum->allocated,
                         (long long)sum->reserved, (long long)sum->mallocs, (long long)sum->flushes, sum->died_at,
                         outcome.cycles, outcome.settled, (long long)sum->lacked, (long long)sum->pressed,
                         outcome.flushing);
}

/* The numbers of an array("q"). Returns 0 where it is none, with an error set. */
static int take_numbers(PyObject *array, Py_buffer *numbers) {
    if (PyObject_GetBuffer(array, numbers, PyBUF_FORMAT) < 0) return 0;
    if (numbers->itemsize == sizeof(int64_t) && numbers->format && !strcmp(numbers->format, "q")) return 1;
    PyBuffer_Release(numbers);
    PyErr_SetString(PyExc_TypeError, "neither events nor sizes are an array of 64 bits");
    return 0;
}

/* The events and their pools; 0: an error is set. */
static int read_events(Run *run, const int64_t *events, const int64_t *sizes, Py_ssize_t num_sizes) {
    for (Py_ssize_t number = 0; number < run->count; number++) {
        int64_t event = events[number];
        if (event >= FIRST_STAND_IN) {
            if (event - FIRST_STAND_IN >= num_sizes) {
                PyErr_SetString(PyExc_IndexError, "there are fewer sizes");
                return 0;
            }
            event = sizes[event - FIRST_STAND_IN];
        }
        if (event > LARGEST * UNIT) {
            PyErr_SetString(PyExc_OverflowError, "a block is too large");
            return 0;
        }
        if (event > 0) {
            event = (event + UNIT - 1) / UNIT;
            run->pools[number] = event <= SMALL_REQUEST;
        }
        run->events[number] = event;
    }
    return 1;
}

/* The number of streams; 0: an error is set. */
static long read_streams(Run *run, PyObject *streams) {
    PyObject *key, *value;
    Py_ssize_t place = 0;
    long num_streams = 1;
    while (PyDict_Next(streams, &place, &key, &value)) {
        Py_ssize_t number = PyLong_AsSsize_t(key);
        long stream = PyLong_AsLong(value);
        if ((number == -1 || stream == -1) && PyErr_Occurred()) return 0;
        if (number < 0 || number >= run->count || stream < 0 || stream > 1024) {
            PyErr_SetString(PyExc_ValueError, "a stream of no event");
            return 0;
        }
        run->pools[number] |= (int16_t)(stream << 1);
        if (stream >= num_streams) num_streams = stream + 1;
    }
    return num_streams;
}

PyDoc_STRVAR(prepare_doc,
"prepare(events, streams, sizes, before, cycle, expandable) -> a run, as replay() takes it.\n"
"Events and sizes are arrays of type q. An event of FIRST_STAND_IN or more bytes stands for one of `sizes`; `cycle` is the number of events where\n"
"no step recurs. Raises OverflowError for a block that no card will ever hold.");

/* A run with room for its events; NULL: an error is set. */
static Kept *new_run(Py_ssize_t num_events, Py_ssize_t before, Py_ssize_t cycle, int expandable) {
    Kept *kept = calloc(1, sizeof(Kept));
    if (!kept) { PyErr_NoMemory(); return NULL; }
    Run *run = &kept->run;
    size_t count = (size_t)num_events, again = cycle < num_events ? count - (size_t)cycle : 0;
    *run = (Run){malloc((count + 1) * sizeof(int64_t)), calloc(count + 1, sizeof(int16_t)), num_events, before, cycle};
    kept->state.expandable = expandable;
    kept->made = calloc(count + 1, sizeof(Block *));
    kept->spare = calloc(again + 1, sizeof(Block *));
    if (run->events && run->pools && kept->made && kept->spare) return kept;
    PyErr_NoMemory();
    discard(kept);
    return NULL;
}

/* Fill it. Returns 0 where that is no run, with an error set. */
static int fill(Kept *kept, const Py_buffer *events, const Py_buffer *sizes, PyObject *streams) {
    Run *run = &kept->run;
    State *state = &kept->state;
    if (!read_events(run, events->buf, sizes->buf, sizes->len / (Py_ssize_t)sizeof(int64_t))) return 0;
    long num_streams = read_streams(run, streams);
    if (!num_streams) return 0;
    if (!is_sound(run, 2 * (int)num_streams)) {
        PyErr_SetString(PyExc_ValueError, "these events are no run");
        return 0;
    }
    cut(kept);
    state->pools = calloc(2 * (size_t)num_streams, sizeof(Pool));
    if (!state->pools) { PyErr_NoMemory(); return 0; }
    state->num_pools = 2 * (int)num_streams;
    return 1;
}

static PyObject *prepare(PyObject *module, PyObject *args) {
    PyObject *array, *streams, *size_array, *found = NULL;
    Py_buffer events, sizes;
    Py_ssize_t before, cycle;
    int expandable;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO!Onnp", &array, &PyDict_Type, &streams, &size_array, &before, &cycle, &expandable))
        return NULL;
    if (!take_numbers(array, &events)) return NULL;
    if (!take_numbers(size_array, &sizes)) { PyBuffer_Release(&events); return NULL; }
    Kept *kept = new_run(events.len / (Py_ssize_t)sizeof(int64_t), before, cycle, expandable);
    if (kept && fill(kept, &events, &sizes, streams)) found = PyCapsule_New(kept, NAME, discard_capsule);
    if (kept && !found) discard(kept);
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&events);
    return found;
}

static PyMethodDef methods[] = {
    {"replay", replay, METH_VARARGS, replay_doc},
    {"prepare", prepare, METH_VARARGS, prepare_doc},
    {NULL, NULL, 0, NULL},
};

#define INTERFACE 3  /* as replay.py has it: one that was built before is left aside */

static int add_interface(PyObject *module) {
    return PyModule_AddIntConstant(module, "INTERFACE", INTERFACE);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)add_interface}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_replay", "torch's caching allocator, replayed.", 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__replay(void) { return PyModuleDef_Init(&definition); }
