// Causal depthwise convolution along time, forward and backward.
//
// A thread has V neighbouring channels and goes along a chunk of time with the last W - 1 inputs in registers, so every
// input is read once. Where a document begins, these inputs become zero.
//
// Compiled with W (taps), V (channels of a thread: 4, which are one word of memory, or 1), STEPS (that are read at once), IO
// (common.cuh), SILU, DOCUMENTS; for backward MORE, whether the gradient of y comes in two parts.

#define PAST (W - 1)
#define HELD (W > 1 ? W - 1 : 1)  // no array is empty
#define THREADS 128

struct Strides {
    index_t row, step;
};

struct Inputs {
    const io_t* x;
    Strides sx;
    const float *weight, *bias;  // (channels, W), (channels)
    const int* documents;        // (batch, length), contiguous
    const io_t* initial;         // (batch, W - 1, channels), contiguous
    index_t batch, length, channels, chunk_length;
};

typedef float Wide[V];

#if V == 4
typedef Four Stored;
#else
struct Stored {
    io_t values[V];
};

__device__ __forceinline__ float number(const Stored& stored, int v) { return widen(stored.values[v]); }
#endif

__device__ __forceinline__ void widen_all(Wide& values, const Stored& stored) {
#pragma unroll
    for (int v = 0; v < V; ++v) values[v] = number(stored, v);
}

__device__ __forceinline__ void store(io_t* memory, const Wide& values) {
#if V == 4
    store_four(memory, values);
#else
#pragma unroll
    for (int v = 0; v < V; ++v) memory[v] = narrow(values[v]);
#endif
}

__device__ __forceinline__ Stored load(const io_t* memory) { return *reinterpret_cast<const Stored*>(memory); }

struct Place {
    index_t row, channel, chunk;
    int begin, end;
    bool inside;
};

__device__ __forceinline__ Place find_place(const Inputs& in) {
    const index_t groups = in.channels / V, chunks = (in.length + in.chunk_length - 1) / in.chunk_length;
    const index_t number = (index_t)blockIdx.x * THREADS + threadIdx.x;
    Place at;
    at.channel = number % groups * V;
    at.chunk = number / groups % chunks;
    at.row = number / groups / chunks;
    at.begin = (int)(at.chunk * in.chunk_length);
    at.end = (int)min(at.begin + in.chunk_length, in.length);
    at.inside = at.row < in.batch;
    return at;
}

__device__ __forceinline__ void load_parameters(float (&weight)[W][V], Wide& bias, const Inputs& in, index_t channel) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int k = 0; k < W; ++k) weight[k][v] = in.weight[(channel + v) * W + k];  // the newest tap last
        bias[v] = in.bias ? in.bias[channel + v] : 0.f;
    }
}

// The W - 1 inputs before `t`, the newest last, zero where they are older than the document of t - 1. Gives how many of
// them belong to it.
__device__ __forceinline__ int load_past(float (&past)[HELD][V], const Inputs& in, index_t row, index_t channel,
                                         int t) {
    int age = PAST;
#pragma unroll
    for (int k = 1; k <= PAST; ++k) {
        const int s = t - k;
        bool known = s >= 0 || in.initial;
#if DOCUMENTS
        const int* documents = in.documents + row * in.length;
        if (documents[max(s, 0)] != documents[max(t - 1, 0)]) {
            known = false;
            age = min(age, k - 1);
        }
#endif
        Stored stored = {};
        if (known)
            stored = s >= 0 ? load(in.x + row * in.sx.row + s * in.sx.step + channel)
                            : load(in.initial + (row * PAST + PAST + s) * in.channels + channel);
        widen_all(past[PAST - k], stored);
    }
    return age;
}

// STEPS numbers as they are stored, or the `left` ones that are there.
__device__ __forceinline__ void fetch(Stored (&values)[STEPS], const io_t* memory, int step, int left) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
        if (i < left) values[i] = load(memory + (index_t)step * i);
}

// Inputs, and the documents they belong to.
struct Read {
    Stored values[STEPS];
    int documents[DOCUMENTS ? STEPS : 1];

    __device__ __forceinline__ void fetch(const io_t* memory, int step, const int* ids, int left) {
        ::fetch(values, memory, step, left);
#if DOCUMENTS
        if (left >= STEPS && STEPS % 4 == 0 && ((size_t)ids & 15) == 0) {
#pragma unroll
            for (int i = 0; i < STEPS; i += 4) {
                const int4 four = *reinterpret_cast<const int4*>(ids + i);
                documents[i] = four.x, documents[i + 1] = four.y, documents[i + 2] = four.z, documents[i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < STEPS; ++i)
                if (i < left) documents[i] = ids[i];
        }
#endif
    }
};

// bias + sum of weight x input: the value before the activation. `seen` ends with the newest.
__device__ __forceinline__ float convolve(const float (&weight)[W][V], const Wide& bias, const float* seen, int v) {
    float sum = bias[v];
#pragma unroll
    for (int k = 0; k < W; ++k) sum = fmaf(weight[k][v], seen[k * V + v], sum);
    return sum;
}

__device__ __forceinline__ void clear_past(float* seen) {
#pragma unroll
    for (int k = 0; k < PAST * V; ++k) seen[k] = 0.f;
}

struct Forward {
    Inputs in;
    io_t *y, *final_state;  // (batch, length, channels), (batch, W - 1, channels)
};

extern "C" __global__ void __launch_bounds__(THREADS, FORWARD_BLOCKS) conv_forward(const __grid_constant__ Forward p) {
    const Inputs& in = p.in;
    const Place at = find_place(in);
    if (!at.inside) return;
    float weight[W][V], seen[PAST + STEPS][V];
    Wide bias;
    load_parameters(weight, bias, in, at.channel);
    {
        float past[HELD][V];
        load_past(past, in, at.row, at.channel, at.begin);
#pragma unroll
        for (int k = 0; k < PAST; ++k)
#pragma unroll
            for (int v = 0; v < V; ++v) seen[k][v] = past[k][v];
    }
    const io_t* x = in.x + at.row * in.sx.row + at.begin * in.sx.step + at.channel;
    io_t* y = p.y + (at.row * in.length + at.begin) * in.channels + at.channel;
    const int* documents = in.documents + at.row * in.length + at.begin;
    const int x_step = (int)in.sx.step, y_step = (int)in.channels;
    int left = at.end - at.begin, document = DOCUMENTS ? documents[at.begin > 0 ? -1 : 0] : 0;
    Read now, ahead;
    now.fetch(x, x_step, documents, left);
    for (; left > 0; left -= STEPS) {
        x += (index_t)x_step * STEPS;
        documents += STEPS;
        ahead.fetch(x, x_step, documents, left - STEPS);  // while this is computed
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            if (i >= left) break;
            widen_all(seen[PAST + i], now.values[i]);
            if (DOCUMENTS && now.documents[i] != document) {
                clear_past(seen[i]);
                document = now.documents[i];
            }
            Wide out;
#pragma unroll
            for (int v = 0; v < V; ++v) {
                float value = convolve(weight, bias, seen[i], v);
                out[v] = SILU ? value * sigmoid(value) : value;
            }
            store(y + (index_t)y_step * i, out);
        }
        y += (index_t)y_step * STEPS;
        now = ahead;
        if (left >= STEPS) {
#pragma unroll
            for (int k = 0; k < PAST; ++k)
#pragma unroll
                for (int v = 0; v < V; ++v) seen[k][v] = seen[STEPS + k][v];
        } else {
#pragma unroll
            for (int i = 1; i < STEPS; ++i)
                if (i == left)
#pragma unroll
                    for (int k = 0; k < PAST; ++k)
#pragma unroll
                        for (int v = 0; v < V; ++v) seen[k][v] = seen[i + k][v];
        }
    }
    if (at.end == in.length)
#pragma unroll
        for (int k = 0; k < PAST; ++k)
            store(p.final_state + (at.row * PAST + k) * in.channels + at.channel, seen[k]);
}

struct Backward {
    Inputs in;
    const io_t* dy;
    Strides sdy;
    const io_t* more_dy;  // the other part of the gradient of y, or null
    Strides smore;
    const io_t* dfinal;  // (batch, W - 1, channels), contiguous, or null
    io_t* dx;            // (batch, length, channels)
    Strides sdx;
    io_t* dinitial;      // (batch, W - 1, channels) or null
    float* parts;        // (batch, chunks, W + 1, channels): parts of dweight and dbias
};

extern "C" __global__ void __launch_bounds__(THREADS, BACKWARD_BLOCKS)
    conv_backward(const __grid_constant__ Backward p) {
    const Inputs& in = p.in;
    const Place at = find_place(in);
    if (!at.inside) return;
    float weight[W][V], dweight[W][V] = {}, seen[PAST + STEPS][V], grad[PAST + STEPS][V];
    Wide bias, dbias = {};
    load_parameters(weight, bias, in, at.channel);
    int age;  // steps since the document began, as far as they matter: W - 1 at most
    {
        float past[HELD][V];
        age = load_past(past, in, at.row, at.channel, at.begin);
#pragma unroll
        for (int k = 0; k < PAST; ++k)
#pragma unroll
            for (int v = 0; v < V; ++v) seen[k][v] = past[k][v], grad[k][v] = 0.f;
    }
    if (at.begin == 0) age = PAST;  // the initial state belongs to the first document

    // The gradient of an input is complete W - 1 steps later. What was read before the chunk began is another chunk's,
    // or the initial state's.
    io_t* dx = p.dx + at.row * p.sdx.row + at.channel;
    const int ends = (int)in.length - PAST;  // from here on, inputs are in the final state
    const auto finish = [&](int t, Wide& value) {
        if (p.dfinal && t >= ends) {
            bool last = true;
#if DOCUMENTS
            const int* documents = in.documents + at.row * in.length;
            last = documents[max(t, 0)] == documents[in.length - 1];
#endif
            if (last) {
                Wide more;
                widen_all(more, load(p.dfinal + (at.row * PAST + t - ends) * in.channels + at.channel));
#pragma unroll
                for (int v = 0; v < V; ++v) value[v] += more[v];
            }
        }
        if (t >= at.begin && t < at.end)
            store(dx + t * p.sdx.step, value);
        else if (t < 0 && p.dinitial)
            store(p.dinitial + (at.row * PAST + PAST + t) * in.channels + at.channel, value);
    };

    const io_t* x = in.x + at.row * in.sx.row + at.begin * in.sx.step + at.channel;
    const io_t* dy = p.dy + at.row * p.sdy.row + at.begin * p.sdy.step + at.channel;
    const io_t* more_dy = MORE ? p.more_dy + at.row * p.smore.row + at.begin * p.smore.step + at.channel : nullptr;
    const int x_step = (int)in.sx.step, dy_step = (int)p.sdy.step, more_step = (int)p.smore.step;
    const int stop = (int)min((index_t)at.end + PAST, in.length);  // the chunk, and what looks back into it
    const int* documents = in.documents + at.row * in.length + at.begin;
    int left = stop - at.begin, document = DOCUMENTS ? documents[at.begin > 0 ? -1 : 0] : 0;
    Read now, ahead;
    Stored dys[STEPS], dys_ahead[STEPS], more[STEPS], more_ahead[STEPS];
    now.fetch(x, x_step, documents, left);
    fetch(dys, dy, dy_step, left);
    if (MORE) fetch(more, more_dy, more_step, left);
    // The next steps. Those are `inner` that are all of this chunk, and complete gradients of this chunk alone.
    const auto advance = [&](int t, const bool is_inner) __attribute__((always_inline)) {
        const int here = is_inner ? STEPS : left;
        x += (index_t)x_step * STEPS;
        dy += (index_t)dy_step * STEPS;
        if (MORE) more_dy += (index_t)more_step * STEPS;
        documents += STEPS;
        ahead.fetch(x, x_step, documents, left - STEPS);  // while this is computed
        fetch(dys_ahead, dy, dy_step, left - STEPS);
        if (MORE) fetch(more_ahead, more_dy, more_step, left - STEPS);
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            if (i >= here) break;
            widen_all(seen[PAST + i], now.values[i]);
            Wide d;
            widen_all(d, dys[i]);
            if (MORE) {
                Wide other;
                widen_all(other, more[i]);
#pragma unroll
                for (int v = 0; v < V; ++v) d[v] += other[v];
            }
            if (DOCUMENTS && now.documents[i] != document) {
                clear_past(seen[i]);
                document = now.documents[i];
                age = 0;
            }
            const bool counts = is_inner || t + i < at.end;  // for the weights
#pragma unroll
            for (int v = 0; v < V; ++v) {
                if (SILU) {
                    const float value = convolve(weight, bias, seen[i], v), open = sigmoid(value);
                    d[v] *= fmaf(value * open, 1.f - open, open);
                }
                grad[PAST + i][v] = 0.f;
#pragma unroll
                for (int k = 0; k < W; ++k) {
                    if (!DOCUMENTS || PAST - k <= age) grad[i + k][v] = fmaf(weight[k][v], d[v], grad[i + k][v]);
                    if (counts) dweight[k][v] = fmaf(d[v], seen[i + k][v], dweight[k][v]);
                }
                if (counts) dbias[v] += d[v];
            }
            if (DOCUMENTS) age = min(age + 1, PAST);
            if (is_inner)
                store(dx + (t + i - PAST) * p.sdx.step, grad[i]);
            else
                finish(t + i - PAST, grad[i]);
        }
        now = ahead;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            dys[i] = dys_ahead[i];
            if (MORE) more[i] = more_ahead[i];
        }
        if (here >= STEPS) {
#pragma unroll
            for (int k = 0; k < PAST; ++k)
#pragma unroll
                for (int v = 0; v < V; ++v) seen[k][v] = seen[STEPS + k][v], grad[k][v] = grad[STEPS + k][v];
        } else {
#pragma unroll
            for (int i = 1; i < STEPS; ++i)
                if (i == here)
#pragma unroll
                    for (int k = 0; k < PAST; ++k)
#pragma unroll
                        for (int v = 0; v < V; ++v) grad[k][v] = grad[i + k][v];
        }
    };
    for (int t = at.begin; left > 0; t += STEPS, left -= STEPS) {
        if (t >= at.begin + PAST && t + STEPS <= at.end)
            advance(t, true);
        else
            advance(t, false);
    }
    if (stop == in.length)  // nothing later looks back at the last W - 1
#pragma unroll
        for (int k = 0; k < PAST; ++k) finish(stop - PAST + k, grad[k]);

    const index_t chunks = (in.length + in.chunk_length - 1) / in.chunk_length;
    float* parts = p.parts + (at.row * chunks + at.chunk) * (W + 1) * in.channels + at.channel;
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int k = 0; k < W; ++k) parts[k * in.channels + v] = dweight[k][v];
        parts[W * in.channels + v] = dbias[v];
    }
}

struct Sums {
    const float* parts;      // (count, W + 1, channels)
    float *dweight, *dbias;  // (channels, W), (channels)
    index_t count, channels;
};

#define SLICES 8  // of the parts, which a block sums side by side

extern "C" __global__ void __launch_bounds__(32 * SLICES) conv_sum_parts(const __grid_constant__ Sums p) {
    __shared__ float sums[SLICES][32];
    const int lane = threadIdx.x % 32, slice = threadIdx.x / 32, k = blockIdx.x % (W + 1);
    const index_t channel = (index_t)(blockIdx.x / (W + 1)) * 32 + lane;
    float sum = 0.f;
    if (channel < p.channels)
#pragma unroll 4
        for (index_t i = slice; i < p.count; i += SLICES) sum += p.parts[(i * (W + 1) + k) * p.channels + channel];
    sums[slice][lane] = sum;
    __syncthreads();
    if (slice > 0 || channel >= p.channels) return;
    for (int i = 1; i < SLICES; ++i) sum += sums[i][lane];
    if (k < W)
        p.dweight[channel * W + k] = sum;
    else
        p.dbias[channel] = sum;
}
