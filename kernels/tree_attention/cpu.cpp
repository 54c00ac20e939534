// Tree attention over a paged cache; README.md derives the layout.
//
// The queries of a request times the heads of a GQA group are the rows of a tile. A tile visits its keys in splits
// of SPLIT slots anchored at slot 0 and merges the splits' softmax states in that order, so a query's result does not
// depend on its batch mates, on the number of threads or on which of the two schedules below ran.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "simd.h"

using namespace specdec;

namespace {

constexpr int SPLIT = 128;
constexpr int VECTORS = SPLIT / LANES;
constexpr int WORDS = SPLIT / 32;
constexpr int MAX_ROWS = 6;          // rows that share one pass over keys and values, in registers
constexpr int TILE_ROWS = 192;       // rows that share one transposed copy of a split's keys
constexpr int64_t PARALLEL_WORK = 1024;  // row x slot pairs below which a second thread costs more than it saves

// Mirrors `AttentionCall` in native.py.
struct Call {
    const int32_t *query_offsets, *tree_starts, *kv_lens, *causal_limits, *ancestors, *block_tables;
    const int64_t* positions;
    int64_t num_queries, num_requests, num_words, table_width, block_size, num_blocks;
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t window;  // 0: none
    float scale, soft_cap;  // soft_cap 0: none
};

struct Tile {
    int64_t request, head, first_query, num_rows;
    int64_t first_split, num_splits;
    int64_t state;  // index of its first row state in the shared buffer
    int64_t work() const { return num_rows * num_splits * SPLIT; }
};

// Softmax states of a tile's rows: sum of weights * values, largest score, sum of weights (scores in base 2).
struct States {
    float *values, *peak, *total;
    int64_t stride;
    States at(int64_t row) const { return {values + row * stride, peak + row, total + row, stride}; }
};

template <class E>
E* grown(int64_t count) {
    struct Free {
        void operator()(E* p) const { std::free(p); }
    };
    thread_local std::unique_ptr<E, Free> buffer;
    thread_local int64_t capacity = 0;
    if (count > capacity) {
        buffer.reset(static_cast<E*>(std::aligned_alloc(64, (count * sizeof(E) + 63) / 64 * 64)));
        capacity = count;
    }
    return buffer.get();
}



// 32 ancestor bits starting at tree slot `first`, which may be negative or past the end.
uint32_t ancestor_bits(const int32_t* words, int64_t num_words, int64_t first) {
    const int64_t word = first >> 5, shift = first & 31;
    const uint32_t low = word >= 0 && word < num_words ? uint32_t(words[word]) : 0;
    if (shift == 0) return low;
    const uint32_t high = word + 1 >= 0 && word + 1 < num_words ? uint32_t(words[word + 1]) : 0;
    return low >> shift | high << (32 - shift);
}

// Bits of the slots `first .. first + 31` that are below `end`.
uint32_t bits_below(int64_t end, int64_t first) {
    const int64_t count = end - first;
    return count <= 0 ? 0 : count >= 32 ? ~0u : (1u << count) - 1;
}

bool visible_words(const Call& call, int64_t request, int64_t query, int64_t first_slot, uint32_t* words) {
    const int32_t* ancestors = call.ancestors + query * call.num_words;
    const int64_t oldest = call.window ? call.positions[query] - call.window + 1 : 0;
    uint32_t any = 0;
    for (int w = 0; w < WORDS; w++) {
        const int64_t slot = first_slot + 32 * w;
        const uint32_t committed = bits_below(call.causal_limits[query], slot) & ~bits_below(oldest, slot);
        words[w] = committed | ancestor_bits(ancestors, call.num_words, slot - call.tree_starts[request]);
        any |= words[w];
    }
    return any != 0;
}



// Keys are handled as 32-bit words: one float, or a pair of bf16 elements.
template <class T>
constexpr int64_t words_of(int64_t dim) {
    return (dim * int64_t(sizeof(T)) + 3) / 4;
}

inline VecU load_bytes(const void* p, int64_t bytes) {
    VecU v = {};
    if (bytes >= 64)
        std::memcpy(&v, p, 64);
    else if (bytes == 32)
        std::memcpy(&v, p, 32);
    else
        std::memcpy(&v, p, bytes);
    return v;
}

template <int D>
inline void swap_lanes(VecU* r) {
    constexpr auto low = [](int lane) { return lane & D ? lane - D + LANES : lane; };
    constexpr auto high = [](int lane) { return lane & D ? lane + LANES : lane + D; };
    for (int i = 0; i < LANES; i++) {
        if (i & D) continue;
        const VecU a = r[i], b = r[i + D];
        r[i] = __builtin_shufflevector(a, b, low(0), low(1), low(2), low(3), low(4), low(5), low(6), low(7), low(8),
                                       low(9), low(10), low(11), low(12), low(13), low(14), low(15));
        r[i + D] = __builtin_shufflevector(a, b, high(0), high(1), high(2), high(3), high(4), high(5), high(6),
                                           high(7), high(8), high(9), high(10), high(11), high(12), high(13),
                                           high(14), high(15));
    }
}

// Writes 16 slots' keys as [word][slot] vectors, `stride` vectors apart.
template <class T>
void transpose_keys(const T* const* rows, int64_t count, int64_t dim, VecU* out, int64_t stride) {
    const int64_t num_words = words_of<T>(dim), bytes = dim * sizeof(T);
    for (int64_t word = 0; word < num_words; word += LANES) {
        VecU block[LANES];
        for (int i = 0; i < LANES; i++)
            block[i] = i < count ? load_bytes(reinterpret_cast<const char*>(rows[i]) + 4 * word, bytes - 4 * word)
                                 : VecU{};
        swap_lanes<1>(block);
        swap_lanes<2>(block);
        swap_lanes<4>(block);
        swap_lanes<8>(block);
        for (int i = 0; i < LANES && word + i < num_words; i++) out[(word + i) * stride] = block[i];
    }
}

inline VecF multiply_add(VecF sum, uint32_t query, VecU keys, const float*) {
    return sum + bit_cast<float>(query) * bit_cast<VecF>(keys);
}

inline VecF multiply_add(VecF sum, uint32_t query, VecU keys, const bf16*) {
#if defined(__AVX512BF16__)
    return VecF(_mm512_dpbf16_ps(__m512(sum), bit_cast<__m512bh>(VecU{} + query), bit_cast<__m512bh>(keys)));
#else
    sum += bit_cast<float>(query << 16) * bit_cast<VecF>(keys << 16);
    return sum + bit_cast<float>(query & 0xFFFF0000) * bit_cast<VecF>(keys & 0xFFFF0000);
#endif
}



template <class T>
struct Split {
    const Call& call;
    const T* values[SPLIT];  // value row of each slot
    const VecU* keys;        // [pair of vectors][word][2]
    int64_t num_slots, num_words;
};

template <class T, int R>
void scores_of(const Split<T>& split, const uint32_t* const* queries, VecF scores[][VECTORS]) {
    for (int v = 0; v * LANES < split.num_slots; v += 2) {
        VecF sums[R][2] = {};
        const VecU* keys = split.keys + v * split.num_words;
        for (int64_t w = 0; w < split.num_words; w++)
            for (int r = 0; r < R; r++)
                for (int i = 0; i < 2; i++)
                    sums[r][i] = multiply_add(sums[r][i], queries[r][w], keys[2 * w + i], (const T*)nullptr);
        for (int r = 0; r < R; r++)
            for (int i = 0; i < 2; i++) scores[r][v + i] = sums[r][i];
    }
}

// Turns scores into weights 2^(score - peak), 0 where a slot is hidden.
template <class T>
void softmax(const Split<T>& split, const uint32_t* words, VecF* scores, float* peak, float* total) {
    const int vectors = (split.num_slots + LANES - 1) / LANES;
    const float scale = split.call.scale, cap = split.call.soft_cap;
    VecF top = splat(-INFINITY);
    for (int v = 0; v < vectors; v++) {
        const VecI visible = LANE_BITS & int32_t(words[v / 2] >> (v % 2 * LANES) & 0xFFFF);
        const VecF score = cap > 0 ? tanh(scores[v] * (scale / cap)) * (cap * LOG2_E) : scores[v] * (scale * LOG2_E);
        scores[v] = visible != 0 ? score : splat(-INFINITY);
        top = maximum(top, scores[v]);
    }
    *peak = largest(top);
    VecF weights = {};
    for (int v = 0; v < vectors; v++) {
        const VecI visible = LANE_BITS & int32_t(words[v / 2] >> (v % 2 * LANES) & 0xFFFF);
        const VecF weight = exp2(scores[v] - *peak);
        scores[v] = visible != 0 ? weight : VecF{};
        weights += scores[v];
    }
    *total = sum(weights);
}

// Adds weights * values for C vectors of the head dimension. Only slots in `seen` are read: others may be unwritten.
template <class T, int R, int C>
void weighted_values(const Split<T>& split, const uint32_t* seen, const float weights[][SPLIT], int64_t d,
                     const States& states) {
    VecF sums[R][C] = {};
    for (int w = 0; w < WORDS; w++)
        for (uint32_t bits = seen[w]; bits; bits &= bits - 1) {
            const int slot = 32 * w + __builtin_ctz(bits);
            VecF value[C];
            for (int c = 0; c < C; c++) value[c] = load(split.values[slot] + d + c * LANES);
            for (int r = 0; r < R; r++)
                for (int c = 0; c < C; c++) sums[r][c] += weights[r][slot] * value[c];
        }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(states.at(r).values + d + c * LANES, sums[r][c]);
}

template <class T, int R>
void weighted_tail(const Split<T>& split, const uint32_t* seen, const float weights[][SPLIT], int64_t d,
                   const States& states) {
    for (; d < split.call.head_dim; d++)
        for (int r = 0; r < R; r++) {
            float sum = 0;
            for (int w = 0; w < WORDS; w++)
                for (uint32_t bits = seen[w]; bits; bits &= bits - 1) {
                    const int slot = 32 * w + __builtin_ctz(bits);
                    sum += weights[r][slot] * to_float(split.values[slot][d]);
                }
            states.at(r).values[d] = sum;
        }
}

template <class T, int R>
void attend_rows(const Split<T>& split, const uint32_t* const* queries, const uint32_t* const* visible,
                 const States& states) {
    uint32_t seen[WORDS] = {};
    for (int r = 0; r < R; r++)
        for (int w = 0; w < WORDS; w++) seen[w] |= visible[r][w];
    const bool empty = std::all_of(seen, seen + WORDS, [](uint32_t word) { return word == 0; });
    VecF scores[R][VECTORS] = {};
    if (!empty) scores_of<T, R>(split, queries, scores);
    for (int r = 0; r < R; r++) softmax(split, visible[r], scores[r], states.peak + r, states.total + r);
    const auto weights = reinterpret_cast<const float(*)[SPLIT]>(scores);
    int64_t d = 0;
    for (; d + 4 * LANES <= split.call.head_dim; d += 4 * LANES)
        weighted_values<T, R, 4>(split, seen, weights, d, states);
    if (d + 2 * LANES <= split.call.head_dim) weighted_values<T, R, 2>(split, seen, weights, d, states), d += 2 * LANES;
    if (d + LANES <= split.call.head_dim) weighted_values<T, R, 1>(split, seen, weights, d, states), d += LANES;
    weighted_tail<T, R>(split, seen, weights, d, states);
}

template <class T>
using AttendRows = void (*)(const Split<T>&, const uint32_t* const*, const uint32_t* const*, const States&);

template <class T>
constexpr AttendRows<T> ATTEND_ROWS[MAX_ROWS] = {attend_rows<T, 1>, attend_rows<T, 2>, attend_rows<T, 3>,
                                                 attend_rows<T, 4>, attend_rows<T, 5>, attend_rows<T, 6>};



template <class T>
struct Cache {
    const T *q, *k, *v;
};

template <class T>
void locate_rows(const Call& call, const Cache<T>& cache, const Tile& tile, int64_t first_slot, Split<T>& split,
                 const T** keys) {
    const int32_t* table = call.block_tables + tile.request * call.table_width;
    const int64_t row = call.num_kv_heads * call.head_dim;
    int64_t i = 0;
    while (i < split.num_slots) {
        const int64_t slot = first_slot + i, page = slot / call.block_size, inside = slot % call.block_size;
        const int64_t stop = std::min(split.num_slots, i + call.block_size - inside);
        int64_t offset = (table[page] * call.block_size + inside) * row + tile.head * call.head_dim;
        for (; i < stop; i++, offset += row) {
            keys[i] = cache.k + offset;
            split.values[i] = cache.v + offset;
            for (int64_t d = 0; d < call.head_dim; d += 64 / sizeof(T)) __builtin_prefetch(split.values[i] + d);
        }
    }
}

// The query rows of a tile, padded to whole words.
template <class T>
const uint32_t* pack_queries(const Call& call, const T* q, const Tile& tile) {
    const int64_t group = call.num_heads / call.num_kv_heads, num_words = words_of<T>(call.head_dim);
    uint32_t* packed = grown<uint32_t>(tile.num_rows * num_words);
    for (int64_t row = 0; row < tile.num_rows; row++) {
        const int64_t query = tile.first_query + row / group, head = tile.head * group + row % group;
        uint32_t* out = packed + row * num_words;
        out[num_words - 1] = 0;
        std::memcpy(out, q + (query * call.num_heads + head) * call.head_dim, call.head_dim * sizeof(T));
    }
    return packed;
}

template <class T>
void attend_split(const Call& call, const Cache<T>& cache, const Tile& tile, int64_t index, const States& states) {
    const int64_t group = call.num_heads / call.num_kv_heads, first_slot = index * SPLIT;
    const int64_t kv_len = call.kv_lens[tile.request], num_words = words_of<T>(call.head_dim);
    VecU* transposed = grown<VecU>(num_words * VECTORS);
    const T* keys[SPLIT];
    Split<T> split{call, {}, transposed, std::min<int64_t>(SPLIT, kv_len - first_slot), num_words};
    locate_rows(call, cache, tile, first_slot, split, keys);
    for (int64_t v = 0; v < VECTORS && (v & ~1) * LANES < split.num_slots; v++)
        transpose_keys<T>(keys + v * LANES, split.num_slots - v * LANES, call.head_dim,
                          transposed + (v & ~1) * num_words + v % 2, 2);

    const uint32_t* packed = pack_queries(call, cache.q, tile);
    for (int64_t row = 0; row < tile.num_rows; row += MAX_ROWS) {
        const int count = std::min<int64_t>(MAX_ROWS, tile.num_rows - row);
        uint32_t words[MAX_ROWS][WORDS];
        const uint32_t *queries[MAX_ROWS], *visible[MAX_ROWS];
        for (int r = 0; r < count; r++) {
            queries[r] = packed + (row + r) * num_words;
            visible[r] = r && (row + r) % group ? visible[r - 1] : words[r];
            if (visible[r] == words[r])
                visible_words(call, tile.request, tile.first_query + (row + r) / group, first_slot, words[r]);
        }
        ATTEND_ROWS<T>[count - 1](split, queries, visible, states.at(row));
    }
}



// Folds the states of a later split into those of the earlier ones. Kept out of line so that both schedules run the
// very same instructions.
__attribute__((noinline)) void merge(const States& into, const States& from, int64_t num_rows) {
    for (int64_t row = 0; row < num_rows; row++) {
        const States a = into.at(row), b = from.at(row);
        if (*b.peak == -INFINITY) continue;
        const float peak = std::max(*a.peak, *b.peak);
        const VecF factors = exp2(VecF{*a.peak - peak, *b.peak - peak});
        *a.peak = peak;
        *a.total = *a.total * factors[0] + *b.total * factors[1];
        for (int64_t d = 0; d < a.stride; d += LANES)
            store(a.values + d, load(a.values + d) * factors[0] + load(b.values + d) * factors[1]);
    }
}

// A row that sees nothing gives zeros.
template <class T>
void finish(const Call& call, const Tile& tile, const States& states, T* out) {
    const int64_t group = call.num_heads / call.num_kv_heads;
    for (int64_t row = 0; row < tile.num_rows; row++) {
        const States state = states.at(row);
        const int64_t query = tile.first_query + row / group, head = tile.head * group + row % group;
        const float factor = *state.total > 0 ? 1.0f / *state.total : 0.0f;
        T* target = out + (query * call.num_heads + head) * call.head_dim;
        int64_t d = 0;
        for (; d + LANES <= call.head_dim; d += LANES) store(target + d, load(state.values + d) * factor);
        for (; d < call.head_dim; d++) assign(target + d, state.values[d] * factor);
    }
}



void set_splits(const Call& call, Tile& tile, int64_t last_query) {
    int64_t end = 0, oldest = call.window ? INT64_MAX : 0;
    for (int64_t query = tile.first_query; query < last_query; query++) {
        const int32_t* words = call.ancestors + query * call.num_words;
        const bool in_tree = std::any_of(words, words + call.num_words, [](int32_t word) { return word != 0; });
        end = std::max<int64_t>(end, in_tree ? call.kv_lens[tile.request] : call.causal_limits[query]);
        if (call.window) oldest = std::min(oldest, call.positions[query] - call.window + 1);
    }
    tile.first_split = std::max<int64_t>(0, oldest) / SPLIT;
    tile.num_splits = std::max<int64_t>(0, (end + SPLIT - 1) / SPLIT - tile.first_split);
}

// Tiles of all requests; empty with `valid` false if a block table names a page outside the pool.
std::vector<Tile> plan(const Call& call, bool& valid) {
    std::vector<Tile> tiles;
    const int64_t group = call.num_heads / call.num_kv_heads;
    const int64_t queries_per_tile = std::max<int64_t>(1, TILE_ROWS / group);
    for (int64_t b = 0; b < call.num_requests; b++) {
        const int32_t* table = call.block_tables + b * call.table_width;
        for (int64_t page = 0; page * call.block_size < call.kv_lens[b]; page++)
            valid &= table[page] >= 0 && table[page] < call.num_blocks;
        for (int64_t q = call.query_offsets[b]; q < call.query_offsets[b + 1]; q += queries_per_tile) {
            const int64_t stop = std::min<int64_t>(q + queries_per_tile, call.query_offsets[b + 1]);
            Tile tile{b, 0, q, (stop - q) * group, 0, 0, 0};
            set_splits(call, tile, stop);
            for (tile.head = 0; tile.head < call.num_kv_heads; tile.head++) tiles.push_back(tile);
        }
    }
    return tiles;
}



int64_t state_floats(const Call& call) { return (call.head_dim + LANES - 1) / LANES * LANES + 2; }

States states_in(const Call& call, float* buffer, int64_t num_rows) {
    const int64_t stride = (call.head_dim + LANES - 1) / LANES * LANES;
    return {buffer, buffer + num_rows * stride, buffer + num_rows * (stride + 1), stride};
}

// One thread a tile: for batches, whose tiles outnumber the threads.
template <class T>
void run_by_tile(const Call& call, const Cache<T>& cache, const std::vector<Tile>& tiles, T* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
    for (size_t i = 0; i < tiles.size(); i++) {
        const Tile& tile = tiles[i];
        float* buffer = grown<float>(2 * tile.num_rows * state_floats(call));
        const States states = states_in(call, buffer, tile.num_rows);
        const States later = states_in(call, buffer + tile.num_rows * state_floats(call), tile.num_rows);
        std::fill(states.total, states.total + tile.num_rows, 0.0f);
        for (int64_t s = 0; s < tile.num_splits; s++) {
            attend_split(call, cache, tile, tile.first_split + s, s == 0 ? states : later);
            if (s > 0) merge(states, later, tile.num_rows);
        }
        finish(call, tile, states, out);
    }
}

// All splits in parallel, then the merges: for a few long requests.
template <class T>
void run_by_split(const Call& call, const Cache<T>& cache, std::vector<Tile>& tiles, T* out, int threads) {
    int64_t floats = 0;
    std::vector<std::pair<int32_t, int32_t>> items;  // tile, split
    for (size_t i = 0; i < tiles.size(); i += call.num_kv_heads)
        for (int64_t s = 0; s < tiles[i].num_splits; s++)
            for (int64_t head = 0; head < call.num_kv_heads; head++) items.emplace_back(i + head, s);
    for (Tile& tile : tiles) {
        tile.state = floats;
        floats += std::max<int64_t>(1, tile.num_splits) * tile.num_rows * state_floats(call);
    }
    float* shared = grown<float>(floats);
    const auto states_of = [&](const Tile& tile, int64_t s) {
        return states_in(call, shared + tile.state + s * tile.num_rows * state_floats(call), tile.num_rows);
    };
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < items.size(); i++) {
            const Tile& tile = tiles[items[i].first];
            const int64_t s = items[i].second;
            attend_split(call, cache, tile, tile.first_split + s, states_of(tile, s));
        }
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < tiles.size(); i++) {
            const Tile& tile = tiles[i];
            const States states = states_of(tile, 0);
            if (tile.num_splits == 0) std::fill(states.total, states.total + tile.num_rows, 0.0f);
            for (int64_t s = 1; s < tile.num_splits; s++) merge(states, states_of(tile, s), tile.num_rows);
            finish(call, tile, states, out);
        }
    }
}

template <class T>
int tree_attention(const Call& call, const Cache<T>& cache, T* out, int threads) {
    bool valid = true;
    std::vector<Tile> tiles = plan(call, valid);
    if (!valid) return 1;
    const int64_t row = call.num_heads * call.head_dim, packed = call.query_offsets[call.num_requests];
    std::memset(out + packed * row, 0, (call.num_queries - packed) * row * sizeof(T));
    int64_t total = 0, largest_tile = 0;
    for (const Tile& tile : tiles) {
        total += tile.work();
        largest_tile = std::max(largest_tile, tile.work());
    }
    if (total < PARALLEL_WORK) threads = 1;
    if (2 * largest_tile * threads <= total || threads == 1)
        run_by_tile(call, cache, tiles, out, threads);
    else
        run_by_split(call, cache, tiles, out, threads);
    return 0;
}

}  // namespace

extern "C" {

// Both return 0, or 1 if a block table names a page outside the pool (nothing is written then).
int specdec_tree_attention_float32(const Call* call, const float* q, const float* k, const float* v, float* out,
                                   int threads) {
    return tree_attention<float>(*call, {q, k, v}, out, threads);
}
int specdec_tree_attention_bfloat16(const Call* call, const bf16* q, const bf16* k, const bf16* v, bf16* out,
                                    int threads) {
    return tree_attention<bf16>(*call, {q, k, v}, out, threads);
}
}
