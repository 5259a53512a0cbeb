// Matrix products of decoding steps with at most 16 rows, in bfloat16: out [rows, features] from x [rows, inputs] and
// weights [features, inputs]. Such a product takes as long as its weights take to arrive, if nothing else delays it:
//
// - Every warp loads weights into registers, many at once, before it waits for the kernel that computes x.
// - The warps of a program divide the inputs, so that even small matrices occupy all multiprocessors, and add their sums
//   up in shared memory, always in the same order.
// - The norm before a product, and what follows it, need no kernels of their own. The norm's weight is multiplied into x;
//   its scale, which depends on all inputs of a row, into the result.
//
// The host defines GROUPS (of eight features, per program), HALVES (1 for up to eight rows, 2 for up to 16), WARPS,
// DEPTH (loads at once) and NORM.

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

constexpr int CHUNK = 32;  // inputs that a warp loads at once: eight per thread and feature
constexpr int STRIDE = WARPS * CHUNK;
constexpr int PAIRS = GROUPS > 1 ? GROUPS / 2 : 1;

enum { STORE = 0, ADD = 1, SILU = 2, GELU = 3, ROTATE = 4 };  // what happens to a result

__device__ inline float low(u32 x) { return __uint_as_float(x << 16); }
__device__ inline float high(u32 x) { return __uint_as_float(x & 0xFFFF0000u); }

__device__ inline u32 packed(float first, float second) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
    return y;
}

__device__ inline float rounded(float x) { return low(packed(x, 0.0f)); }

__device__ inline uint4 load(const u16* from, bool inside) {
    return inside ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
}

// Weights are read once, so they should not displace anything in the first cache.
__device__ inline uint4 load_weights(const u16* from, bool inside) {
    uint4 y = make_uint4(0, 0, 0, 0);
    if (inside)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w) : "l"(from));
    return y;
}

// sums [16 rows x 8 features] += a [16 rows x 16 inputs] b [16 inputs x 8 features]
__device__ inline void multiply(float4& sums, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums.x), "+f"(sums.y), "+f"(sums.z), "+f"(sums.w) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two inputs times the norm's weights; adds their squares to `squares`.
__device__ inline u32 weighted(u32 x, u32 weight, float offset, float& squares) {
    const float a = low(x), b = high(x);
    squares += a * a + b * b;
    return packed(a * (low(weight) + offset), b * (high(weight) + offset));
}

__device__ inline uint4 weighted(uint4 x, uint4 weight, float offset, float& squares) {
    return make_uint4(weighted(x.x, weight.x, offset, squares), weighted(x.y, weight.y, offset, squares),
                      weighted(x.z, weight.z, offset, squares), weighted(x.w, weight.w, offset, squares));
}

__device__ inline float gated(float gate, float up, bool gelu) {
    gate = rounded(gate), up = rounded(up);
    const float exponent = gelu ? gate * (1.5957691216f + 0.0713548163f * gate * gate) : gate;
    return gate / (1.0f + __expf(-exponent)) * up;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) few_rows(
    const u16* x, const u16* norm, const u16* weights, const u16* bias, u16* out, int rows, int inputs, int features,
    int mode, float eps, float offset,
    // To rotate: heads of `2 half` numbers (queries, keys, values), slots in the cache (-1: not stored), and angles
    // [positions, 2 half] (cosines, then sines).
    const i64* positions, const i64* slots, const float* angles, u16* kv, i64 head_stride, int heads, int kv_heads,
    int half
) {
    __shared__ float4 parts[WARPS][GROUPS][32];
    __shared__ float squares_of[WARPS][2][8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const bool is_gated = mode == SILU || mode == GELU, is_pair = is_gated || mode == ROTATE;
    const int all = is_gated ? 2 * features : features;
    // The first feature of a group. Gating and rotation combine features that are far from each other: the second half of
    // the groups has the partners of the first half.
    auto first_of = [&](int group) {
        if (!is_pair) return (int)(8 * (GROUPS * blockIdx.x + group));
        const int pair = PAIRS * blockIdx.x + group % PAIRS, second = group / PAIRS;
        if (is_gated) return 8 * pair + second * features;
        return pair / (half / 8) * 2 * half + pair % (half / 8) * 8 + second * half;
    };
    const u16* from[GROUPS];
#pragma unroll
    for (int f = 0; f < GROUPS; f++) from[f] = weights + (size_t)min(first_of(f) + g, all - 1) * inputs + 8 * t;
    uint4 w[DEPTH][GROUPS], scales[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        const int input = warp * CHUNK + i * STRIDE;
#pragma unroll
        for (int f = 0; f < GROUPS; f++) w[i][f] = load_weights(from[f] + input, input + 8 * t < inputs);
        if (NORM) scales[i] = load(norm + input + 8 * t, input + 8 * t < inputs);
    }
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");

    // What the end needs is loaded now: by warp i, of group i or pair i.
    const int feature = first_of(warp % (is_pair ? PAIRS : GROUPS)) + 2 * t;
    const bool finishes = warp < (is_pair ? PAIRS : GROUPS) && feature < (is_gated ? features : all);
    u32 earlier[HALVES];
    i64 slot[HALVES];
    float2 cosine[HALVES], sine[HALVES];
    const int head = mode == ROTATE ? feature / (2 * half) : 0, place = mode == ROTATE ? feature % (2 * half) : 0;
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        const int row = g + 8 * h;
        earlier[h] = 0, slot[h] = -1, cosine[h] = make_float2(1.0f, 1.0f), sine[h] = make_float2(0.0f, 0.0f);
        if (!finishes || row >= rows) continue;
        if (mode == ADD) earlier[h] = *(const u32*)(out + (size_t)row * features + feature);
        if (mode == ROTATE) {
            slot[h] = slots[row];
            const float* angle = angles + positions[row] * 2 * half + place;
            if (head < heads + kv_heads) cosine[h] = *(const float2*)angle, sine[h] = *(const float2*)(angle + half);
        }
    }

    float4 sums[GROUPS];
    float squares[2] = {0.0f, 0.0f};
#pragma unroll
    for (int f = 0; f < GROUPS; f++) sums[f] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    uint4 part[DEPTH][HALVES];
    auto load_rows = [&](uint4* to, int input) {
#pragma unroll
        for (int h = 0; h < HALVES; h++)
            to[h] = load(x + (size_t)min(g + 8 * h, rows - 1) * inputs + input + 8 * t, input + 8 * t < inputs);
    };
#pragma unroll
    for (int i = 0; i < DEPTH; i++) load_rows(part[i], warp * CHUNK + i * STRIDE);
    for (int start = warp * CHUNK; start < inputs; start += DEPTH * STRIDE) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int next = start + (i + DEPTH) * STRIDE;
            uint4 a = part[i][0], b = HALVES == 2 ? part[i][HALVES - 1] : make_uint4(0, 0, 0, 0);
            if (NORM) {
                a = weighted(a, scales[i], offset, squares[0]);
                if (HALVES == 2) b = weighted(b, scales[i], offset, squares[1]);
                scales[i] = load(norm + next + 8 * t, next + 8 * t < inputs);
            }
            load_rows(part[i], next);
            // The order of the inputs within a chunk does not matter, as long as both sides have the same.
#pragma unroll
            for (int f = 0; f < GROUPS; f++) {
                multiply(sums[f], a.x, b.x, a.y, b.y, w[i][f].x, w[i][f].y);
                multiply(sums[f], a.z, b.z, a.w, b.w, w[i][f].z, w[i][f].w);
                w[i][f] = load_weights(from[f] + next, next + 8 * t < inputs);
            }
        }
    }

#pragma unroll
    for (int f = 0; f < GROUPS; f++) parts[warp][f][lane] = sums[f];
    if (NORM)
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            squares[h] += __shfl_xor_sync(~0u, squares[h], 1);
            squares[h] += __shfl_xor_sync(~0u, squares[h], 2);
            if (t == 0) squares_of[warp][h][g] = squares[h];
        }
    __syncthreads();
    if (!finishes) return;
    float4 first = make_float4(0.0f, 0.0f, 0.0f, 0.0f), second = first;
    float scale[2] = {1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        const float4 y = parts[i][warp][lane];
        first.x += y.x, first.y += y.y, first.z += y.z, first.w += y.w;
        if (is_pair) {
            const float4 z = parts[i][warp + PAIRS][lane];
            second.x += z.x, second.y += z.y, second.z += z.z, second.w += z.w;
        }
    }
    if (NORM)
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; i++) sum += squares_of[i][h][g];
            scale[h] = rsqrtf(sum / inputs + eps);
        }
    u32 biases = 0, other_biases = 0;
    if (bias != nullptr) {
        biases = *(const u32*)(bias + feature);
        if (is_pair) other_biases = *(const u32*)(bias + feature + (is_gated ? features : half));
    }
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        const int row = g + 8 * h;
        if (row >= rows) continue;
        const float a = (h ? first.z : first.x) * scale[h] + low(biases), b = (h ? first.w : first.y) * scale[h] + high(biases);
        const float c = (h ? second.z : second.x) * scale[h] + low(other_biases);
        const float d = (h ? second.w : second.y) * scale[h] + high(other_biases);
        u32* to = (u32*)(out + (size_t)row * features + feature);
        if (is_gated) {
            *to = packed(gated(a, c, mode == GELU), gated(b, d, mode == GELU));
        } else if (mode == ROTATE) {
            to = (u32*)(out + ((size_t)row * heads + head) * 2 * half + place);
            if (head >= heads) {
                if (slot[h] < 0) continue;
                to = (u32*)(kv + (head - heads) * head_stride + slot[h] * 2 * half + place);
            }
            const float p = rounded(a), q = rounded(b), r = rounded(c), s = rounded(d);
            to[0] = packed(p * cosine[h].x - r * sine[h].x, q * cosine[h].y - s * sine[h].y);
            to[half / 2] = packed(r * cosine[h].x + p * sine[h].x, s * cosine[h].y + q * sine[h].y);
        } else {
            *to = packed(low(earlier[h]) + a, high(earlier[h]) + b);
        }
    }
}
