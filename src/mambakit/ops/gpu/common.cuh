// What all kernels share: numbers as they are stored, and the functions they are put through. No header is needed, so
// that NVRTC alone can compile this. IO says how tensors are stored: 0 fp32, 1 bf16, 2 fp16. Arithmetic is fp32.

typedef long long index_t;

#if IO == 0
typedef float io_t;
#else
typedef unsigned short io_t;
#endif

__device__ __forceinline__ float widen(io_t stored) {
#if IO == 0
    return stored;
#elif IO == 1
    return __uint_as_float((unsigned)stored << 16);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(stored));
    return value;
#endif
}

__device__ __forceinline__ io_t narrow(float value) {
#if IO == 0
    return value;
#elif IO == 1
    io_t stored;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(stored) : "f"(value));
#else
    unsigned bits = __float_as_uint(value);
    if (value != value) return 0x7fff;
    stored = (io_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to the nearest, ties to even
#endif
    return stored;
#else
    io_t stored;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(stored) : "f"(value));
    return stored;
#endif
}

#if IO != 0
// Two numbers as one word.
__device__ __forceinline__ unsigned narrow_two(float low, float high) {
#if IO == 1 && __CUDA_ARCH__ >= 800
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return narrow(low) | (unsigned)narrow(high) << 16;
#endif
}
#endif

// Two and four neighbouring numbers as they are stored.
#if IO == 0
typedef float2 Two;
typedef float4 Four;
#else
typedef unsigned Two;
typedef uint2 Four;
#endif

__device__ __forceinline__ Two join(io_t first, io_t second) {
#if IO == 0
    return make_float2(first, second);
#else
    return first | (unsigned)second << 16;
#endif
}

__device__ __forceinline__ Four join(const Two& first, const Two& second) {
#if IO == 0
    return make_float4(first.x, first.y, second.x, second.y);
#else
    return make_uint2(first, second);
#endif
}

__device__ __forceinline__ float number(const Two& two, int i) {
#if IO == 0
    return i == 0 ? two.x : two.y;
#elif IO == 1
    return __uint_as_float(i % 2 ? two & 0xffff0000u : two << 16);
#else
    return widen((io_t)(two >> i % 2 * 16));
#endif
}

__device__ __forceinline__ float number(const Four& four, int i) {
#if IO == 0
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
#else
    return number(i < 2 ? four.x : four.y, i % 2);
#endif
}

// By an instruction, since the compiler takes an assignment apart where that saves it a move.
__device__ __forceinline__ void store_words(float* memory, const float (&values)[4]) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(memory), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
                 : "memory");
}

__device__ __forceinline__ void store_two(io_t* memory, const float (&values)[2]) {
#if IO == 0
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" : : "l"(memory), "f"(values[0]), "f"(values[1]) : "memory");
#else
    asm volatile("st.global.b32 [%0], %1;" : : "l"(memory), "r"(narrow_two(values[0], values[1])) : "memory");
#endif
}

__device__ __forceinline__ void store_four(io_t* memory, const float (&values)[4]) {
#if IO == 0
    store_words(memory, values);
#else
    const unsigned low = narrow_two(values[0], values[1]), high = narrow_two(values[2], values[3]);
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" : : "l"(memory), "r"(low), "r"(high) : "memory");
#endif
}

#if __CUDA_ARCH__ >= 800
// d += a b by tensor cores: a (16, 8) and b (8, 8), without the last 13 bits of each number. Of d, a lane has the rows
// lane / 4 and 8 further, and the columns 2 (lane % 4) and the next; of a these rows, and the columns lane % 4 and 4
// further; of b the rows lane % 4 and 4 further, and the column lane / 4.
__device__ __forceinline__ void multiply(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
          "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
#endif

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define FULL 0xffffffffu

__device__ __forceinline__ float exp2_(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.f + exp2_(-LOG2E * x)); }

// log(1 + e) for e in [0, 1], to 2e-7 of itself: a polynomial, since lg2 would lose the digits of a small e.
__device__ __forceinline__ float log1p_(float e) {
    float p = 0.005126102362f;
    p = fmaf(p, e, -0.02907406539f);
    p = fmaf(p, e, 0.0775160864f);
    p = fmaf(p, e, -0.1360224783f);
    p = fmaf(p, e, 0.1907688081f);
    p = fmaf(p, e, -0.2483539879f);
    p = fmaf(p, e, 0.3331812024f);
    p = fmaf(p, e, -0.4999944568f);
    p = fmaf(p, e, 0.9999999404f);
    return p * e;
}

__device__ __forceinline__ float softplus(float v) {
    return fmaxf(v, 0.f) + log1p_(exp2_(-LOG2E * fabsf(v)));
}
