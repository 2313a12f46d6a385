// The gradient of an embedding, summed in a fixed order. Positions in the text are sorted by token; a block sums PIECE
// of them for its columns. A token whose positions lie in one piece is finished there. Of a token in several pieces,
// each piece stores its partial sum, and the piece where the token begins adds them up afterwards.

struct Gradient {
    const io_t* dy;  // (places, columns)
    const index_t *tokens, *places;  // sorted by token: which token, and where it stood
    io_t* out;                       // (tokens, columns)
    float* edges;                    // (pieces, 2, columns): partial sums of a piece's first and last token
    index_t count, columns;
};

__device__ __forceinline__ index_t column_of(const Gradient& p) {
    const index_t blocks = (p.columns + THREADS - 1) / THREADS;
    return blockIdx.x % blocks * THREADS + threadIdx.x;
}

__device__ __forceinline__ index_t piece_of(const Gradient& p) {
    return blockIdx.x / ((p.columns + THREADS - 1) / THREADS);
}

extern "C" __global__ void __launch_bounds__(THREADS) embedding_sum_pieces(const __grid_constant__ Gradient p) {
    const index_t column = column_of(p), piece = piece_of(p);
    if (column >= p.columns) return;
    const index_t begin = piece * PIECE, end = min(begin + PIECE, p.count);
    float* edges = p.edges + piece * 2 * p.columns + column;
    index_t token = p.tokens[begin];
    bool continues = begin > 0 && p.tokens[begin - 1] == token;
    float sum = 0.f;
#pragma unroll 4
    for (index_t i = begin; i < end; ++i) {
        sum += widen(p.dy[p.places[i] * p.columns + column]);
        const index_t next = i + 1 < p.count ? p.tokens[i + 1] : -1;
        if (next == token && i + 1 < end) continue;
        if (continues)
            edges[0] = sum;
        else if (next == token)
            edges[p.columns] = sum;
        else
            p.out[token * p.columns + column] = narrow(sum);
        token = next, continues = false, sum = 0.f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) embedding_sum_edges(const __grid_constant__ Gradient p) {
    const index_t column = column_of(p), piece = piece_of(p);
    if (column >= p.columns) return;
    const index_t begin = piece * PIECE, end = begin + PIECE;
    if (end >= p.count) return;
    const index_t token = p.tokens[end - 1];
    const bool begins_here = p.tokens[begin] != token || begin == 0 || p.tokens[begin - 1] != token;
    if (p.tokens[end] != token || !begins_here) return;
    float sum = p.edges[(piece * 2 + 1) * p.columns + column];
    for (index_t next = piece + 1; next * PIECE < p.count && p.tokens[next * PIECE] == token; ++next)
        sum += p.edges[next * 2 * p.columns + column];
    p.out[token * p.columns + column] = narrow(sum);
}
