// Moves units between pages and the wire. GNU C++, for one thread; the caller has checked every index.

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// As pddbridge.native.moves lays it out.
struct Move {
    int64_t first_layer;
    int64_t num_layers;
    const int64_t* places;  // [num_layers, 2]: the address of a layer's first stored byte, and its size
    int64_t offset;         // from there to unit 0
    char* wire;             // the first unit of the first layer on the wire
    int64_t layer_bytes;    // from a layer to the next on the wire
    const int64_t* which;   // [num]: which units of the pages
    int64_t num;            // units, back to back on the wire
    int64_t unit_bytes;
};

// A cache line that holds units of two moves is still in the first-level cache when the second one comes to it.
constexpr int64_t kTurnBytes = 4 << 10;
// What is read from pages is fetched so far ahead, into the second-level cache: the first level waits for too few lines at once to keep
// memory busy, and the processor's own fetching ends with every piece that stands alone. Longer units it sees through.
constexpr int64_t kAheadBytes = 4 << 10;
constexpr int64_t kLongestFetched = 16 << 10;
constexpr int64_t kLine = 64;

// ``Fetches``: lines of ``later`` are fetched meanwhile.
template <int64_t Fixed, bool Streams, bool Fetches>
inline void copy_lines(char* to, const char* from, const char* later, int64_t num_bytes) {
    const int64_t size = Fixed ? Fixed : num_bytes;
    for (int64_t line = 0; line < size; line += kLine) {
        if constexpr (Fetches) __builtin_prefetch(later + line, 0, 2);
#if defined(__AVX512F__)
        const __m512i values = _mm512_loadu_si512(from + line);
        if constexpr (Streams)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(to + line), values);
        else
            _mm512_storeu_si512(to + line, values);
#elif defined(__x86_64__)
        for (int64_t at = line; at < line + kLine; at += 16) {
            const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at));
            if constexpr (Streams)
                _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), part);
            else
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to + at), part);
        }
#else
        std::memcpy(to + line, from + line, kLine);
#endif
    }
}

// Units of one layer.
struct Layer {
    char* pages;
    char* wire;
    const int64_t* which;
    int64_t num;
    int64_t unit_bytes;
};

template <bool ToWire, typename Copy>
inline void each(const Layer& move, int64_t first, int64_t last, Copy copy) {
    for (int64_t i = first; i < last; i++) {
        char* in_pages = move.pages + move.which[i] * move.unit_bytes;
        char* on_wire = move.wire + i * move.unit_bytes;
        if constexpr (ToWire)
            copy(on_wire, in_pages);
        else
            copy(in_pages, on_wire);
    }
}

template <bool ToWire, int64_t Fixed>
inline void each_of(const Layer& move, int64_t first, int64_t last) {
    each<ToWire>(move, first, last, [](char* to, const char* from) { std::memcpy(to, from, Fixed); });
}

template <bool ToWire, int64_t Fixed, bool Streams, bool Fetches>
inline void lines_of(const Layer& move, int64_t first, int64_t last) {
    const int64_t size = Fixed ? Fixed : move.unit_bytes, ahead = std::max<int64_t>(1, kAheadBytes / size);
    for (int64_t i = first; i < last; i++) {
        char* in_pages = move.pages + move.which[i] * size;
        char* on_wire = move.wire + i * size;
        const char* later = Fetches ? move.pages + move.which[std::min(i + ahead, move.num - 1)] * size : nullptr;
        copy_lines<Fixed, Streams, Fetches>(ToWire ? on_wire : in_pages, ToWire ? in_pages : on_wire, later, size);
    }
}

template <bool ToWire, bool Streams>
inline void lines(const Layer& move, int64_t first, int64_t last) {
    switch (move.unit_bytes) {
        case 64: return lines_of<ToWire, 64, Streams, ToWire>(move, first, last);
        case 128: return lines_of<ToWire, 128, Streams, ToWire>(move, first, last);
        case 256: return lines_of<ToWire, 256, Streams, ToWire>(move, first, last);
        default:
            if (ToWire && move.unit_bytes <= kLongestFetched)
                lines_of<ToWire, 0, Streams, ToWire>(move, first, last);
            else
                lines_of<ToWire, 0, Streams, false>(move, first, last);
    }
}

template <bool ToWire>
void turn(const Layer& move, int64_t first, int64_t last, bool streams) {
    const int64_t size = move.unit_bytes;
    if (size % kLine == 0) {
        if (streams && reinterpret_cast<uintptr_t>(ToWire ? move.wire : move.pages) % kLine == 0)
            lines<ToWire, true>(move, first, last);
        else
            lines<ToWire, false>(move, first, last);
        return;
    }
    switch (size) {
        case 1: return each_of<ToWire, 1>(move, first, last);
        case 2: return each_of<ToWire, 2>(move, first, last);
        case 4: return each_of<ToWire, 4>(move, first, last);
        case 8: return each_of<ToWire, 8>(move, first, last);
        case 16: return each_of<ToWire, 16>(move, first, last);
        case 32: return each_of<ToWire, 32>(move, first, last);
        default: each<ToWire>(move, first, last, [size](char* to, const char* from) { std::memcpy(to, from, size); });
    }
}

template <bool ToWire>
void make(const Move* moves, int64_t num_moves, bool streams) {
    int64_t layer = INT64_MAX, stop = 0;
    for (int64_t m = 0; m < num_moves; m++) {
        layer = std::min(layer, moves[m].first_layer);
        stop = std::max(stop, moves[m].first_layer + moves[m].num_layers);
    }
    for (; layer < stop; layer++) {
        for (int64_t round = 0, left = 1; left; round++) {
            left = 0;
            for (int64_t m = 0; m < num_moves; m++) {
                const Move& move = moves[m];
                const int64_t within = layer - move.first_layer;
                const int64_t step = std::max<int64_t>(1, kTurnBytes / move.unit_bytes);
                const int64_t first = round * step, last = std::min(first + step, move.num);
                if (within < 0 || within >= move.num_layers || first >= move.num) continue;
                char* pages = reinterpret_cast<char*>(move.places[2 * within]) + move.offset;
                turn<ToWire>({pages, move.wire + within * move.layer_bytes, move.which, move.num, move.unit_bytes}, first, last, streams);
                left |= last < move.num;
            }
        }
    }
#if defined(__x86_64__)
    if (streams) _mm_sfence();
#endif
}

}  // namespace

extern "C" void pdd_moves(const void* moves, int64_t num_moves, int to_wire, int streams) {
    const Move* first = static_cast<const Move*>(moves);
    if (to_wire)
        make<true>(first, num_moves, streams);
    else
        make<false>(first, num_moves, streams);
}
