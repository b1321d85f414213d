/* Kernels of the OpenCL backend. Built with
   TILED: 1 for GPUs (local-memory tiles), 0 for processors (panels of packed operands and a register tile);
   RM rows and W*NV columns of the register tile, KC steps of the summed index and MB x NB panels a work-item does
   at a time so that operands stay in the caches; RT, LS: results a work-item and work-items a side of a local tile;
   W numbers at once (1, 8 or 16); PER numbers a work-item in kernels that go over numbers one by one;
   ROWS of scores, and SUMS times W columns to be summed, a work-item. */

typedef struct {
  int rows, columns, inner, fold, heads, has_bias, accumulate; float alpha;
  int a_row, a_inner, a_fold, a_batch, a_head, a_shared;
  int b_inner, b_column, b_fold, b_batch, b_head, b_shared;
  int c_row, c_batch, c_head, z0;
} Product;

#if W == 16
typedef float16 numbers;
typedef int16 conditions;
#define LOAD_AT(j, p) vload16(j, p)
#define OF_BYTES(p) convert_float16(vload16(0, p))
#elif W == 8
typedef float8 numbers;
typedef int8 conditions;
#define LOAD_AT(j, p) vload8(j, p)
#define OF_BYTES(p) convert_float8(vload8(0, p))
#else
typedef float numbers;
typedef int conditions;
#define LOAD_AT(j, p) ((p)[j])
#define OF_BYTES(p) ((float)*(p))
#endif

#if W > 1 /* where floats lie; some drivers' vstore writes a quarter at a time */
typedef numbers loose __attribute__((aligned(4)));
#define STORE_IN(SPACE, v, j, p) (*(SPACE loose *)((p) + W * (j)) = (v))
#else
#define STORE_IN(SPACE, v, j, p) ((p)[j] = (v))
#endif
#define STORE_AT(v, j, p) STORE_IN(__global, v, j, p)

/* The last numbers of a row may be fewer than W. */
#if W > 1
#define SOME(SUFFIX, SPACE) \
inline numbers load_some##SUFFIX(SPACE const float *p, int count, float other) { \
  if (count < W) { \
    float t[W]; \
    for (int i = 0; i < W; i++) t[i] = i < count ? p[i] : other; \
    return LOAD_AT(0, t); \
  } \
  return LOAD_AT(0, p); \
} \
inline void store_some##SUFFIX(numbers v, SPACE float *p, int count) { \
  if (count < W) { \
    float t[W]; \
    STORE_IN(__private, v, 0, t); \
    for (int i = 0; i < count; i++) p[i] = t[i]; \
    return; \
  } \
  STORE_IN(SPACE, v, 0, p); \
}
#else
#define SOME(SUFFIX, SPACE) \
inline float load_some##SUFFIX(SPACE const float *p, int count, float other) { return *p; } \
inline void store_some##SUFFIX(float v, SPACE float *p, int count) { *p = v; }
#endif
SOME(, __global)
SOME(_local, __local)
inline numbers load_keep(__global const uchar *p, int count) {
#if W > 1
  if (count < W) {
    float t[W];
    for (int i = 0; i < W; i++) t[i] = i < count ? (float)p[i] : 0.f;
    return LOAD_AT(0, t);
  }
#endif
  return OF_BYTES(p);
}
#if W == 16
inline float8 halves_added(float16 v) { return v.lo + v.hi; }
inline float8 halves_most(float16 v) { return fmax(v.lo, v.hi); }
#else
#define halves_added(v) (v)
#define halves_most(v) (v)
#endif
inline float sum_of(numbers v) {
#if W == 1
  return v;
#else
  const float8 e = halves_added(v);
  const float4 h = e.lo + e.hi;
  return h.x + h.y + h.z + h.w;
#endif
}
inline float most_of(numbers v) {
#if W == 1
  return v;
#else
  const float8 e = halves_most(v);
  const float4 h = fmax(e.lo, e.hi);
  return fmax(fmax(h.x, h.y), fmax(h.z, h.w));
#endif
}

/* ---------------------------------------------------------------- products */

#if TILED
#define TK 16
#define TM (LS * RT)
__kernel __attribute__((reqd_work_group_size(LS, LS, 1)))
void product_tiled(__constant Product *g, __global const float *A, __global const float *B, __global float *C,
                   __global const float *bias) {
  __local float a[TK][TM + 1], b[TK][TM + 1];
  const int lx = get_local_id(0), ly = get_local_id(1), t = ly * LS + lx;
  const int n0 = get_group_id(0) * TM, m0 = get_group_id(1) * TM;
  const int z = get_group_id(2), zb = z / g->heads, zh = z % g->heads;
  const int M = g->rows, N = g->columns, K = g->inner, F = g->fold;
  A += (size_t)zb * g->a_batch + (size_t)(zh / g->a_shared) * g->a_head;
  B += (size_t)zb * g->b_batch + (size_t)(zh / g->b_shared) * g->b_head;
  C += (size_t)zb * g->c_batch + (size_t)zh * g->c_head;
  float acc[RT][RT];
  for (int i = 0; i < RT; i++) for (int j = 0; j < RT; j++) acc[i][j] = 0;
  for (int k0 = 0; k0 < K; k0 += TK) {
    for (int i = t; i < TK * TM; i += LS * LS) { /* neighbours read neighbouring addresses */
      int kk = g->a_inner == 1 ? i % TK : i / TM, mm = g->a_inner == 1 ? i / TK : i % TM, k = k0 + kk;
      a[kk][mm] = m0 + mm < M && k < K ? A[(m0 + mm) * g->a_row + (k / F) * g->a_fold + (k % F) * g->a_inner] : 0.f;
      kk = g->b_inner == 1 ? i % TK : i / TM; mm = g->b_inner == 1 ? i / TK : i % TM; k = k0 + kk;
      b[kk][mm] = n0 + mm < N && k < K ? B[(k / F) * g->b_fold + (k % F) * g->b_inner + (n0 + mm) * g->b_column] : 0.f;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int kk = 0; kk < TK; kk++) {
      float x[RT], y[RT];
      for (int i = 0; i < RT; i++) { x[i] = a[kk][ly + LS * i]; y[i] = b[kk][lx + LS * i]; }
      for (int i = 0; i < RT; i++) for (int j = 0; j < RT; j++) acc[i][j] += x[i] * y[j];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  for (int i = 0; i < RT; i++) for (int j = 0; j < RT; j++) {
    const int m = m0 + ly + LS * i, n = n0 + lx + LS * j;
    if (m < M && n < N) {
      __global float *c = C + (size_t)m * g->c_row + n;
      *c = acc[i][j] * g->alpha + (g->has_bias ? bias[n] : 0.f) + (g->accumulate ? *c : 0.f);
    }
  }
}
#else

#define NR (W * NV)

/* Every second number of the result is of the other: W vectors, put through this log2(W) times, lie transposed. */
#if W == 16
inline numbers weave_low(numbers a, numbers b) {
  return (numbers)(a.s0, b.s0, a.s1, b.s1, a.s2, b.s2, a.s3, b.s3, a.s4, b.s4, a.s5, b.s5, a.s6, b.s6, a.s7, b.s7);
}
inline numbers weave_high(numbers a, numbers b) {
  return (numbers)(a.s8, b.s8, a.s9, b.s9, a.sa, b.sa, a.sb, b.sb, a.sc, b.sc, a.sd, b.sd, a.se, b.se, a.sf, b.sf);
}
#else
inline numbers weave_low(numbers a, numbers b) { return (numbers)(a.s0, b.s0, a.s1, b.s1, a.s2, b.s2, a.s3, b.s3); }
inline numbers weave_high(numbers a, numbers b) { return (numbers)(a.s4, b.s4, a.s5, b.s5, a.s6, b.s6, a.s7, b.s7); }
#endif
#define WEAVE(from, to) \
  _Pragma("unroll") for (int i = 0; i < W / 2; i++) { \
    to[2 * i] = weave_low(from[i], from[i + W / 2]); \
    to[2 * i + 1] = weave_high(from[i], from[i + W / 2]); \
  }

/* W rows of `source`, `step` apart, of W numbers: written as columns, `pitch` from one row of the target to the next. */
#if W == 16
#define FROM r
#define TURN_ALL WEAVE(r, t) WEAVE(t, r) WEAVE(r, t) WEAVE(t, r)
#else
#define FROM t
#define TURN_ALL WEAVE(t, r) WEAVE(r, t) WEAVE(t, r)
#endif
#define TRANSPOSE(NAME, SPACE) \
inline void NAME(__global const float *source, size_t step, SPACE float *target, int pitch) { \
  numbers r[W], t[W]; \
  _Pragma("unroll") for (int i = 0; i < W; i++) FROM[i] = LOAD_AT(0, source + i * step); \
  TURN_ALL \
  _Pragma("unroll") for (int i = 0; i < W; i++) STORE_IN(SPACE, r[i], 0, target + i * pitch); \
}
TRANSPOSE(transpose, __global)
TRANSPOSE(transpose_local, __local)

/* Panels of `WIDTH` neighbours: [z][panel][inner][WIDTH], filled up with zeros. COPY: neighbours that lie side by side;
   TURN: several steps of the summed index, which lie side by side, counted in k. */
#define PACK(NAME, WIDTH, COPY, TURN, LENGTH, STEP, INNER, FOLD, BATCH, HEAD, SHARED) \
__kernel void NAME(__constant Product *g, __global const float *source, __global float *target) { \
  const int p = get_global_id(0), z = get_global_id(1), zb = z / g->heads, zh = z % g->heads; \
  const int K = g->inner, L = g->LENGTH, F = g->fold, panels = (L + WIDTH - 1) / WIDTH; \
  const int step = g->STEP, inner = g->INNER, l0 = p * WIDTH; \
  source += (size_t)zb * g->BATCH + (size_t)(zh / g->SHARED) * g->HEAD + (size_t)l0 * step; \
  target += ((size_t)z * panels + p) * K * WIDTH; \
  for (int f = 0; f * F < K; f++) { \
    __global const float *s = source + (size_t)f * g->FOLD; __global float *t = target + (size_t)f * F * WIDTH; \
    int k = 0; \
    if (l0 + WIDTH <= L && step == 1) \
      for (; k < F; k++) { COPY(s + (size_t)k * inner, t + k * WIDTH) } \
    else if (l0 + WIDTH <= L && inner == 1) { TURN } \
    for (; k < F; k++) \
      for (int i = 0; i < WIDTH; i++) \
        t[k * WIDTH + i] = l0 + i < L ? s[(size_t)i * step + (size_t)k * inner] : 0.f; \
  } \
}
#define COPY_A(from, to) \
  _Pragma("unroll") for (int i = 0; i < RM / 4; i++) vstore4(vload4(i, from), i, to); \
  if (RM % 4) vstore2(vload2(0, (from) + RM / 4 * 4), 0, (to) + RM / 4 * 4);
#define COPY_B(from, to) _Pragma("unroll") for (int j = 0; j < NV; j++) STORE_AT(LOAD_AT(j, from), j, to);
#define TURN_B \
  for (; k + W <= F; k += W) for (int j = 0; j < NV; j++) transpose(s + (size_t)j * W * step + k, step, t + k * NR + j * W, NR);
PACK(pack_a, RM, COPY_A, , rows, a_row, a_inner, a_fold, a_batch, a_head, a_shared)
PACK(pack_b, NR, COPY_B, TURN_B, columns, b_column, b_inner, b_fold, b_batch, b_head, b_shared)

/* One register tile: RM rows and NR columns over kc steps. AT(i, k): how `a` is read. */
#define TILE(NAME, ARGUMENTS, AT) \
inline void NAME(__constant Product *g, ARGUMENTS, __global const float *b, __global float *C, \
                 __global const float *bias, int m0, int n0, int kc, int first, int last) { \
  numbers c[RM][NV]; \
  _Pragma("unroll") for (int i = 0; i < RM; i++) { _Pragma("unroll") for (int j = 0; j < NV; j++) c[i][j] = 0; } \
  for (int k = 0; k < kc; k++) { \
    numbers y[NV]; \
    _Pragma("unroll") for (int j = 0; j < NV; j++) y[j] = LOAD_AT(j, b + k * NR); \
    _Pragma("unroll") for (int i = 0; i < RM; i++) { \
      const numbers x = (numbers)(AT(i, k)); \
      _Pragma("unroll") for (int j = 0; j < NV; j++) c[i][j] += x * y[j]; \
    } \
  } \
  const float alpha = g->alpha; const int add = !first || g->accumulate, with_bias = last && g->has_bias; \
  if (n0 + NR <= g->columns) { \
    numbers q[NV]; \
    _Pragma("unroll") for (int j = 0; j < NV; j++) q[j] = with_bias ? LOAD_AT(j, bias + n0) : (numbers)(0.f); \
    _Pragma("unroll") for (int i = 0; i < RM; i++) if (m0 + i < g->rows) { \
      __global float *r = C + (size_t)(m0 + i) * g->c_row + n0; \
      _Pragma("unroll") for (int j = 0; j < NV; j++) { \
        numbers v = c[i][j] * alpha + q[j]; \
        if (add) v += LOAD_AT(j, r); \
        STORE_AT(v, j, r); \
      } \
    } \
  } else { \
    _Pragma("unroll") for (int i = 0; i < RM; i++) if (m0 + i < g->rows) { \
      __global float *r = C + (size_t)(m0 + i) * g->c_row + n0; \
      float t[NR]; \
      _Pragma("unroll") for (int j = 0; j < NV; j++) STORE_IN(__private, c[i][j], j, t); \
      for (int j = 0; j < g->columns - n0; j++) \
        r[j] = t[j] * alpha + (with_bias ? bias[n0 + j] : 0.f) + (add ? r[j] : 0.f); \
    } \
  } \
}
#define PACKED_AT(i, k) a[(k) * RM + (i)]
#define DIRECT_AT(i, k) a[i][k]
#define PACKED_ARGUMENT __global const float *a
#define DIRECT_ARGUMENT __global const float *const *a
TILE(tile_packed, PACKED_ARGUMENT, PACKED_AT)
TILE(tile_direct, DIRECT_ARGUMENT, DIRECT_AT)

/* Loops in the order that keeps a panel of b in the first cache and a block of a in the second. */
#define OVER_PANELS(BODY) \
  const int K = g->inner, panels_m = (g->rows + RM - 1) / RM, panels_n = (g->columns + NR - 1) / NR; \
  const int z = get_global_id(2), zb = z / g->heads, zh = z % g->heads; \
  const int end_m = min((int)(get_global_id(1) + 1) * MB, panels_m), end_n = min((int)(get_global_id(0) + 1) * NB, panels_n); \
  C += (size_t)zb * g->c_batch + (size_t)zh * g->c_head; \
  for (int k0 = 0; k0 < K; k0 += KC) { \
    const int kc = min(KC, K - k0), first = k0 == 0, last = k0 + KC >= K; \
    for (int pn = get_global_id(0) * NB; pn < end_n; pn++) { \
      __global const float *b = B + (((size_t)z * panels_n + pn) * K + k0) * NR; \
      for (int pm = get_global_id(1) * MB; pm < end_m; pm++) { BODY } \
    } \
  }

__kernel void product_packed(__constant Product *g, __global const float *A, __global const float *B, __global float *C,
                             __global const float *bias) {
  OVER_PANELS(tile_packed(g, A + (((size_t)z * panels_m + pm) * K + k0) * RM, b, C, bias, pm * RM, pn * NR, kc, first, last);)
}

/* Rows of a as they lie, where the summed index runs through neighbours. */
__kernel void product_direct(__constant Product *g, __global const float *A, __global const float *B, __global float *C,
                             __global const float *bias) {
  A += (size_t)(get_global_id(2) / g->heads) * g->a_batch + (size_t)(get_global_id(2) % g->heads / g->a_shared) * g->a_head;
  OVER_PANELS(
    __global const float *a[RM];
    _Pragma("unroll") for (int i = 0; i < RM; i++) a[i] = A + (size_t)min(pm * RM + i, g->rows - 1) * g->a_row + k0;
    tile_direct(g, a, b, C, bias, pm * RM, pn * NR, kc, first, last);)
}
#endif

/* ---------------------------------------------------------------- number by number */

#define EACH(n) for (int i = get_global_id(0) * PER, end = min((int)(get_global_id(0) + 1) * PER, n); i < end; i += W)

__kernel void drop(__global const float *source, __global const uchar *keep, __global float *target, float scale, int n) {
  EACH(n) store_some(load_some(source + i, n - i, 0.f) * load_keep(keep + i, n - i) * scale, target + i, n - i);
}

__kernel void add(__global float *target, __global const float *source, int n) {
  EACH(n) store_some(load_some(target + i, n - i, 0.f) + load_some(source + i, n - i, 0.f), target + i, n - i);
}

/* SUMS times W neighbouring columns a work-item. */
__kernel void column_sums(__global const float *source, __global float *target, int rows, int columns) {
  const int i = get_global_id(0) * SUMS * W;
  if (i + SUMS * W <= columns) { /* whole lines of the cache, and the next ones with them */
    numbers total[SUMS];
    for (int j = 0; j < SUMS; j++) total[j] = 0.f;
    for (int r = 0; r < rows; r++) {
      _Pragma("unroll") for (int j = 0; j < SUMS; j++) total[j] += LOAD_AT(j, source + (size_t)r * columns + i);
    }
    for (int j = 0; j < SUMS; j++) STORE_AT(total[j], j, target + i);
    return;
  }
  for (int j = i; j < columns; j += W) {
    numbers total = 0.f;
    for (int r = 0; r < rows; r++) total += load_some(source + (size_t)r * columns + j, columns - j, 0.f);
    store_some(total, target + j, columns - j);
  }
}

/* Abramowitz and Stegun 7.1.26, absolute error 1.5e-7, given exp(-x*x): many times faster than the library's. */
inline numbers error_function(numbers x, numbers bell) {
  const numbers a = fabs(x), t = 1.f / (1.f + 0.3275911f * a);
  const numbers y = 1.f - (((((1.061405429f * t - 1.453152027f) * t) + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t * bell;
  return copysign(y, x);
}

/* 0 gelu, 1 gelu_tanh, 2 relu, 3 silu: value and slope. */
inline numbers activation(int kind, numbers u, numbers *slope) {
  if (kind == 0) {
    const numbers bell = exp(-0.5f * u * u), phi = 0.5f + 0.5f * error_function(u * 0.70710678f, bell);
    *slope = phi + u * 0.39894228f * bell;
    return u * phi;
  }
  if (kind == 1) {
    const numbers y = 0.79788456f * (u + 0.044715f * u * u * u), e = exp(2.f * fmin(y, (numbers)(40.f)));
    const numbers t = 1.f - 2.f / (e + 1.f);
    *slope = 0.5f * (1.f + t) + 0.5f * u * (1.f - t * t) * 0.79788456f * (1.f + 0.134145f * u * u);
    return 0.5f * u * (1.f + t);
  }
  if (kind == 2) {
    *slope = select((numbers)(0.f), (numbers)(1.f), (conditions)(u > 0.f));
    return select(u, (numbers)(0.f), (conditions)(u < 0.f));
  }
  const numbers s = 1.f / (1.f + exp(-u));
  *slope = s * (1.f + u * (1.f - s));
  return u * s;
}

#define ACTIVATION(KIND, NAME) \
__kernel void NAME(__global const float *up, __global const float *gate, __global float *target, int gated, int n) { \
  EACH(n) { \
    numbers slope; const numbers u = load_some(up + i, n - i, 0.f); \
    const numbers v = activation(KIND, gated ? load_some(gate + i, n - i, 0.f) : u, &slope); \
    store_some(gated ? v * u : v, target + i, n - i); \
  } \
} \
__kernel void NAME##_gradient(__global const float *up, __global const float *gate, __global float *d_up, __global float *d_gate, \
                              int gated, int n) { \
  EACH(n) { \
    numbers slope; const numbers u = load_some(up + i, n - i, 0.f), d = load_some(d_up + i, n - i, 0.f); \
    const numbers v = activation(KIND, gated ? load_some(gate + i, n - i, 0.f) : u, &slope); \
    if (gated) store_some(d * u * slope, d_gate + i, n - i); \
    store_some(d * (gated ? v : slope), d_up + i, n - i); \
  } \
}
ACTIVATION(0, gelu)
ACTIVATION(1, gelu_tanh)
ACTIVATION(2, relu)
ACTIVATION(3, silu)
