// Selective scan, forward and backward.
//
// A warp has CHANNELS neighbouring channels of one row of the batch and goes along time. Each thread keeps the states
// of NC channels x 4 states in registers: Q lanes share NC channels and divide their N states, and 32 / Q such groups
// are a warp. So B and C are read once for NC channels and dt x once for 4 states, and sums over states (y, and the
// gradients per channel) or over channels (dB, dC) are half done in registers before lanes exchange anything. With
// fewer channels of a thread there are more warps, whose waits fill each other; with more, fewer instructions.
//
// Inputs and outputs are moved a tile of steps at a time. Of a tile, each lane has some steps of its group's channels.
//
// Compiled with N (states, up to 64), NC (2 or 4), IO (common.cuh), HAS_Z, SOFTPLUS; ALIGNED, whether four neighbouring
// channels are one word of memory, and ALIGNED_STATES, whether four states of B and C are; WARPS of a block; KEEP, the
// steps between the states that forward keeps for backward; FORWARD_TILE and BACKWARD_TILE, the steps of a tile in
// either direction: all states of a tile of BACKWARD_TILE are in registers.

#define NS 4  // states of a thread
#define Q (N <= NS ? 1 : N <= 2 * NS ? 2 : N <= 4 * NS ? 4 : N <= 8 * NS ? 8 : 16)  // lanes that share channels
#define PADDED (Q * NS)                                                 // N, or a little more
#define CHANNELS (32 / Q * NC)                                          // of a warp
#define ROW (CHANNELS + 8)  // numbers of a step in shared memory, so that lanes of different steps use different banks
// Of a tile of so many steps: lanes of a group that have different ones, and how many each has. A lane has the steps
// `mine`, `mine` + APART, …; with more lanes than steps, the last lanes do what another one does.
#define APART(steps) (Q < (steps) ? Q : (steps))
#define OWN(steps) ((steps) / APART(steps))

// Sums over states by tensor cores, where the outputs have less precision than their inputs then have: three bits more
// than bf16.
#if IO == 1 && __CUDA_ARCH__ >= 800
#define BY_TENSOR_CORES (Q == 4)
#else
#define BY_TENSOR_CORES 0
#endif

#if NC == 2
typedef Two Word;  // the channels of a thread
#else
typedef Four Word;
#endif

struct Strides {
    index_t row, step;
};

struct Inputs {
    const io_t *x, *dt, *z, *B, *C;
    Strides sx, sdt, sz, sB, sC;
    const float *A, *D, *bias;  // (D, N), (D), (D)
    const int* documents;       // (batch, length), contiguous
    index_t batch, length, channels;
    index_t chunks, chunk_length;  // time is cut into chunks, which run in parallel
};

// Where a warp works: a row, a chunk of time, some channels.
struct Place {
    index_t row, chunk, first;  // first of its channels
    int begin, end;
    int lane, q, group;
    index_t column;  // the first of the group's channels, held inside the tensor
    int count;       // of the group's channels that there are
};

__device__ __forceinline__ Place find_place(const Inputs& in, index_t block) {
    Place at;
    index_t blocks = (in.channels + WARPS * CHANNELS - 1) / (WARPS * CHANNELS);
    at.first = (block % blocks * WARPS + threadIdx.x / 32) * CHANNELS;
    at.row = block / blocks % in.batch;
    at.chunk = block / blocks / in.batch;
    at.begin = (int)(at.chunk * in.chunk_length);
    at.end = (int)min(at.begin + in.chunk_length, in.length);
    at.lane = threadIdx.x % 32;
    at.q = at.lane % Q;
    at.group = at.lane / Q;
    const index_t channel = at.first + at.group * NC;
    at.column = min(channel, in.channels - (ALIGNED ? NC : 1));
    at.count = (int)max(min(in.channels - channel, (index_t)NC), (index_t)0);
    return at;
}

// The first `count` of two or four numbers, which are one word if they are `aligned`: then all of them, if there is one.
template <bool aligned>
__device__ __forceinline__ void fetch(Two& word, const io_t* memory, int count) {
    word = join((io_t)0, (io_t)0);
    if (aligned) {
        if (count > 0) word = *reinterpret_cast<const Two*>(memory);
    } else {
        word = join(count > 0 ? memory[0] : (io_t)0, count > 1 ? memory[1] : (io_t)0);
    }
}

template <bool aligned>
__device__ __forceinline__ void fetch(Four& word, const io_t* memory, int count) {
    Two first = join((io_t)0, (io_t)0), second = first;
    if (!aligned) fetch<false>(first, memory, count), fetch<false>(second, memory + 2, count - 2);
    word = join(first, second);
    if (aligned && count > 0) word = *reinterpret_cast<const Four*>(memory);
}

__device__ __forceinline__ void store(io_t* memory, const float (&values)[2]) { store_two(memory, values); }
__device__ __forceinline__ void store(io_t* memory, const float (&values)[4]) { store_four(memory, values); }

__device__ __forceinline__ void write(io_t* memory, const float (&values)[NC], int count) {
    if (ALIGNED) {
        if (count) store(memory, values);
    } else {
#pragma unroll
        for (int i = 0; i < NC; ++i)
            if (i < count) memory[i] = narrow(values[i]);
    }
}

// The group's channels of a tensor, at a lane's own steps of one tile after the other.
struct Column {
    const io_t* now;
    int step;
};

__device__ __forceinline__ Column column(const io_t* memory, Strides stride, int t, const Place& at) {
    return {memory + at.row * stride.row + t * stride.step + at.column, (int)stride.step};
}

__device__ __forceinline__ void move(Column& column, int steps) { column.now += (index_t)column.step * steps; }

// The own steps of a tile of so many, from where the column stands; zeros in place of those that are not `left`.
template <int steps>
__device__ __forceinline__ void fetch_own(Word (&own)[OWN(steps)], const Column& from, const Place& at) {
#pragma unroll
    for (int k = 0; k < OWN(steps); ++k)
        fetch<ALIGNED>(own[k], from.now + (index_t)from.step * (k * APART(steps)), at.count);
}

template <int steps>
__device__ __forceinline__ void fetch_some(Word (&own)[OWN(steps)], const Column& from, int left, const Place& at) {
#pragma unroll
    for (int k = 0; k < OWN(steps); ++k) {
        const int count = k * APART(steps) < left ? at.count : 0;
        fetch<ALIGNED>(own[k], from.now + (index_t)from.step * (k * APART(steps)), count);
    }
}

// One number for each channel of the warp, or zeros.
__device__ __forceinline__ void stage_channels(float* shared, const float* memory, const Place& at) {
#pragma unroll
    for (int c = 0; c < NC; ++c)
        if (at.q == 0) shared[at.group * NC + c] = memory && c < at.count ? memory[at.column + c] : 0.f;
}

typedef float Tile[NC][NS];  // a value for each state of a thread

// Moves the states of a warp to or from (channels, N) at `memory`, which is aligned to 16 bytes.
__device__ __forceinline__ void load_states(Tile& h, const float* memory, const Place& at, const Inputs& in) {
    const index_t channel = at.first + at.group * NC;
    memory += channel * N + at.q * NS;
#pragma unroll
    for (int c = 0; c < NC; ++c) {
        const bool real = channel + c < in.channels;
        if (N % NS == 0) {
            float4 v = real && at.q * NS < N ? __ldcg(reinterpret_cast<const float4*>(memory + c * N))
                                             : make_float4(0.f, 0.f, 0.f, 0.f);
            h[c][0] = v.x, h[c][1] = v.y, h[c][2] = v.z, h[c][3] = v.w;
        } else {
#pragma unroll
            for (int s = 0; s < NS; ++s) h[c][s] = real && at.q * NS + s < N ? __ldcg(memory + c * N + s) : 0.f;
        }
    }
}

__device__ __forceinline__ void store_states(const Tile& h, float* memory, const Place& at, const Inputs& in) {
    const index_t channel = at.first + at.group * NC;
    memory += channel * N + at.q * NS;
#pragma unroll
    for (int c = 0; c < NC; ++c) {
        const bool real = channel + c < in.channels;
        if (N % NS == 0) {
            if (real && at.q * NS < N)
                store_words(memory + c * N, h[c]);
        } else {
#pragma unroll
            for (int s = 0; s < NS; ++s)
                if (real && at.q * NS + s < N) memory[c * N + s] = h[c][s];
        }
    }
}

__device__ __forceinline__ void clear(Tile& h) {
#pragma unroll
    for (int c = 0; c < NC; ++c)
#pragma unroll
        for (int s = 0; s < NS; ++s) h[c][s] = 0.f;
}

__device__ __forceinline__ void load_A(Tile& A, const Place& at, const Inputs& in) {
    load_states(A, in.A, at, in);
#pragma unroll
    for (int c = 0; c < NC; ++c)
#pragma unroll
        for (int s = 0; s < NS; ++s) A[c][s] *= LOG2E;
}

// Which of `count` <= 32 steps begin a document, as bits.
__device__ __forceinline__ unsigned find_starts(int count, int first, const Place& at, const Inputs& in) {
    if (!in.documents) return 0;
    int t = first + at.lane;
    bool begins = false;
    if (at.lane < count && t > 0 && t >= at.begin && t < at.end) {
        const int* document = in.documents + at.row * in.length + t;
        begins = document[0] != document[-1];
    }
    return __ballot_sync(FULL, begins);
}

__device__ __forceinline__ float step_size(float v) {
#if SOFTPLUS
    return softplus(v);
#else
    return v;
#endif
}

__device__ __forceinline__ void prefetch(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

__device__ __forceinline__ void unpack(float (&values)[2], const float* memory) {
    const float2 v = *reinterpret_cast<const float2*>(memory);
    values[0] = v.x, values[1] = v.y;
}

__device__ __forceinline__ void pack(float* memory, const float (&values)[2]) {
    *reinterpret_cast<float2*>(memory) = make_float2(values[0], values[1]);
}

__device__ __forceinline__ void unpack(float (&values)[4], const float* memory) {
    const float4 v = *reinterpret_cast<const float4*>(memory);
    values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
}

__device__ __forceinline__ void pack(float* memory, const float (&values)[4]) {
    *reinterpret_cast<float4*>(memory) = make_float4(values[0], values[1], values[2], values[3]);
}

__device__ __forceinline__ void unpack_stored(float* memory, const Four& four) {
    *reinterpret_cast<float4*>(memory) = make_float4(number(four, 0), number(four, 1), number(four, 2), number(four, 3));
}

// The sums over all states of a[c][s] b[s], in all lanes that share the channels. Tensor cores cut off the last 13 bits
// of a; times CUT, sums are right on average.
__device__ __forceinline__ void sum_states(float (&sums)[NC], const Tile& a, const float (&b)[NS]) {
#if BY_TENSOR_CORES
#pragma unroll
    for (int c = 0; c < NC; c += 2) {  // in each column the same product
        float d[4] = {};
        multiply(d, a[c][0], a[c + 1][0], a[c][1], a[c + 1][1], b[0], b[1]);
        multiply(d, a[c][2], a[c + 1][2], a[c][3], a[c + 1][3], b[2], b[3]);
        sums[c] = d[0], sums[c + 1] = d[2];
    }
#else
#pragma unroll
    for (int c = 0; c < NC; ++c) {
        sums[c] = a[c][0] * b[0];
#pragma unroll
        for (int s = 1; s < NS; ++s) sums[c] = fmaf(a[c][s], b[s], sums[c]);
    }
#pragma unroll
    for (int bit = 1; bit < Q; bit *= 2)
#pragma unroll
        for (int c = 0; c < NC; ++c) sums[c] += __shfl_xor_sync(FULL, sums[c], bit);
#endif
}

#if BY_TENSOR_CORES
#define CUT 1.000345f
#else
#define CUT 1.f
#endif

// Adds values of the i-th step of a tile to what is this lane's own, where that step is.
template <int steps>
__device__ __forceinline__ void add_own(float (&own)[OWN(steps)][NC], int i, const float (&values)[NC], int mine) {
#pragma unroll
    for (int c = 0; c < NC; ++c)
        if (APART(steps) == 1 || i % APART(steps) == mine)
            own[i / APART(steps)][c] = fmaf(CUT, values[c], own[i / APART(steps)][c]);
}

// The sums over the lanes of a group, for the whole group.
template <int steps>
__device__ __forceinline__ void sum_group(float (&values)[NC]) {
#pragma unroll
    for (int bit = 1; bit < APART(steps); bit *= 2)
#pragma unroll
        for (int c = 0; c < NC; ++c) values[c] += __shfl_xor_sync(FULL, values[c], bit);
}

// One step: h = exp(dt A) h + u B, with u = dt x.
__device__ __forceinline__ void advance(Tile& h, const Tile& A, const float (&dt)[NC], const float (&u)[NC],
                                        const float (&B)[NS]) {
#pragma unroll
    for (int c = 0; c < NC; ++c)
#pragma unroll
        for (int s = 0; s < NS; ++s) h[c][s] = fmaf(exp2_(dt[c] * A[c][s]), h[c][s], u[c] * B[s]);
}

// Sums over the lanes of a group, of tiles of forward, to (channels).
__device__ __forceinline__ void store_total(float* memory, float (&total)[NC], const Place& at) {
    sum_group<FORWARD_TILE>(total);
#pragma unroll
    for (int c = 0; c < NC; ++c)
        if (at.q == 0 && c < at.count) memory[at.column + c] = total[c];
}

// ------------------------------------------------------------------------------------------------------------- forward

struct Forward {
    Inputs in;
    const float* initial_states;  // (batch, chunks, channels, N): the state before each chunk; or null: zeros
    io_t* y;                // (batch, length, channels)
    float* final_state;     // (batch, channels, N)
    float* kept;            // (batch, length / KEEP, channels, N): the state before each KEEP steps
    float* chunk_states;         // (batch, chunks, channels, N): each chunk's last state, from zero
    float* total_dt;        // (batch, chunks, channels): summed over a chunk; infinite where a document begins inside
};

struct ForwardShared {
    float dt[FORWARD_TILE][ROW], u[FORWARD_TILE][ROW];
    float B[FORWARD_TILE][PADDED], C[FORWARD_TILE][PADDED];
    float D[CHANNELS], bias[CHANNELS];
};

// B or C of a tile, four states at a time: a lane takes every 32nd four.
#define FOURS ((FORWARD_TILE * PADDED / 4 + 31) / 32)

__device__ __forceinline__ Column states_column(const io_t* memory, Strides stride, int t, const Place& at) {
    const int number = at.lane * 4;
    return {memory + at.row * stride.row + (t + number / PADDED) * stride.step + number % PADDED, (int)stride.step};
}

__device__ __forceinline__ void fetch_states(Four (&own)[FOURS], const Column& from, int left, const Place& at) {
    const int n = at.lane * 4 % PADDED;
#pragma unroll
    for (int k = 0; k < FOURS; ++k) {
        const int step = k * 128 / PADDED, i = step + at.lane * 4 / PADDED;
        const bool inside = i < FORWARD_TILE && i < left && n < N;
        fetch<ALIGNED_STATES>(own[k], from.now + (index_t)from.step * step, inside ? N - n : 0);
    }
}

__device__ __forceinline__ void stage_states(float (&tile)[FORWARD_TILE][PADDED], const Four (&own)[FOURS], int lane) {
#pragma unroll
    for (int k = 0; k < FOURS; ++k)
        if (k * 32 + lane < FORWARD_TILE * PADDED / 4)
            unpack_stored(&tile[0][(k * 32 + lane) * 4], own[k]);
}

template <bool with_output, bool with_starts>
__device__ __forceinline__ void forward_tile(float (&y)[OWN(FORWARD_TILE)][NC], Tile& h, const Tile& A,
                                             const ForwardShared& shared, unsigned starts, int mine, const Place& at) {
#pragma unroll
    for (int i = 0; i < FORWARD_TILE; ++i) {
        float dt[NC], u[NC], B[NS], Cs[NS], sums[NC];
        unpack(dt, &shared.dt[i][at.group * NC]);
        unpack(u, &shared.u[i][at.group * NC]);
        unpack(B, &shared.B[i][at.q * NS]);
        if (with_starts && (starts >> i & 1)) clear(h);
        advance(h, A, dt, u, B);
        if (with_output) {
            unpack(Cs, &shared.C[i][at.q * NS]);
            sum_states(sums, h, Cs);
            add_own<FORWARD_TILE>(y, i, sums, mine);
        }
    }
}

// With output: y, the kept states and the final one. Without: only each chunk's last state, from zero.
template <bool with_output>
__device__ __forceinline__ void forward(const Forward& p) {
    __shared__ __align__(16) ForwardShared all_shared[WARPS];
    const Inputs& in = p.in;
    ForwardShared& shared = all_shared[threadIdx.x / 32];
    const Place at = find_place(in, blockIdx.x);
    if (at.first >= in.channels) return;
    const int mine = at.q % APART(FORWARD_TILE);

    Tile A, h;
    load_A(A, at, in);
    const index_t state_size = in.channels * N;
    clear(h);
    if (with_output && p.initial_states)
        load_states(h, p.initial_states + (at.row * in.chunks + at.chunk) * state_size, at, in);
    float total[NC] = {};
    stage_channels(shared.D, in.D, at);
    stage_channels(shared.bias, in.bias, at);
    __syncwarp();
    float* kept = p.kept + (at.row * ((in.length + KEEP - 1) / KEEP) + at.begin / KEEP) * state_size;
    io_t* y = p.y + (at.row * in.length + at.begin + mine) * in.channels + at.column;
    const int y_step = (int)in.channels;
    Column xs = column(in.x, in.sx, at.begin + mine, at), dts = column(in.dt, in.sdt, at.begin + mine, at);
    Column zs = column(HAS_Z ? in.z : in.x, HAS_Z ? in.sz : in.sx, at.begin + mine, at);
    Column Bs = states_column(in.B, in.sB, at.begin, at), Cs = states_column(in.C, in.sC, at.begin, at);

    Word x[OWN(FORWARD_TILE)], dt[OWN(FORWARD_TILE)], z[OWN(FORWARD_TILE)];
    Four B[FOURS], C[FOURS];
    const auto fetch_tile = [&] {
        fetch_own<FORWARD_TILE>(x, xs, at);
        fetch_own<FORWARD_TILE>(dt, dts, at);
        fetch_states(B, Bs, FORWARD_TILE, at);
        if (with_output) fetch_states(C, Cs, FORWARD_TILE, at);
    };
    int left = at.end - at.begin;
    if (left >= FORWARD_TILE) fetch_tile();
    for (int t = at.begin; t < at.end; t += FORWARD_TILE, left -= FORWARD_TILE) {
        const bool full = left >= FORWARD_TILE;
        if (!full) {
            fetch_some<FORWARD_TILE>(x, xs, left - mine, at);
            fetch_some<FORWARD_TILE>(dt, dts, left - mine, at);
            fetch_states(B, Bs, left, at);
            if (with_output) fetch_states(C, Cs, left, at);
        }
        float D[NC], bias[NC], sums[OWN(FORWARD_TILE)][NC];
        unpack(D, &shared.D[at.group * NC]);
        unpack(bias, &shared.bias[at.group * NC]);
#pragma unroll
        for (int k = 0; k < OWN(FORWARD_TILE); ++k) {
            const int i = mine + k * APART(FORWARD_TILE);
            float steps[NC], u[NC];
#pragma unroll
            for (int c = 0; c < NC; ++c) {
                const float input = number(x[k], c);
                steps[c] = step_size(number(dt[k], c) + bias[c]);
                if (!full && i >= left) steps[c] = 0.f;  // a step that is not there changes nothing
                u[c] = steps[c] * input;
                if (with_output)
                    sums[k][c] = D[c] * input;
                else
                    total[c] += steps[c];
            }
            pack(&shared.dt[i][at.group * NC], steps);
            pack(&shared.u[i][at.group * NC], u);
        }
        stage_states(shared.B, B, at.lane);
        if (with_output) stage_states(shared.C, C, at.lane);
        unsigned starts = find_starts(FORWARD_TILE, t, at, in);
        __syncwarp();
        if (with_output && HAS_Z) {
            if (full)
                fetch_own<FORWARD_TILE>(z, zs, at);
            else
                fetch_some<FORWARD_TILE>(z, zs, left - mine, at);
            move(zs, FORWARD_TILE);
        }
        move(xs, FORWARD_TILE), move(dts, FORWARD_TILE), move(Bs, FORWARD_TILE), move(Cs, FORWARD_TILE);
        if (left >= 2 * FORWARD_TILE) fetch_tile();  // the next, while this one is computed
        if (with_output && t % KEEP == 0) {
            store_states(h, kept, at, in);
            kept += state_size;
        }
        if (starts) {
            forward_tile<with_output, true>(sums, h, A, shared, starts, mine, at);
#pragma unroll
            for (int c = 0; c < NC; ++c) total[c] = __int_as_float(0x7f800000);
        } else {
            forward_tile<with_output, false>(sums, h, A, shared, 0, mine, at);
        }
        if (with_output) {
#pragma unroll
            for (int k = 0; k < OWN(FORWARD_TILE); ++k) {
#if HAS_Z
#pragma unroll
                for (int c = 0; c < NC; ++c) {
                    const float gate = number(z[k], c);
                    sums[k][c] *= gate * sigmoid(gate);
                }
#endif
                const int i = k * APART(FORWARD_TILE);
                if (at.q < APART(FORWARD_TILE) && (full || mine + i < left))
                    write(y + (index_t)y_step * i, sums[k], at.count);
            }
            y += (index_t)y_step * FORWARD_TILE;
        }
        __syncwarp();
    }
    if (with_output) {
        if (at.end == in.length) store_states(h, p.final_state + at.row * state_size, at, in);
    } else {
        const index_t place = at.row * in.chunks + at.chunk;
        store_states(h, p.chunk_states + place * state_size, at, in);
        store_total(p.total_dt + place * in.channels, total, at);
    }
}

#ifdef FORWARD
extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS) scan_forward(const __grid_constant__ Forward p) {
    forward<true>(p);
}
#endif

#ifdef CHUNKED
extern "C" __global__ void __launch_bounds__(WARPS * 32) scan_chunk_states(const __grid_constant__ Forward p) {
    forward<false>(p);
}
#endif

// -------------------------------------------------------------------------------------- passing states between chunks

struct StatePassing {
    float* states;          // (batch, chunks, channels, N): each chunk's last state, from zero; becomes its first state
    const float* total_dt;  // (batch, chunks, channels)
    const float *A, *first;  // (D, N); (batch, channels, N) or null: the initial state of the first chunk passed
    float* last;             // (batch, channels, N) or null: the state after the last chunk passed
    index_t batch, chunks, channels, backwards;
};

#ifdef CHUNKED
extern "C" __global__ void scan_state_passing(const __grid_constant__ StatePassing p) {
    index_t state_size = p.channels * N, place = (index_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (place >= p.batch * state_size) return;
    index_t row = place / state_size, within = place % state_size, channel = within / N;
    float A = p.A[within] * LOG2E;
    float state = p.first ? p.first[place] : 0.f;
#pragma unroll 8
    for (index_t k = 0; k < p.chunks; ++k) {
        index_t chunk = row * p.chunks + (p.backwards ? p.chunks - 1 - k : k);
        float left = p.states[chunk * state_size + within], total = p.total_dt[chunk * p.channels + channel];
        p.states[chunk * state_size + within] = state;
        state = isinf(total) ? left : fmaf(exp2_(A * total), state, left);
    }
    if (p.last) p.last[place] = state;
}
#endif

// ------------------------------------------------------------------------------------------------------------ backward

struct Backward {
    Inputs in;
    const io_t* dy;
    Strides sdy;
    const float* dstates;  // (batch, chunks, channels, N): the gradient of the state after each chunk; or null
    const float* kept;
    io_t *dx, *ddt, *dz;  // (batch, length, channels)
    Strides sdz;
    float* dBC;           // (blocks of channels, batch, length, 2 N): parts of the sums over channels
    float* parts;         // (batch, chunks, channels, N + 2): parts of dA, dD and dbias
    float* dinitial;      // (batch, channels, N) or null
    float* chunk_dstates;       // (batch, chunks, channels, N): the gradient before a chunk, of that chunk alone
    float* total_dt;
    float* chained;    // (batch, chunks, channels, N) or null: the gradient after each chunk, from the next one
    unsigned* done;  // how many blocks have begun; then, for each row and block of channels, how many chunks are done
};

#define TILES (KEEP / BACKWARD_TILE)
#define VALUES (2 * PADDED)  // dB and dC of a step

struct BackwardShared {
    float4 states[TILES][NC][32];  // the state before each tile; then the dB and dC of the tile before it
    float last[BACKWARD_TILE][VALUES];    // the dB and dC of the last tile: just where one more state would be
    float dt[BACKWARD_TILE][ROW], u[BACKWARD_TILE][ROW], dy[BACKWARD_TILE][ROW];
    float sums[2][BACKWARD_TILE][ROW];  // du and ddt
    // Of each lane.
    float x[OWN(BACKWARD_TILE)][32][NC], slope[OWN(BACKWARD_TILE)][32][NC], dgate[OWN(BACKWARD_TILE)][32][NC];
    float D[CHANNELS], bias[CHANNELS];

    static_assert(BACKWARD_TILE * VALUES <= NC * NS * 32, "the sums of a tile lie where a state was");
    __device__ __forceinline__ float* place_of_sums(int tile) {
        return reinterpret_cast<float*>(states) + (tile + 1) * (NC * 32 * 4);
    }
};

struct BlockShared {
    BackwardShared warps[WARPS];
    float B[KEEP][PADDED], C[KEEP][PADDED];
};

// Sums over lanes that differ in the bits from `high` down to `low`. With each exchange lanes halve the values they
// hold. Gives the first of the values that a lane then has; -1 where others have the same. `left` is their number.
template <int high, int low, int count>
__device__ __forceinline__ int sum_lanes(float (&values)[count], int& left, int lane) {
    int first = 0;
    bool mine = true;
    left = count;
#pragma unroll
    for (int bit = high; bit >= low; bit /= 2) {
        const bool upper = lane & bit;
        if (left > 1) {
            left /= 2;
#pragma unroll
            for (int v = 0; v < count / 2; ++v)
                if (v < left) {
                    const float low_half = values[v], high_half = values[v + left];
                    const float sent = upper ? low_half : high_half;
                    values[v] = (upper ? high_half : low_half) + __shfl_xor_sync(FULL, sent, bit);
                }
            first += upper ? left : 0;
        } else {
            values[0] += __shfl_xor_sync(FULL, values[0], bit);
            mine = mine && !upper;
        }
    }
    return mine ? first : -1;
}

template <bool with_starts>
__device__ __forceinline__ void recompute_tile(Tile& h, const Tile& A, const BackwardShared& shared,
                                            const BlockShared& block, int tile, unsigned starts, const Place& at) {
#pragma unroll
    for (int i = 0; i < BACKWARD_TILE; ++i) {
        float step[NC], u[NC], B[NS];
        unpack(step, &shared.dt[i][at.group * NC]);
        unpack(u, &shared.u[i][at.group * NC]);
        unpack(B, &block.B[tile * BACKWARD_TILE + i][at.q * NS]);
        if (with_starts && (starts >> i & 1)) clear(h);
        advance(h, A, step, u, B);
    }
}

template <bool with_starts>
__device__ __forceinline__ void backward_tile(float (&y)[OWN(BACKWARD_TILE)][NC], Tile& g, Tile& dA, const Tile& A,
                                              BackwardShared& shared, const BlockShared& block, int tile,
                                              unsigned starts, int mine, const Place& at) {
    Tile h, after[BACKWARD_TILE], decay[BACKWARD_TILE];  // after[i]: the state after step i
    const auto load_start = [&] {
#pragma unroll
        for (int c = 0; c < NC; ++c) {
            float4 v = shared.states[tile][c][at.lane];
            h[c][0] = v.x, h[c][1] = v.y, h[c][2] = v.z, h[c][3] = v.w;
        }
    };
    load_start();
#pragma unroll
    for (int i = 0; i < BACKWARD_TILE; ++i) {
        float dt[NC], u[NC], B[NS], Cs[NS], sums[NC];
        unpack(dt, &shared.dt[i][at.group * NC]);
        unpack(u, &shared.u[i][at.group * NC]);
        unpack(B, &block.B[tile * BACKWARD_TILE + i][at.q * NS]);
        if (with_starts && (starts >> i & 1)) clear(h);
#pragma unroll
        for (int c = 0; c < NC; ++c)
#pragma unroll
            for (int s = 0; s < NS; ++s) {
                decay[i][c][s] = exp2_(dt[c] * A[c][s]);
                h[c][s] = fmaf(decay[i][c][s], h[c][s], u[c] * B[s]);
                after[i][c][s] = h[c][s];
            }
        if (HAS_Z) {
            unpack(Cs, &block.C[tile * BACKWARD_TILE + i][at.q * NS]);
            sum_states(sums, h, Cs);
            add_own<BACKWARD_TILE>(y, i, sums, mine);
        }
    }
    float* out = shared.place_of_sums(tile);  // the states of the tile after this one are not needed any more
#pragma unroll
    for (int i = BACKWARD_TILE - 1; i >= 0; --i) {
        int left;
        float dt[NC], u[NC], dy[NC], B[NS], Cs[NS], sums[2 * NC], sums_BC[2 * NS];  // of du and ddt; of dB and dC
        unpack(dt, &shared.dt[i][at.group * NC]);
        unpack(u, &shared.u[i][at.group * NC]);
        unpack(dy, &shared.dy[i][at.group * NC]);
        unpack(B, &block.B[tile * BACKWARD_TILE + i][at.q * NS]);
        unpack(Cs, &block.C[tile * BACKWARD_TILE + i][at.q * NS]);
        const bool begins = with_starts && (starts >> i & 1);
        if (i == 0) load_start();
#pragma unroll
        for (int c = 0; c < NC; ++c) {
            sums[c] = sums[NC + c] = 0.f;
#pragma unroll
            for (int s = 0; s < NS; ++s) {
                float before = begins ? 0.f : i ? after[(i + BACKWARD_TILE - 1) % BACKWARD_TILE][c][s] : h[c][s];
                float grad = fmaf(Cs[s], dy[c], g[c][s]);
                sums_BC[s] = c ? fmaf(grad, u[c], sums_BC[s]) : grad * u[c];
                sums_BC[NS + s] = c ? fmaf(after[i][c][s], dy[c], sums_BC[NS + s]) : after[i][c][s] * dy[c];
                sums[c] = fmaf(grad, B[s], sums[c]);
                float passed = grad * decay[i][c][s];
                float rate = passed * before;
                sums[NC + c] = fmaf(rate, A[c][s], sums[NC + c]);
                dA[c][s] = fmaf(rate, dt[c], dA[c][s]);
                g[c][s] = begins ? 0.f : passed;
            }
        }
        const int first = sum_lanes<Q / 2, 1>(sums, left, at.lane);
#pragma unroll
        for (int v = 0; v < 2 * NC; ++v)
            if (v < left && first >= 0) shared.sums[(first + v) / NC][i][at.group * NC + (first + v) % NC] = sums[v];
        const int first_BC = sum_lanes<16, Q>(sums_BC, left, at.lane);
#pragma unroll
        for (int v = 0; v < 2 * NS; ++v)
            if (v < left && first_BC >= 0)
                out[i * VALUES + (first_BC + v) / NS * PADDED + at.q * NS + (first_BC + v) % NS] = sums_BC[v];
    }
}

// KEEP steps, or the fewer that are left of the row: backwards from t0 + KEEP to t0.
template <bool whole>
__device__ __forceinline__ void backward_interval(const Backward& p, const Place& at, const int t0, BlockShared& block,
                                                  BackwardShared& shared, const Tile& A, Tile& g, Tile& dA,
                                                  float (&dD)[NC], float (&dbias)[NC], float* dBC) {
    const Inputs& in = p.in;
    const index_t state_size = in.channels * N, kept_per_row = (in.length + KEEP - 1) / KEEP;
    const int steps = whole ? KEEP : at.end - t0, out_step = (int)in.channels;
    {
        const io_t* B = in.B + at.row * in.sB.row + t0 * in.sB.step;
        const io_t* C = in.C + at.row * in.sC.row + t0 * in.sC.step;
        const int B_step = (int)in.sB.step, C_step = (int)in.sC.step;
#pragma unroll
        for (int k = threadIdx.x; k < KEEP * PADDED / 4; k += WARPS * 32) {
            const int i = k * 4 / PADDED, n = k * 4 % PADDED, count = n < N && i < steps ? N - n : 0;
            Four b, c;
            fetch<ALIGNED_STATES>(b, B + (index_t)B_step * i + n, count);
            fetch<ALIGNED_STATES>(c, C + (index_t)C_step * i + n, count);
            unpack_stored(&block.B[0][k * 4], b);
            unpack_stored(&block.C[0][k * 4], c);
        }
    }
    const unsigned all_starts = find_starts(KEEP, t0, at, in);
    if (t0 > at.begin && at.first < in.channels) {  // what the next interval reads may come nearer meanwhile
        const int t = t0 - KEEP + at.lane;
        if (at.lane < KEEP) {
            prefetch(in.x + at.row * in.sx.row + t * in.sx.step + at.first);
            prefetch(in.dt + at.row * in.sdt.row + t * in.sdt.step + at.first);
            if (HAS_Z) prefetch(in.z + at.row * in.sz.row + t * in.sz.step + at.first);
            prefetch(p.dy + at.row * p.sdy.row + t * p.sdy.step + at.first);
        }
        const float* states = p.kept + (at.row * kept_per_row + t0 / KEEP - 1) * state_size + at.first * N;
        if (at.lane * 32 < CHANNELS * N && at.first * N + at.lane * 32 < state_size) prefetch(states + at.lane * 32);
    }
    __syncthreads();

    // Forward once more, from the kept state, to have the state before each tile.
    const int mine = at.q % APART(BACKWARD_TILE);
    Column xs = column(in.x, in.sx, t0 + mine, at), dts = column(in.dt, in.sdt, t0 + mine, at);
    Word x[OWN(BACKWARD_TILE)], dt[OWN(BACKWARD_TILE)], z[OWN(BACKWARD_TILE)], dy[OWN(BACKWARD_TILE)];
    const auto fetch_from = [&](Word(&own)[OWN(BACKWARD_TILE)], const Column& from, int left) {
        if (whole)
            fetch_own<BACKWARD_TILE>(own, from, at);
        else
            fetch_some<BACKWARD_TILE>(own, from, left - mine, at);
    };
    fetch_from(x, xs, steps);
    fetch_from(dt, dts, steps);
    {
        Tile h;
        load_states(h, p.kept + (at.row * kept_per_row + t0 / KEEP) * state_size, at, in);
#pragma unroll 1
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int c = 0; c < NC; ++c)
                shared.states[tile][c][at.lane] = make_float4(h[c][0], h[c][1], h[c][2], h[c][3]);
            if (tile + 1 == TILES) break;
            const int left = steps - tile * BACKWARD_TILE;
#pragma unroll
            for (int k = 0; k < OWN(BACKWARD_TILE); ++k) {
                const int i = mine + k * APART(BACKWARD_TILE);
                float bias[NC], sizes[NC], u[NC];
                unpack(bias, &shared.bias[at.group * NC]);
#pragma unroll
                for (int c = 0; c < NC; ++c) {
                    sizes[c] = step_size(number(dt[k], c) + bias[c]);
                    if (!whole && i >= left) sizes[c] = 0.f;
                    u[c] = sizes[c] * number(x[k], c);
                }
                pack(&shared.dt[i][at.group * NC], sizes);
                pack(&shared.u[i][at.group * NC], u);
            }
            __syncwarp();
            move(xs, BACKWARD_TILE), move(dts, BACKWARD_TILE);
            fetch_from(x, xs, left - BACKWARD_TILE);
            fetch_from(dt, dts, left - BACKWARD_TILE);
            const unsigned starts = all_starts >> tile * BACKWARD_TILE & ((1u << BACKWARD_TILE) - 1);
            if (starts)
                recompute_tile<true>(h, A, shared, block, tile, starts, at);
            else
                recompute_tile<false>(h, A, shared, block, tile, 0, at);
            __syncwarp();
        }
    }

    // Tile by tile from the last: all its states and decays once more, then the gradients.
    const int last = (TILES - 1) * BACKWARD_TILE;
    Column zs = column(HAS_Z ? in.z : in.x, HAS_Z ? in.sz : in.sx, t0 + last + mine, at);
    Column dys = column(p.dy, p.sdy, t0 + last + mine, at);
    if (HAS_Z) fetch_from(z, zs, steps - last);
    fetch_from(dy, dys, steps - last);
    index_t place = (at.row * in.length + t0 + last + mine) * in.channels + at.column;
    io_t* dz = p.dz + at.row * p.sdz.row + (t0 + last + mine) * p.sdz.step + at.column;
    const int dz_step = (int)p.sdz.step;
#pragma unroll 1
    for (int tile = TILES - 1; tile >= 0; --tile) {
        const int left = steps - tile * BACKWARD_TILE;
        float y[OWN(BACKWARD_TILE)][NC];
#pragma unroll
        for (int k = 0; k < OWN(BACKWARD_TILE); ++k) {
            const int i = mine + k * APART(BACKWARD_TILE);
            float D[NC], bias[NC], sizes[NC], u[NC], dplain[NC], inputs[NC], slope[NC], dgate[NC];
            unpack(D, &shared.D[at.group * NC]);
            unpack(bias, &shared.bias[at.group * NC]);
#pragma unroll
            for (int c = 0; c < NC; ++c) {
                const float v = number(dt[k], c) + bias[c];
                sizes[c] = v, slope[c] = 1.f;
#if SOFTPLUS
                const float e = exp2_(-LOG2E * fabsf(v)), r = reciprocal(1.f + e);
                sizes[c] = fmaxf(v, 0.f) + log1p_(e);
                slope[c] = v >= 0.f ? r : e * r;
#endif
                if (!whole && i >= left) sizes[c] = 0.f;
                inputs[c] = number(x[k], c), dplain[c] = number(dy[k], c);
#if HAS_Z
                const float gate = number(z[k], c), open = sigmoid(gate), silu = gate * open;
                dgate[c] = dplain[c] * fmaf(silu, 1.f - open, open);
                dplain[c] *= silu;
#endif
                u[c] = sizes[c] * inputs[c];
                y[k][c] = D[c] * inputs[c];
            }
            pack(&shared.dt[i][at.group * NC], sizes);
            pack(&shared.u[i][at.group * NC], u);
            pack(&shared.dy[i][at.group * NC], dplain);
            pack(shared.x[k][at.lane], inputs);
            pack(shared.slope[k][at.lane], slope);
            if (HAS_Z) pack(shared.dgate[k][at.lane], dgate);
        }
        __syncwarp();
        if (tile > 0) {
            move(xs, -BACKWARD_TILE), move(dts, -BACKWARD_TILE), move(zs, -BACKWARD_TILE), move(dys, -BACKWARD_TILE);
            fetch_from(x, xs, left + BACKWARD_TILE);
            fetch_from(dt, dts, left + BACKWARD_TILE);
            if (HAS_Z) fetch_from(z, zs, left + BACKWARD_TILE);
            fetch_from(dy, dys, left + BACKWARD_TILE);
        }
        const unsigned starts = all_starts >> tile * BACKWARD_TILE & ((1u << BACKWARD_TILE) - 1);
        if (starts)
            backward_tile<true>(y, g, dA, A, shared, block, tile, starts, mine, at);
        else
            backward_tile<false>(y, g, dA, A, shared, block, tile, 0, mine, at);
        __syncwarp();
#pragma unroll
        for (int k = 0; k < OWN(BACKWARD_TILE); ++k) {
            const int i = k * APART(BACKWARD_TILE);
            const bool is_there = whole || mine + i < left;
            const int count = is_there && at.q < APART(BACKWARD_TILE) ? at.count : 0;
            float D[NC], sizes[NC], dplain[NC], inputs[NC], slope[NC], dgate[NC];
            float du[NC], ddt[NC], dx[NC], dv[NC], dgates[NC];
            unpack(du, &shared.sums[0][mine + i][at.group * NC]);
            unpack(ddt, &shared.sums[1][mine + i][at.group * NC]);
            unpack(D, &shared.D[at.group * NC]);
            unpack(sizes, &shared.dt[mine + i][at.group * NC]);
            unpack(dplain, &shared.dy[mine + i][at.group * NC]);
            unpack(inputs, shared.x[k][at.lane]);
            unpack(slope, shared.slope[k][at.lane]);
            if (HAS_Z) unpack(dgate, shared.dgate[k][at.lane]);
#pragma unroll
            for (int c = 0; c < NC; ++c) {
                dv[c] = fmaf(du[c], inputs[c], LN2 * ddt[c]) * slope[c];
                dx[c] = fmaf(du[c], sizes[c], D[c] * dplain[c]);
                if (HAS_Z) dgates[c] = y[k][c] * dgate[c];
                dD[c] = fmaf(dplain[c], inputs[c], dD[c]);
                dbias[c] += is_there ? dv[c] : 0.f;
            }
            write(p.dx + place + (index_t)out_step * i, dx, count);
            write(p.ddt + place + (index_t)out_step * i, dv, count);
            if (HAS_Z) write(dz + (index_t)dz_step * i, dgates, count);
        }
        place -= (index_t)out_step * BACKWARD_TILE;
        dz -= (index_t)dz_step * BACKWARD_TILE;
        __syncwarp();
    }

    // dB and dC over the warps of this block, in a fixed order.
    __syncthreads();
    float* out = dBC + (index_t)t0 * (2 * N);
    for (int k = threadIdx.x; k < KEEP * VALUES; k += WARPS * 32) {
        int i = k / VALUES, v = k % VALUES, n = v % PADDED;
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w)
            sum += block.warps[w].place_of_sums(i / BACKWARD_TILE)[i % BACKWARD_TILE * VALUES + v];
        if (n < N && i < steps) out[i * (2 * N) + v / PADDED * N + n] = sum;
    }
    __syncthreads();
}

#ifdef BACKWARD
extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS) scan_backward(const __grid_constant__ Backward p) {
    extern __shared__ __align__(16) char raw_shared[];
    BlockShared& block = *reinterpret_cast<BlockShared*>(raw_shared);
    BackwardShared& shared = block.warps[threadIdx.x / 32];
    const Inputs& in = p.in;
    const index_t state_size = in.channels * N;
    const index_t channel_blocks = (in.channels + WARPS * CHANNELS - 1) / (WARPS * CHANNELS);
    index_t number = blockIdx.x;
    unsigned* done = nullptr;
    if (p.chained) {  // blocks are numbered as they begin, and the last chunk of time is first
        __shared__ unsigned begun;
        if (threadIdx.x == 0) begun = atomicAdd(p.done, 1u);
        __syncthreads();
        const index_t lanes = channel_blocks * in.batch, round = begun / lanes;
        number = (in.chunks - 1 - round) * lanes + begun % lanes;
        done = p.done + 1 + begun % lanes;
        if (threadIdx.x == 0)
            while (*(volatile unsigned*)done < round) __nanosleep(100);
        __syncthreads();
        __threadfence();
    }
    const Place at = find_place(in, number);
    float* dBC = p.dBC + (number % channel_blocks * in.batch + at.row) * in.length * (2 * N);

    Tile A, g, dA;
    load_A(A, at, in);
    clear(g);
    const index_t here = at.row * in.chunks + at.chunk;
    if (p.chained && at.end < in.length)
        load_states(g, p.chained + here * state_size, at, in);
    else if (p.dstates)
        load_states(g, p.dstates + (p.chained ? at.row : here) * state_size, at, in);
    clear(dA);
    float dD[NC] = {}, dbias[NC] = {};
    stage_channels(shared.D, in.D, at);
    stage_channels(shared.bias, in.bias, at);
    int t0 = (at.end - 1) / KEEP * KEEP;
    if (at.end - t0 < KEEP) {
        backward_interval<false>(p, at, t0, block, shared, A, g, dA, dD, dbias, dBC);
        t0 -= KEEP;
    }
    for (; t0 >= at.begin; t0 -= KEEP)
        backward_interval<true>(p, at, t0, block, shared, A, g, dA, dD, dbias, dBC);

    if (p.chained && at.chunk > 0) {
        store_states(g, p.chained + (here - 1) * state_size, at, in);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) atomicAdd(done, 1u);
    }
    if (at.begin == 0 && p.dinitial) store_states(g, p.dinitial + at.row * state_size, at, in);
    float* parts = p.parts + here * in.channels * (N + 2);
#pragma unroll
    for (int c = 0; c < NC; ++c)
#pragma unroll
        for (int s = 0; s < NS; ++s) {
            index_t channel = at.first + at.group * NC + c;
            int n = at.q * NS + s;
            if (channel < in.channels && n < N) parts[channel * (N + 2) + n] = dA[c][s];
        }
    sum_group<BACKWARD_TILE>(dD);
    sum_group<BACKWARD_TILE>(dbias);
#pragma unroll
    for (int c = 0; c < NC; ++c)
        if (at.q == 0 && c < at.count) {
            parts[(at.column + c) * (N + 2) + N] = dD[c];
            parts[(at.column + c) * (N + 2) + N + 1] = dbias[c];
        }
}

struct BlockSums {
    const float* dBC;  // (blocks, batch * length, 2 N)
    io_t *dB, *dC;     // (batch * length, N)
    index_t blocks, steps;
};

extern "C" __global__ void scan_sum_dB_dC(const __grid_constant__ BlockSums p) {
    index_t place = (index_t)blockIdx.x * blockDim.x + threadIdx.x, size = p.steps * (2 * N);
    if (place >= size) return;
    float sum = 0.f;
    for (index_t k = 0; k < p.blocks; ++k) sum += p.dBC[k * size + place];
    index_t step = place / (2 * N), v = place % (2 * N);
    (v < N ? p.dB : p.dC)[step * N + v % N] = narrow(sum);
}
#endif

#ifdef CHUNKED
// The gradient of the state before each chunk, of that chunk alone: g = decay (g + C dy), backwards through it.
extern "C" __global__ void __launch_bounds__(WARPS * 32) scan_chunk_dstates(const __grid_constant__ Backward p) {
    __shared__ __align__(16) ForwardShared all_shared[WARPS];
    const Inputs& in = p.in;
    ForwardShared& shared = all_shared[threadIdx.x / 32];
    const Place at = find_place(in, blockIdx.x);
    if (at.first >= in.channels) return;
    Tile A, g;
    load_A(A, at, in);
    clear(g);
    const int mine = at.q % APART(FORWARD_TILE);
    float bias[NC], total[NC] = {};
    stage_channels(shared.bias, in.bias, at);
    __syncwarp();
    unpack(bias, &shared.bias[at.group * NC]);
    Word dt[OWN(FORWARD_TILE)], z[OWN(FORWARD_TILE)], dy[OWN(FORWARD_TILE)];
    Four C[FOURS];
    int t = at.begin + (at.end - 1 - at.begin) / FORWARD_TILE * FORWARD_TILE;
    Column dts = column(in.dt, in.sdt, t + mine, at), dys = column(p.dy, p.sdy, t + mine, at);
    Column zs = column(HAS_Z ? in.z : in.x, HAS_Z ? in.sz : in.sx, t + mine, at);
    Column Cs = states_column(in.C, in.sC, t, at);
    fetch_some<FORWARD_TILE>(dt, dts, at.end - t - mine, at);
    fetch_some<FORWARD_TILE>(dy, dys, at.end - t - mine, at);
    if (HAS_Z) fetch_some<FORWARD_TILE>(z, zs, at.end - t - mine, at);
    fetch_states(C, Cs, at.end - t, at);
    for (; t >= at.begin; t -= FORWARD_TILE) {
        const int left = at.end - t;
#pragma unroll
        for (int k = 0; k < OWN(FORWARD_TILE); ++k) {
            const int i = mine + k * APART(FORWARD_TILE);
            float steps[NC], dplain[NC];
#pragma unroll
            for (int c = 0; c < NC; ++c) {
                steps[c] = i < left ? step_size(number(dt[k], c) + bias[c]) : 0.f;
                dplain[c] = number(dy[k], c);
#if HAS_Z
                const float gate = number(z[k], c);
                dplain[c] *= gate * sigmoid(gate);
#endif
                total[c] += steps[c];
            }
            pack(&shared.dt[i][at.group * NC], steps);
            pack(&shared.u[i][at.group * NC], dplain);
        }
        stage_states(shared.C, C, at.lane);
        const unsigned starts = find_starts(FORWARD_TILE, t, at, in);
        __syncwarp();
        if (t > at.begin) {
            move(dts, -FORWARD_TILE), move(dys, -FORWARD_TILE), move(zs, -FORWARD_TILE), move(Cs, -FORWARD_TILE);
            fetch_own<FORWARD_TILE>(dt, dts, at);
            fetch_own<FORWARD_TILE>(dy, dys, at);
            if (HAS_Z) fetch_own<FORWARD_TILE>(z, zs, at);
            fetch_states(C, Cs, FORWARD_TILE, at);
        }
        if (starts)
#pragma unroll
            for (int c = 0; c < NC; ++c) total[c] = __int_as_float(0x7f800000);
#pragma unroll
        for (int i = FORWARD_TILE - 1; i >= 0; --i) {
            float step[NC], dplain[NC], C_[NS];
            unpack(step, &shared.dt[i][at.group * NC]);
            unpack(dplain, &shared.u[i][at.group * NC]);
            unpack(C_, &shared.C[i][at.q * NS]);
#pragma unroll
            for (int c = 0; c < NC; ++c)
#pragma unroll
                for (int s = 0; s < NS; ++s)
                    g[c][s] = exp2_(step[c] * A[c][s]) * fmaf(C_[s], dplain[c], g[c][s]);
            if (starts >> i & 1) clear(g);
        }
        __syncwarp();
    }
    const index_t place = at.row * in.chunks + at.chunk;
    store_states(g, p.chunk_dstates + place * in.channels * N, at, in);
    store_total(p.total_dt + place * in.channels, total, at);
}
#endif
