/* What the files of compiled code share: threads, and one version of each function for each kind of processor. */

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define HIDDEN __attribute__((visibility("hidden")))

typedef struct {
    void (*work)(const void *plan, int64_t item, float *scratch);
    const void *plan;
    int64_t num_items, scratch_size; /* scratch: floats for each thread */
    float *scratch;
} Job;

/* Work on items, which any thread may take next. The caller never waits for a thread that has not begun. */
HIDDEN void run(const Job *job, int64_t num_threads);

/* VERSIONS(DEFINE) calls DEFINE(name, attributes, fused, rows, vectors) for each version: whether it rounds a b + c once,
   and the tile of a product of matrices. CHOOSE(function) is function_NAME of the best one for this processor. */
#if defined(__x86_64__)
#define VERSIONS(DEFINE)                                                                                              \
    DEFINE(plain, , 0, 6, 1)                                                                                          \
    DEFINE(avx2, __attribute__((target("arch=x86-64-v3"))), 1, 6, 1)                                                  \
    DEFINE(avx512, __attribute__((target("arch=x86-64-v4"))), 1, 8, 2)
#define HAS(feature) __builtin_cpu_supports(feature)
#define HAS_AVX512 (HAS("avx512f") && HAS("avx512vl") && HAS("avx512bw") && HAS("avx512dq"))
#define CHOOSE(name)                                                                                                  \
    (highest_version > 1 && HAS_AVX512 ? name##_avx512                                                                \
     : highest_version > 0 && HAS("avx2") && HAS("fma") ? name##_avx2                                                 \
                                                        : name##_plain)
HIDDEN extern int64_t highest_version;
#else
#define VERSIONS(DEFINE) DEFINE(plain, , 1, 6, 1)
#define CHOOSE(name) name##_plain
#endif
