/* torch's caching allocator, replayed: the rules of memplan/memory/allocator.py and
 * memplan/memory/expandable.py, which say where they come from, and give the same answers.
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
#define FIRST_STAND_IN (INT64_C(1) << 62) /* memplan/memory/ledger.py */
#define LASTING (-1) /* the name of a block from before the step that recurs */

typedef struct Block { /* one line of a cache */
    int64_t address, size, request;
    struct Block *before, *after;         /* neighbours in its segment or range */
    struct Block *earlier, *later;        /* segments of its pool, of a segment's first block */
    int32_t name;
    int16_t pool;
    char used, mapped;
} Block;

typedef struct { int64_t size, address; Block *block; } Key;

typedef struct {
    Key *keys;                 /* free blocks by size, then address */
    Py_ssize_t count;
    Key *held;                 /* the memory in which they lie, with room before and behind them */
    Py_ssize_t room;
    Block *first, *last;       /* segments in the order of their addresses; the range's blocks */
    int64_t page;              /* of an expandable range */
} Pool;

typedef struct Chunk { struct Chunk *next; Block blocks[CHUNK]; } Chunk;

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
    Chunk *chunks;
    Py_ssize_t taken;          /* blocks of the newest chunk */
} State;

static Block *fresh(State *state) {
    Block *block = state->spare;
    if (block) {
        state->spare = block->after;
    } else {
        if (!state->chunks || state->taken == CHUNK) {
            Chunk *chunk = malloc(sizeof(Chunk));
            if (!chunk) { state->failed = 1; return NULL; }
            chunk->next = state->chunks;
            state->chunks = chunk;
            state->taken = 0;
        }
        block = &state->chunks->blocks[state->taken++];
    }
    *block = (Block){0};
    return block;
}

static void drop(State *state, Block *block) {
    block->after = state->spare;
    state->spare = block;
}

/* Of the keys from `low` to `high` the first that does not come before a size and an address. */
static Py_ssize_t between(const Pool *pool, Py_ssize_t low, Py_ssize_t high, int64_t size, int64_t address) {
    while (low < high) {
        Py_ssize_t middle = (low + high) >> 1;
        const Key *key = &pool->keys[middle];
        if (key->size < size || (key->size == size && key->address < address)) low = middle + 1;
        else high = middle;
    }
    return low;
}

static Py_ssize_t lower(const Pool *pool, int64_t size, int64_t address) {
    return between(pool, 0, pool->count, size, address);
}

static Py_ssize_t place(const Pool *pool, const Block *block) {
    return lower(pool, block->size, block->address);
}

/* Lay the keys into the middle of their memory; where that is half full, of twice as much. */
static void spread(State *state, Pool *pool) {
    Py_ssize_t room = pool->room ? pool->room : 64;
    if (2 * pool->count >= room) room *= 2;
    Key *held = malloc((size_t)room * sizeof(Key));
    if (!held) { state->failed = 1; return; }
    Key *keys = held + (room - pool->count) / 2;
    if (pool->count) memcpy(keys, pool->keys, (size_t)pool->count * sizeof(Key));
    free(pool->held);
    pool->held = held;
    pool->keys = keys;
    pool->room = room;
}

/* Of the keys on both sides of a place the fewer ones move. */
static void put(State *state, Block *block) {
    Pool *pool = &state->pools[block->pool];
    Py_ssize_t at = lower(pool, block->size, block->address);
    int forward = at >= pool->count - at;
    if (pool->keys == (forward ? pool->held + pool->room - pool->count : pool->held)) {
        spread(state, pool);
        if (state->failed) return;
    }
    if (forward) {
        memmove(pool->keys + at + 1, pool->keys + at, (pool->count - at) * sizeof(Key));
    } else {
        pool->keys--;
        memmove(pool->keys, pool->keys + 1, at * sizeof(Key));
    }
    pool->count++;
    pool->keys[at] = (Key){block->size, block->address, block};
    block->used = 0;
}

static void take_at(Pool *pool, Py_ssize_t at) {
    pool->count--;
    if (at < pool->count - at) {
        memmove(pool->keys + 1, pool->keys, at * sizeof(Key));
        pool->keys++;
    } else {
        memmove(pool->keys + at, pool->keys + at + 1, (pool->count - at) * sizeof(Key));
    }
}

static void take(State *state, Block *block) {
    Pool *pool = &state->pools[block->pool];
    take_at(pool, place(pool, block));
}

/* A smaller block takes the place of a key: those between move by one. */
static void put_below(Pool *pool, Py_ssize_t at, Block *block) {
    Py_ssize_t to = between(pool, 0, at, block->size, block->address);
    memmove(pool->keys + to + 1, pool->keys + to, (size_t)(at - to) * sizeof(Key));
    pool->keys[to] = (Key){block->size, block->address, block};
}

/* The same with a larger one. */
static void put_above(Pool *pool, Py_ssize_t at, Block *block) {
    Py_ssize_t to = between(pool, at + 1, pool->count, block->size, block->address) - 1;
    memmove(pool->keys + at, pool->keys + at + 1, (size_t)(to - at) * sizeof(Key));
    pool->keys[to] = (Key){block->size, block->address, block};
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

static void release_segments(State *state) {
    for (int number = 0; number < state->num_pools; number++) {
        Pool *pool = &state->pools[number];
        Py_ssize_t kept = 0;
        for (Py_ssize_t at = 0; at < pool->count; at++) {
            Block *block = pool->keys[at].block;
            if (block->before || block->after) {
                pool->keys[kept++] = pool->keys[at];
                continue;
            }
            state->reserved -= block->size;
            if (block->earlier) block->earlier->later = block->later; else pool->first = block->later;
            if (block->later) block->later->earlier = block->earlier; else pool->last = block->earlier;
            drop(state, block);
        }
        pool->count = kept;
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
    Py_ssize_t at = lower(pool, request, 0);
    int is_new = at == pool->count;
    Block *block = is_new ? new_segment(state, request, number) : pool->keys[at].block;
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
        if (is_new) put(state, other); else put_below(pool, at, other);
    } else if (!is_new) {
        take_at(pool, at);
    }
    return block;
}

static void free_cached(State *state, Block *block) {
    Pool *pool = &state->pools[block->pool];
    Block *before = block->before, *after = block->after;
    Py_ssize_t at = -1; /* the key of which the joined block takes the place */
    if (after && !after->used) {
        at = place(pool, after);
        absorb(state, block, after);
    }
    if (before && !before->used) {
        Py_ssize_t other = place(pool, before);
        if (at >= 0) {
            take_at(pool, at);
            if (at < other) other--;
        }
        at = other;
        absorb(state, before, block);
        block = before;
    }
    if (at >= 0) put_above(pool, at, block); else put(state, block);
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
    Py_ssize_t at = lower(pool, size, -1);
    if (at == pool->count) return NULL;
    Block *block = pool->keys[at].block;
    for (at++; at < pool->count; at++) {
        Block *other = pool->keys[at].block;
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

static void release_pages(State *state) {
    for (int number = 0; number < state->num_pools; number++) {
        Pool *pool = &state->pools[number];
        Py_ssize_t count = pool->count;
        if (!count) continue;
        Block **found = malloc(count * sizeof(Block *));
        if (!found) { state->failed = 1; return; }
        for (Py_ssize_t at = 0; at < count; at++) found[at] = pool->keys[at].block;
        for (Py_ssize_t at = 0; at < count && !state->failed; at++) unmap(state, found[at]);
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
    const int64_t *events;
    const int32_t *pools;
    Py_ssize_t count, before, cycle, max_cycles;
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

/* Follow the events `from` to the end; what event n allocated is noted at made[n - base], and what
 * events before `base` did at earlier[n - first]. Returns the event at which memory ran out, or -1. */
static Py_ssize_t follow(State *state, const Run *run, Py_ssize_t from, Py_ssize_t base,
                         Block **made, Py_ssize_t first, Block **earlier) {
    for (Py_ssize_t number = from; number < run->count; number++) {
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
            block->name = number < run->cycle ? LASTING : (int32_t)(number - run->cycle);
            made[number - base] = block;
        }
        if (state->failed) return number;
    }
    return -1;
}

typedef struct { int64_t *words; Py_ssize_t count, room; } Picture;

static void note(State *state, Picture *picture, int64_t word) {
    if (picture->count == picture->room) {
        Py_ssize_t room = picture->room ? 2 * picture->room : 1024;
        int64_t *words = realloc(picture->words, room * sizeof(int64_t));
        if (!words) { state->failed = 1; return; }
        picture->words = words;
        picture->room = room;
    }
    picture->words[picture->count++] = word;
}

/* All that later decisions depend on: of each pool, each segment's blocks in order, and whose they are. */
static void draw(State *state, Picture *picture) {
    picture->count = 0;
    for (int number = 0; number < state->num_pools && !state->failed; number++) {
        for (Block *head = state->pools[number].first; head; head = head->later) {
            for (Block *block = head; block; block = block->after) {
                note(state, picture, block->size);
                note(state, picture, block->used ? block->name : block->mapped ? -2 : -3);
            }
            note(state, picture, -4);
        }
        note(state, picture, -5);
    }
}

static int same(const Picture *one, const Picture *other) {
    return one->count == other->count
        && !memcmp(one->words, other->words, one->count * sizeof(int64_t));
}

typedef struct {
    Py_ssize_t died_at, cycles;
    int settled, flushing; /* flushing: the cache was given back in the last cycle too */
} Outcome;

/* The step that recurs, until the state has been there before: then every later step has been too. */
static void recur(State *state, const Run *run, Block **made, Block **other, Outcome *outcome) {
    Picture kept = {0}, now = {0};
    Py_ssize_t until = 1;
    draw(state, &kept);
    while (outcome->cycles < run->max_cycles && !state->failed) {
        int64_t flushes = state->flushes;
        outcome->died_at = follow(state, run, run->cycle, run->cycle, other, run->before, made);
        outcome->cycles++;
        outcome->flushing = state->flushes > flushes;
        if (outcome->died_at >= 0) break;
        Block **swapped = made;
        made = other;
        other = swapped;
        draw(state, &now);
        if (same(&kept, &now)) { outcome->settled = 1; break; }
        if (outcome->cycles == until) { /* Brent: states may come back after several steps */
            Picture spare = kept;
            kept = now;
            now = spare;
            until *= 2;
        }
    }
    free(kept.words);
    free(now.words);
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

PyDoc_STRVAR(replay_doc,
"replay(events, pools, num_pools, before, cycle, max_cycles, capacity, expandable)\n"
"-> (requested, allocated, reserved, mallocs, flushes, died_at, cycles, settled, lacked, pressed, flushing), in units.\n"
"`cycle` is the number of events where no step recurs; `capacity` is -1 where there is room.");

static PyObject *replay(PyObject *module, PyObject *args) {
    Py_buffer events, pools;
    int num_pools, expandable;
    Py_ssize_t before, cycle, max_cycles;
    long long capacity;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*innnLp", &events, &pools, &num_pools, &before, &cycle,
                          &max_cycles, &capacity, &expandable))
        return NULL;
    PyObject *found = NULL;
    Py_ssize_t count = events.len / (Py_ssize_t)sizeof(int64_t);
    Run run = {events.buf, pools.buf, count, before, cycle, max_cycles};
    if (pools.len / (Py_ssize_t)sizeof(int32_t) != count || num_pools < 1 || num_pools > INT16_MAX
        || !is_sound(&run, num_pools)) {
        PyErr_SetString(PyExc_ValueError, "these events are no run");
        goto done;
    }
    State state = {0};
    Outcome outcome = {-1, 0, 0, 0};
    state.expandable = expandable;
    state.capacity = capacity < 0 ? ENDLESS : capacity;
    state.lacked = ENDLESS;
    state.num_pools = num_pools;
    state.pools = calloc((size_t)num_pools, sizeof(Pool));
    Block **made = calloc((size_t)count + 1, sizeof(Block *));
    Block **other = calloc((size_t)(count - cycle) + 1, sizeof(Block *));
    if (state.pools && made && other) {
        Py_BEGIN_ALLOW_THREADS
        outcome.died_at = follow(&state, &run, 0, 0, made, 0, NULL);
        if (outcome.died_at < 0 && cycle < count && !state.failed)
            recur(&state, &run, made + cycle, other, &outcome);
        Py_END_ALLOW_THREADS
    } else {
        state.failed = 1;
    }
    if (state.failed == 1)
        PyErr_NoMemory();
    else if (state.failed)
        PyErr_SetString(PyExc_ValueError, "a block is freed twice");
    else
        found = Py_BuildValue("(LLLLLnniLLi)", (long long)state.peak_requested,
                              (long long)state.peak_allocated, (long long)state.peak_reserved,
                              (long long)state.mallocs, (long long)state.flushes, outcome.died_at,
                              outcome.cycles, outcome.settled, (long long)state.lacked,
                              (long long)state.pressed, outcome.flushing);
    if (state.pools)
        for (int number = 0; number < num_pools; number++) free(state.pools[number].held);
    free(state.pools);
    while (state.chunks) {
        Chunk *chunk = state.chunks->next;
        free(state.chunks);
        state.chunks = chunk;
    }
    free(made);
    free(other);
done:
    PyBuffer_Release(&events);
    PyBuffer_Release(&pools);
    return found;
}

PyDoc_STRVAR(pack_doc,
"pack(events, streams, sizes) -> (events, pools, num_pools): lists as replay() takes them.\n"
"An event of FIRST_STAND_IN or more bytes stands for one of `sizes`.\n"
"Raises OverflowError for a block that no card will ever hold.");

static PyObject *pack(PyObject *module, PyObject *args) {
    PyObject *list, *streams, *sizes, *found = NULL, *key, *value;
    Py_ssize_t place = 0;
    long num_streams = 1;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyList_Type, &list, &PyDict_Type, &streams, &PyList_Type,
                          &sizes))
        return NULL;
    Py_ssize_t count = PyList_Size(list);
    int64_t *events = malloc((size_t)(count + 1) * sizeof(int64_t));
    int32_t *pools = calloc((size_t)count + 1, sizeof(int32_t));
    if (!events || !pools) { PyErr_NoMemory(); goto done; }
    for (Py_ssize_t number = 0; number < count; number++) {
        int64_t event = PyLong_AsLongLong(PyList_GetItem(list, number));
        if (event == -1 && PyErr_Occurred()) goto done;
        if (event >= FIRST_STAND_IN) {
            PyObject *size = PyList_GetItem(sizes, (Py_ssize_t)(event - FIRST_STAND_IN));
            if (!size) goto done; /* there are fewer */
            event = PyLong_AsLongLong(size);
            if (event == -1 && PyErr_Occurred()) goto done;
        }
        if (event > LARGEST * UNIT) {
            PyErr_SetString(PyExc_OverflowError, "a block is too large");
            goto done;
        }
        if (event > 0) {
            event = (event + UNIT - 1) / UNIT;
            pools[number] = event <= SMALL_REQUEST;
        }
        events[number] = event;
    }
    while (PyDict_Next(streams, &place, &key, &value)) {
        Py_ssize_t number = PyLong_AsSsize_t(key);
        long stream = PyLong_AsLong(value);
        if ((number == -1 || stream == -1) && PyErr_Occurred()) goto done;
        if (number < 0 || number >= count || stream < 0 || stream > 1024) {
            PyErr_SetString(PyExc_ValueError, "a stream of no event");
            goto done;
        }
        pools[number] |= (int32_t)stream << 1;
        if (stream >= num_streams) num_streams = stream + 1;
    }
    found = Py_BuildValue("(y#y#l)", (char *)events, count * (Py_ssize_t)sizeof(int64_t),
                          (char *)pools, count * (Py_ssize_t)sizeof(int32_t), 2 * num_streams);
done:
    free(events);
    free(pools);
    return found;
}

static PyMethodDef methods[] = {
    {"replay", replay, METH_VARARGS, replay_doc},
    {"pack", pack, METH_VARARGS, pack_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_replay", "torch's caching allocator, replayed.", 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__replay(void) { return PyModuleDef_Init(&definition); }
