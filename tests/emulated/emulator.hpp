// CUDA C++ on a CPU, for tests: what the sources of ops/gpu use of it, and no more. Stands before a kernel's source.
//
// A thread of a block is a fiber, which runs until a barrier. In which order the threads of a block run until then is
// given: results must not depend on it. Blocks run one after the other. Shared memory is all NaN when a block begins.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("emulated_shared")))
#define __CUDA_ARCH__ 900

extern "C" {
extern char __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));
}

using std::isinf;
using std::max;
using std::min;

struct Dim {
    unsigned x;
};
static Dim threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
const int LANES = 32, MOST_THREADS = 256, STACK = 1 << 18, DYNAMIC = 1 << 18;

enum Where { RUNNING, AT_WARP, AT_BLOCK, DONE };

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    Where where = DONE;
    unsigned exchanges = 0;
};

typedef uint32_t Words[8];  // what a lane shows the others of its warp

// Two exchanges, so that one can be read while others write the next.
struct Warp {
    Words shown[2][LANES];
};

static Fiber fibers[MOST_THREADS];
static Warp warps[MOST_THREADS / LANES];
static ucontext_t scheduler;
static std::function<void()> kernel;
alignas(16) static char dynamic[DYNAMIC];

inline void leave(Where where) {
    Fiber& fiber = fibers[threadIdx.x];
    fiber.where = where;
    swapcontext(&fiber.context, &scheduler);
}

inline void begin() {
    kernel();
    leave(DONE);
}

template <class T>
const Words* exchange(const T& mine) {
    static_assert(sizeof(T) <= sizeof(Words), "too much to show");
    auto& shown = warps[threadIdx.x / LANES].shown[fibers[threadIdx.x].exchanges++ % 2];
    memcpy(shown[threadIdx.x % LANES], &mine, sizeof(T));
    leave(AT_WARP);
    return shown;
}

template <class T>
T as(const Words& words, int place = 0) {
    T value;
    memcpy(&value, &words[place], sizeof(T));
    return value;
}

// Lets go those of fibers [first, last) that wait at a barrier where all that have not ended have come. Gives whether
// any was let go.
inline bool release(int first, int last, Where barrier) {
    bool any = false;
    for (int i = first; i < last; ++i) {
        if (fibers[i].where != barrier && fibers[i].where != DONE) return false;
        any = any || fibers[i].where == barrier;
    }
    for (int i = first; i < last; ++i)
        if (fibers[i].where == barrier) fibers[i].where = RUNNING;
    return any;
}

// Gives 0; 1 where a block's threads wait at different barriers, 2 where a block is larger than it can be here, 3 where
// one has written beyond the shared memory that it asked for.
inline int run(unsigned blocks, int threads, int shared, bool last_first) {
    if (threads > MOST_THREADS || threads % LANES || shared > DYNAMIC) return 2;
    gridDim.x = blocks, blockDim.x = threads;
    std::vector<int> turn(threads);
    for (int i = 0; i < threads; ++i) turn[i] = last_first ? threads - 1 - i : i;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        memset(__start_emulated_shared, 0xff, __stop_emulated_shared - __start_emulated_shared);
        memset(dynamic, 0xff, DYNAMIC);
        for (int i = 0; i < threads; ++i) {
            Fiber& fiber = fibers[i];
            if (!fiber.stack) fiber.stack.reset(new char[STACK]);
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = STACK;
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, begin, 0);
            fiber.where = RUNNING;
        }
        for (;;) {
            for (int i : turn)
                if (fibers[i].where == RUNNING) {
                    threadIdx.x = i;
                    swapcontext(&scheduler, &fibers[i].context);
                }
            bool any = false;
            for (int i = 0; i < threads; i += LANES) any = release(i, i + LANES, AT_WARP) || any;
            if (any || release(0, threads, AT_BLOCK)) continue;
            for (int i = 0; i < threads; ++i)
                if (fibers[i].where != DONE) return 1;
            break;
        }
        for (int i = shared; i < DYNAMIC; ++i)
            if (dynamic[i] != (char)0xff) return 3;
    }
    return 0;
}

// The instructions that the sources name, by their names with _ for each dot.
inline void ex2_approx_ftz_f32(float& y, float x) { y = exp2f(x); }
inline void rcp_approx_ftz_f32(float& y, float x) { y = 1.f / x; }
inline void cvt_f32_f16(float& y, unsigned short x) { y = (float)reinterpret_cast<_Float16&>(x); }
inline void cvt_rn_f16_f32(unsigned short& y, float x) {
    const _Float16 half = (_Float16)x;
    memcpy(&y, &half, 2);
}
inline void cvt_rn_bf16_f32(unsigned short& y, float x) {
    const uint32_t bits = reinterpret_cast<uint32_t&>(x);
    y = x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void cvt_rn_bf16x2_f32(unsigned& word, float high, float low) {
    unsigned short parts[2];
    cvt_rn_bf16_f32(parts[0], low), cvt_rn_bf16_f32(parts[1], high);
    memcpy(&word, parts, 4);
}
inline void st_global_b32(void* place, unsigned word) {
    if ((uintptr_t)place % 4) abort();
    memcpy(place, &word, 4);
}
inline void st_global_v2_f32(void* place, float a, float b) {
    if ((uintptr_t)place % 8) abort();
    const float words[2] = {a, b};
    memcpy(place, words, 8);
}
inline void st_global_v2_b32(void* place, unsigned low, unsigned high) {
    if ((uintptr_t)place % 8) abort();
    const unsigned words[2] = {low, high};
    memcpy(place, words, 8);
}
inline void st_global_v4_f32(void* place, float a, float b, float c, float d) {
    if ((uintptr_t)place % 16) abort();
    const float words[4] = {a, b, c, d};
    memcpy(place, words, 16);
}
inline void prefetch_global_L2(const void*) {}
inline void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(float& d0, float& d1, float& d2, float& d3, unsigned a0,
                                                               unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                                               unsigned b1) {
    const Words mine = {a0, a1, a2, a3, b0, b1};
    const Words* shown = exchange(mine);
    float* const d[4] = {&d0, &d1, &d2, &d3};
    const int lane = threadIdx.x % LANES;
    const auto cut = [&](int from, int word) { return as<float>(Words{shown[from][word] & ~0x1fffu}); };
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, half = i / 2, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 8; ++k)
            *d[i] += cut(row * 4 + k % 4, half + k / 4 * 2) * cut(column * 4 + k % 4, 4 + k / 4);
    }
}
}  // namespace emulator

struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __int_as_float(int bits) { return reinterpret_cast<float&>(bits); }
inline float __uint_as_float(unsigned bits) { return reinterpret_cast<float&>(bits); }
inline unsigned __float_as_uint(float value) { return reinterpret_cast<unsigned&>(value); }
template <class T>
T __ldcg(const T* place) {
    return *place;
}
inline unsigned atomicAdd(unsigned* place, unsigned value) { return std::exchange(*place, *place + value); }
inline void __threadfence() {}
inline void __nanosleep(unsigned) {
    fprintf(stderr, "a block waits for one that has not run\n");
    abort();
}
inline void __syncwarp() { emulator::leave(emulator::AT_WARP); }
inline void __syncthreads() { emulator::leave(emulator::AT_BLOCK); }
inline float __shfl_xor_sync(unsigned, float value, int other) {
    return emulator::as<float>(emulator::exchange(value)[(threadIdx.x ^ other) % emulator::LANES]);
}
inline unsigned __ballot_sync(unsigned, bool mine) {
    const auto* shown = emulator::exchange((int)mine);
    unsigned found = 0;
    for (int lane = 0; lane < emulator::LANES; ++lane) found |= (unsigned)(shown[lane][0] != 0) << lane;
    return found;
}
