/* Counts the memory of a process, loaded before all others (LD_PRELOAD). glibc only.
 *
 * torch's CPU allocator asks posix_memalign for the exact bytes of every storage (torch 2.13, c10/core/impl/alloc_cpu.cpp,
 * alloc_cpu), and next to nobody else calls it: so what comes through it is tensors, to the byte. Tensors that a thread
 * of the communication backend makes, and those made while a collective is called, are the backend's staging, as are
 * its large plain blocks. All else is the process's own heap.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void *__libc_malloc(size_t);
extern void __libc_free(void *);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

enum { TENSORS, STAGING, HEAP, KINDS };
#define SLOTS (1u << 20)
#define TENSOR_ALIGNMENT 64
#define LARGE_BLOCK 16384

/* Open addressing with linear probing; zero is an empty slot. */
static struct { uintptr_t pointer; uint64_t bytes_and_kind; } table[SLOTS];
static atomic_flag lock = ATOMIC_FLAG_INIT;
static int64_t held[KINDS];
static int64_t most_tensors, most_both;
static _Atomic int64_t heap_bytes;
static _Atomic int64_t lost; /* blocks that found no slot: the figures are then worth nothing */
static uint32_t used;

static __thread int in_collective __attribute__((tls_model("initial-exec")));
static __thread int thread_kind __attribute__((tls_model("initial-exec"))); /* 0 not known yet, 1 ours, 2 the backend's */

static int is_backend_thread(void) {
    if (thread_kind == 0) {
        char name[32] = {0};
        if (syscall(SYS_gettid) == getpid()) { thread_kind = 1; return 0; }
        pthread_getname_np(pthread_self(), name, sizeof name);
        if (strstr(name, "gloo")) thread_kind = 2; /* others may be named later */
    }
    return thread_kind == 2;
}

static void take_lock(void) { while (atomic_flag_test_and_set_explicit(&lock, memory_order_acquire)) {} }
static void give_lock(void) { atomic_flag_clear_explicit(&lock, memory_order_release); }

static uint32_t home(uintptr_t pointer) { return (uint32_t)((pointer >> 6) * 0x9E3779B97F4A7C15ull >> 44) & (SLOTS - 1); }

static void remember(void *pointer, size_t bytes, int kind) {
    take_lock();
    if (used > SLOTS / 2) { give_lock(); atomic_fetch_add(&lost, 1); return; }
    uint32_t slot = home((uintptr_t)pointer);
    while (table[slot].pointer) slot = (slot + 1) & (SLOTS - 1);
    table[slot].pointer = (uintptr_t)pointer;
    table[slot].bytes_and_kind = ((uint64_t)bytes << 2) | (uint64_t)kind;
    used++;
    held[kind] += (int64_t)bytes;
    if (held[TENSORS] > most_tensors) most_tensors = held[TENSORS];
    if (held[TENSORS] + held[STAGING] > most_both) most_both = held[TENSORS] + held[STAGING];
    give_lock();
}

/* Whether the block was in the table; then it is counted as given back. */
static int forget(void *pointer) {
    if ((uintptr_t)pointer % 16) return 0;
    take_lock();
    uint32_t slot = home((uintptr_t)pointer);
    while (table[slot].pointer && table[slot].pointer != (uintptr_t)pointer) slot = (slot + 1) & (SLOTS - 1);
    if (!table[slot].pointer) { give_lock(); return 0; }
    held[table[slot].bytes_and_kind & 3] -= (int64_t)(table[slot].bytes_and_kind >> 2);
    used--;
    /* Close the gap: move back what would no longer be found. */
    uint32_t gap = slot;
    for (uint32_t next = (gap + 1) & (SLOTS - 1); table[next].pointer; next = (next + 1) & (SLOTS - 1)) {
        uint32_t wanted = home(table[next].pointer);
        if (((next - wanted) & (SLOTS - 1)) >= ((next - gap) & (SLOTS - 1))) { table[gap] = table[next]; gap = next; }
    }
    table[gap].pointer = 0;
    give_lock();
    return 1;
}

static void *counted(void *pointer, size_t bytes, int is_tensor) {
    if (!pointer) return pointer;
    int staging = in_collective || is_backend_thread();
    if (is_tensor) remember(pointer, bytes, staging ? STAGING : TENSORS);
    else if (staging && bytes >= LARGE_BLOCK) remember(pointer, bytes, STAGING);
    else atomic_fetch_add(&heap_bytes, (int64_t)malloc_usable_size(pointer));
    return pointer;
}

static void discount(void *pointer) {
    if (pointer && !forget(pointer)) atomic_fetch_sub(&heap_bytes, (int64_t)malloc_usable_size(pointer));
}

void *malloc(size_t bytes) { return counted(__libc_malloc(bytes), bytes, 0); }
void free(void *pointer) { discount(pointer); __libc_free(pointer); }
void *calloc(size_t count, size_t size) { return counted(__libc_calloc(count, size), count * size, 0); }
void *memalign(size_t alignment, size_t bytes) { return counted(__libc_memalign(alignment, bytes), bytes, 0); }
void *aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }

void *realloc(void *old, size_t bytes) {
    discount(old);
    void *pointer = __libc_realloc(old, bytes);
    if (!pointer && bytes && old) {
        counted(old, malloc_usable_size(old), 0); /* it is still there */
        return NULL;
    }
    return counted(pointer, bytes, 0);
}

int posix_memalign(void **out, size_t alignment, size_t bytes) {
    void *pointer = __libc_memalign(alignment, bytes);
    if (!pointer) return ENOMEM;
    *out = counted(pointer, bytes, alignment >= TENSOR_ALIGNMENT);
    return 0;
}

/* What Python reads. */
void meter_collective(int step) { in_collective += step; }
void meter_reset(void) {
    take_lock();
    most_tensors = held[TENSORS];
    most_both = held[TENSORS] + held[STAGING];
    give_lock();
}
int64_t meter_tensors(void) { return held[TENSORS]; }
int64_t meter_staging(void) { return held[STAGING]; }
int64_t meter_most_tensors(void) { return most_tensors; }
int64_t meter_most_both(void) { return most_both; }
int64_t meter_heap(void) { return atomic_load(&heap_bytes); }
int64_t meter_lost(void) { return atomic_load(&lost); }
