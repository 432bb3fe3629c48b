/* Copyright: The nanochat.ddp contributors
 * GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
 * SPDX-License-Identifier: GPL-3.0-or-later
 *
 * The operations between a step's matrix products, each in one pass over memory. kernels.py builds this file, compares every
 * kernel with torch's operations and calls it on torch's tensors; it also documents the arguments, beside each kernel's twin.
 *
 * A kernel works on some rows: p are pointers, n sizes, f factors. Rows are split among the threads of torch's own OpenMP,
 * passed in by set_team, because a second set of threads would compete for the cores.
 * Plain C, vectorised by the compiler. Products and sums are never contracted (-ffp-contract=off), so that a kernel rounds
 * alike on every CPU unless it uses MULADD or sums in another order.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;
typedef void kernel(void *const *p, const int64_t *n, const float *f, int64_t start, int64_t stop);
typedef void team_body(void *);

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define MULADD(a, b, c) __builtin_fmaf(a, b, c)
#else
#define MULADD(a, b, c) ((a) * (b) + (c))
#endif
#define INLINE static inline __attribute__((always_inline))
#define EACH _Pragma("omp simd")
#define SUM_(x) _Pragma(#x)
#define SUMMING(x) SUM_(omp simd reduction(+ : x))

/* -- threads */

static void (*team_run)(team_body *, void *, unsigned, unsigned);
static int (*team_rank)(void), (*team_size)(void);

struct job {
    kernel *body;
    void *const *p;
    const int64_t *n;
    const float *f;
    int64_t rows;
};

static void work(void *data) {
    const struct job *job = data;
    int64_t rank = team_rank(), size = team_size();
    job->body(job->p, job->n, job->f, job->rows * rank / size, job->rows * (rank + 1) / size);
}

void set_team(void *run, void *rank, void *size) {
    team_run = (void (*)(team_body *, void *, unsigned, unsigned))run;
    team_rank = (int (*)(void))rank;
    team_size = (int (*)(void))size;
}

void launch(kernel *body, int64_t rows, int64_t threads, void *const *p, const int64_t *n, const float *f) {
    struct job job = {body, p, n, f, rows};
    if (threads > 1 && team_run)
        team_run(work, &job, (unsigned)threads, 0);
    else
        body(p, n, f, 0, rows);
}

/* -- numbers */

INLINE float wide(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

/* Round to nearest, ties to even. */
INLINE bf16 narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bf16)(x == x ? rounded : 0x7fc0);
}

/* e^x for x up to 87; 6e-39 below -87. Relative error 1e-7. */
INLINE float exponential(float x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    x = x < -87.0f ? -87.0f : x;
    float shifted = MULADD(x, 1.44269504f, magic), whole = shifted - magic, scale;
    float r = MULADD(whole, -1.42860677e-6f, MULADD(whole, -0.693145752f, x));
    float y = MULADD(r, 1.0f / 720, 1.0f / 120);
    y = MULADD(r, y, 1.0f / 24);
    y = MULADD(r, y, 1.0f / 6);
    y = MULADD(r, y, 0.5f);
    y = MULADD(r, y, 1.0f);
    y = MULADD(r, y, 1.0f);
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (bits + 127) << 23;
    memcpy(&scale, &bits, 4);
    return y * scale;
}

/* Element j of a row of either type; callers pass a constant type, so no loop tests it. */
INLINE float load(const void *row, int64_t j, int narrow_type) {
    return narrow_type ? wide(((const bf16 *)row)[j]) : ((const float *)row)[j];
}

INLINE void store(void *row, int64_t j, float x, int narrow_type) {
    if (narrow_type)
        ((bf16 *)row)[j] = narrow(x);
    else
        ((float *)row)[j] = x;
}

#define BOTH_TYPES(name)                                                                                     \
    void name##_fp32(void *const *p, const int64_t *n, const float *f, int64_t start, int64_t stop) {         \
        name(p, n, f, start, stop, 0);                                                                       \
    }                                                                                                        \
    void name##_bf16(void *const *p, const int64_t *n, const float *f, int64_t start, int64_t stop) {         \
        name(p, n, f, start, stop, 1);                                                                       \
    }

INLINE float dot(const float *a, const float *b, int64_t n) {
    float sum = 0;
    SUMMING(sum)
    for (int64_t j = 0; j < n; j++) sum = MULADD(a[j], b[j], sum);
    return sum;
}

/* -- the head: t [R, V], gradient [R, V], columns [R], sums [R], at_target [2, R] */

INLINE void exponentials(void *const *p, const int64_t *n, const float *f, int64_t start, int64_t stop, int narrow_type) {
    const int64_t width = n[0], rows = n[1], size = narrow_type ? 2 : 4;
    const int64_t *columns = p[2];
    const float cap = f[0];
    float *sums = p[3], *at_target = p[4];
    for (int64_t r = start; r < stop; r++) {
        const char *restrict t = (const char *)p[0] + r * width * size;
        char *restrict g = (char *)p[1] + r * width * size;
        float sum = 0, at = load(t, columns[r], narrow_type);
        SUMMING(sum)
        for (int64_t j = 0; j < width; j++) {
            float x = load(t, j, narrow_type), e = exponential(x * cap);
            sum += e;
            store(g, j, e * (1.0f - x * x), narrow_type);
        }
        sums[r] = sum;
        at_target[r] = exponential(at * cap);
        at_target[rows + r] = at;
    }
}
BOTH_TYPES(exponentials)

/* -- norms: x, start or none, u or none, y, operand or none, factor [R] */

INLINE void norm(void *const *p, const int64_t *n, const float *f, int64_t start, int64_t stop, int narrow_type) {
    const int64_t width = n[0];
    const float a = f[0], b = f[1];
    float *factor = p[5];
    for (int64_t r = start; r < stop; r++) {
        const float *restrict x = (float *)p[0] + r * width;
        float *restrict y = (float *)p[3] + r * width;
        if (p[1]) {
            const float *restrict first = (float *)p[1] + r * width;
            float *restrict u = (float *)p[2] + r * width;
            EACH
            for (int64_t j = 0; j < width; j++) u[j] = x[j] * a + first[j] * b;
            x = u;
        }
        const float scale = factor[r] = 1.0f / sqrtf(dot(x, x, width) / width + FLT_EPSILON);
        EACH
        for (int64_t j = 0; j < width; j++) y[j] = x[j] * scale;
        if (narrow_type) {
            bf16 *restrict operand = (bf16 *)p[4] + r * width;
            EACH
            for (int64_t j = 0; j < width; j++) operand[j] = narrow(y[j]);
        }
    }
}
BOTH_TYPES(norm)

/* dy, y, factor [R], d: d += the gradient of the norm's input */
void norm_backward(void *const *p, const int64_t *n, const float *f, int64_t start, int64_t stop) {
    const int64_t width = n[0];
    for (int64_t r = start; r < stop; r++) {
        const float *restrict dy = (float *)p[0] + r * width, *restrict y = (float *)p[1] + r * width;
        float *restrict d = (float *)p[3] + r * width;
        const float scale = ((float *)p[2])[r], along = dot(dy, y, width) / width;
        EACH
        for (int64_t j = 0; j < width; j++) d[j] += (dy[j] - y[j] * along) * scale;
    }
}

/* -- rotary: x [N, H, D] in rows of a longer stride, out [B, H, T, D], factor [N, H], cos and sin [T, D/2] */

void rotate(void *const *p, const int64_t *n, const float *f, int64_t start, int64_t stop) {
    const int64_t stride = n[0], heads = n[1], tokens = n[2], half = n[3], size = 2 * half;
    const float gain = f[0];
    for (int64_t r = start; r < stop; r++) {
        const int64_t row = r / tokens, token = r % tokens;
        const float *restrict cosine = (float *)p[3] + token * half, *restrict sine = (float *)p[4] + token * half;
        for (int64_t h = 0; h < heads; h++) {
            const float *restrict x = (float *)p[0] + r * stride + h * size;
            float *restrict out = (float *)p[1] + ((row * heads + h) * tokens + token) * size;
            const float scale = gain / sqrtf(dot(x, x, size) / size + FLT_EPSILON);
            ((float *)p[2])[r * heads + h] = scale;
            EACH
            for (int64_t j = 0; j < half; j++) {
                const float first = x[j], second = x[half + j];
                out[j] = (first * cosine[j] + second * sine[j]) * scale;
                out[half + j] = (second * cosine[j] - first * sine[j]) * scale;
            }
        }
    }
}

/* out [N, H, D] in rows of a longer stride, dy and y [B, H, T, D], factor [N, H], cos, sin */
void rotate_backward(void *const *p, const int64_t *n, const float *f, int64_t start, int64_t stop) {
    const int64_t stride = n[0], heads = n[1], tokens = n[2], half = n[3], size = 2 * half;
    const float gain = f[0];
    for (int64_t r = start; r < stop; r++) {
        const int64_t row = r / tokens, token = r % tokens;
        const float *restrict cosine = (float *)p[4] + token * half, *restrict sine = (float *)p[5] + token * half;
        for (int64_t h = 0; h < heads; h++) {
            const int64_t place = ((row * heads + h) * tokens + token) * size;
            const float *restrict dy = (float *)p[1] + place, *restrict y = (float *)p[2] + place;
            float *restrict out = (float *)p[0] + r * stride + h * size;
            const float scale = ((float *)p[3])[r * heads + h], along = dot(dy, y, size) / (size * gain * gain);
            EACH
            for (int64_t j = 0; j < half; j++) {
                const float first = (dy[j] - y[j] * along) * scale, second = (dy[half + j] - y[half + j] * along) * scale;
                out[j] = first * cosine[j] - second * sine[j];
                out[half + j] = second * cosine[j] + first * sine[j];
            }
        }
    }
}

/* -- attention: scores [M, Q, K]; query q sees keys up to q + n[2] and at most n[3] before that */

void softmax(void *const *p, const int64_t *n, const float *f, int64_t start, int64_t stop) {
    const int64_t queries = n[0], keys = n[1], before = n[2], window = n[3];
    for (int64_t r = start; r < stop; r++) {
        float *restrict s = (float *)p[0] + r * keys;
        const int64_t last = r % queries + before, first = last > window ? last - window : 0;
        float most = s[first], sum = 0;
        _Pragma("omp simd reduction(max : most)")
        for (int64_t j = first; j <= last; j++) most = s[j] > most ? s[j] : most;
        SUMMING(sum)
        for (int64_t j = first; j <= last; j++) {
            s[j] = exponential(s[j] - most);
            sum += s[j];
        }
        const float scale = 1.0f / sum;
        for (int64_t j = 0; j < first; j++) s[j] = 0;
        EACH
        for (int64_t j = first; j <= last; j++) s[j] *= scale;
        for (int64_t j = last + 1; j < keys; j++) s[j] = 0;
    }
}

/* -- sums of products: out [R, C] += product [R, C], which has the narrow type */

void accumulate(void *const *p, const int64_t *n, const float *f, int64_t start, int64_t stop) {
    const int64_t width = n[0];
    for (int64_t r = start; r < stop; r++) {
        float *restrict out = (float *)p[0] + r * width;
        const bf16 *restrict product = (bf16 *)p[1] + r * width;
        EACH
        for (int64_t j = 0; j < width; j++) out[j] += wide(product[j]);
    }
}

/* -- Muon: parameter [R, C], direction [R, C]; each operation rounds once, like torch's, so that all ranks agree */

void muon_apply(void *const *p, const int64_t *n, const float *f, int64_t start, int64_t stop) {
    const int64_t width = n[0];
    const float rate = f[0], decay = f[1];
    for (int64_t r = start; r < stop; r++) {
        float *restrict parameter = (float *)p[0] + r * width;
        const float *restrict direction = (float *)p[1] + r * width;
        EACH
        for (int64_t j = 0; j < width; j++) {
            const float x = parameter[j], d = direction[j];
            const float shrink = (x * d >= 0 ? 1.0f : 0.0f) * x * decay;
            parameter[j] = x - d * rate - shrink;
        }
    }
}

/* -- AdamW of rows: parameter, m, v [*, C], rows [R] or none (all), steps done [*] of int32 or none, gradient [R, C] or none.
 * n: C, the step before the first in f; the last step. f: seven figures per step. Each operation rounds once, so ranks agree. */

void adamw(void *const *p, const int64_t *n, const float *f, int64_t start, int64_t stop) {
    const int64_t width = n[0], base = n[1], last = n[2];
    const int64_t *rows = p[3];
    int32_t *done = p[4];
    for (int64_t r = start; r < stop; r++) {
        const int64_t row = rows ? rows[r] : r, place = row * width;
        float *restrict x = (float *)p[0] + place, *restrict m = (float *)p[1] + place, *restrict v = (float *)p[2] + place;
        const float *restrict gradient = p[5] ? (float *)p[5] + r * width : 0;
        for (int64_t number = gradient ? last - 1 : done[row]; number < last; number++) {
            const float *now = f + 7 * (number - base);
            const float keep = now[0], toward = now[1], beta2 = now[2], square = now[3], root = now[4], epsilon = now[5];
            const float step = now[6];
            EACH
            for (int64_t j = 0; j < width; j++) {
                const float g = gradient ? gradient[j] : 0.0f;
                m[j] = m[j] + toward * (g - m[j]);
                v[j] = v[j] * beta2 + square * g * g;
                x[j] = x[j] * keep + step * m[j] / (sqrtf(v[j]) / root + epsilon);
            }
        }
        if (done) done[row] = (int32_t)last;
    }
}
