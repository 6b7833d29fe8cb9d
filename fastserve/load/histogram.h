// A log-linear histogram of times: constant memory, and no value off by more than 1 part in 128.
//
// Buckets are 1 ns wide below 128 ns; above, each power of two is cut into 128 equal buckets.
// histogram.py reads what `histogram_print` writes, so the two agree on `histogram_index`.

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>

enum { SUB_BITS = 7, SUB_BUCKETS = 1 << SUB_BITS };
// 2^43 ns are 2.4 hours: whatever takes longer is counted as that long.
enum { OCTAVES = 43 - SUB_BITS, BUCKETS = (OCTAVES + 1) * SUB_BUCKETS };

struct histogram {
    uint64_t counts[BUCKETS];
    uint64_t total, sum_ns, max_ns;
};

static inline unsigned histogram_index(uint64_t value_ns) {
    if (value_ns < SUB_BUCKETS) return (unsigned)value_ns;
    unsigned octave = 63 - (unsigned)__builtin_clzll(value_ns) - SUB_BITS;
    unsigned within = (unsigned)(value_ns >> octave) & (SUB_BUCKETS - 1);
    unsigned index = (octave + 1) * SUB_BUCKETS + within;
    return index < BUCKETS ? index : BUCKETS - 1;
}

static inline void histogram_add(struct histogram *histogram, uint64_t value_ns) {
    histogram->counts[histogram_index(value_ns)]++;
    histogram->total++;
    histogram->sum_ns += value_ns;
    if (value_ns > histogram->max_ns) histogram->max_ns = value_ns;
}

// As JSON: the buckets that hold anything, as [index, count] pairs.
static void histogram_print(const struct histogram *histogram, const char *name) {
    printf("\"%s\": {\"sum_ns\": %" PRIu64 ", \"max_ns\": %" PRIu64 ", \"buckets\": [", name,
           histogram->sum_ns, histogram->max_ns);
    const char *separator = "";
    for (unsigned index = 0; index < BUCKETS; index++) {
        if (!histogram->counts[index]) continue;
        printf("%s[%u, %" PRIu64 "]", separator, index, histogram->counts[index]);
        separator = ", ";
    }
    printf("]}");
}
