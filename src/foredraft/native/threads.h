// Division of work among threads. Each thread has a share that is cut into pieces, and takes over pieces of other
// threads that are not begun. If the system pauses a thread, it delays only one piece instead of a whole share.

#pragma once

#include <stdint.h>

enum { PIECES = 32 };  // most pieces of a thread's share

typedef void (*Task)(const void* work, int64_t first, int64_t last, int thread);

void share_out(int64_t count, int threads, int pieces, Task task, const void* work);

// Calls work(first, last, thread) for ranges that together cover [0, count), on up to `threads` threads. `thread` is
// less than `threads`, and no two calls with the same `thread` overlap. Returns when all calls are done.
template <typename Work>
static inline void share_out(int64_t count, int threads, const Work& work, int pieces = PIECES) {
  if (threads > 1 && count > 1)
    return share_out(count, threads, pieces, [](const void* given, int64_t first, int64_t last, int thread) {
      (*(const Work*)given)(first, last, thread);
    }, &work);
  if (count > 0) work(0, count, 0);
}

// Calls work(index, thread) for every index in [0, count), divided in the same way.
template <typename Work>
static inline void share_each(int64_t count, int threads, const Work& work) {
  share_out(count, threads, [&](int64_t first, int64_t last, int thread) {
    for (int64_t index = first; index < last; ++index) work(index, thread);
  });
}

void gather_crew(int threads, void (*work)(void*), void* given);

// Calls work() with up to `threads` threads kept ready. Work that it shares out begins at once and does not wait for
// threads that have not arrived. Idle threads prefetch the memory given to `fetch_next`.
template <typename Work>
static inline void with_crew(int threads, Work work) {
  if (threads < 2) return work();
  gather_crew(threads, [](void* given) { (*(Work*)given)(); }, &work);
}

// Announces the memory of the work after the next: `count` units of `bytes` each, contiguous.
void fetch_next(const void* memory, int64_t bytes, int64_t count);
