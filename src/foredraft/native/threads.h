// Work that is shared out among threads: each has a share of its own, in pieces, and takes over those of others that
// nobody has begun. So a thread that the system keeps from running holds up one piece, not a share.

#pragma once

#include <stdint.h>

enum { PIECES = 32 };  // that a thread's share is cut into at most: another thread that is free takes them over

typedef void (*Task)(const void* work, int64_t first, int64_t last, int thread);

void share_out(int64_t count, int threads, int pieces, Task task, const void* work);

// Calls work(first, last, thread) for ranges that make up [0, count), on up to `threads` threads; `thread` is less than
// that, and no two calls with the same one run at a time. Returns when all are done.
template <typename Work>
static inline void share_out(int64_t count, int threads, const Work& work, int pieces = PIECES) {
  if (threads > 1 && count > 1)
    return share_out(count, threads, pieces, [](const void* given, int64_t first, int64_t last, int thread) {
      (*(const Work*)given)(first, last, thread);
    }, &work);
  if (count > 0) work(0, count, 0);
}

// As above, one after another: work(index, thread).
template <typename Work>
static inline void share_each(int64_t count, int threads, const Work& work) {
  share_out(count, threads, [&](int64_t first, int64_t last, int thread) {
    for (int64_t index = first; index < last; ++index) work(index, thread);
  });
}

void gather_crew(int threads, void (*work)(void*), void* given);

// Calls work(), and has up to `threads` threads together meanwhile: what it shares out begins at once, nothing waits for
// a thread that has not come, and threads without work fetch what `fetch_next` names.
template <typename Work>
static inline void with_crew(int threads, Work work) {
  if (threads < 2) return work();
  gather_crew(threads, [](void* given) { (*(Work*)given)(); }, &work);
}

// Says what will be shared out after the work that is shared out next: `count` units of `bytes` that lie together.
void fetch_next(const void* memory, int64_t bytes, int64_t count);
