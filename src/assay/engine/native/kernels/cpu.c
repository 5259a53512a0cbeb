// Decoding steps in float32 for one CPU thread, in one pass instead of many torch calls or copies of the cache. Matrix
// products are for small models only. Compiled at first use by assay/engine/native/compiled.py, which also defines the
// constants in capitals: columns and states of assay/engine/sequence.py, constants of sampler.py (PART is its BLOCK).

#include <math.h>
#include <stdint.h>
#include <string.h>

#define SIMD _Pragma("omp simd")
#define SIMD_SUM(x) SIMD_SUM_(omp simd reduction(+ : x))
#define SIMD_SUM_(words) _Pragma(#words)

// e^x for x <= 0, with an error of about 2 units in the last place; 0 below -87; NaN for NaN.
static inline float exponential(float x) {
    float n = rintf((x < -87.0f ? -87.0f : x) * 1.44269504f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // x - n log 2, in two exact steps
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : (p * r * r + r + 1.0f) * power;
}

#ifdef __AVX__
#define LANES 8  // floats per register
#define ACROSS 2  // registers per row of a tile with four rows: as many as there are
#else
#define LANES 4
#define ACROSS 4
#endif
#define TILE (LANES * ACROSS)
#define INLINE static inline __attribute__((always_inline))
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define AT(x, i) (*(Lanes *)((x) + (i) * LANES))

// Vectorized by hand with two partial sums: compilers may not reorder floating-point sums.
static inline float dot(const float *a, const float *b, int64_t size) {
    Lanes x = {0.0f}, y = {0.0f};
    float sum = 0.0f;
    int64_t i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES) {
        x += AT(a + i, 0) * AT(b + i, 0);
        y += AT(a + i, 1) * AT(b + i, 1);
    }
    for (; i < size; i++) sum += a[i] * b[i];
    x += y;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}

static inline void scaled(const float *x, const float *weight, int64_t size, float eps, float offset, float *out) {
    float scale = 1.0f / sqrtf(dot(x, x, size) / (float)size + eps);
    SIMD
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * scale * (weight[i] + offset);
}

// Position of the next token of each row and its slot in the cache; -1 if it is stored already or not to be stored.
void place_rows(const int64_t *table, const int32_t *blocks, int64_t width, int64_t block, int64_t rows,
                int64_t *positions, int64_t *slots) {
    for (int64_t row = 0; row < rows; row++, table += WIDTH) {
        int64_t at = positions[row] = table[POSITION];
        int stores = table[STATE] == RUNNING && at >= table[STORED];
        slots[row] = stores ? blocks[row * width + at / block] * block + at % block : -1;
    }
}

// x, out [rows, size]
void rms_norm(const float *x, const float *weight, int64_t rows, int64_t size, float eps, float offset, float *out) {
    for (int64_t row = 0; row < rows; row++) scaled(x + row * size, weight, size, eps, offset, out + row * size);
}

// gate_up [rows, 2 size], out [rows, size]: x times the logistic function of x (silu), or of 2 sqrt(2 / pi)
// (x + 0.044715 x^3) with `gelu` (its approximation by tanh), times up.
void gated(const float *gate_up, int64_t rows, int64_t size, int64_t gelu, float *out) {
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + 2 * row * size, *up = gate + size;
        float *y = out + row * size;
        if (gelu) {
            SIMD
            for (int64_t i = 0; i < size; i++) {
                float x = gate[i], weight = exponential(-fabsf(x * (1.5957691216f + 0.0713548163f * x * x)));
                y[i] = x * up[i] * (x < 0.0f ? weight : 1.0f) / (1.0f + weight);
            }
        } else {
            SIMD
            for (int64_t i = 0; i < size; i++) {
                float x = gate[i], weight = exponential(-fabsf(x));
                y[i] = x * up[i] * (x < 0.0f ? weight : 1.0f) / (1.0f + weight);
            }
        }
    }
}

// Rotates the queries in qkv [rows, heads + 2 kv_heads, size] in place; rotated keys, and values, are stored in the
// cache [2, kv_heads, capacity, size] at `slots`, unless these are negative. rotations [*, rotated]: cosines, sines.
// Pairs of the first `rotated` numbers of a head are half of them apart, or neighbors if `interleaved`.
void rope_store(float *qkv, int64_t rows, int64_t heads, int64_t kv_heads, int64_t size, int64_t rotated,
                int64_t interleaved, const int64_t *positions, const int64_t *slots, const float *rotations,
                const float *q_norm, const float *k_norm, float eps, float offset, float *kv, int64_t capacity) {
    int64_t half = rotated / 2, step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
    for (int64_t row = 0; row < rows; row++) {
        float *start = qkv + row * (heads + 2 * kv_heads) * size;
        const float *cosines = rotations + positions[row] * rotated, *sines = cosines + half;
        for (int64_t head = 0; head < heads + kv_heads; head++) {
            float *x = start + head * size;
            const float *weight = head < heads ? q_norm : k_norm;
            if (weight) scaled(x, weight, size, eps, offset, x);
            SIMD
            for (int64_t i = 0; i < half; i++) {
                float a = x[step * i], b = x[step * i + apart];
                x[step * i] = a * cosines[i] - b * sines[i];
                x[step * i + apart] = b * cosines[i] + a * sines[i];
            }
        }
        for (int64_t i = 0; slots[row] >= 0 && i < 2 * kv_heads; i++)
            memcpy(kv + (i * capacity + slots[row]) * size, start + (heads + i) * size, size * sizeof(float));
    }
}

// One row and head: a query over the keys and values `first` .. `seen` in the cache blocks listed in `table`.
INLINE void attend(
    const float *query, const float *keys, const float *values, const int32_t *table, int64_t block, int64_t first,
    int64_t seen, int64_t size, float scale, float *scores, float *out) {
    float largest = -INFINITY, total = 0.0f;
    for (int64_t t = first; t < seen; t = (t / block + 1) * block) {
        const float *key = keys + (table[t / block] * block + t % block) * size;
        int64_t stop = (t / block + 1) * block < seen ? (t / block + 1) * block : seen;
        for (int64_t i = t; i < stop; i++, key += size) scores[i] = dot(query, key, size) * scale;
    }
    for (int64_t t = first; t < seen; t++) largest = scores[t] > largest ? scores[t] : largest;
    SIMD_SUM(total)
    for (int64_t t = first; t < seen; t++) total += scores[t] = exponential(scores[t] - largest);
    memset(out, 0, size * sizeof(float));
    for (int64_t j = 0; j + 4 * LANES <= size; j += 4 * LANES) {  // several columns of values at a time, in registers
        Lanes a = {0.0f}, b = {0.0f}, c = {0.0f}, d = {0.0f};
        for (int64_t t = first; t < seen; t = (t / block + 1) * block) {
            const float *value = values + (table[t / block] * block + t % block) * size + j;
            int64_t stop = (t / block + 1) * block < seen ? (t / block + 1) * block : seen;
            for (int64_t i = t; i < stop; i++, value += size) {
                a += scores[i] * AT(value, 0);
                b += scores[i] * AT(value, 1);
                c += scores[i] * AT(value, 2);
                d += scores[i] * AT(value, 3);
            }
        }
        Lanes sums[4] = {a / total, b / total, c / total, d / total};
        memcpy(out + j, sums, sizeof sums);
    }
    for (int64_t j = size / (4 * LANES) * (4 * LANES); j < size; j++) {  // the remaining columns
        for (int64_t t = first; t < seen; t++)
            out[j] += scores[t] * values[(table[t / block] * block + t % block) * size + j];
        out[j] /= total;
    }
}

// Queries q [rows, heads, size], with `stride` numbers between rows, each over positions 0 .. positions[row], at most
// `span`, of its blocks in the cache [2, kv_heads, blocks, block, size], or over the last `window` of these unless it is
// 0. scores [span]: work buffer.
void attend_rows(const float *q, int64_t stride, const float *kv, int64_t blocks, int64_t block, const int32_t *tables,
                 int64_t width, const int64_t *positions, int64_t span, int64_t rows, int64_t heads,
                 int64_t kv_heads, int64_t size, int64_t window, float scale, float *scores, float *out) {
    int64_t head_stride = blocks * block * size;  // numbers per head
    for (int64_t head = 0; head < heads; head++) {  // the outer loop, because consecutive rows weight blocks
        const float *keys = kv + head / (heads / kv_heads) * head_stride, *values = keys + kv_heads * head_stride;
        for (int64_t row = 0; row < rows; row++) {
            const float *query = q + row * stride + head * size;
            const int32_t *table = tables + row * width;
            float *y = out + (row * heads + head) * size;
            int64_t seen = positions[row] < span ? positions[row] + 1 : span;
            int64_t first = window && window < seen ? seen - window : 0;
            // The same code for each size; the compiler unrolls it for constant sizes.
            if (size == 32) attend(query, keys, values, table, block, first, seen, 32, scale, scores, y);
            else if (size == 64) attend(query, keys, values, table, block, first, seen, 64, scale, scores, y);
            else attend(query, keys, values, table, block, first, seen, size, scale, scores, y);
        }
    }
}

INLINE void tile(const float *x, int64_t rows, int64_t in, const float *weight, int64_t out, float *y) {
    Lanes sums[4][ACROSS];
    for (int64_t row = 0; row < rows; row++)
        for (int i = 0; i < ACROSS; i++) sums[row][i] = AT(y + row * out, i);
    for (int64_t k = 0; k < in; k++, weight += out) {
        __builtin_prefetch(weight + 8 * out);
        for (int64_t row = 0; row < rows; row++)
            for (int i = 0; i < ACROSS; i++) sums[row][i] += x[row * in + k] * AT(weight, i);
    }
    for (int64_t row = 0; row < rows; row++)
        for (int i = 0; i < ACROSS; i++) AT(y + row * out, i) = sums[row][i];
}

// y [rows, out] = x [rows, in] times weight [in, out], plus the bias if there is one, plus y itself with `keep`.
static void product(const float *x, int64_t rows, int64_t in, const float *weight, const float *bias, int64_t out,
                    int keep, float *y) {
    int64_t column = 0;
    if (!keep) memset(y, 0, rows * out * sizeof(float));
    for (int64_t row = 0; bias && row < rows; row++)
        for (int64_t i = 0; i < out; i++) y[row * out + i] += bias[i];
    for (; column + TILE <= out; column += TILE) {
        int64_t row = 0;
        for (; row + 4 <= rows; row += 4) tile(x + row * in, 4, in, weight + column, out, y + row * out + column);
        for (; row < rows; row++) tile(x + row * in, 1, in, weight + column, out, y + row * out + column);
    }
    for (; column < out; column++)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t k = 0; k < in; k++) y[row * out + column] += x[row * in + k] * weight[k * out + column];
}

typedef struct {
    const float *norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *mlp_norm, *gate_up, *gate_up_bias, *down,
        *down_bias;
} Layer;

typedef struct {
    int64_t layers, hidden, heads, kv_heads, size, inner, vocabulary;
    const float *embedding, *norm, *head, *rotations;
    const Layer *layer;
} Model;

// Logits [rows, vocabulary] of a small model whose matrices are stored by columns. kv [layers] of caches as above.
// Work buffers: positions [2, rows], work [rows, 2 hidden + 4 times the larger of heads x size and inner].
void decode_rows(const Model *m, float eps, const int64_t *table, const int32_t *tables, int64_t width, int64_t rows,
                 int64_t span, float *kv, int64_t blocks, int64_t block, int64_t *positions, float *scores, float *work,
                 float *logits) {
    int64_t heads = m->heads * m->size, most = heads > m->inner ? heads : m->inner;
    int64_t qkv = heads + 2 * m->kv_heads * m->size, *slots = positions + rows;
    float *x = work, *y = x + rows * m->hidden, *narrow = y + rows * m->hidden, *wide = narrow + rows * most;
    place_rows(table, tables, width, block, rows, positions, slots);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < m->hidden; i++)
            x[row * m->hidden + i] = m->embedding[i * m->vocabulary + table[row * WIDTH + TOKEN]];
    for (const Layer *l = m->layer; l < m->layer + m->layers; l++) {
        rms_norm(x, l->norm, rows, m->hidden, eps, 0.0f, y);
        product(y, rows, m->hidden, l->qkv, l->qkv_bias, qkv, 0, wide);
        rope_store(wide, rows, m->heads, m->kv_heads, m->size, m->size, 0, positions, slots, m->rotations, l->q_norm,
                   l->k_norm, eps, 0.0f, kv, blocks * block);
        attend_rows(wide, qkv, kv, blocks, block, tables, width, positions, span, rows, m->heads, m->kv_heads, m->size,
                    0, 1.0f / sqrtf((float)m->size), scores, narrow);
        product(narrow, rows, heads, l->out, l->out_bias, m->hidden, 1, x);
        rms_norm(x, l->mlp_norm, rows, m->hidden, eps, 0.0f, y);
        product(y, rows, m->hidden, l->gate_up, l->gate_up_bias, 2 * m->inner, 0, wide);
        gated(wide, rows, m->inner, 0, narrow);
        product(narrow, rows, m->inner, l->down, l->down_bias, m->hidden, 1, x);
        kv += 2 * m->kv_heads * blocks * block * m->size;
    }
    rms_norm(x, m->norm, rows, m->hidden, eps, 0.0f, y);
    product(y, rows, m->hidden, m->head, 0, m->vocabulary, 0, logits);
}

static inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * FIRST_MULTIPLIER;
    x = (x ^ (x >> 27)) * SECOND_MULTIPLIER;
    return x ^ (x >> 31);
}

// The first token at which the cumulative sum of `weights` exceeds `target`; `sums`: sums of the parts.
static int64_t invert(const float *weights, const double *sums, int64_t size, double target) {
    int64_t part = 0, parts = (size + PART - 1) / PART;
    while (part < parts - 1 && target >= sums[part]) target -= sums[part++];
    int64_t start = part * PART, stop = start + PART < size ? start + PART : size;
    double total = 0.0, sum = 0.0;
    for (int64_t i = start; i < stop; i++) total += weights[i];
    double most = total * (1 - 0x1p-52);  // because sums of parts are rounded
    target = target < most ? target : most;
    for (int64_t i = start; i < stop; i++)
        if ((sum += weights[i]) > target) return i;
    return stop - 1;  // only for NaN
}

// A token for each running row from logits [rows, size]: `sample_rows` of sampler.py for rows without truncation and
// forbidden tokens. settings [rows, 4]: temperature first. Results: tokens [rows], and four scores per row, `stride`
// apart. Work buffers: weights [size], sums [size / PART, rounded up].
void sample_rows(const float *logits, int64_t size, int64_t *table, const float *settings, int64_t rows, int32_t *tokens,
               float *scores, int64_t stride, float *weights, double *sums) {
    for (int64_t row = 0; row < rows; row++, table += WIDTH, logits += size) {
        if (table[STATE] != RUNNING) continue;
        float temperature = settings[4 * row], divisor = temperature == 0.0f ? 1.0f : temperature, largest = -INFINITY;
        int64_t token = 0;
        for (int64_t i = 0; i < size; i++) largest = logits[i] > largest ? logits[i] : largest;
        double total = 0.0, mean = 0.0;
        for (int64_t start = 0; start < size; start += PART) {
            int64_t stop = start + PART < size ? start + PART : size;
            float part = 0.0f, weighted = 0.0f;
#pragma omp simd reduction(+ : part, weighted)
            for (int64_t i = start; i < stop; i++) {
                float x = (logits[i] - largest) / divisor, weight = weights[i] = exponential(x);
                part += weight;
                weighted += weight > 0.0f ? weight * x : 0.0f;
            }
            total += sums[start / PART] = part;
            mean += weighted;
        }
        if (temperature == 0.0f) {
            while (token < size - 1 && logits[token] != largest) token++;
        } else {
            uint64_t bits = mix((uint64_t)table[KEY] + (uint64_t)(table[COUNT] + 1) * GOLDEN);
            token = invert(weights, sums, size, (double)(bits >> 12) * 0x1p-52 * total);
        }
        double logprob = (logits[token] - largest) / divisor - log(total), entropy = log(total) - mean / total;
        if (isnan(total)) logprob = NAN;
        int64_t state = ++table[COUNT] >= table[LIMIT] ? LENGTH : RUNNING;
        for (int64_t i = STOPS; i < WIDTH; i++) state = table[i] == token ? STOP : state;
        table[STATE] = isnan(logprob) ? BROKEN : state;
        table[TOKEN] = tokens[row] = token;
        table[POSITION]++;
        scores[row] = logprob;
        scores[stride + row] = temperature == 0.0f || logprob > 0.0 ? 0.0 : logprob;
        scores[2 * stride + row] = 1.0f;
        scores[3 * stride + row] = entropy < 0.0 ? 0.0 : entropy;
    }
}
