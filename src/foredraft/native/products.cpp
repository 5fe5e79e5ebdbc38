// Products of a few rows with a packed matrix, (M, K) x (K, N) -> (M, N). Weights are read once, at full memory
// bandwidth. A row is summed in the same order whatever the number of rows, so its bits do not depend on M.
//
// Built for one instruction set by -DFOREDRAFT_AMX, -DFOREDRAFT_AVX512_BF16, -DFOREDRAFT_AVX512 or -DFOREDRAFT_AVX2,
// with the matching -m options. packed_matmul.py describes the packed formats.

#include "abi.h"
#include "floats.h"
#include "threads.h"
#include "vectors.h"

#include <vector>

#if defined(FOREDRAFT_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// ---- bfloat16 in and out, sums in float32 ---------------------------------------------------------------------------

#if defined(FOREDRAFT_AMX) || defined(FOREDRAFT_AVX512_BF16)

// Stores two registers of sums, 32 outputs, as bfloat16. The last block of a matrix may have fewer outputs.
static inline void store_block(__m512 low, __m512 high, const float* bias, uint16_t* out, int64_t count) {
  if (bias) {
    const __mmask16 first = count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1);
    const __mmask16 second = count >= 32 ? 0xffff : count <= 16 ? 0 : (__mmask16)((1u << (count - 16)) - 1);
    low = _mm512_add_ps(low, _mm512_maskz_loadu_ps(first, bias));
    high = _mm512_add_ps(high, _mm512_maskz_loadu_ps(second, bias + 16));
  }
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  if (count >= 32)
    _mm512_storeu_si512(out, both);
  else
    _mm512_mask_storeu_epi16(out, (__mmask32)((1u << count) - 1), both);
}

#endif

#if defined(FOREDRAFT_AMX)

// A matrix of pairs has two tiles per block of 32 outputs and 32 inputs. Each tile has 16 pairs of inputs x 16 outputs.

// Tiles 0-3 contain sums (upper and lower rows x two halves of outputs), 4 and 5 inputs, 6 and 7 weights.
static inline void configure(int64_t upper, int64_t lower) {
  const uint8_t first = (uint8_t)upper, second = (uint8_t)(lower ? lower : 1);
  configure_tiles({first, first, second, second, first, second, 16, 16});
}

static inline void store_tiles(const float* sums, int64_t rows, const float* bias, uint16_t* out, int64_t stride,
                               int64_t count) {
  for (int64_t row = 0; row < rows; ++row)
    store_block(_mm512_load_ps(sums + row * 32), _mm512_load_ps(sums + row * 32 + 16), bias, out + row * stride, count);
}

// Multiplies up to 32 rows. `step` is the distance between tiles of inputs in values, `bytes` that between rows of a
// tile.
__attribute__((always_inline)) static inline void tile_rows(const uint16_t* upper_rows, const uint16_t* lower_rows, int64_t step, int64_t bytes,
                             int64_t inputs, const uint16_t* weight, bool has_lower, bool fetches) {
  _tile_zero(0);
  _tile_zero(1);
  if (has_lower) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t input = 0; input < inputs; input += 32, weight += 1024, upper_rows += step, lower_rows += step) {
    if (fetches)
      for (int line = 0; line < 32; ++line) _mm_prefetch((const char*)(weight + 4096) + line * 64, _MM_HINT_T0);
    _tile_loadd(6, weight, 64);
    _tile_loadd(4, upper_rows, bytes);
    if (has_lower) _tile_loadd(5, lower_rows, bytes);
    _tile_loadd(7, weight + 512, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (has_lower) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

static void finish_rows(const Matrix* matrix, int64_t block, int64_t upper, int64_t lower, uint16_t* out) {
  alignas(64) float sums[16 * 32];
  const int64_t first = block * 32, count = least(32, matrix->outputs - first), stride = matrix->outputs;
  const float* bias = matrix->bias ? matrix->bias + first : nullptr;
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  store_tiles(sums, upper, bias, out + first, stride, count);
  if (lower) {
    _tile_stored(2, sums, 128);
    _tile_stored(3, sums + 16, 128);
    store_tiles(sums, lower, bias, out + 16 * stride + first, stride, count);
  }
}

// Few rows, or no memory for arranging them: tiles of inputs are read in place.
static void few_rows(const Matrix* matrix, const uint16_t* x, int64_t num_rows, uint16_t* out, int64_t first_block,
                     int64_t last_block) {
  const int64_t inputs = matrix->inputs;
  for (int64_t start = 0; start < num_rows; start += 32) {
    const int64_t upper = least(16, num_rows - start), lower = least(16, num_rows - start - upper);
    const uint16_t* rows = x + start * inputs;
    configure(upper, lower);
    for (int64_t block = first_block; block < last_block; ++block) {
      const uint16_t* weight = (const uint16_t*)matrix->weight + block * 32 * inputs;
      if (lower)
        tile_rows(rows, rows + 16 * inputs, 32, inputs * 2, inputs, weight, true, true);
      else
        tile_rows(rows, rows, 32, inputs * 2, inputs, weight, false, true);
      finish_rows(matrix, block, upper, lower, out + start * matrix->outputs);
    }
  }
}

enum { CHUNK = 256 };  // rows that are arranged as tiles at a time; they stay in the L2 cache

static void many_rows(const Matrix* matrix, const uint16_t* x, int64_t num_rows, uint16_t* out, int64_t first_block,
                      int64_t last_block) {
  const int64_t inputs = matrix->inputs, tile = 16 * inputs;
  uint16_t* rows = (uint16_t*)aligned_alloc(64, (size_t)(CHUNK * inputs * 2));
  if (!rows) return few_rows(matrix, x, num_rows, out, first_block, last_block);
  configure(16, 16);
  for (int64_t start = 0; start < num_rows; start += CHUNK) {
    const int64_t here = least(CHUNK, num_rows - start), whole = (here + 15) / 16 * 16;
    for (int64_t row = 0; row < whole; ++row)
      for (int64_t input = 0; input < inputs; input += 32) {
        const __m512i values =
            row < here ? _mm512_loadu_si512(x + (start + row) * inputs + input) : _mm512_setzero_si512();
        _mm512_store_si512(rows + row / 16 * tile + input * 16 + row % 16 * 32, values);
      }
    for (int64_t block = first_block; block < last_block; ++block) {
      const uint16_t* weight = (const uint16_t*)matrix->weight + block * 32 * inputs;
      for (int64_t row = 0; row < here; row += 32) {
        const int64_t upper = least(16, here - row), lower = least(16, here - row - upper);
        const uint16_t* above = rows + row * inputs;
        if (lower)
          tile_rows(above, above + tile, 512, 64, inputs, weight, true, row == 0);
        else
          tile_rows(above, above, 512, 64, inputs, weight, false, row == 0);
        finish_rows(matrix, block, upper, lower, out + (start + row) * matrix->outputs);
      }
    }
  }
  free(rows);
}

static void pairs(const Matrix* matrix, const uint16_t* x, int64_t num_rows, uint16_t* out, int64_t first_block,
                  int64_t last_block) {
  if (num_rows > 32)
    many_rows(matrix, x, num_rows, out, first_block, last_block);
  else
    few_rows(matrix, x, num_rows, out, first_block, last_block);
  _tile_release();
}

#elif defined(FOREDRAFT_AVX512_BF16)

static inline __m512bh pair_of(const uint16_t* x) {
  int32_t both;
  memcpy(&both, x, sizeof both);
  return (__m512bh)_mm512_set1_epi32(both);
}

// Adds the products of a tile, 16 outputs and 32 inputs, to sums of rows `stride` apart, and prefetches the tile after
// next.
template <int ROWS>
static inline void add_tile(const uint16_t* tile, const uint16_t* x, int64_t stride, __m512* sums) {
#pragma GCC unroll 16
  for (int pair = 0; pair < 16; ++pair) {
    const __m512bh weights = (__m512bh)_mm512_loadu_si512(tile + pair * 32);
    _mm_prefetch((const char*)(tile + pair * 32 + 1024), _MM_HINT_T0);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
      sums[row] = _mm512_dpbf16_ps(sums[row], weights, pair_of(x + row * stride + pair * 2));
  }
}

// The same for two tiles side by side, so that an input is read once for both. Prefetches tiles far ahead.
template <int ROWS>
static inline void add_tiles(const uint16_t* tiles, const uint16_t* x, int64_t stride, bool fetches, __m512* low,
                             __m512* high) {
#pragma GCC unroll 16
  for (int pair = 0; pair < 16; ++pair) {
    if (fetches) {
      _mm_prefetch((const char*)(tiles + 8192 + pair * 64), _MM_HINT_T1);
      _mm_prefetch((const char*)(tiles + 8192 + pair * 64 + 32), _MM_HINT_T1);
    }
    const __m512bh one = (__m512bh)_mm512_loadu_si512(tiles + pair * 32);
    const __m512bh two = (__m512bh)_mm512_loadu_si512(tiles + pair * 32 + 512);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row) {
      const __m512bh both = pair_of(x + row * stride + pair * 2);
      low[row] = _mm512_dpbf16_ps(low[row], one, both);
      high[row] = _mm512_dpbf16_ps(high[row], two, both);
    }
  }
}

// Weights are read or prefetched in the order of memory addresses. Reading two tiles side by side from memory would be
// half as fast.
template <int ROWS>
static inline void pair_rows(const Matrix* matrix, const uint16_t* x, uint16_t* out, int64_t block, bool fetches) {
  const int64_t inputs = matrix->inputs, first = block * 32;
  const uint16_t* tiles = (const uint16_t*)matrix->weight + first * inputs;
  __m512 low[ROWS], high[ROWS];
  for (int row = 0; row < ROWS; ++row) low[row] = high[row] = _mm512_setzero_ps();
  for (int64_t input = 0; input < inputs; input += 32, tiles += 1024)
    if (fetches && ROWS < 3) {  // memory-bound
      add_tile<ROWS>(tiles, x + input, inputs, low);
      add_tile<ROWS>(tiles + 512, x + input, inputs, high);
    } else {
      add_tiles<ROWS>(tiles, x + input, inputs, fetches, low, high);
    }
  const float* bias = matrix->bias ? matrix->bias + first : nullptr;
  for (int row = 0; row < ROWS; ++row)
    store_block(low[row], high[row], bias, out + row * matrix->outputs + first, least(32, matrix->outputs - first));
}

static void pairs(const Matrix* matrix, const uint16_t* x, int64_t num_rows, uint16_t* out, int64_t first_block,
                  int64_t last_block) {
  for (int64_t block = first_block; block < last_block; ++block)
    for (int64_t row = 0; row < num_rows; row += 8) {
      const uint16_t* from = x + row * matrix->inputs;
      uint16_t* to = out + row * matrix->outputs;
      switch (least(8, num_rows - row)) {
        case 1: pair_rows<1>(matrix, from, to, block, row == 0); break;
        case 2: pair_rows<2>(matrix, from, to, block, row == 0); break;
        case 3: pair_rows<3>(matrix, from, to, block, row == 0); break;
        case 4: pair_rows<4>(matrix, from, to, block, row == 0); break;
        case 5: pair_rows<5>(matrix, from, to, block, row == 0); break;
        case 6: pair_rows<6>(matrix, from, to, block, row == 0); break;
        case 7: pair_rows<7>(matrix, from, to, block, row == 0); break;
        default: pair_rows<8>(matrix, from, to, block, row == 0);
      }
    }
}

#endif

// ---- entry points ---------------------------------------------------------------------------------------------------

static void part(const Matrix* matrix, const void* x, int64_t num_rows, void* out, int64_t first, int64_t last) {
  switch (matrix->kind) {
#if defined(FOREDRAFT_AMX) || defined(FOREDRAFT_AVX512_BF16)
    case PAIRS: return pairs(matrix, (const uint16_t*)x, num_rows, (uint16_t*)out, first, last);
#endif
    default: return few_floats(matrix, (const float*)x, num_rows, (float*)out, first, last);
  }
}

#if defined(FOREDRAFT_AMX) || defined(FOREDRAFT_AVX512_BF16)

// Pads inputs with zeros to a multiple of 32; the packed weights are padded in the same way.
static void fill_up(const Matrix* matrix, const uint16_t* x, int64_t num_rows, void* out, int threads) {
  Matrix filled = *matrix;
  filled.inputs = rounded_up(matrix->inputs, 32);
  std::vector<uint16_t> rows(num_rows * filled.inputs);
  for (int64_t row = 0; row < num_rows; ++row)
    memcpy(rows.data() + row * filled.inputs, x + row * matrix->inputs, matrix->inputs * sizeof *x);
  foredraft_product(&filled, rows.data(), num_rows, out, threads);
}

#endif

// (num_rows, K) -> (num_rows, N), both contiguous. Threads share the blocks of outputs, and of rows if there are many.
extern "C" void foredraft_product(const Matrix* matrix, const void* x, int64_t num_rows, void* out, int threads) {
#if defined(FOREDRAFT_AMX) || defined(FOREDRAFT_AVX512_BF16)
  if (matrix->kind == PAIRS && matrix->inputs % 32) return fill_up(matrix, (const uint16_t*)x, num_rows, out, threads);
#endif
  if (threads < 1) threads = 1;
  if (bits_of(matrix->kind)) return multiply_codes(matrix, x, num_rows, out, threads);
  const int64_t size = matrix->kind == PAIRS ? 32 : BLOCK, blocks = (matrix->outputs + size - 1) / size;
  const bool is_large = matrix->kind != PAIRS && num_rows >= MANY && matrix->outputs >= WIDE;
  if (is_large && many_floats(matrix, (const float*)x, num_rows, (float*)out, threads)) return;
  const int pieces = matrix->kind == PAIRS && num_rows > 32 ? 1 : PIECES;  // each piece arranges all rows again
  share_out(blocks, threads, [&](int64_t first, int64_t last, int) { part(matrix, x, num_rows, out, first, last); },
            pieces);
}

// Returns the size of a block of outputs in memory.
BlockShape block_of(const Matrix& matrix) {
  const int64_t of_code = bits_of(matrix.kind), bits = of_code ? of_code : matrix.kind == FLOAT32 ? 32 : 16;
  const int64_t span = of_code ? (matrix.group ? matrix.group : CODES_SPAN) : matrix.kind == PAIRS ? 32 : 1;
  const int64_t size = of_code ? CODES_BLOCK : matrix.kind == PAIRS ? 32 : BLOCK;
  return {size, size * rounded_up(matrix.inputs, span) * bits / 8};
}

// Announces the matrix of the next product, for prefetching.
void fetch_matrix(const Matrix& matrix) {
  const BlockShape block = block_of(matrix);
  fetch_next(matrix.weight, block.bytes, (matrix.outputs + block.outputs - 1) / block.outputs);
}

// Returns the outputs per block of a matrix in float32. Blocks of pairs have 32.
extern "C" int foredraft_num_outputs() { return BLOCK; }

// Returns whether this process may use the instructions that the library was built for.
extern "C" int foredraft_is_allowed() {
#if defined(FOREDRAFT_AMX)
  enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return 1;
#endif
}
