/* Batch norm and ReLU of images on a CPU, and the end of a residual block, each in two passes over the memory.

Images are float32 and channels_last: (B, H, W, C). Sums are those of fixed slices of the batch, added in their order,
so that results do not depend on the number of threads. */

#include <math.h>
#include <stddef.h>

#include "kernels.h"

typedef struct {
    int64_t images, height, width, channels;
    const float *inputs, *skip;                  /* (B, H, W, C); no residual block: skip is NULL */
    float *outputs;                              /* relu(norm(inputs)), or with skip its sum with that, max-pooled by 2 */
    const float *gradient;                       /* of the objective with respect to the outputs */
    float *input_gradient, *skip_gradient;       /* (B, H, W, C) */
    const float *scale, *shift;                  /* (C); no batch norm: NULL, in the forward pass only */
    float *scale_gradient, *shift_gradient;      /* (C) */
    float *mean, *inverse;                       /* (C): of this batch; the inverse of the standard deviation */
    float *running_mean, *running_variance;      /* (C) */
    double *sums;                                /* (slices, 2, C) */
    float eps, momentum;
} ImageNorm;

enum { MAX_CHANNELS = 512, SLICES = 16, MIN_SPAN = 64, SPANS = 64 };

/* Channels of several pixels side by side are computed as one span, so that loops are long enough for vectors. */
INLINE int64_t pixels_of_span(const ImageNorm *norm) {
    return norm->channels >= MIN_SPAN ? 1 : MIN_SPAN / norm->channels;
}

INLINE void repeat(const float *values, int64_t channels, int64_t times, float *restrict out) {
    for (int64_t t = 0; t < times; t++)
        for (int64_t c = 0; c < channels; c++)
            out[t * channels + c] = values[c];
}

typedef struct {
    float factor[MAX_CHANNELS], offset[MAX_CHANNELS]; /* norm(x) = factor x + offset */
    float mean[MAX_CHANNELS];
} Coefficients;

INLINE void find_coefficients(const ImageNorm *norm, int64_t times, Coefficients *out) {
    const int64_t channels = norm->channels;
    float factor[MAX_CHANNELS], offset[MAX_CHANNELS];
    for (int64_t c = 0; c < channels; c++) {
        factor[c] = norm->scale ? norm->scale[c] * norm->inverse[c] : 1;
        offset[c] = norm->scale ? norm->shift[c] - norm->mean[c] * factor[c] : 0;
    }
    repeat(factor, channels, times, out->factor);
    repeat(offset, channels, times, out->offset);
    if (norm->mean)
        repeat(norm->mean, channels, times, out->mean);
}

static int64_t first_image(const ImageNorm *norm, int64_t slice) { return slice * norm->images / SLICES; }

/* Sums of inputs and of their squares, both less the first pixel's values, so that nothing cancels out. */
INLINE void sum_inputs(const ImageNorm *norm, int64_t slice, float *scratch) {
    (void)scratch;
    const int64_t channels = norm->channels, times = pixels_of_span(norm), span = times * channels;
    const int64_t area = norm->height * norm->width, first = first_image(norm, slice) * area;
    const int64_t end = first_image(norm, slice + 1) * area;
    double *restrict totals = norm->sums + slice * 2 * channels, *restrict squares = totals + channels;
    float base[MAX_CHANNELS], sum[MAX_CHANNELS], square[MAX_CHANNELS];
    repeat(norm->inputs, channels, times, base);
    for (int64_t c = 0; c < channels; c++)
        totals[c] = squares[c] = 0;
    for (int64_t pixel = first; pixel < end;) {
        for (int64_t c = 0; c < span; c++)
            sum[c] = square[c] = 0;
        for (int64_t n = 0; n < SPANS && pixel < end; n++) {
            const int64_t count = end - pixel < times ? (end - pixel) * channels : span;
            const float *restrict inputs = norm->inputs + pixel * channels;
            for (int64_t c = 0; c < count; c++) {
                const float value = inputs[c] - base[c];
                sum[c] += value;
                square[c] += value * value;
            }
            pixel += times;
        }
        for (int64_t t = 0; t < times; t++)
            for (int64_t c = 0; c < channels; c++) {
                totals[c] += sum[t * channels + c];
                squares[c] += square[t * channels + c];
            }
    }
}

static void add_slices(const ImageNorm *norm) { /* to the first one */
    for (int64_t slice = 1; slice < SLICES; slice++)
        for (int64_t c = 0; c < 2 * norm->channels; c++)
            norm->sums[c] += norm->sums[slice * 2 * norm->channels + c];
}

static void find_statistics(const ImageNorm *norm) {
    const double count = (double)(norm->images * norm->height * norm->width);
    add_slices(norm);
    for (int64_t c = 0; c < norm->channels; c++) {
        const double shifted = norm->sums[c] / count, mean = norm->inputs[c] + shifted;
        double variance = norm->sums[norm->channels + c] / count - shifted * shifted;
        variance = variance < 0 ? 0 : variance;
        norm->mean[c] = (float)mean;
        norm->inverse[c] = (float)(1 / sqrt(variance + norm->eps));
        norm->running_mean[c] += norm->momentum * ((float)mean - norm->running_mean[c]);
        norm->running_variance[c] +=
            norm->momentum * ((float)(variance * count / (count - 1)) - norm->running_variance[c]);
    }
}

INLINE float rectified(float value) { return value < 0 ? 0 : value; } /* NaN stays NaN */

INLINE void apply(const ImageNorm *norm, int64_t slice, float *scratch) {
    (void)scratch;
    const int64_t channels = norm->channels, times = pixels_of_span(norm), span = times * channels;
    const int64_t size = norm->height * norm->width * channels;
    Coefficients k;
    find_coefficients(norm, times, &k);
    const int64_t end = first_image(norm, slice + 1) * size;
    for (int64_t i = first_image(norm, slice) * size; i < end; i += span) {
        const int64_t count = end - i < span ? end - i : span;
        const float *restrict inputs = norm->inputs + i;
        float *restrict outputs = norm->outputs + i;
        for (int64_t c = 0; c < count; c++)
            outputs[c] = rectified(inputs[c] * k.factor[c] + k.offset[c]);
    }
}

INLINE int is_larger(float value, float other) { return (value > other) | (value != value); } /* as torch's pooling */

INLINE void apply_and_pool(const int64_t channels, const ImageNorm *norm, int64_t slice) {
    Coefficients k;
    find_coefficients(norm, 1, &k);
    const int64_t row = norm->width * channels, height = norm->height / 2, width = norm->width / 2;
    for (int64_t image = first_image(norm, slice); image < first_image(norm, slice + 1); image++)
        for (int64_t y = 0; y < height; y++)
            for (int64_t x = 0; x < width; x++) {
                const int64_t i = (image * norm->height + 2 * y) * row + 2 * x * channels;
                const float *restrict inputs = norm->inputs + i, *restrict skip = norm->skip + i;
                float *restrict outputs = norm->outputs + ((image * height + y) * width + x) * channels;
                for (int64_t c = 0; c < channels; c++) {
                    float best = skip[c] + rectified(inputs[c] * k.factor[c] + k.offset[c]);
#pragma GCC unroll 3
                    for (int j = 1; j < 4; j++) {
                        const int64_t at = (j / 2) * row + (j % 2) * channels + c;
                        const float value = skip[at] + rectified(inputs[at] * k.factor[c] + k.offset[c]);
                        best = is_larger(value, best) ? value : best;
                    }
                    outputs[c] = best;
                }
            }
}

/* Sums of the gradient with respect to norm(x), and of its products with x - mean. */
INLINE void sum_gradients(const ImageNorm *norm, int64_t slice) {
    const int64_t channels = norm->channels, times = pixels_of_span(norm), span = times * channels;
    const int64_t area = norm->height * norm->width, end = first_image(norm, slice + 1) * area;
    double *restrict totals = norm->sums + slice * 2 * channels, *restrict products = totals + channels;
    float sum[MAX_CHANNELS], product[MAX_CHANNELS];
    Coefficients k;
    find_coefficients(norm, times, &k);
    for (int64_t c = 0; c < channels; c++)
        totals[c] = products[c] = 0;
    for (int64_t pixel = first_image(norm, slice) * area; pixel < end;) {
        for (int64_t c = 0; c < span; c++)
            sum[c] = product[c] = 0;
        for (int64_t n = 0; n < SPANS && pixel < end; n++) {
            const int64_t count = end - pixel < times ? (end - pixel) * channels : span;
            const float *restrict inputs = norm->inputs + pixel * channels;
            const float *restrict gradient = norm->gradient + pixel * channels;
            for (int64_t c = 0; c < count; c++) {
                const float slope = inputs[c] * k.factor[c] + k.offset[c] <= 0 ? 0 : gradient[c];
                sum[c] += slope;
                product[c] += slope * (inputs[c] - k.mean[c]);
            }
            pixel += times;
        }
        for (int64_t t = 0; t < times; t++)
            for (int64_t c = 0; c < channels; c++) {
                totals[c] += sum[t * channels + c];
                products[c] += product[t * channels + c];
            }
    }
}

/* The gradient with respect to skip: that of the outputs, at the maximum of each window; with sums as above. */
INLINE void unpool(const int64_t channels, const ImageNorm *norm, int64_t slice) {
    double *restrict totals = norm->sums + slice * 2 * channels, *restrict products = totals + channels;
    float sum[MAX_CHANNELS], product[MAX_CHANNELS], places[MAX_CHANNELS];
    Coefficients k;
    find_coefficients(norm, 1, &k);
    const int64_t row = norm->width * channels, height = norm->height / 2, width = norm->width / 2;
    for (int64_t c = 0; c < channels; c++)
        totals[c] = products[c] = 0;
    for (int64_t image = first_image(norm, slice); image < first_image(norm, slice + 1); image++) {
        float *last = norm->skip_gradient + (image + 1) * norm->height * row;
        if (norm->height % 2)
            for (int64_t i = 0; i < row; i++)
                last[i - row] = 0;
        for (int64_t y = 0; y < height; y++) {
            for (int64_t c = 0; c < channels; c++)
                sum[c] = product[c] = 0;
            for (int64_t x = 0; x < width; x++) {
                const int64_t i = (image * norm->height + 2 * y) * row + 2 * x * channels;
                const float *restrict inputs = norm->inputs + i, *restrict skip = norm->skip + i;
                const float *restrict gradient = norm->gradient + ((image * height + y) * width + x) * channels;
                for (int64_t c = 0; c < channels; c++) {
                    float best = skip[c] + rectified(inputs[c] * k.factor[c] + k.offset[c]), place = 0;
#pragma GCC unroll 3
                    for (int j = 1; j < 4; j++) {
                        const int64_t at = (j / 2) * row + (j % 2) * channels + c;
                        const float value = skip[at] + rectified(inputs[at] * k.factor[c] + k.offset[c]);
                        const int larger = is_larger(value, best);
                        best = larger ? value : best;
                        place = larger ? (float)j : place;
                    }
                    places[c] = place;
                }
                for (int j = 0; j < 4; j++) {
                    const float *restrict values = inputs + (j / 2) * row + (j % 2) * channels;
                    float *restrict out = norm->skip_gradient + i + (j / 2) * row + (j % 2) * channels;
                    for (int64_t c = 0; c < channels; c++) {
                        const float slope = places[c] == (float)j ? gradient[c] : 0;
                        const float passed = values[c] * k.factor[c] + k.offset[c] <= 0 ? 0 : slope;
                        out[c] = slope;
                        sum[c] += passed;
                        product[c] += passed * (values[c] - k.mean[c]);
                    }
                }
            }
            for (int64_t c = 0; c < channels; c++) {
                totals[c] += sum[c];
                products[c] += product[c];
            }
            if (norm->width % 2)
                for (int64_t r = 0; r < 2; r++)
                    for (int64_t c = 0; c < channels; c++)
                        norm->skip_gradient[(image * norm->height + 2 * y + r + 1) * row - channels + c] = 0;
        }
    }
}

static void find_gradients(const ImageNorm *norm) {
    add_slices(norm);
    for (int64_t c = 0; c < norm->channels; c++) {
        norm->shift_gradient[c] = (float)norm->sums[c];
        norm->scale_gradient[c] = (float)(norm->sums[norm->channels + c] * norm->inverse[c]);
    }
}

INLINE void apply_gradient(const ImageNorm *norm, int64_t number, float *scratch) {
    (void)scratch;
    const int64_t slice = SLICES - 1 - number; /* the last ones may still be in the cache */
    const int64_t channels = norm->channels, times = pixels_of_span(norm), span = times * channels;
    const int64_t size = norm->height * norm->width * channels;
    const float count = (float)(norm->images * norm->height * norm->width);
    const float *slopes = norm->skip ? norm->skip_gradient : norm->gradient;
    float constant[MAX_CHANNELS], by_input[MAX_CHANNELS];
    Coefficients k;
    find_coefficients(norm, times, &k);
    for (int64_t c = 0; c < span; c++) {
        const int64_t channel = c % channels;
        constant[c] = k.factor[c] * norm->shift_gradient[channel] / count;
        by_input[c] = k.factor[c] * norm->inverse[channel] * norm->scale_gradient[channel] / count;
    }
    const int64_t end = first_image(norm, slice + 1) * size;
    for (int64_t i = first_image(norm, slice) * size; i < end; i += span) {
        const int64_t n = end - i < span ? end - i : span;
        const float *restrict inputs = norm->inputs + i, *restrict gradient = slopes + i;
        float *restrict out = norm->input_gradient + i;
        for (int64_t c = 0; c < n; c++) {
            const float slope = inputs[c] * k.factor[c] + k.offset[c] <= 0 ? 0 : gradient[c];
            out[c] = k.factor[c] * slope - constant[c] - (inputs[c] - k.mean[c]) * by_input[c];
        }
    }
}

/* The commonest numbers of channels as constants, since loops over them are short. */
#define WITH_CHANNELS(function, norm, slice)                                                                          \
    switch ((norm)->channels) {                                                                                       \
    case 16: function(16, norm, slice); break;                                                                        \
    case 32: function(32, norm, slice); break;                                                                        \
    default: function((norm)->channels, norm, slice);                                                                 \
    }

INLINE void results(const ImageNorm *norm, int64_t number, float *scratch) {
    const int64_t slice = SLICES - 1 - number; /* the last ones may still be in the cache */
    if (!norm->skip)
        apply(norm, slice, scratch);
    else
        WITH_CHANNELS(apply_and_pool, norm, slice)
}

INLINE void slopes(const ImageNorm *norm, int64_t slice, float *scratch) {
    (void)scratch;
    if (!norm->skip)
        sum_gradients(norm, slice);
    else
        WITH_CHANNELS(unpool, norm, slice)
}

#define VERSION(name, attributes, ...)                                                                                \
    attributes static void sum_inputs_##name(const void *norm, int64_t slice, float *scratch) {                       \
        sum_inputs(norm, slice, scratch);                                                                             \
    }                                                                                                                 \
    attributes static void results_##name(const void *norm, int64_t slice, float *scratch) {                          \
        results(norm, slice, scratch);                                                                                \
    }                                                                                                                 \
    attributes static void slopes_##name(const void *norm, int64_t slice, float *scratch) {                           \
        slopes(norm, slice, scratch);                                                                                 \
    }                                                                                                                 \
    attributes static void apply_gradient_##name(const void *norm, int64_t slice, float *scratch) {                   \
        apply_gradient(norm, slice, scratch);                                                                         \
    }

VERSIONS(VERSION)

int64_t image_norm_size(void) { return sizeof(ImageNorm); }

void image_norm_forward(const ImageNorm *norm, int64_t num_threads) {
    if (norm->scale) {
        run(&(Job){CHOOSE(sum_inputs), norm, SLICES, 0, NULL}, num_threads);
        find_statistics(norm);
    }
    run(&(Job){CHOOSE(results), norm, SLICES, 0, NULL}, num_threads);
}

void image_norm_backward(const ImageNorm *norm, int64_t num_threads) {
    run(&(Job){CHOOSE(slopes), norm, SLICES, 0, NULL}, num_threads);
    find_gradients(norm);
    run(&(Job){CHOOSE(apply_gradient), norm, SLICES, 0, NULL}, num_threads);
}
