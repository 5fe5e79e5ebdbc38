// Work for the threads of libgomp, which torch's own operators and inductor's kernels between ours run on, too: a second
// pool would wait for processors beside them. The two functions are those that `#pragma omp parallel` calls. They are
// called by name, and nothing is linked to, so that whoever compiled this gets the library that torch has loaded.

#include "threads.h"

#include <atomic>

extern "C" void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags);
extern "C" int omp_get_thread_num(void);

namespace {

enum { MOST_THREADS = 256 };

struct alignas(64) Share {
  std::atomic<int64_t> next{0};  // piece that nobody has begun
};

std::atomic<int> limit{MOST_THREADS};

}  // namespace

// How many threads may work at most, whatever a call allows.
extern "C" void foretoken_limit_threads(int threads) { limit = threads < MOST_THREADS ? threads : MOST_THREADS; }

void share_out(int64_t count, int threads, int pieces, Task task, const void* work) {
  const int64_t most = limit.load(std::memory_order_relaxed) < threads ? limit.load() : threads;
  const int64_t shares = most < count ? most : count;
  if (shares <= 1) return task(work, 0, count, 0);
  Share all[MOST_THREADS];  // 16 KiB
  const auto run = [&] {
    const int own = omp_get_thread_num();
    for (int64_t turn = 0; turn < shares; ++turn) {
      const int64_t share = (own + turn) % shares, begin = count * share / shares;
      const int64_t size = count * (share + 1) / shares - begin, parts = size < pieces ? size : pieces;
      for (int64_t part; (part = all[share].next.fetch_add(1, std::memory_order_relaxed)) < parts;)
        task(work, begin + size * part / parts, begin + size * (part + 1) / parts, own);
    }
  };
  typedef decltype(run) Run;
  GOMP_parallel([](void* given) { (*(Run*)given)(); }, (void*)&run, (unsigned)shares, 0);
}
