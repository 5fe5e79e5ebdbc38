// Work runs on the threads of libgomp, which also run torch's operators and inductor's kernels between ours. A second
// pool would compete with them for processors. The two functions are those that `#pragma omp parallel` calls. They are
// looked up by name without linking, so that the library that torch has loaded is used, whatever compiler built this
// file.
//
// Starting all threads and waiting for them takes 2 us, and a forward pass has hundreds of products. A forward pass
// therefore keeps the threads as a crew that waits for work within one call.

#include "threads.h"

#include <atomic>
#include <sched.h>
#include <time.h>
#include <utility>

extern "C" void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags);
extern "C" int omp_get_thread_num(void);

namespace {

enum { MOST_THREADS = 256 };

struct alignas(64) Share {
  std::atomic<int64_t> next{0};  // first piece that is not begun
};

std::atomic<int> limit{MOST_THREADS};

struct Shared {  // work that is divided among threads
  int64_t count, shares;
  int pieces, threads;
  Task task;
  const void* work;
  Share all[MOST_THREADS];  // 16 KiB

  void run(int own) {
    for (int64_t turn = 0; turn < shares; ++turn) {
      const int64_t share = (own + turn) % shares, begin = count * share / shares;
      const int64_t size = count * (share + 1) / shares - begin, parts = size < pieces ? size : pieces;
      for (int64_t part; (part = all[share].next.fetch_add(1, std::memory_order_relaxed)) < parts;)
        task(work, begin + size * part / parts, begin + size * (part + 1) / parts, own);
    }
  }
};

// Memory that a thread will read soon. It is written while work runs and read without a lock, since prefetching memory
// that is not needed does no harm.
struct Next {
  std::atomic<const char*> memory{nullptr};
  std::atomic<int64_t> bytes{0}, count{0};
};

enum { LINE = 64, AT_ONCE = 16 * LINE, MOST_FETCHED = 1 << 17 };  // bytes: half of a small L2 cache

// Progress of one thread in prefetching: the beginning of its share, as far as it fits into its cache.
struct Fetching {
  const char* memory = nullptr;
  int64_t done = 0;

  bool some(const Next& next, int64_t own, int64_t shares) {
    const char* named = next.memory.load(std::memory_order_relaxed);
    if (named != memory) memory = named, done = 0;
    if (!memory) return false;
    const int64_t bytes = next.bytes.load(std::memory_order_relaxed), count = next.count.load(std::memory_order_relaxed);
    const int64_t begin = count * own / shares, size = (count * (own + 1) / shares - begin) * bytes;
    if (done >= size || done >= MOST_FETCHED) return false;
    const char* from = memory + begin * bytes + done;
    for (int64_t at = 0; at < AT_ONCE; at += LINE) __builtin_prefetch(from + at, 0, 2);
    done += AT_ONCE;
    return true;
  }
};

// Threads spin for about 50 us, much longer than the time between two products; then they yield, and finally sleep.
enum { SPINS = 4096, YIELDS = 64, NAP = 50 * 1000 };

void rest(int& spins) {
  ++spins;
  if (spins < SPINS) return __builtin_ia32_pause();
  if (spins < SPINS + YIELDS) return (void)sched_yield();
  const timespec nap = {0, NAP};
  nanosleep(&nap, nullptr);
}

// Threads that wait for work. `state` contains the number of works so far, whether the current one can be joined, and
// how many threads have joined. The thread that shares out work waits only for those that have joined.
struct Crew {
  enum : uint64_t { MEMBERS = (1 << 16) - 1, OPEN = 1 << 16, ENDED = 1 << 17, WORK = 1 << 18 };

  int64_t threads;
  alignas(64) std::atomic<uint64_t> state{0};
  alignas(64) Next next;
  Shared shared;
  Fetching fetching;  // of the thread that shares out work

  explicit Crew(int64_t threads) : threads(threads) {}

  void share_out() {
    state.store((state.load(std::memory_order_relaxed) + WORK) | OPEN, std::memory_order_release);
    shared.run(0);
    int spins = 0;
    for (uint64_t now = state.fetch_and(~(uint64_t)OPEN); now & MEMBERS; now = state.load(std::memory_order_acquire))
      if (!fetching.some(next, 0, threads)) rest(spins);
  }

  void wait_for_work(int own) {
    Fetching fetching;
    uint64_t seen = 0;
    for (int spins = 0;;) {
      uint64_t now = state.load(std::memory_order_acquire);
      if (now & ENDED) return;
      if ((now & OPEN) && now / WORK != seen) {
        if (!state.compare_exchange_weak(now, now + 1, std::memory_order_acquire)) continue;
        seen = now / WORK;
        if (own < shared.threads) shared.run(own);
        state.fetch_sub(1, std::memory_order_release);
        spins = 0;
      } else if (!fetching.some(next, own, threads)) {
        rest(spins);
      }
    }
  }
};

thread_local Crew* crew = nullptr;

}  // namespace

// Sets the most threads that may work, whatever a call allows.
extern "C" void foredraft_limit_threads(int threads) { limit = threads < MOST_THREADS ? threads : MOST_THREADS; }

static int within_limit(int threads) {
  const int most = limit.load(std::memory_order_relaxed);
  return most < threads ? most : threads;
}

void share_out(int64_t count, int threads, int pieces, Task task, const void* work) {
  const int most = within_limit(threads);
  const int64_t shares = most < count ? most : count;
  if (shares <= 1) return task(work, 0, count, 0);
  const auto fill = [&](Shared& shared) {
    shared.count = count, shared.shares = shares, shared.pieces = pieces, shared.threads = most;
    shared.task = task, shared.work = work;
  };
  if (crew) {
    fill(crew->shared);
    for (int64_t i = 0; i < shares; ++i) crew->shared.all[i].next.store(0, std::memory_order_relaxed);
    Crew* own = std::exchange(crew, nullptr);  // work that is shared out within this work runs on one thread
    own->share_out();
    crew = own;
    return;
  }
  Shared shared;
  fill(shared);
  GOMP_parallel([](void* given) { ((Shared*)given)->run(omp_get_thread_num()); }, &shared, (unsigned)shares, 0);
}

void gather_crew(int threads, void (*work)(void*), void* given) {
  const int most = within_limit(threads);
  if (most < 2 || crew) return work(given);
  Crew own(most);
  const auto run = [&] {
    if (const int number = omp_get_thread_num()) return own.wait_for_work(number);
    crew = &own;
    work(given);
    crew = nullptr;
    own.state.fetch_or(Crew::ENDED, std::memory_order_release);
  };
  typedef decltype(run) Run;
  GOMP_parallel([](void* all) { (*(Run*)all)(); }, (void*)&run, (unsigned)most, 0);
}

void fetch_next(const void* memory, int64_t bytes, int64_t count) {
  if (!crew) return;
  crew->next.bytes.store(bytes, std::memory_order_relaxed), crew->next.count.store(count, std::memory_order_relaxed);
  crew->next.memory.store((const char*)memory, std::memory_order_relaxed);
}
