/* Attention between the projections. Built after `opencl_kernels.cl`, with BLOCK: rows of scores that processors have at
   a time in backward. */

/* For each whole vector of a row, and for what is left of it. */
#define ALONG(n, BODY) { \
  int i = 0; \
  for (; i + W <= (n); i += W) { const int left = W; BODY } \
  if (i < (n)) { const int left = (n) - i; BODY } \
}
#define LARGER(a, b) ((a) > (b) ? (a) : (b)) /* what is not a number stays in the sum */

/* Scores of a row, with the bias if there is one, to probabilities. */
inline void softmax_row(__global float *p, __global const float *bias, int has_bias, int tokens) {
  numbers most = -INFINITY, total = 0.f;
  if (has_bias) ALONG(tokens, store_some(load_some(p + i, left, 0.f) + load_some(bias + i, left, 0.f), p + i, left);)
  ALONG(tokens, const numbers v = load_some(p + i, left, -INFINITY); most = LARGER(v, most);)
  const float top = most_of(most);
  ALONG(tokens, const numbers v = exp(load_some(p + i, left, -INFINITY) - top); store_some(v, p + i, left); total += v;)
  const float factor = 1.f / sum_of(total);
  ALONG(tokens, store_some(load_some(p + i, left, 0.f) * factor, p + i, left);)
}

__kernel void softmax(__global float *scores, __global const float *bias, int has_bias, int sb, int sh, int st, int heads,
                      int tokens, int rows) {
  const int end = min((int)(get_global_id(0) + 1) * ROWS, rows);
  for (int r = get_global_id(0) * ROWS; r < end; r++)
    softmax_row(scores + (size_t)r * tokens,
                bias + (size_t)(r / tokens / heads) * sb + (size_t)(r / tokens % heads) * sh + (size_t)(r % tokens) * st,
                has_bias, tokens);
}

__kernel void softmax_gradient(__global const float *P, __global float *D, int tokens, float scale, int rows) {
  const int end = min((int)(get_global_id(0) + 1) * ROWS, rows);
  for (int r = get_global_id(0) * ROWS; r < end; r++) {
    __global const float *p = P + (size_t)r * tokens;
    __global float *d = D + (size_t)r * tokens;
    numbers total = 0.f;
    ALONG(tokens, total += load_some(p + i, left, 0.f) * load_some(d + i, left, 0.f);)
    const float mean = sum_of(total);
    ALONG(tokens, store_some(load_some(p + i, left, 0.f) * (load_some(d + i, left, 0.f) - mean) * scale, d + i, left);)
  }
}

/* A pair's numbers are (i, i + dims/2), or (2i, 2i + 1) if interleaved; sign -1 is the transposed map. */
__kernel void turn(__global float *target, __global const float *cosines, __global const float *sines, int heads, int head_dim,
                   int dims, int tokens, int per_row, int interleaved, float sign, int rows) {
  const int r = get_global_id(0);
  if (r >= rows) return;
  const size_t at = (size_t)(per_row ? r : r % tokens) * dims;
  for (int h = 0; h < heads; h++) {
    __global float *x = target + ((size_t)r * heads + h) * head_dim;
    for (int i = 0; i < dims / 2; i++) {
      const int u = interleaved ? 2 * i : i, v = interleaved ? 2 * i + 1 : i + dims / 2;
      const float a = x[u], b = x[v], c = cosines[at + u], s = sign * sines[at + u];
      x[u] = a * c - b * s;
      x[v] = b * c + a * s;
    }
  }
}

/* ---------------------------------------------------------------- all of it at once, for processors

   One work-item does all rows of a head (forward) or of a group of heads (backward), a few rows of scores at a time, so
   that these are in the first cache when they are used and no operand needs another order. */

#if !TILED

typedef struct {
  int heads, groups, tokens, dims, has_bias, bias_row, bias_head, bias_token, has_keep; float scale, keep_scale;
} Heads;

/* RM rows by NR columns: c = alpha * a b, or added to it. b is a panel [inner][NR]; a's entries lie a_row and a_inner
   apart. Rows and columns beyond those of the result are computed, and not stored. */
#define SCORE_TILE(NAME, A_SPACE, C_SPACE) \
inline void NAME(A_SPACE const float *a, int a_row, int a_inner, __local const float *b, int inner, C_SPACE float *c, \
                 int c_row, int rows, int columns, float alpha, int add) { \
  A_SPACE const float *p[RM]; numbers s[RM][NV]; \
  _Pragma("unroll") for (int i = 0; i < RM; i++) p[i] = a + (size_t)min(i, rows - 1) * a_row; \
  _Pragma("unroll") for (int i = 0; i < RM; i++) { _Pragma("unroll") for (int j = 0; j < NV; j++) s[i][j] = 0; } \
  for (int k = 0; k < inner; k++) { \
    numbers y[NV]; \
    _Pragma("unroll") for (int j = 0; j < NV; j++) y[j] = LOAD_AT(j, b + k * NR); \
    _Pragma("unroll") for (int i = 0; i < RM; i++) { \
      const numbers x = (numbers)(p[i][(size_t)k * a_inner]); \
      _Pragma("unroll") for (int j = 0; j < NV; j++) s[i][j] += x * y[j]; \
    } \
  } \
  _Pragma("unroll") for (int i = 0; i < RM; i++) if (i < rows) { \
    C_SPACE float *r = c + (size_t)i * c_row; \
    if (columns >= NR) { \
      _Pragma("unroll") for (int j = 0; j < NV; j++) { \
        numbers v = s[i][j] * alpha; \
        if (add) v += LOAD_AT(j, r); \
        STORE_IN(C_SPACE, v, j, r); \
      } \
    } else { \
      float t[NR]; \
      _Pragma("unroll") for (int j = 0; j < NV; j++) STORE_IN(__private, s[i][j], j, t); \
      for (int j = 0; j < columns; j++) r[j] = t[j] * alpha + (add ? r[j] : 0.f); \
    } \
  } \
}
SCORE_TILE(score_tile, __global, __global)
SCORE_TILE(score_tile_into_local, __global, __local)
SCORE_TILE(score_tile_of_local, __local, __global)

/* [tokens, dims] as panels of NR dims, [panel][token][NR], filled up with zeros. */
inline void panels_of_dims(__global const float *source, int pitch, __local float *target, int tokens, int dims) {
  for (int d = 0; d < dims; d += NR, target += tokens * NR)
    for (int t = 0; t < tokens; t++) {
      __global const float *s = source + (size_t)t * pitch + d;
      __local float *to = target + t * NR;
      if (d + NR <= dims) {
        _Pragma("unroll") for (int j = 0; j < NV; j++) STORE_IN(__local, LOAD_AT(j, s), j, to);
      } else {
        for (int j = 0; j < NR; j++) to[j] = d + j < dims ? s[j] : 0.f;
      }
    }
}

/* The same transposed, as panels of NR tokens: [panel][dim][NR]. */
inline void panels_of_tokens(__global const float *source, int pitch, __local float *target, int tokens, int dims) {
  for (int t = 0; t < tokens; t += NR, target += dims * NR) {
    __global const float *s = source + (size_t)t * pitch;
    int d = 0;
    if (t + NR <= tokens)
      for (; d + W <= dims; d += W)
        for (int j = 0; j < NV; j++) transpose_local(s + (size_t)j * W * pitch + d, pitch, target + d * NR + j * W, NR);
    for (; d < dims; d++)
      for (int j = 0; j < NR; j++) target[d * NR + j] = t + j < tokens ? s[(size_t)j * pitch + d] : 0.f;
  }
}

/* A row of probabilities after dropout. */
inline void drop_row(__global const float *p, __global const uchar *keep, __local float *target, int tokens, float scale) {
  ALONG(tokens, store_some_local(load_some(p + i, left, 0.f) * load_keep(keep + i, left) * scale, target + i, left);)
}

/* Gradient of a row's probabilities, after dropout if there is any, to that of its scores. */
inline void score_gradient_row(__global const float *p, __global const uchar *keep, __local float *d, int tokens, float scale,
                               float keep_scale) {
  numbers total = 0.f;
  if (keep) ALONG(tokens, store_some_local(load_some_local(d + i, left, 0.f) * load_keep(keep + i, left) * keep_scale, d + i, left);)
  ALONG(tokens, total += load_some(p + i, left, 0.f) * load_some_local(d + i, left, 0.f);)
  const float mean = sum_of(total);
  ALONG(tokens,
    store_some_local(load_some(p + i, left, 0.f) * (load_some_local(d + i, left, 0.f) - mean) * scale, d + i, left);)
}

#define PANELS(n) (((n) + NR - 1) / NR)

/* Queries and output lie as [B,T,H,d], keys and values as [B,T,G,d], probabilities as [B,H,T,T] before dropout. */
__kernel void mix_heads(__constant Heads *g, __global const float *Q, __global const float *K, __global const float *V,
                        __global const float *bias, __global const uchar *keep, __global float *P, __global float *O,
                        __local float *scratch) {
  const int h = get_global_id(0), b = get_global_id(1), T = g->tokens, d = g->dims;
  const int width = g->heads * d, narrow = g->groups * d, group = h / (g->heads / g->groups);
  const size_t at = (size_t)b * T * width + (size_t)h * d, own = (size_t)b * T * narrow + (size_t)group * d;
  __local float *keys = scratch, *values = keys + PANELS(T) * NR * d, *dropped = values + PANELS(d) * NR * T;
  panels_of_tokens(K + own, narrow, keys, T, d);
  panels_of_dims(V + own, narrow, values, T, d);
  Q += at; O += at;
  const size_t first = ((size_t)b * g->heads + h) * T;
  bias += (size_t)b * g->bias_row + (size_t)h * g->bias_head;
  for (int t = 0; t < T; t += RM) {
    const int rows = min(RM, T - t);
    __global float *p = P + (first + t) * T;
    for (int n = 0; n < T; n += NR)
      score_tile(Q + (size_t)t * width, width, 1, keys + n * d, d, p + n, T, rows, T - n, g->scale, 0);
    for (int i = 0; i < rows; i++) {
      softmax_row(p + (size_t)i * T, bias + (size_t)(t + i) * g->bias_token, g->has_bias, T);
      if (g->has_keep) drop_row(p + (size_t)i * T, keep + (first + t + i) * T, dropped + i * T, T, g->keep_scale);
    }
    for (int n = 0; n < d; n += NR) {
      __global float *o = O + (size_t)t * width + n;
      if (g->has_keep) score_tile_of_local(dropped, T, 1, values + n * T, T, o, width, rows, d - n, 1.f, 0);
      else score_tile(p, T, 1, values + n * T, T, o, width, rows, d - n, 1.f, 0);
    }
  }
}

/* Gradients of queries, keys and values, of that of the output. */
__kernel void mix_heads_gradient(__constant Heads *g, __global const float *Q, __global const float *K,
                                 __global const float *V, __global const uchar *keep, __global const float *P,
                                 __global const float *dO, __global float *dQ, __global float *dK, __global float *dV,
                                 __local float *scratch) {
  const int group = get_global_id(0), b = get_global_id(1), T = g->tokens, d = g->dims, each = g->heads / g->groups;
  const int width = g->heads * d, narrow = g->groups * d;
  const size_t own = (size_t)b * T * narrow + (size_t)group * d;
  const int turned = PANELS(T) * NR * d, plain = PANELS(d) * NR * T;
  __local float *values = scratch, *keys = values + turned, *above = keys + plain, *queries = above + plain;
  __local float *scores = queries + plain, *dropped = scores + BLOCK * T;
  panels_of_tokens(V + own, narrow, values, T, d);
  panels_of_dims(K + own, narrow, keys, T, d);
  dK += own; dV += own;
  for (int h = group * each; h < (group + 1) * each; h++) {
    const size_t at = (size_t)b * T * width + (size_t)h * d, first = ((size_t)b * g->heads + h) * T;
    panels_of_dims(dO + at, width, above, T, d);
    panels_of_dims(Q + at, width, queries, T, d);
    for (int t = 0; t < T; t += BLOCK) {
      const int block = min(BLOCK, T - t), add = t > 0 || h > group * each;
      __global const float *p = P + (first + t) * T;
      for (int r = 0; r < block; r += RM) {
        const int rows = min(RM, block - r);
        __local float *s = scores + r * T;
        for (int n = 0; n < T; n += NR)
          score_tile_into_local(dO + at + (size_t)(t + r) * width, width, 1, values + n * d, d, s + n, T, rows, T - n, 1.f, 0);
        for (int i = 0; i < rows; i++) {
          __global const float *row = p + (size_t)(r + i) * T;
          __global const uchar *kept = g->has_keep ? keep + (first + t + r + i) * T : 0;
          if (kept) drop_row(row, kept, dropped + (r + i) * T, T, g->keep_scale);
          score_gradient_row(row, kept, s + i * T, T, g->scale, g->keep_scale);
        }
        for (int n = 0; n < d; n += NR)
          score_tile_of_local(s, T, 1, keys + n * T, T, dQ + at + (size_t)(t + r) * width + n, width, rows, d - n, 1.f, 0);
      }
      for (int m = 0; m < T; m += RM) {
        const int rows = min(RM, T - m);
        for (int n = 0; n < d; n += NR) {
          const size_t c = (size_t)m * narrow + n;
          __local const float *o = above + n * T + t * NR, *q = queries + n * T + t * NR;
          if (g->has_keep) score_tile_of_local(dropped + m, 1, T, o, block, dV + c, narrow, rows, d - n, 1.f, add);
          else score_tile(p + m, 1, T, o, block, dV + c, narrow, rows, d - n, 1.f, add);
          score_tile_of_local(scores + m, 1, T, q, block, dK + c, narrow, rows, d - n, 1.f, add);
        }
      }
    }
  }
}
#endif
