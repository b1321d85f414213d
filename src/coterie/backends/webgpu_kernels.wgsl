// Kernels of the WebGPU backend. Each starts at a line `//// name: access of its buffers` (r read, w read and write) and
// is compiled by itself, behind the declarations that follow here and those of its buffers `b1`, `b2`, ...
// A dimension has at most 65,535 groups, so kernels that go over rows or numbers do so in strides.

struct Words {
  rows: i32, columns: i32, inner: i32, fold: i32,
  heads: i32, has_bias: i32, accumulate: i32, alpha: f32,
  a_row: i32, a_inner: i32, a_fold: i32, a_batch: i32,
  a_head: i32, a_shared: i32, b_inner: i32, b_column: i32,
  b_fold: i32, b_batch: i32, b_head: i32, b_shared: i32,
  c_row: i32, c_batch: i32, c_head: i32, z0: i32,
}
@group(0) @binding(0) var<uniform> g: Words;

// Abramowitz and Stegun 7.1.26, absolute error 1.5e-7, given exp(-x*x).
fn error_function(x: f32, bell: f32) -> f32 {
  let t = 1.0 / (1.0 + 0.3275911 * abs(x));
  let y = 1.0 - (((((1.061405429 * t - 1.453152027) * t) + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t * bell;
  return select(y, -y, x < 0.0);
}

// 0 gelu, 1 gelu_tanh, 2 relu, 3 silu: value and slope.
fn activation(kind: i32, u: f32) -> vec2<f32> {
  if (kind == 0) {
    let bell = exp(-0.5 * u * u);
    let phi = 0.5 + 0.5 * error_function(u * 0.70710678, bell);
    return vec2<f32>(u * phi, phi + u * 0.39894228 * bell);
  }
  if (kind == 1) {
    let y = clamp(0.79788456 * (u + 0.044715 * u * u * u), -40.0, 40.0);
    let t = 1.0 - 2.0 / (exp(2.0 * y) + 1.0);
    let slope = 0.5 * (1.0 + t) + 0.5 * u * (1.0 - t * t) * 0.79788456 * (1.0 + 0.134145 * u * u);
    return vec2<f32>(0.5 * u * (1.0 + t), slope);
  }
  if (kind == 2) { return select(vec2<f32>(u, 1.0), vec2<f32>(0.0, 0.0), u <= 0.0); }
  let s = 1.0 / (1.0 + exp(-u));
  return vec2<f32>(u * s, s * (1.0 + u * (1.0 - s)));
}

//// product: r r w r
const LS: i32 = 16; const RT: i32 = 4; const TM: i32 = 64; const TK: i32 = 16;
var<workgroup> sa: array<f32, 1024>;
var<workgroup> sb: array<f32, 1024>;
@compute @workgroup_size(16, 16, 1)
fn main(@builtin(local_invocation_id) l: vec3<u32>, @builtin(workgroup_id) w: vec3<u32>) {
  let lx = i32(l.x); let ly = i32(l.y); let t = ly * LS + lx; let n0 = i32(w.x) * TM; let m0 = i32(w.y) * TM;
  let z = g.z0 + i32(w.z); let zb = z / g.heads; let zh = z % g.heads;
  let ao = zb * g.a_batch + (zh / g.a_shared) * g.a_head;
  let bo = zb * g.b_batch + (zh / g.b_shared) * g.b_head;
  let co = zb * g.c_batch + zh * g.c_head;
  var acc: array<vec4<f32>, 4>;
  for (var k0 = 0; k0 < g.inner; k0 += TK) {
    for (var i = t; i < TK * TM; i += LS * LS) { // neighbours read neighbouring addresses
      var kk = i / TM; var mm = i % TM;
      if (g.a_inner == 1) { kk = i % TK; mm = i / TK; }
      var k = k0 + kk; var v = 0.0;
      if (m0 + mm < g.rows && k < g.inner) { v = b1[ao + (m0 + mm) * g.a_row + (k / g.fold) * g.a_fold + (k % g.fold) * g.a_inner]; }
      sa[kk * TM + mm] = v;
      kk = i / TM; mm = i % TM;
      if (g.b_inner == 1) { kk = i % TK; mm = i / TK; }
      k = k0 + kk; v = 0.0;
      if (n0 + mm < g.columns && k < g.inner) { v = b2[bo + (k / g.fold) * g.b_fold + (k % g.fold) * g.b_inner + (n0 + mm) * g.b_column]; }
      sb[kk * TM + mm] = v;
    }
    workgroupBarrier();
    for (var kk = 0; kk < TK; kk++) {
      let o = kk * TM; let y = vec4<f32>(sb[o + lx], sb[o + lx + LS], sb[o + lx + 2 * LS], sb[o + lx + 3 * LS]);
      acc[0] = fma(vec4<f32>(sa[o + ly]), y, acc[0]); acc[1] = fma(vec4<f32>(sa[o + ly + LS]), y, acc[1]);
      acc[2] = fma(vec4<f32>(sa[o + ly + 2 * LS]), y, acc[2]); acc[3] = fma(vec4<f32>(sa[o + ly + 3 * LS]), y, acc[3]);
    }
    workgroupBarrier();
  }
  for (var i = 0; i < 4; i++) { for (var j = 0; j < 4; j++) {
    let m = m0 + ly + LS * i; let n = n0 + lx + LS * j;
    if (m < g.rows && n < g.columns) {
      let at = co + m * g.c_row + n;
      var v = acc[i][j] * g.alpha;
      if (g.has_bias != 0) { v += b4[n]; }
      if (g.accumulate != 0) { v += b3[at]; }
      b3[at] = v;
    }
  } }
}

//// softmax: w r
// rows, columns: of the scores; a_row, a_inner, a_fold: strides of the bias. Less than the least float is no number here:
// a driver may take infinities for anything, so a masked row is held at the least float, as its mask is.
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) w: vec3<u32>) {
  let tokens = g.columns;
  for (var r = i32(id.x); r < g.rows; r += i32(w.x) * 64) {
    let o = r * tokens;
    let m = (r / tokens / g.heads) * g.a_row + (r / tokens % g.heads) * g.a_inner + (r % tokens) * g.a_fold;
    var most = -3.4028234e38; var total = 0.0;
    for (var i = 0; i < tokens; i++) {
      var v = b1[o + i];
      if (g.has_bias != 0) { v = max(v + b2[m + i], -3.4028234e38); }
      b1[o + i] = v; most = max(most, v);
    }
    for (var i = 0; i < tokens; i++) { let e = exp(b1[o + i] - most); b1[o + i] = e; total += e; }
    let factor = 1.0 / total;
    for (var i = 0; i < tokens; i++) { b1[o + i] *= factor; }
  }
}

//// softmax_gradient: r w
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) w: vec3<u32>) {
  for (var r = i32(id.x); r < g.rows; r += i32(w.x) * 64) {
    let o = r * g.columns; var mean = 0.0;
    for (var i = 0; i < g.columns; i++) { mean += b1[o + i] * b2[o + i]; }
    for (var i = 0; i < g.columns; i++) { b2[o + i] = b1[o + i] * (b2[o + i] - mean) * g.alpha; }
  }
}

//// turn: w r r
// columns: numbers of a head; inner: those turned; fold: tokens; has_bias: tables a row; accumulate: interleaved; alpha: sign.
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) w: vec3<u32>) {
  for (var r = i32(id.x); r < g.rows; r += i32(w.x) * 64) {
    let at = select(r % g.fold, r, g.has_bias != 0) * g.inner;
    for (var h = 0; h < g.heads; h++) {
      let x = (r * g.heads + h) * g.columns;
      for (var i = 0; i < g.inner / 2; i++) {
        var u = i; var v = i + g.inner / 2;
        if (g.accumulate != 0) { u = 2 * i; v = 2 * i + 1; }
        let a = b1[x + u]; let b = b1[x + v]; let c = b2[at + u]; let s = g.alpha * b3[at + u];
        b1[x + u] = a * c - b * s;
        b1[x + v] = b * c + a * s;
      }
    }
  }
}

//// drop: r r w
// The mask's bytes lie four in a number.
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) w: vec3<u32>) {
  for (var i = i32(id.x); i < g.rows; i += i32(w.x) * 64) {
    let kept = (bitcast<u32>(b2[i / 4]) >> (u32(i % 4) * 8u)) & 255u;
    b3[i] = b1[i] * f32(kept) * g.alpha;
  }
}

//// drop_own: w r
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) w: vec3<u32>) {
  for (var i = i32(id.x); i < g.rows; i += i32(w.x) * 64) {
    let kept = (bitcast<u32>(b2[i / 4]) >> (u32(i % 4) * 8u)) & 255u;
    b1[i] *= f32(kept) * g.alpha;
  }
}

//// add: w r
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) w: vec3<u32>) {
  for (var i = i32(id.x); i < g.rows; i += i32(w.x) * 64) { b1[i] += b2[i]; }
}

//// column_sums: r w
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) w: vec3<u32>) {
  for (var n = i32(id.x); n < g.columns; n += i32(w.x) * 64) {
    var total = 0.0;
    for (var r = 0; r < g.rows; r++) { total += b1[r * g.columns + n]; }
    b2[n] = total;
  }
}

//// activate: r w
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) w: vec3<u32>) {
  for (var i = i32(id.x); i < g.rows; i += i32(w.x) * 64) { b2[i] = activation(g.heads, b1[i]).x; }
}

//// activate_gated: r r w
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) w: vec3<u32>) {
  for (var i = i32(id.x); i < g.rows; i += i32(w.x) * 64) { b3[i] = activation(g.heads, b2[i]).x * b1[i]; }
}

//// activate_gradient: r w
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) w: vec3<u32>) {
  for (var i = i32(id.x); i < g.rows; i += i32(w.x) * 64) { b2[i] *= activation(g.heads, b1[i]).y; }
}

//// activate_gated_gradient: r r w w
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) w: vec3<u32>) {
  for (var i = i32(id.x); i < g.rows; i += i32(w.x) * 64) {
    let v = activation(g.heads, b2[i]); let d = b3[i];
    b4[i] = d * b1[i] * v.y;
    b3[i] = d * v.x;
  }
}
