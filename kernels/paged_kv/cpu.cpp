// Page pool updates: rows are moved as bytes, so one function serves every dtype.
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

bool in_range(const int64_t* indices, int64_t count, int64_t size) {
    for (int64_t i = 0; i < count; i++)
        if (indices[i] < 0 || indices[i] >= size) return false;
    return true;
}

}  // namespace

extern "C" {

// Returns 0, or 1 if a slot lies outside the cache (nothing is written then).
int specdec_write_kv(const char* k, const char* v, char* k_cache, char* v_cache, const int64_t* slots,
                     int64_t count, int64_t num_slots, int64_t row_bytes) {
    if (!in_range(slots, count, num_slots)) return 1;
    for (int64_t n = 0; n < count; n++) {
        std::memcpy(k_cache + slots[n] * row_bytes, k + n * row_bytes, row_bytes);
        std::memcpy(v_cache + slots[n] * row_bytes, v + n * row_bytes, row_bytes);
    }
    return 0;
}

// Moves rows of each of `num_planes` planes of `num_rows` rows; all reads of a plane come before its writes.
int specdec_move_rows(char* pool, const int64_t* sources, const int64_t* targets, int64_t count,
                      int64_t num_planes, int64_t num_rows, int64_t row_bytes, int threads) {
    if (!in_range(sources, count, num_rows) || !in_range(targets, count, num_rows)) return 1;
    const bool parallel = threads > 1 && num_planes * count * row_bytes > (1 << 17);
#pragma omp parallel num_threads(threads) if (parallel)
    {
        thread_local std::vector<char> rows;
        if (rows.size() < size_t(count * row_bytes)) rows.resize(count * row_bytes);
#pragma omp for schedule(static)
        for (int64_t plane = 0; plane < num_planes; plane++) {
            char* base = pool + plane * num_rows * row_bytes;
            for (int64_t i = 0; i < count; i++)
                std::memcpy(rows.data() + i * row_bytes, base + sources[i] * row_bytes, row_bytes);
            for (int64_t i = 0; i < count; i++)
                std::memcpy(base + targets[i] * row_bytes, rows.data() + i * row_bytes, row_bytes);
        }
    }
    return 0;
}
}
