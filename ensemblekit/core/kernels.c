/* Training steps of small networks on a CPU, one member after the other, so that its values stay in the cache.

Plain C without dependencies, called by kernels.py through ctypes. All arrays are float32 and contiguous; those of
members begin with the member. Each member is computed by one thread in a fixed order, so that results do not depend on
the number of threads. */

#include <math.h>
#include <stddef.h>

#include "kernels.h"

enum { VERSION_OF_CALLS = 1 }; /* also in kernels.py */

/* ---- Products of matrices */

typedef float Vector __attribute__((vector_size(64), aligned(4)));
enum { LANES = 16, MAX_ROWS = 8, MAX_VECTORS = 2, PANEL = LANES * MAX_VECTORS };

typedef struct {
    const float *values;
    int64_t row, column; /* strides */
} Matrix;

/* Compute `rows` rows of a tile: panel is (depth, vectors * LANES). */
INLINE void tile(const int rows, const int vectors, int64_t depth, Matrix a, const float *panel, float *out) {
    Vector sums[MAX_ROWS][MAX_VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            sums[i][v] = (Vector){0};
    for (int64_t p = 0; p < depth; p++) {
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                sums[i][v] += a.values[i * a.row + p * a.column] * ((const Vector *)panel)[p * vectors + v];
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            ((Vector *)out)[i * vectors + v] = sums[i][v];
}

/* out (m, n) = a (m, depth) b (depth, n) + bias; `panel` has room for depth * PANEL floats, and a tile. */
INLINE void multiply(const int rows, const int vectors, int64_t m, int64_t n, int64_t depth, Matrix a, Matrix b,
                     const float *bias, float *out, float *panel) {
    const int64_t width = vectors * LANES;
    float results[MAX_ROWS * PANEL];
    for (int64_t j = 0; j < n; j += width) {
        int64_t columns = n - j < width ? n - j : width;
        for (int64_t p = 0; p < depth; p++)
            for (int64_t c = 0; c < width; c++)
                panel[p * width + c] = c < columns ? b.values[p * b.row + (j + c) * b.column] : 0;
        for (int64_t i = 0; i < m; i += rows) {
            /* the last tile may begin among the rows of the one before */
            int64_t first = i + rows <= m ? i : m - rows;
            Matrix part = {a.values + first * a.row, a.row, a.column};
            int64_t count = rows;
            if (m >= rows) {
                tile(rows, vectors, depth, part, panel, results);
            } else {
                part.values = a.values;
                first = 0;
                count = m;
                for (int64_t r = 0; r < m; r++)
                    tile(1, vectors, depth, (Matrix){a.values + r * a.row, a.row, a.column}, panel, results + r * width);
            }
            for (int64_t r = 0; r < count; r++)
                for (int64_t c = 0; c < columns; c++)
                    out[(first + r) * n + j + c] = results[r * width + c] + (bias ? bias[j + c] : 0);
        }
    }
}

/* ---- Layers: linear, then batch norm and ReLU where the layer has them */

typedef struct {
    int64_t inputs, outputs;
    float *weight, *bias;                        /* (K, outputs, inputs), (K, outputs); no bias: NULL */
    float *weight_gradient, *bias_gradient;      /* not learned: NULL */
    int64_t has_norm, has_relu;
    float *scale, *shift;                        /* (K, outputs); not there: NULL */
    float *scale_gradient, *shift_gradient;      /* not learned: NULL */
    float *mean, *variance;                      /* (K, outputs): the running statistics */
    int64_t *counter;                            /* (K,) */
    float eps, momentum;
    float *inverse;                              /* (K, outputs): of the standard deviations */
    float *kept;                                 /* (K, B, outputs): normalised values; without batch norm, results */
} Layer;

typedef struct {
    const Layer *layers;
    int64_t num_layers, num_members, batch;
    const float *inputs;
    int64_t input_stride; /* from member to member; 0 if all have the same inputs */
    float *outputs;        /* (K, B, outputs of the last layer); also what that keeps, if it has no batch norm */
    const float *gradient; /* of the objective with respect to these */
    int64_t widest;        /* the largest number of inputs or outputs */
    float *scratch;        /* scratch_size(widest, batch) floats for each thread */
} Pass;

int64_t scratch_size(int64_t widest, int64_t batch) {
    /* results and two gradients; then either a panel or the sums of each column, of which some are of type double */
    int64_t deepest = batch > widest ? batch : widest;
    return 3 * batch * widest + deepest * PANEL + 8 * widest;
}

INLINE void sum_columns(int64_t rows, int64_t columns, const float *a, const float *b, float *sums, double *totals) {
    /* sums of a, or of a times b; single precision only within blocks of rows */
    for (int64_t c = 0; c < columns; c++)
        totals[c] = 0;
    for (int64_t first = 0; first < rows; first += 64) {
        int64_t end = first + 64 < rows ? first + 64 : rows;
        for (int64_t c = 0; c < columns; c++)
            sums[c] = 0;
        for (int64_t r = first; r < end; r++)
            for (int64_t c = 0; c < columns; c++)
                sums[c] += b ? a[r * columns + c] * b[r * columns + c] : a[r * columns + c];
        for (int64_t c = 0; c < columns; c++)
            totals[c] += sums[c];
    }
}

INLINE void normalise(const Layer *layer, int64_t member, int64_t batch, float *restrict values, float *restrict scratch) {
    const int64_t width = layer->outputs;
    float *restrict inverse = layer->inverse + member * width;
    float *running_mean = layer->mean + member * width, *running_variance = layer->variance + member * width;
    double *totals = (double *)scratch;
    float *sums = scratch + 2 * width, *means = sums + width;
    sum_columns(batch, width, values, NULL, sums, totals);
    for (int64_t c = 0; c < width; c++)
        means[c] = (float)(totals[c] / batch);
    for (int64_t r = 0; r < batch; r++)
        for (int64_t c = 0; c < width; c++)
            values[r * width + c] -= means[c];
    sum_columns(batch, width, values, values, sums, totals);
    for (int64_t c = 0; c < width; c++) {
        inverse[c] = (float)(1 / sqrt(totals[c] / batch + layer->eps));
        running_mean[c] += layer->momentum * (means[c] - running_mean[c]);
        running_variance[c] += layer->momentum * ((float)(totals[c] / (batch - 1)) - running_variance[c]);
    }
    layer->counter[member]++;
    for (int64_t r = 0; r < batch; r++)
        for (int64_t c = 0; c < width; c++)
            values[r * width + c] *= inverse[c];
}

INLINE float at_least(float lowest, float value) { return value < lowest ? lowest : value; } /* NaN stays NaN */

/* The results (B, outputs) of a layer from what it has kept; in `memory`, if they are not what is kept. */
INLINE const float *results_of(const Layer *layer, int64_t member, int64_t batch, float *restrict memory) {
    const int64_t width = layer->outputs;
    const float *restrict kept = layer->kept + member * batch * width;
    if (!layer->has_norm)
        return kept;
    const float lowest = layer->has_relu ? 0 : -INFINITY;
    if (layer->scale) {
        const float *restrict scale = layer->scale + member * width, *restrict shift = layer->shift + member * width;
        for (int64_t r = 0; r < batch; r++)
            for (int64_t c = 0; c < width; c++)
                memory[r * width + c] = at_least(lowest, kept[r * width + c] * scale[c] + shift[c]);
    } else {
        for (int64_t i = 0; i < batch * width; i++)
            memory[i] = at_least(lowest, kept[i]);
    }
    return memory;
}

INLINE void denormalise(const Layer *layer, int64_t member, int64_t batch, float *restrict gradient, float *restrict scratch) {
    const int64_t width = layer->outputs;
    const float *normalised = layer->kept + member * batch * width;
    const float *inverse = layer->inverse + member * width;
    double *totals = (double *)scratch;
    float *sums = scratch + 2 * width, *shifts = sums + width, *scales = shifts + width, *factors = scales + width;
    sum_columns(batch, width, gradient, NULL, sums, totals);
    for (int64_t c = 0; c < width; c++)
        shifts[c] = (float)totals[c];
    sum_columns(batch, width, gradient, normalised, sums, totals);
    for (int64_t c = 0; c < width; c++)
        scales[c] = (float)totals[c];
    if (layer->shift_gradient)
        for (int64_t c = 0; c < width; c++)
            layer->shift_gradient[member * width + c] = shifts[c];
    if (layer->scale_gradient)
        for (int64_t c = 0; c < width; c++)
            layer->scale_gradient[member * width + c] = scales[c];
    for (int64_t c = 0; c < width; c++) {
        factors[c] = layer->scale ? layer->scale[member * width + c] * inverse[c] : inverse[c];
        shifts[c] /= batch;
        scales[c] /= batch;
    }
    for (int64_t r = 0; r < batch; r++)
        for (int64_t c = 0; c < width; c++)
            gradient[r * width + c] =
                factors[c] * (gradient[r * width + c] - shifts[c] - normalised[r * width + c] * scales[c]);
}

INLINE void forward(const int rows, const int vectors, const Pass *pass, int64_t member, float *scratch) {
    const int64_t batch = pass->batch;
    const Layer *last = pass->layers + pass->num_layers - 1;
    const float *inputs = pass->inputs + member * pass->input_stride;
    float *memory = scratch;
    scratch += batch * pass->widest;
    for (const Layer *layer = pass->layers; layer <= last; layer++) {
        const int64_t width = layer->outputs, size = batch * width;
        Matrix values = {inputs, layer->inputs, 1};
        Matrix transposed = {layer->weight + member * width * layer->inputs, 1, layer->inputs};
        float *kept = layer->kept + member * size;
        multiply(rows, vectors, batch, width, layer->inputs, values, transposed,
                 layer->bias ? layer->bias + member * width : NULL, kept, scratch);
        if (layer->has_norm)
            normalise(layer, member, batch, kept, scratch);
        else if (layer->has_relu)
            for (int64_t i = 0; i < size; i++)
                kept[i] = at_least(0, kept[i]);
        inputs = results_of(layer, member, batch, layer == last ? pass->outputs + member * size : memory);
    }
}

INLINE void backward(const int rows, const int vectors, const Pass *pass, int64_t member, float *scratch) {
    const int64_t batch = pass->batch, room = batch * pass->widest;
    float *memory = scratch, *gradient = memory + room, *next = gradient + room;
    scratch = next + room;
    const Layer *last = pass->layers + pass->num_layers - 1;
    const float *results = pass->outputs + member * batch * last->outputs;
    for (int64_t i = 0; i < batch * last->outputs; i++)
        gradient[i] = pass->gradient[member * batch * last->outputs + i];
    for (const Layer *layer = last; layer >= pass->layers; layer--) {
        const int64_t width = layer->outputs, depth = layer->inputs;
        if (layer->has_relu)
            for (int64_t i = 0; i < batch * width; i++)
                gradient[i] = results[i] <= 0 ? 0 : gradient[i];
        if (layer->has_norm)
            denormalise(layer, member, batch, gradient, scratch);
        if (layer->bias_gradient) {
            double *totals = (double *)scratch;
            sum_columns(batch, width, gradient, NULL, scratch + 2 * width, totals);
            for (int64_t c = 0; c < width; c++)
                layer->bias_gradient[member * width + c] = (float)totals[c];
        }
        const int is_first = layer == pass->layers;
        const float *inputs =
            is_first ? pass->inputs + member * pass->input_stride : results_of(layer - 1, member, batch, memory);
        if (layer->weight_gradient)
            multiply(rows, vectors, width, depth, batch, (Matrix){gradient, 1, width}, (Matrix){inputs, depth, 1},
                     NULL, layer->weight_gradient + member * width * depth, scratch);
        if (is_first)
            return;
        multiply(rows, vectors, batch, depth, width, (Matrix){gradient, width, 1},
                 (Matrix){layer->weight + member * width * depth, depth, 1}, NULL, next, scratch);
        float *swapped = gradient;
        gradient = next;
        next = swapped;
        results = inputs;
    }
}

/* ---- Cross-entropy */

typedef struct {
    const float *outputs;  /* (rows, classes) */
    const int64_t *target; /* (batch): row r is of sample r % batch */
    float *losses;         /* (rows) */
    float *slopes;         /* (rows, classes): the gradient of each row's loss */
    int64_t rows, batch, classes;
} CrossEntropy;

enum { BLOCK = 64 }; /* rows */

INLINE float exponential(float x) { /* for x <= 0, to about a unit in the last place; not smaller than 1e-38 */
    x = x < -87.0f ? -87.0f : x;
    const float whole = rintf(x * 1.44269504f), rest = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
    float sum = 1.0f / 720; /* the Taylor series, for at most log(2) / 2 */
    sum = sum * rest + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * (rest * rest) + rest + 1;
    union {
        uint32_t bits;
        float value;
    } power = {.bits = ((uint32_t)(int32_t)whole + 127) << 23}; /* 2 to the power of `whole` */
    return sum * power.value;
}

INLINE void cross_entropy(const CrossEntropy *loss, int64_t block) {
    const int64_t classes = loss->classes, first = block * BLOCK;
    const int64_t count = loss->rows - first < BLOCK ? loss->rows - first : BLOCK;
    const float *restrict outputs = loss->outputs + first * classes;
    float *restrict slopes = loss->slopes + first * classes;
    for (int64_t r = 0; r < count; r++) {
        const float *row = outputs + r * classes;
        float largest = row[0];
        for (int64_t c = 1; c < classes; c++)
            largest = row[c] > largest ? row[c] : largest;
        for (int64_t c = 0; c < classes; c++)
            slopes[r * classes + c] = row[c] - largest;
        loss->losses[first + r] = slopes[r * classes + loss->target[(first + r) % loss->batch]];
    }
    for (int64_t i = 0; i < count * classes; i++)
        slopes[i] = exponential(slopes[i]);
    for (int64_t r = 0; r < count; r++) {
        float *row = slopes + r * classes, *result = loss->losses + first + r, sum = 0;
        for (int64_t c = 0; c < classes; c++)
            sum += row[c];
        const float factor = 1 / sum;
        for (int64_t c = 0; c < classes; c++)
            row[c] *= factor;
        *result = logf(sum) - *result;
        row[loss->target[(first + r) % loss->batch]] = expm1f(-*result); /* q - 1 without cancellation */
    }
}

/* ---- AdaBelief with RAdam's rectification: ensemblekit/spec/adabelief.py in one pass over the memory */

typedef struct {
    float *values, *mean, *variance;
    const float *gradient;
    int64_t size;
    float beta1, beta2, rest1, rest2, eps; /* rest1 = 1 - beta1 */
    float rate;                            /* how far to go; negative */
    int64_t is_adaptive;                   /* else a step of momentum */
} Update;

enum { CHUNK = 8192 };

/* a b + c, rounded as torch rounds it: once where the processor can */
INLINE float multiply_add(const int fused, float a, float b, float c) {
    return fused ? __builtin_fmaf(a, b, c) : a * b + c;
}

INLINE void update(const int fused, const Update *step, int64_t chunk) {
    const int64_t first = chunk * CHUNK, rest = step->size - first, count = rest < CHUNK ? rest : CHUNK;
    float *restrict values = step->values + first, *restrict mean = step->mean + first;
    float *restrict variance = step->variance + first;
    const float *restrict gradient = step->gradient + first;
    const Update s = *step;
    for (int64_t i = 0; i < count; i++) {
        const float slope = gradient[i];
        const float average = multiply_add(fused, slope, s.rest1, mean[i] * s.beta1), deviation = slope - average;
        const float spread = multiply_add(fused, s.rest2 * deviation, deviation, variance[i] * s.beta2) + s.eps;
        const float divisor = s.is_adaptive ? sqrtf(spread) + s.eps : 1;
        mean[i] = average;
        variance[i] = spread;
        values[i] += s.rate * average / divisor;
    }
}

/* ---- One version for each kind of processor */

#define VERSION(name, attributes, fused, rows, vectors)                                                               \
    attributes static void forward_##name(const void *plan, int64_t member, float *scratch) {                         \
        forward(rows, vectors, plan, member, scratch);                                                                \
    }                                                                                                                 \
    attributes static void backward_##name(const void *plan, int64_t member, float *scratch) {                        \
        backward(rows, vectors, plan, member, scratch);                                                               \
    }                                                                                                                 \
    attributes static void cross_entropy_##name(const void *plan, int64_t block, float *scratch) {                    \
        (void)scratch;                                                                                                \
        cross_entropy(plan, block);                                                                                   \
    }                                                                                                                 \
    attributes static void update_##name(const void *plan, int64_t chunk, float *scratch) {                           \
        (void)scratch;                                                                                                \
        update(fused, plan, chunk);                                                                                   \
    }

VERSIONS(VERSION)

/* ---- What Python calls */

int64_t layout(void) { /* changes with the structures that Python fills, so that it never uses an older version of this */
    return 1000000 * VERSION_OF_CALLS + 1000 * (int64_t)sizeof(Layer) + (int64_t)sizeof(Pass);
}

void compute_forward(const Pass *pass, int64_t num_threads) {
    Job job = {CHOOSE(forward), pass, pass->num_members, scratch_size(pass->widest, pass->batch), pass->scratch};
    run(&job, num_threads);
}

void compute_backward(const Pass *pass, int64_t num_threads) {
    Job job = {CHOOSE(backward), pass, pass->num_members, scratch_size(pass->widest, pass->batch), pass->scratch};
    run(&job, num_threads);
}

int64_t compute_cross_entropy(const CrossEntropy *loss, int64_t num_threads) { /* 0: a target is not a class */
    for (int64_t b = 0; b < loss->batch; b++)
        if (loss->target[b] < 0 || loss->target[b] >= loss->classes)
            return 0;
    Job job = {CHOOSE(cross_entropy), loss, (loss->rows + BLOCK - 1) / BLOCK, 0, NULL};
    run(&job, num_threads);
    return 1;
}

void adabelief(const Update *step, int64_t num_threads) {
    Job job = {CHOOSE(update), step, (step->size + CHUNK - 1) / CHUNK, 0, NULL};
    run(&job, num_threads);
}
