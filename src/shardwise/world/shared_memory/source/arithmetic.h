/* Sums, maxima and minima of several ranks' numbers, in the order of ranks. d = a op b, where d may be a or b.
 * NaN (a != a) propagates through maxima and minima too, as in torch. */

#define PAIR(T, NAME, EXPRESSION)                                           \
    static void NAME(T *d, const T *p, const T *q, size_t n) {              \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++) {               \
            T a = p[i], b = q[i];                                           \
            d[i] = EXPRESSION;                                              \
        }                                                                   \
    }
#define KIND(T, U, NAME)                                \
    PAIR(T, NAME##_sum, (T)((U)a + (U)b))               \
    PAIR(T, NAME##_max, a > b || a != a ? a : b)        \
    PAIR(T, NAME##_min, a < b || a != a ? a : b)        \
    static void NAME##_pair(int op, void *d, const void *a, const void *b, size_t n) { \
        (op == SUM ? NAME##_sum : op == MAX ? NAME##_max : NAME##_min)(d, a, b, n);    \
    }
KIND(float, float, f32)
KIND(double, double, f64)
KIND(int64_t, uint64_t, i64) /* sums wrap, which signed ones may not in C */
KIND(int32_t, uint32_t, i32)
KIND(int16_t, uint16_t, i16)
KIND(int8_t, uint8_t, i8)
KIND(uint8_t, uint8_t, u8)

static void widen_bf16(float *d, const uint16_t *s, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t u = (uint32_t)s[i] << 16;
        memcpy(d + i, &u, 4);
    }
}

static void narrow_bf16(uint16_t *d, const float *s, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, s + i, 4);
        uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16; /* to nearest, ties to even */
        d[i] = (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)rounded;
    }
}

#ifdef __FLT16_MANT_DIG__
static void widen_f16(float *d, const uint16_t *s, size_t n) {
    const _Float16 *h = (const _Float16 *)s;
    for (size_t i = 0; i < n; i++) d[i] = (float)h[i];
}
static void narrow_f16(uint16_t *d, const float *s, size_t n) {
    _Float16 *h = (_Float16 *)d;
    for (size_t i = 0; i < n; i++) h[i] = (_Float16)s[i];
}
#endif

/* Returns whether this build can reduce that type. */
int shardwise_adds(int dtype) {
#ifndef __FLT16_MANT_DIG__
    if (dtype == F16) return 0;
#endif
    return dtype >= F32 && dtype <= U8;
}

static void pair(int dtype, int op, void *d, const void *a, const void *b, size_t n) {
    switch (dtype) {
    case F32: f32_pair(op, d, a, b, n); break;
    case F64: f64_pair(op, d, a, b, n); break;
    case I64: i64_pair(op, d, a, b, n); break;
    case I32: i32_pair(op, d, a, b, n); break;
    case I16: i16_pair(op, d, a, b, n); break;
    case I8: i8_pair(op, d, a, b, n); break;
    default: u8_pair(op, d, a, b, n);
    }
}

/* Adds `bytes` of n sources, in their order, and writes the sum to all destinations; a destination may be a source. */
static void add(char **to, int num_to, char **from, int n, uint64_t bytes, uint64_t item, int dtype, int op) {
    _Alignas(64) char sum[BLOCK * 8];
    _Alignas(64) float wide[BLOCK], next[BLOCK];
    uint64_t step = BLOCK * item;
    int direct = num_to == 1 && n == 2 && dtype != BF16 && dtype != F16;
    if (direct) {
        pair(dtype, op, to[0], from[0], from[1], bytes / item);
        return;
    }
    for (uint64_t at = 0; at < bytes; at += step) {
        uint64_t size = least(step, bytes - at), count = size / item;
        if (dtype == BF16 || dtype == F16) {
            void (*widen)(float *, const uint16_t *, size_t) = widen_bf16;
            void (*narrow)(uint16_t *, const float *, size_t) = narrow_bf16;
#ifdef __FLT16_MANT_DIG__
            if (dtype == F16) widen = widen_f16, narrow = narrow_f16;
#endif
            widen(wide, (uint16_t *)(from[0] + at), count);
            for (int r = 1; r < n; r++) {
                widen(next, (uint16_t *)(from[r] + at), count);
                f32_pair(op, wide, wide, next, count);
            }
            narrow((uint16_t *)sum, wide, count);
        } else if (n == 1) {
            memcpy(sum, from[0] + at, size);
        } else {
            pair(dtype, op, sum, from[0] + at, from[1] + at, count);
            for (int r = 2; r < n; r++) pair(dtype, op, sum, sum, from[r] + at, count);
        }
        for (int k = 0; k < num_to; k++) memcpy(to[k] + at, sum, size);
    }
}
