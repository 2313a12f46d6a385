// Selective scan, forward and backward.
//
// A warp has CHANNELS neighbouring channels of one row of the batch and goes along time. Each thread keeps the states
// of 4 channels x 4 states in registers: Q lanes share 4 channels and divide their N states, and 32 / Q such groups
// are a warp. So B and C are read once for 4 channels and dt x once for 4 states, and sums over states (y, and the
// gradients per channel) or over channels (dB, dC) are half done in registers before a shuffle is needed.
//
// Compiled with N (states, up to 64), IO (common.cuh), HAS_Z, SOFTPLUS; WARPS of a block; KEEP, the steps between the
// states that forward keeps for backward; FORWARD_TILE and BACKWARD_TILE, the steps of a tile in either direction: all
// states of a tile of BACKWARD_TILE are in registers.

#define NC 4  // channels of a thread
#define NS 4  // states of a thread
#define Q (N <= NS ? 1 : N <= 2 * NS ? 2 : N <= 4 * NS ? 4 : N <= 8 * NS ? 8 : 16)  // lanes that share channels
#define PADDED (Q * NS)                                                 // N, or a little more
#define CHANNELS (32 / Q * NC)                                          // of a warp
#define OWN (Q < NC ? NC / Q : 1)  // channels whose inputs and outputs a lane moves
#define PARTS (Q > NC ? Q / NC : 1)  // lanes that have the same own channel

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
    int own;            // the first of this lane's own channels, counted from `first`
    index_t column;     // the same channel, counted from the tensor's first and held inside the tensor
    int near[OWN];      // its own channels counted from `column`, held inside the tensor
    bool real[OWN];     // whether they are inside
    bool writes[OWN];   // whether this lane is the one that writes them
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
    at.own = at.group * NC + (Q < NC ? at.q * OWN : at.q % NC);
    at.column = min(at.first + at.own, in.channels - 1);
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
        at.real[j] = at.first + at.own + j < in.channels;
        at.writes[j] = at.real[j] && at.q < NC;
        at.near[j] = j ? (int)(min(at.first + at.own + j, in.channels - 1) - at.column) : 0;
    }
    return at;
}

// A lane's own channels of a tensor, step after step.
struct Column {
    const io_t* now;
    int step;
};

__device__ __forceinline__ Column column(const io_t* memory, Strides stride, int t, const Place& at) {
    return {memory + at.row * stride.row + t * stride.step + at.column, (int)stride.step};
}

// `count` steps from where the column stands, as they are stored.
template <int count>
__device__ __forceinline__ void fetch(io_t (&values)[count][OWN], const Column& from, const Place& at) {
#pragma unroll
    for (int i = 0; i < count; ++i)
#pragma unroll
        for (int j = 0; j < OWN; ++j) values[i][j] = from.now[(index_t)from.step * i + at.near[j]];
}

// The same where only `left` steps are there; zeros after them.
template <int count>
__device__ __forceinline__ void fetch_some(io_t (&values)[count][OWN], const Column& from, int left, const Place& at) {
#pragma unroll
    for (int i = 0; i < count; ++i)
#pragma unroll
        for (int j = 0; j < OWN; ++j)
            values[i][j] = i < left ? from.now[(index_t)from.step * i + at.near[j]] : (io_t)0;
}

__device__ __forceinline__ void move(Column& column, int steps) { column.now += (index_t)column.step * steps; }

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
                *reinterpret_cast<float4*>(memory + c * N) = make_float4(h[c][0], h[c][1], h[c][2], h[c][3]);
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

__device__ __forceinline__ float step_size(io_t dt, float bias) {
    float v = widen(dt) + bias;
#if SOFTPLUS
    return softplus(v);
#else
    return v;
#endif
}

__device__ __forceinline__ void prefetch(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

__device__ __forceinline__ void unpack(float (&values)[4], const float* memory) {
    const float4 v = *reinterpret_cast<const float4*>(memory);
    values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
}

// The sums of `values[c]` over the Q lanes that share channels; lane q gets those of its own channels.
__device__ __forceinline__ void sum_states(float (&own)[OWN], float (&values)[NC], int q) {
    int left = NC;
#pragma unroll
    for (int bit = (Q < NC ? Q : NC) / 2; bit >= 1; bit /= 2) {  // each lane of a pair keeps half of the channels
        left /= 2;
#pragma unroll
        for (int c = 0; c < NC / 2; ++c)
            if (c < left) {
                float low = values[c], high = values[c + left];
                float other = q & bit ? low : high;
                values[c] = (q & bit ? high : low) + __shfl_xor_sync(FULL, other, bit);
            }
    }
#pragma unroll
    for (int bit = NC; bit < Q; bit *= 2)  // more lanes than channels: these hold the same one
        values[0] += __shfl_xor_sync(FULL, values[0], bit);
#pragma unroll
    for (int j = 0; j < OWN; ++j) own[j] = values[j];
}

// One step: h = exp(dt A) h + u B, with u = dt x.
__device__ __forceinline__ void advance(Tile& h, const Tile& A, const float (&dt)[NC], const float (&u)[NC],
                                        const float (&B)[NS]) {
#pragma unroll
    for (int c = 0; c < NC; ++c)
#pragma unroll
        for (int s = 0; s < NS; ++s) h[c][s] = fmaf(exp2_(dt[c] * A[c][s]), h[c][s], u[c] * B[s]);
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
    float dt[FORWARD_TILE][CHANNELS], u[FORWARD_TILE][CHANNELS];
    float B[FORWARD_TILE][PADDED], C[FORWARD_TILE][PADDED];
};

// B or C of a tile, by all lanes of a warp: lane l takes every 32nd of its values.
#define TILE_WORDS ((FORWARD_TILE * PADDED + 31) / 32)

__device__ __forceinline__ Column states_column(const io_t* memory, Strides stride, int t, const Place& at) {
    return {memory + at.row * stride.row + (t + at.lane / PADDED) * stride.step + at.lane % PADDED, (int)stride.step};
}

__device__ __forceinline__ void fetch_states(io_t (&values)[TILE_WORDS], const Column& from, int left,
                                             const Place& at) {
#pragma unroll
    for (int k = 0; k < TILE_WORDS; ++k) {
        const int i = k * 32 / PADDED, n = k * 32 % PADDED;  // from where this lane stands
        const bool inside = i + at.lane / PADDED < left && n + at.lane % PADDED < N;
        values[k] = inside ? from.now[(index_t)from.step * i + n] : (io_t)0;
    }
}

__device__ __forceinline__ void stage_states(float (&tile)[FORWARD_TILE][PADDED], const io_t (&values)[TILE_WORDS],
                                             int lane) {
#pragma unroll
    for (int k = 0; k < TILE_WORDS; ++k)
        if (k * 32 + lane < FORWARD_TILE * PADDED) tile[0][k * 32 + lane] = widen(values[k]);
}

template <bool with_output, bool with_starts>
__device__ __forceinline__ void forward_tile(float (&y)[FORWARD_TILE][OWN], Tile& h, const Tile& A,
                                             const ForwardShared& shared, unsigned starts, const Place& at) {
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
#pragma unroll
            for (int c = 0; c < NC; ++c) {
                sums[c] = h[c][0] * Cs[0];
#pragma unroll
                for (int s = 1; s < NS; ++s) sums[c] = fmaf(h[c][s], Cs[s], sums[c]);
            }
            sum_states(y[i], sums, at.q);
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

    Tile A, h;
    load_A(A, at, in);
    const index_t state_size = in.channels * N;
    clear(h);
    if (with_output && p.initial_states)
        load_states(h, p.initial_states + (at.row * in.chunks + at.chunk) * state_size, at, in);
    float D[OWN], bias[OWN], total[OWN];
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
        index_t channel = at.column + at.near[j];
        D[j] = in.D ? in.D[channel] : 0.f;
        bias[j] = in.bias ? in.bias[channel] : 0.f;
        total[j] = 0.f;
    }
    float* kept = p.kept + (at.row * ((in.length + KEEP - 1) / KEEP) + at.begin / KEEP) * state_size;
    io_t* y = p.y + (at.row * in.length + at.begin) * in.channels + at.first + at.own;
    const int y_step = (int)in.channels;
    Column xs = column(in.x, in.sx, at.begin, at), dts = column(in.dt, in.sdt, at.begin, at);
    Column zs = column(HAS_Z ? in.z : in.x, HAS_Z ? in.sz : in.sx, at.begin, at);
    Column Bs = states_column(in.B, in.sB, at.begin, at), Cs = states_column(in.C, in.sC, at.begin, at);

    io_t x[FORWARD_TILE][OWN], dt[FORWARD_TILE][OWN], z[FORWARD_TILE][OWN], B[TILE_WORDS], C[TILE_WORDS];
    const auto fetch_tile = [&] {
        fetch(x, xs, at);
        fetch(dt, dts, at);
        fetch_states(B, Bs, FORWARD_TILE, at);
        if (with_output) fetch_states(C, Cs, FORWARD_TILE, at);
    };
    int left = at.end - at.begin;
    if (left >= FORWARD_TILE) fetch_tile();
    for (int t = at.begin; t < at.end; t += FORWARD_TILE, left -= FORWARD_TILE) {
        const bool full = left >= FORWARD_TILE;
        if (!full) {
            fetch_some(x, xs, left, at);
            fetch_some(dt, dts, left, at);
            fetch_states(B, Bs, left, at);
            if (with_output) fetch_states(C, Cs, left, at);
        }
        float skip[FORWARD_TILE][OWN];
#pragma unroll
        for (int i = 0; i < FORWARD_TILE; ++i)
#pragma unroll
            for (int j = 0; j < OWN; ++j) {
                float input = widen(x[i][j]), step = step_size(dt[i][j], bias[j]);
                shared.dt[i][at.own + j] = step;
                shared.u[i][at.own + j] = step * input;
                if (with_output)
                    skip[i][j] = D[j] * input;
                else if (full || i < left)
                    total[j] += step;
            }
        if (!full)  // steps that are not there change nothing
#pragma unroll
            for (int i = 0; i < FORWARD_TILE; ++i)
#pragma unroll
                for (int j = 0; j < OWN; ++j)
                    if (i >= left) shared.dt[i][at.own + j] = 0.f;
        stage_states(shared.B, B, at.lane);
        if (with_output) stage_states(shared.C, C, at.lane);
        unsigned starts = find_starts(FORWARD_TILE, t, at, in);
        __syncwarp();
        if (with_output && HAS_Z) {
            if (full)
                fetch(z, zs, at);
            else
                fetch_some(z, zs, left, at);
            move(zs, FORWARD_TILE);
        }
        move(xs, FORWARD_TILE), move(dts, FORWARD_TILE), move(Bs, FORWARD_TILE), move(Cs, FORWARD_TILE);
        if (left >= 2 * FORWARD_TILE) fetch_tile();  // the next, while this one is computed
        if (with_output && t % KEEP == 0) {
            store_states(h, kept, at, in);
            kept += state_size;
        }
        float sums[FORWARD_TILE][OWN];
        if (starts) {
            forward_tile<with_output, true>(sums, h, A, shared, starts, at);
#pragma unroll
            for (int j = 0; j < OWN; ++j) total[j] = __int_as_float(0x7f800000);
        } else {
            forward_tile<with_output, false>(sums, h, A, shared, 0, at);
        }
        if (with_output) {
#pragma unroll
            for (int i = 0; i < FORWARD_TILE; ++i)
#pragma unroll
                for (int j = 0; j < OWN; ++j) {
                    float value = sums[i][j] + skip[i][j];
#if HAS_Z
                    float gate = widen(z[i][j]);
                    value *= gate * sigmoid(gate);
#endif
                    if (at.writes[j] && (full || i < left)) y[(index_t)y_step * i + j] = narrow(value);
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
#pragma unroll
        for (int j = 0; j < OWN; ++j)
            if (at.writes[j]) p.total_dt[place * in.channels + at.first + at.own + j] = total[j];
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
#define COUNT (BACKWARD_TILE / PARTS)  // steps of a tile whose inputs and outputs a lane moves, for its own channels
#define VALUES (2 * PADDED)  // dB and dC of a step

struct BackwardShared {
    float4 states[TILES][NC][32];  // the state before each tile; then the dB and dC of the tile before it
    float last[BACKWARD_TILE][VALUES];    // the dB and dC of the last tile: just where one more state would be
    float dt[BACKWARD_TILE][CHANNELS], u[BACKWARD_TILE][CHANNELS], dy[BACKWARD_TILE][CHANNELS];
    // For the end of the tile.
    float x[BACKWARD_TILE][CHANNELS], slope[BACKWARD_TILE][CHANNELS], dgate[BACKWARD_TILE][CHANNELS];

    __device__ __forceinline__ float* place_of_sums(int tile) {
        return reinterpret_cast<float*>(states) + (tile + 1) * (NC * 32 * 4);
    }
};

struct BlockShared {
    BackwardShared warps[WARPS];
    float B[KEEP][PADDED], C[KEEP][PADDED];
};

// The sums over all channels of a warp of dB and dC, of which a thread has NS each: with each exchange, lanes that have
// the same states halve the values they hold, and they write the values that are left.
__device__ __forceinline__ void sum_channels(float* out, float (&values)[2 * NS], const Place& at) {
    int left = 2 * NS, first = 0;
    bool mine = true;
#pragma unroll
    for (int bit = 16; bit >= Q; bit /= 2) {
        bool upper = at.lane & bit;
        if (left > 1) {
            left /= 2;
#pragma unroll
            for (int v = 0; v < NS; ++v)
                if (v < left) {
                    float low = values[v], high = values[v + left];
                    values[v] = (upper ? high : low) + __shfl_xor_sync(FULL, upper ? low : high, bit);
                }
            first += upper ? left : 0;
        } else {
            values[0] += __shfl_xor_sync(FULL, values[0], bit);
            mine = mine && !upper;
        }
    }
#pragma unroll
    for (int v = 0; v < 2 * NS; ++v)
        if (v < left && mine) out[(first + v) / NS * PADDED + at.q * NS + (first + v) % NS] = values[v];
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

// `sum_states` of step i, kept by the lanes whose step it is.
__device__ __forceinline__ void sum_own_states(float (&own)[COUNT][OWN], int i, float (&values)[NC], const Place& at) {
    float sums[OWN];
    sum_states(sums, values, at.q);
#pragma unroll
    for (int j = 0; j < OWN; ++j)
        if (PARTS == 1 || at.q / NC == i / COUNT) own[i % COUNT][j] = sums[j];
}

template <bool with_starts>
__device__ __forceinline__ void backward_tile(float (&y)[COUNT][OWN], float (&du)[COUNT][OWN],
                                              float (&ddt)[COUNT][OWN], Tile& g, Tile& dA, const Tile& A,
                                              BackwardShared& shared, const BlockShared& block, int tile,
                                              unsigned starts, const Place& at) {
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
        if (HAS_Z) unpack(Cs, &block.C[tile * BACKWARD_TILE + i][at.q * NS]);
        if (with_starts && (starts >> i & 1)) clear(h);
#pragma unroll
        for (int c = 0; c < NC; ++c) {
            sums[c] = 0.f;
#pragma unroll
            for (int s = 0; s < NS; ++s) {
                decay[i][c][s] = exp2_(dt[c] * A[c][s]);
                h[c][s] = fmaf(decay[i][c][s], h[c][s], u[c] * B[s]);
                after[i][c][s] = h[c][s];
                if (HAS_Z) sums[c] = fmaf(h[c][s], Cs[s], sums[c]);
            }
        }
        if (HAS_Z) sum_own_states(y, i, sums, at);
    }
    float* out = shared.place_of_sums(tile);  // the states of the tile after this one are not needed any more
#pragma unroll
    for (int i = BACKWARD_TILE - 1; i >= 0; --i) {
        float dt[NC], u[NC], dy[NC], B[NS], Cs[NS], sums_u[NC], sums_dt[NC], sums_BC[2 * NS];
        unpack(dt, &shared.dt[i][at.group * NC]);
        unpack(u, &shared.u[i][at.group * NC]);
        unpack(dy, &shared.dy[i][at.group * NC]);
        unpack(B, &block.B[tile * BACKWARD_TILE + i][at.q * NS]);
        unpack(Cs, &block.C[tile * BACKWARD_TILE + i][at.q * NS]);
        const bool begins = with_starts && (starts >> i & 1);
        if (i == 0) load_start();
#pragma unroll
        for (int c = 0; c < NC; ++c) {
            sums_u[c] = sums_dt[c] = 0.f;
#pragma unroll
            for (int s = 0; s < NS; ++s) {
                float before = begins ? 0.f : i ? after[(i + BACKWARD_TILE - 1) % BACKWARD_TILE][c][s] : h[c][s];
                float grad = fmaf(Cs[s], dy[c], g[c][s]);
                sums_BC[s] = c ? fmaf(grad, u[c], sums_BC[s]) : grad * u[c];
                sums_BC[NS + s] = c ? fmaf(after[i][c][s], dy[c], sums_BC[NS + s]) : after[i][c][s] * dy[c];
                sums_u[c] = fmaf(grad, B[s], sums_u[c]);
                float passed = grad * decay[i][c][s];
                float rate = passed * before;
                sums_dt[c] = fmaf(rate, A[c][s], sums_dt[c]);
                dA[c][s] = fmaf(rate, dt[c], dA[c][s]);
                g[c][s] = begins ? 0.f : passed;
            }
        }
        sum_own_states(du, i, sums_u, at);
        sum_own_states(ddt, i, sums_dt, at);
        sum_channels(out + i * VALUES, sums_BC, at);
    }
}

// KEEP steps, or the fewer that are left of the row: backwards from t0 + KEEP to t0.
template <bool whole>
__device__ __forceinline__ void backward_interval(const Backward& p, const Place& at, const int t0, BlockShared& block,
                                                  BackwardShared& shared, const Tile& A, Tile& g, Tile& dA,
                                                  const float (&D)[OWN], const float (&bias)[OWN], float (&dD)[OWN],
                                                  float (&dbias)[OWN], float* dBC) {
    const Inputs& in = p.in;
    const index_t state_size = in.channels * N, kept_per_row = (in.length + KEEP - 1) / KEEP;
    const int steps = whole ? KEEP : at.end - t0, out_step = (int)in.channels;
    {
        const io_t* B = in.B + at.row * in.sB.row + t0 * in.sB.step;
        const io_t* C = in.C + at.row * in.sC.row + t0 * in.sC.step;
        const int B_step = (int)in.sB.step, C_step = (int)in.sC.step;
#pragma unroll
        for (int k = threadIdx.x; k < KEEP * PADDED; k += WARPS * 32) {
            const int i = k / PADDED, n = k % PADDED;
            const bool inside = n < N && i < steps;
            block.B[0][k] = inside ? widen(B[(index_t)B_step * i + n]) : 0.f;
            block.C[0][k] = inside ? widen(C[(index_t)C_step * i + n]) : 0.f;
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
    const int mine = at.q / NC * COUNT;  // the first of this lane's steps in a tile
    Column xs = column(in.x, in.sx, t0 + mine, at), dts = column(in.dt, in.sdt, t0 + mine, at);
    io_t x[COUNT][OWN], dt[COUNT][OWN], z[COUNT][OWN], dy[COUNT][OWN];
    const auto fetch_from = [&](io_t(&values)[COUNT][OWN], const Column& from, int left) {
        if (whole)
            fetch(values, from, at);
        else
            fetch_some(values, from, left - mine, at);
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
            for (int i = 0; i < COUNT; ++i)
#pragma unroll
                for (int j = 0; j < OWN; ++j) {
                    float step = step_size(dt[i][j], bias[j]);
                    step = whole || mine + i < left ? step : 0.f;
                    shared.dt[mine + i][at.own + j] = step;
                    shared.u[mine + i][at.own + j] = step * widen(x[i][j]);
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
    index_t place = (at.row * in.length + t0 + last + mine) * in.channels + at.first + at.own;
    io_t* dz = p.dz + at.row * p.sdz.row + (t0 + last + mine) * p.sdz.step + at.first + at.own;
    const int dz_step = (int)p.sdz.step;
#pragma unroll 1
    for (int tile = TILES - 1; tile >= 0; --tile) {
        const int left = steps - tile * BACKWARD_TILE;
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int j = 0; j < OWN; ++j) {
                const bool inside = (whole || mine + i < left) && at.real[j];
                float v = widen(dt[i][j]) + bias[j], slope = 1.f, step = v;
#if SOFTPLUS
                float e = exp2_(-LOG2E * fabsf(v)), r = reciprocal(1.f + e);
                step = fmaxf(v, 0.f) + log1p_(e);
                slope = v >= 0.f ? r : e * r;
#endif
                step = inside ? step : 0.f;
                float input = inside ? widen(x[i][j]) : 0.f, dplain = inside ? widen(dy[i][j]) : 0.f;
#if HAS_Z
                float gate = widen(z[i][j]), open = sigmoid(gate), silu = gate * open;
                shared.dgate[mine + i][at.own + j] = dplain * fmaf(silu, 1.f - open, open);
                dplain *= silu;
#endif
                shared.dt[mine + i][at.own + j] = step;
                shared.u[mine + i][at.own + j] = step * input;
                shared.dy[mine + i][at.own + j] = dplain;
                shared.x[mine + i][at.own + j] = input;
                shared.slope[mine + i][at.own + j] = slope;
            }
        __syncwarp();
        if (tile > 0) {
            move(xs, -BACKWARD_TILE), move(dts, -BACKWARD_TILE), move(zs, -BACKWARD_TILE), move(dys, -BACKWARD_TILE);
            fetch_from(x, xs, left + BACKWARD_TILE);
            fetch_from(dt, dts, left + BACKWARD_TILE);
            if (HAS_Z) fetch_from(z, zs, left + BACKWARD_TILE);
            fetch_from(dy, dys, left + BACKWARD_TILE);
        }
        float y[COUNT][OWN], du[COUNT][OWN], ddt[COUNT][OWN];
        const unsigned starts = all_starts >> tile * BACKWARD_TILE & ((1u << BACKWARD_TILE) - 1);
        if (starts)
            backward_tile<true>(y, du, ddt, g, dA, A, shared, block, tile, starts, at);
        else
            backward_tile<false>(y, du, ddt, g, dA, A, shared, block, tile, 0, at);
        io_t *dx = p.dx + place, *ddt_out = p.ddt + place;
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int j = 0; j < OWN; ++j) {
                const index_t offset = (index_t)out_step * i + j;
                const bool writes = at.real[j] && (whole || mine + i < left);
                const float input = shared.x[mine + i][at.own + j], dplain = shared.dy[mine + i][at.own + j];
                const float skipped = D[j] * dplain, step = shared.dt[mine + i][at.own + j];
                const float dv = fmaf(du[i][j], input, LN2 * ddt[i][j]) * shared.slope[mine + i][at.own + j];
                if (writes) {
                    dx[offset] = narrow(fmaf(du[i][j], step, skipped));
                    ddt_out[offset] = narrow(dv);
#if HAS_Z
                    dz[(index_t)dz_step * i + j] =
                        narrow(fmaf(D[j], input, y[i][j]) * shared.dgate[mine + i][at.own + j]);
#endif
                }
                dD[j] = fmaf(dplain, input, dD[j]);
                dbias[j] += whole || mine + i < left ? dv : 0.f;
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
    float D[OWN], bias[OWN], dD[OWN], dbias[OWN];
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
        D[j] = in.D ? in.D[at.column + at.near[j]] : 0.f;
        bias[j] = in.bias ? in.bias[at.column + at.near[j]] : 0.f;
        dD[j] = dbias[j] = 0.f;
    }
    int t0 = (at.end - 1) / KEEP * KEEP;
    if (at.end - t0 < KEEP) {
        backward_interval<false>(p, at, t0, block, shared, A, g, dA, D, bias, dD, dbias, dBC);
        t0 -= KEEP;
    }
    for (; t0 >= at.begin; t0 -= KEEP)
        backward_interval<true>(p, at, t0, block, shared, A, g, dA, D, bias, dD, dbias, dBC);

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
#pragma unroll
    for (int j = 0; j < OWN; ++j)
#pragma unroll
        for (int bit = NC; bit < NC * PARTS; bit *= 2) {
            dD[j] += __shfl_xor_sync(FULL, dD[j], bit);
            dbias[j] += __shfl_xor_sync(FULL, dbias[j], bit);
        }
#pragma unroll
    for (int j = 0; j < OWN; ++j)
        if (at.writes[j]) {
            parts[(at.first + at.own + j) * (N + 2) + N] = dD[j];
            parts[(at.first + at.own + j) * (N + 2) + N + 1] = dbias[j];
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
    float bias[OWN], total[OWN];
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
        bias[j] = in.bias ? in.bias[at.column + at.near[j]] : 0.f;
        total[j] = 0.f;
    }
    io_t dt[FORWARD_TILE][OWN], z[FORWARD_TILE][OWN], dy[FORWARD_TILE][OWN], C[TILE_WORDS];
    int t = at.begin + (at.end - 1 - at.begin) / FORWARD_TILE * FORWARD_TILE;
    Column dts = column(in.dt, in.sdt, t, at), dys = column(p.dy, p.sdy, t, at);
    Column zs = column(HAS_Z ? in.z : in.x, HAS_Z ? in.sz : in.sx, t, at);
    Column Cs = states_column(in.C, in.sC, t, at);
    fetch_some(dt, dts, at.end - t, at);
    fetch_some(dy, dys, at.end - t, at);
    if (HAS_Z) fetch_some(z, zs, at.end - t, at);
    fetch_states(C, Cs, at.end - t, at);
    for (; t >= at.begin; t -= FORWARD_TILE) {
        const int left = at.end - t;
#pragma unroll
        for (int i = 0; i < FORWARD_TILE; ++i)
#pragma unroll
            for (int j = 0; j < OWN; ++j) {
                float step = i < left ? step_size(dt[i][j], bias[j]) : 0.f;
                float dplain = widen(dy[i][j]);
#if HAS_Z
                float gate = widen(z[i][j]);
                dplain *= gate * sigmoid(gate);
#endif
                shared.dt[i][at.own + j] = step;
                shared.u[i][at.own + j] = dplain;
                total[j] += step;
            }
        stage_states(shared.C, C, at.lane);
        const unsigned starts = find_starts(FORWARD_TILE, t, at, in);
        __syncwarp();
        if (t > at.begin) {
            move(dts, -FORWARD_TILE), move(dys, -FORWARD_TILE), move(zs, -FORWARD_TILE), move(Cs, -FORWARD_TILE);
            fetch(dt, dts, at);
            fetch(dy, dys, at);
            if (HAS_Z) fetch(z, zs, at);
            fetch_states(C, Cs, FORWARD_TILE, at);
        }
        if (starts)
#pragma unroll
            for (int j = 0; j < OWN; ++j) total[j] = __int_as_float(0x7f800000);
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
#pragma unroll
    for (int j = 0; j < OWN; ++j)
        if (at.writes[j]) p.total_dt[place * in.channels + at.first + at.own + j] = total[j];
}
#endif
