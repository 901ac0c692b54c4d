/* Numbers modulo a prime P of 62 bits, and exponents modulo Q = P - 1: elementwise arithmetic, powers, logarithms, matrix products, sums.
 *
 * In: contiguous arrays of residues in 0..modulus-1. Out: residues, the same bits as torch's operators in finite_field.py give. A product
 * of 124 bits is reduced by a quotient that is at most 2 too small (Barrett 1986). `step`: 0 for an operand that is one number. */
#include <stdint.h>

typedef unsigned __int128 wide;

/* `reciprocal`: 2^124 / modulus, rounded down. */
typedef struct {
    uint64_t modulus, reciprocal;
} Modulus;

static inline Modulus modulus_of(uint64_t modulus) {
    const Modulus m = {modulus, (uint64_t)(((wide)1 << 124) / modulus)};
    return m;
}

static inline uint64_t reduce(wide product, Modulus m) {
    const uint64_t quotient = (uint64_t)(((wide)(uint64_t)(product >> 61) * m.reciprocal) >> 63);
    uint64_t rest = (uint64_t)product - quotient * m.modulus;
    if (rest >= m.modulus) rest -= m.modulus;
    if (rest >= m.modulus) rest -= m.modulus;
    return rest;
}

static inline uint64_t product(uint64_t x, uint64_t y, Modulus m) { return reduce((wide)x * y, m); }

static inline uint64_t power(uint64_t x, uint64_t exponent, Modulus m) {
    uint64_t out = 1;
    for (; exponent; exponent >>= 1) {
        if (exponent & 1) out = product(out, x, m);
        x = product(x, x, m);
    }
    return out;
}

void field_multiply(const uint64_t *x, int64_t step_x, const uint64_t *y, int64_t step_y, uint64_t *out, int64_t n, uint64_t modulus) {
    const Modulus m = modulus_of(modulus);
    for (int64_t i = 0; i < n; i++) out[i] = product(x[i * step_x], y[i * step_y], m);
}

/* x + y, or x - y where `sign` is negative. */
void field_add(const uint64_t *x, int64_t step_x, const uint64_t *y, int64_t step_y, uint64_t *out, int64_t n, uint64_t modulus, int sign) {
    for (int64_t i = 0; i < n; i++) {
        const uint64_t b = y[i * step_y], other = sign < 0 && b ? modulus - b : b, sum = x[i * step_x] + other;
        out[i] = sum >= modulus ? sum - modulus : sum;
    }
}

/* 1 / x, 0 where x is 0: one inversion of the product of all (Montgomery 1987). */
void field_invert(const uint64_t *x, uint64_t *out, int64_t n, uint64_t modulus) {
    const Modulus m = modulus_of(modulus);
    uint64_t total = 1;
    for (int64_t i = 0; i < n; i++) {
        out[i] = total;
        if (x[i]) total = product(total, x[i], m);
    }
    uint64_t inverse = power(total, modulus - 2, m);
    for (int64_t i = n - 1; i >= 0; i--) {
        out[i] = x[i] ? product(out[i], inverse, m) : 0;
        if (x[i]) inverse = product(inverse, x[i], m);
    }
}

/* Powers of a base from tables of its powers to digits of 16 bits. */
void field_exponential(const uint64_t *exponent, const uint64_t *const tables[4], uint64_t *out, int64_t n, uint64_t modulus) {
    const Modulus m = modulus_of(modulus);
    for (int64_t i = 0; i < n; i++) {
        const uint64_t e = exponent[i];
        const uint64_t lower = product(tables[0][e & 0xFFFF], tables[1][e >> 16 & 0xFFFF], m);
        out[i] = product(lower, product(tables[2][e >> 32 & 0xFFFF], tables[3][e >> 48], m), m);
    }
}

/* A subgroup: its elements, sorted, and their exponents; what a power to `cofactor` lies in it contributes `weight` for. */
typedef struct {
    const uint64_t *elements, *exponents;
    uint64_t order, weight;
} Subgroup;

static inline uint64_t exponent_in(const Subgroup *group, uint64_t x) {
    uint64_t low = 0, high = group->order;
    while (low < high) {
        const uint64_t middle = (low + high) / 2;
        if (group->elements[middle] < x) low = middle + 1;
        else high = middle;
    }
    return group->exponents[low];
}

/* The exponent of the base that gives x, from its residues modulo four orders (Pohlig and Hellman 1978); 0 where x is 0. */
void field_logarithm(const uint64_t *x, const Subgroup groups[4], uint64_t *out, int64_t n, uint64_t modulus) {
    const Modulus p = modulus_of(modulus), q = modulus_of(modulus - 1);
    for (int64_t i = 0; i < n; i++) {
        uint64_t total = 0;
        if (x[i]) {
            const uint64_t lower = power(x[i], groups[2].order * groups[3].order, p);
            const uint64_t upper = power(x[i], groups[0].order * groups[1].order, p);
            for (int k = 0; k < 4; k++) {
                const uint64_t one = power(k < 2 ? lower : upper, groups[k ^ 1].order, p);
                total += product(groups[k].weight, exponent_in(groups + k, one), q);
                if (total >= q.modulus) total -= q.modulus;
            }
        }
        out[i] = total;
    }
}

static inline uint64_t mix(uint64_t z) { /* SplitMix64 */
    z = (z ^ (z >> 30 & 0x3FFFFFFFF)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27 & 0x1FFFFFFFFF)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31 & 0x1FFFFFFFF);
}

static inline uint64_t residue(uint64_t word, uint64_t modulus) { /* of a signed word */
    const int64_t rest = (int64_t)word % (int64_t)modulus;
    return (uint64_t)(rest < 0 ? rest + (int64_t)modulus : rest);
}

void field_random(const uint64_t *x, uint64_t offset, uint64_t *out, int64_t n, uint64_t modulus) {
    for (int64_t i = 0; i < n; i++) out[i] = residue(mix(x[i] + offset), modulus);
}

void field_exponent(const uint64_t *x, uint64_t offset, int last_bits, uint64_t *out, int64_t n, uint64_t modulus) {
    const uint64_t q = modulus - 1;
    for (int64_t i = 0; i < n; i++) {
        const int negative = x[i] > modulus / 2;
        const uint64_t size = negative ? modulus - x[i] : x[i], first = size >> last_bits;
        const uint64_t exponent = ((first ? residue(mix(first + offset), q) : 0) + (size & (((uint64_t)1 << last_bits) - 1))) % q;
        out[i] = negative && exponent ? q - exponent : exponent;
    }
}

/* out[b] = x[b] y[b], of `batch` pairs of n x k and k x m numbers; distances between rows and between columns are given. */
void field_matrix(const uint64_t *x, const int64_t steps_x[3], const uint64_t *y, const int64_t steps_y[3], uint64_t *out, int64_t batch,
                  int64_t n, int64_t k, int64_t m, uint64_t modulus) {
    const Modulus p = modulus_of(modulus);
    const wide whole = (wide)modulus << 64, most = (wide)1 << 126;
    for (int64_t b = 0; b < batch; b++)
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < m; j++) {
                const uint64_t *row = x + b * steps_x[0] + i * steps_x[1], *column = y + b * steps_y[0] + j * steps_y[2];
                wide sum = 0;
                for (int64_t l = 0; l < k; l++) {
                    sum += (wide)row[l * steps_x[2]] * column[l * steps_y[1]];
                    if (sum >= most) sum -= whole;
                }
                *out++ = reduce((wide)(uint64_t)(reduce(sum >> 62, p)) << 62, p) + reduce(sum & (((wide)1 << 62) - 1), p);
                if (out[-1] >= modulus) out[-1] -= modulus;
            }
}

/* Sums over the middle of [outer, terms, inner]. */
void field_sum(const uint64_t *x, uint64_t *out, int64_t outer, int64_t terms, int64_t inner, uint64_t modulus) {
    for (int64_t i = 0; i < outer; i++, out += inner) {
        for (int64_t j = 0; j < inner; j++) out[j] = 0;
        for (int64_t l = 0; l < terms; l++, x += inner)
            for (int64_t j = 0; j < inner; j++) {
                const uint64_t sum = out[j] + x[j];
                out[j] = sum >= modulus ? sum - modulus : sum;
            }
    }
}

/* The sum of parts[i] << (i bits), for whole numbers of either sign. */
void field_combine(const int64_t *const *parts, int count, int bits, uint64_t *out, int64_t n, uint64_t modulus) {
    const Modulus m = modulus_of(modulus);
    for (int64_t i = 0; i < n; i++) {
        uint64_t total = 0;
        for (int k = count - 1; k >= 0; k--) {
            total = reduce((wide)total << bits, m) + residue((uint64_t)parts[k][i], modulus);
            if (total >= modulus) total -= modulus;
        }
        out[i] = total;
    }
}
