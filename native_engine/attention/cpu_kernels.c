/* What lies between the matrix products of a decoder layer, for CPUs.
 *
 * Compiled by native_engine/attention/cpu.py, once per activation type: bf16 by default, fp32 with -DSCALAR_F32. Plain C with
 * GCC's vector extensions, so it builds for any ISA that GCC or Clang know; sums are fp32 everywhere.
 *
 * The promise that the engine's exactness rests on: the result for one row is a function of that row, its position and its
 * sequence's keys and values alone. Threads share out rows and heads, never the terms of a sum; keys are walked in tiles of
 * one block, from the block of the first position that the row may see, whatever the chunk, the batch or the number of threads.
 *
 * Memory, with B = block_size and D = head_dim (both multiples of 16):
 *     keys   [num_blocks][kv_heads][D][B]     one block of one head is a matrix whose columns are positions
 *     values [num_blocks][kv_heads][B][D]
 * With -DKV_INT8 they are bytes, and key_scales and value_scales [num_blocks][kv_heads][B] say in bf16 what a step is worth.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#define LANES 16
#define MAX_HEADS 4   /* query heads that share one pass over the keys: their accumulators fit into registers */
#define MAX_BLOCK 128
#define MAX_HEAD_DIM 256
#define FEW_ROWS 4    /* below this a parallel region costs more than it saves */

typedef float vfloat __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vint __attribute__((vector_size(4 * LANES)));
typedef uint32_t vuint __attribute__((vector_size(4 * LANES)));
typedef uint16_t vhalf __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16; /* the upper half of a float */
INLINE float widen_bf16(bf16 x) {
    union { uint32_t bits; float value; } u = {(uint32_t)x << 16};
    return u.value;
}
INLINE vfloat load_bf16(const bf16 *p) { return (vfloat)(__builtin_convertvector(*(const vhalf *)p, vuint) << 16); }

#ifdef SCALAR_F32
typedef float scalar;
INLINE float widen(scalar x) { return x; }
INLINE scalar narrow(float x) { return x; }
INLINE vfloat load(const scalar *p) { return *(const vfloat *)p; }
INLINE void store(scalar *p, vfloat x) { *(vfloat *)p = x; }
#else
typedef bf16 scalar;
INLINE float widen(scalar x) { return widen_bf16(x); }
INLINE scalar narrow(float x) { /* to nearest, ties to even */
    union { float value; uint32_t bits; } u = {x};
    return (scalar)((u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16);
}
INLINE vfloat load(const scalar *p) { return load_bf16(p); }
INLINE void store(scalar *p, vfloat x) {
    vuint bits = (vuint)x;
    *(vhalf *)p = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, vhalf);
}
#endif

/* What the cache holds: scalars, or with -DKV_INT8 bytes and for each token and head a scale. */
#ifdef KV_INT8
typedef int8_t cached;
typedef int8_t vbytes __attribute__((vector_size(LANES), aligned(1), may_alias));
INLINE vfloat load_cached(const cached *p) { return __builtin_convertvector(*(const vbytes *)p, vfloat); }
#else
typedef scalar cached;
INLINE vfloat load_cached(const cached *p) { return load(p); }
#endif

INLINE vfloat splat(float x) { return (vfloat){0} + x; }
INLINE vfloat select(vint mask, vfloat yes, vfloat no) { return (vfloat)((mask & (vint)yes) | (~mask & (vint)no)); }
INLINE vfloat larger(vfloat a, vfloat b) { return select(a > b, a, b); }

/* Reductions over the lanes, always along the same tree. */
#define SWAP_HALVES ((vint){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7})
#define SWAP_QUARTERS ((vint){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11})
#define SWAP_PAIRS ((vint){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13})
#define SWAP_NEIGHBOURS ((vint){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14})
#ifdef __clang__
#define SHUFFLE(v, order)                                                                                              \
    ({ vfloat moved; for (int lane = 0; lane < LANES; lane++) moved[lane] = (v)[(order)[lane]]; moved; })
#else
#define SHUFFLE(v, order) __builtin_shuffle(v, order)
#endif

INLINE float sum_lanes(vfloat v) {
    v += SHUFFLE(v, SWAP_HALVES);
    v += SHUFFLE(v, SWAP_QUARTERS);
    v += SHUFFLE(v, SWAP_PAIRS);
    v += SHUFFLE(v, SWAP_NEIGHBOURS);
    return v[0];
}

INLINE float max_lanes(vfloat v) {
    v = larger(v, SHUFFLE(v, SWAP_HALVES));
    v = larger(v, SHUFFLE(v, SWAP_QUARTERS));
    v = larger(v, SHUFFLE(v, SWAP_PAIRS));
    v = larger(v, SHUFFLE(v, SWAP_NEIGHBOURS));
    return v[0];
}

/* e^x for x <= 88: range reduction by powers of two, then a polynomial (relative error below 2e-7). Below -87 it is 0. */
INLINE vfloat exponential(vfloat x) {
    const float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    const float to_integer = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    vint underflow = x < splat(-87.0f);
    x = larger(x, splat(-87.0f));
    vfloat shifted = x * log2e + to_integer;
    vfloat n = shifted - to_integer;
    vfloat r = x - n * ln2_high - n * ln2_low;
    vfloat p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vint scale = (__builtin_convertvector(n, vint) + 127) << 23;
    return select(underflow, splat(0.0f), p * (vfloat)scale);
}

/* 1 / rms(x) of `size` values, a multiple of 16 */
INLINE float inverse_rms(const scalar *x, int64_t size, float eps) {
    vfloat squares = splat(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        vfloat value = load(x + i);
        squares += value * value;
    }
    return 1.0f / sqrtf(sum_lanes(squares) / (float)size + eps);
}

/* residual += delta (may be NULL), which is delta / rms(delta) * delta_weight where that is given;
 * out = residual / rms(residual) * weight. `size` is a multiple of 16. */
void add_rms_norm(float *residual, const scalar *delta, const float *delta_weight, const float *weight, scalar *out,
                  int64_t rows, int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (rows > FEW_ROWS)
    for (int64_t row = 0; row < rows; row++) {
        float *x = residual + row * size;
        const scalar *added = delta ? delta + row * size : NULL;
        if (added && delta_weight) {
            float scale = inverse_rms(added, size, eps);
            for (int64_t i = 0; i < size; i += LANES)
                *(vfloat *)(x + i) += load(added + i) * scale * *(const vfloat *)(delta_weight + i);
            added = NULL;
        }
        vfloat squares = splat(0.0f);
        for (int64_t i = 0; i < size; i += LANES) {
            vfloat value = *(vfloat *)(x + i);
            if (added) {
                value += load(added + i);
                *(vfloat *)(x + i) = value;
            }
            squares += value * value;
        }
        float scale = 1.0f / sqrtf(sum_lanes(squares) / (float)size + eps);
        for (int64_t i = 0; i < size; i += LANES)
            store(out + row * size + i, *(vfloat *)(x + i) * scale * *(const vfloat *)(weight + i));
    }
}

/* out = activation(gate) * up, where each row of gate_up is the gate followed by up. `size` is a multiple of 16.
 * silu(g) = g / (1 + e^-g), and gelu(g), by its tanh formula, = g / (1 + e^-z) with z = 2 sqrt(2 / pi) (g + 0.044715 g^3). */
void gate(const scalar *gate_up, scalar *out, int64_t rows, int64_t size, int is_gelu) {
#pragma omp parallel for schedule(static) if (rows > FEW_ROWS)
    for (int64_t row = 0; row < rows; row++) {
        const scalar *gate = gate_up + row * 2 * size, *up = gate + size;
        for (int64_t i = 0; i < size; i += LANES) {
            vfloat g = load(gate + i);
            vfloat z = g;
            if (is_gelu) z = g * (1.59576912f + 0.0713548163f * g * g);
            /* e^-z may overflow to infinity only where the result is 0 anyway; the clamp keeps `exponential` in its range */
            vfloat negative = select(-z > splat(87.0f), splat(87.0f), -z);
            store(out + row * size + i, g / (1.0f + exponential(negative)) * load(up + i));
        }
    }
}

typedef struct { /* one layer's attention over one step; mirrored by a ctypes Structure in cpu.py */
    scalar *qkv;              /* [rows][(query_heads + 2 * kv_heads) * D]; its queries are rotated in place */
    scalar *out;              /* [rows][query_heads * D] */
    cached *keys, *values;    /* this layer's cache */
    bf16 *key_scales, *value_scales; /* [num_blocks][kv_heads][B], with KV_INT8 only */
    const float *cos, *sin;   /* [max_position][D / 2] */
    const float *query_norm, *key_norm; /* [D]: RMS norm of every head before it is rotated; both or neither NULL */
    const int32_t *positions; /* [rows] */
    const int32_t *slots;     /* [rows]: block * B + offset of the row's own key and value */
    const int32_t *tables;    /* [sequences][table_width]: block numbers */
    const int32_t *sequences; /* [rows]: the row's line in `tables` */
    int64_t rows, table_width, query_heads, kv_heads, head_dim, block_size;
    int64_t window; /* how many positions a row sees, its own included; 0: all before it */
    float scale;    /* of the scores */
    float eps;
} Attention;

/* One head, normalised where there is a `norm`, and rotated. */
INLINE void rotate(const scalar *x, float *out, const float *norm, float eps, const float *cos, const float *sin,
                   int64_t half) {
    const float scale = norm ? inverse_rms(x, 2 * half, eps) : 1.0f;
    for (int64_t i = 0; i < half; i++) {
        float a = widen(x[i]), b = widen(x[i + half]);
        if (norm) {
            a = a * scale * norm[i];
            b = b * scale * norm[i + half];
        }
        out[i] = a * cos[i] - b * sin[i];
        out[i + half] = b * cos[i] + a * sin[i];
    }
}

#ifdef KV_INT8
/* One head of one token: x = bytes * scale, `stride` apart. The scale is rounded up, so that no byte is beyond 127. */
INLINE void quantise(const scalar *x, int64_t dim, cached *out, int64_t stride, bf16 *scale) {
    float most = 0.0f;
    for (int64_t i = 0; i < dim; i++) most = fmaxf(most, fabsf(widen(x[i])));
    union { float value; uint32_t bits; } u = {most / 127.0f};
    *scale = (bf16)((u.bits + 0xffff) >> 16);
    const float step = widen_bf16(*scale);
    for (int64_t i = 0; i < dim; i++) out[i * stride] = step > 0.0f ? (cached)rintf(widen(x[i]) / step) : 0;
}
#endif

/* Rotate the row's queries in place and its keys on their way into the cache; put its values beside them. */
static void rope_and_store(const Attention *a, int64_t row) {
    const int64_t dim = a->head_dim, block_size = a->block_size;
    const float *cos = a->cos + (int64_t)a->positions[row] * dim / 2, *sin = a->sin + (int64_t)a->positions[row] * dim / 2;
    const int64_t block = a->slots[row] / block_size, offset = a->slots[row] % block_size;
    scalar *query = a->qkv + row * (a->query_heads + 2 * a->kv_heads) * dim;
    const scalar *key = query + a->query_heads * dim, *value = key + a->kv_heads * dim;
    float rotated[MAX_HEAD_DIM];
    for (int64_t head = 0; head < a->query_heads; head++) {
        rotate(query + head * dim, rotated, a->query_norm, a->eps, cos, sin, dim / 2);
        for (int64_t i = 0; i < dim; i++) query[head * dim + i] = narrow(rotated[i]);
    }
    for (int64_t head = 0; head < a->kv_heads; head++) {
        const int64_t at = (block * a->kv_heads + head) * dim * block_size;
        rotate(key + head * dim, rotated, a->key_norm, a->eps, cos, sin, dim / 2);
#ifdef KV_INT8
        const int64_t place = (block * a->kv_heads + head) * block_size + offset;
        scalar narrowed[MAX_HEAD_DIM];
        for (int64_t i = 0; i < dim; i++) narrowed[i] = narrow(rotated[i]);
        quantise(narrowed, dim, a->keys + at + offset, block_size, a->key_scales + place);
        quantise(value + head * dim, dim, a->values + at + offset * dim, 1, a->value_scales + place);
#else
        for (int64_t i = 0; i < dim; i++) a->keys[at + i * block_size + offset] = narrow(rotated[i]);
        for (int64_t i = 0; i < dim; i++) a->values[at + offset * dim + i] = value[head * dim + i];
#endif
    }
}

/* Softmax(q K^T) V for `heads` query heads of one row that share a KV head. Called with constants, so that it unrolls. */
INLINE void attend(const Attention *a, int64_t row, int64_t first_head, int64_t kv_head, const int heads, const int dim,
                   const int block_size) {
    const int columns = block_size / LANES, parts = dim / LANES;
    const int32_t *table = a->tables + (int64_t)a->sequences[row] * a->table_width;
    const int64_t known = (int64_t)a->positions[row] + 1;
    const int64_t first = a->window && known > a->window ? known - a->window : 0;
    const scalar *query = a->qkv + row * (a->query_heads + 2 * a->kv_heads) * dim + first_head * dim;
    float q[MAX_HEADS][MAX_HEAD_DIM], top[MAX_HEADS], total[MAX_HEADS], weights[MAX_HEADS][MAX_BLOCK];
    vfloat acc[MAX_HEADS][MAX_HEAD_DIM / LANES];
    for (int h = 0; h < heads; h++) {
        for (int i = 0; i < dim; i++) q[h][i] = widen(query[h * dim + i]) * a->scale;
        for (int p = 0; p < parts; p++) acc[h][p] = splat(0.0f);
        top[h] = -INFINITY;
        total[h] = 0.0f;
    }
    for (int64_t start = first - first % block_size; start < known; start += block_size) {
        const int64_t at = ((int64_t)table[start / block_size] * a->kv_heads + kv_head) * dim * block_size;
        const cached *keys = a->keys + at, *values = a->values + at;
        if (start + block_size < known) { /* the next block is elsewhere: the hardware does not foresee it */
            const int64_t next = ((int64_t)table[start / block_size + 1] * a->kv_heads + kv_head) * dim * block_size;
            for (int i = 0; i < dim * block_size; i += 64 / (int)sizeof(cached)) {
                __builtin_prefetch(a->keys + next + i);
                __builtin_prefetch(a->values + next + i);
            }
        }
        const int64_t left = known - start;
        const int count = left < block_size ? (int)left : block_size;
        const int skipped = start < first ? (int)(first - start) : 0;

        vfloat score[MAX_HEADS][MAX_BLOCK / LANES];
        for (int h = 0; h < heads; h++)
            for (int c = 0; c < columns; c++) score[h][c] = splat(0.0f);
        for (int i = 0; i < dim; i++)
            for (int c = 0; c < columns; c++) {
                vfloat k = load_cached(keys + i * block_size + c * LANES);
                for (int h = 0; h < heads; h++) score[h][c] += q[h][i] * k;
            }
#ifdef KV_INT8
        for (int c = 0; c < columns; c++) {
            vfloat scales = load_bf16(a->key_scales + at / dim + c * LANES);
            for (int h = 0; h < heads; h++) score[h][c] *= scales;
        }
#endif
        for (int h = 0; h < heads; h++) {
            if (count < block_size || skipped) { /* after the row's own position, or before its window */
                const vint lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
                for (int c = 0; c < columns; c++)
                    score[h][c] = select((lane + c * LANES < count) & (lane + c * LANES >= skipped), score[h][c],
                                         splat(-INFINITY));
            }
            vfloat best = score[h][0];
            for (int c = 1; c < columns; c++) best = larger(best, score[h][c]);
            const float new_top = fmaxf(top[h], max_lanes(best));
            const float fade = exponential(splat(top[h] - new_top))[0];
            vfloat sum = splat(0.0f);
            for (int c = 0; c < columns; c++) {
                vfloat w = exponential(score[h][c] - new_top);
                sum += w;
#ifdef KV_INT8
                w *= load_bf16(a->value_scales + at / dim + c * LANES);
#endif
                *(vfloat *)(weights[h] + c * LANES) = w;
            }
            total[h] = total[h] * fade + sum_lanes(sum);
            top[h] = new_top;
            for (int p = 0; p < parts; p++) acc[h][p] *= fade;
        }
        for (int j = skipped; j < count; j++)
            for (int p = 0; p < parts; p++) {
                vfloat v = load_cached(values + j * dim + p * LANES);
                for (int h = 0; h < heads; h++) acc[h][p] += weights[h][j] * v;
            }
    }
    for (int h = 0; h < heads; h++) {
        scalar *out = a->out + (row * a->query_heads + first_head + h) * dim;
        const float share = 1.0f / total[h];
        for (int p = 0; p < parts; p++) store(out + p * LANES, acc[h][p] * share);
    }
}

#define FOR_HEADS(DIM, BLOCK)                                                    \
    switch (heads) {                                                             \
    case 1: attend(a, row, first, kv_head, 1, DIM, BLOCK); break;                \
    case 2: attend(a, row, first, kv_head, 2, DIM, BLOCK); break;                \
    case 3: attend(a, row, first, kv_head, 3, DIM, BLOCK); break;                \
    default: attend(a, row, first, kv_head, 4, DIM, BLOCK); break;               \
    }

static void attend_common(const Attention *a, int64_t row, int64_t first, int64_t kv_head, int64_t heads) {
    FOR_HEADS(64, 32)
}

static void attend_any(const Attention *a, int64_t row, int64_t first, int64_t kv_head, int64_t heads) {
    FOR_HEADS((int)a->head_dim, (int)a->block_size)
}

/* All query heads of one row that read one KV head. */
static void attend_group(const Attention *a, int64_t row, int64_t kv_head) {
    const int64_t group = a->query_heads / a->kv_heads;
    const int common = a->head_dim == 64 && a->block_size == 32;
    for (int64_t done = 0; done < group; done += MAX_HEADS) {
        const int64_t heads = group - done < MAX_HEADS ? group - done : MAX_HEADS, first = kv_head * group + done;
        (common ? attend_common : attend_any)(a, row, first, kv_head, heads);
    }
}

/* Rope, KV scatter and causal attention of every row of a step through the block tables. */
void paged_attention(const Attention *a) {
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < a->rows; row++) rope_and_store(a, row);
        /* The barrier here is what lets a chunk's rows see one another's keys. */
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < a->rows * a->kv_heads; task++) attend_group(a, task / a->kv_heads, task % a->kv_heads);
    }
}
