/* Matrix products in fp32 whose every element is summed in one fixed order.
 *
 * gemm_nt: 16 lanes, each a chain of multiply-adds over every 16th product, then a fixed tree over the lanes.
 * gemm_nn: one chain of multiply-adds per element, in the order of k.
 * How rows and columns are grouped into blocks and shared between threads decides who computes an element, never how.
 */
#include <stdint.h>
#include <string.h>

#define LANES 16
#define ROWS 4           /* of a register block */
#define COLUMNS 4        /* of a register block, gemm_nt; vectors of LANES columns, gemm_nn */
#define TASK_ROWS 64     /* of one thread's piece of work */
#define TASK_COLUMNS 64
#define SMALL_WORK 65536 /* multiply-adds below which a second thread costs more than it saves */

typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));

typedef struct {
    const float *a, *b;
    float *c;               /* contiguous */
    const int64_t *b_ids;   /* which matrix of b each matrix of a takes, or NULL: the one of its own number */
    int64_t a_batch, a_row; /* strides in elements; the last dimension is contiguous */
    int64_t b_batch, b_row;
    int64_t m, n, k;
} problem;

#define INLINE static inline __attribute__((always_inline))

INLINE float sum_of_lanes(const vector *v) {
    float lane[LANES];
    memcpy(lane, v, sizeof(lane));
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

INLINE void block_nt(const problem *p, const float *a, const float *b, float *c, const int rows, const int columns) {
    vector sum[ROWS][COLUMNS];
    memset(sum, 0, sizeof(sum));
    int64_t k = 0;
    for (; k + LANES <= p->k; k += LANES)
        for (int i = 0; i < rows; i++) {
            const vector x = *(const vector *)(a + i * p->a_row + k);
            for (int j = 0; j < columns; j++) sum[i][j] += x * *(const vector *)(b + j * p->b_row + k);
        }
    if (k < p->k) {
        const size_t rest = (p->k - k) * sizeof(float);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < columns; j++) {
                vector x, y;
                memset(&x, 0, sizeof(x));
                memset(&y, 0, sizeof(y));
                memcpy(&x, a + i * p->a_row + k, rest);
                memcpy(&y, b + j * p->b_row + k, rest);
                sum[i][j] += x * y;
            }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) c[i * p->n + j] = sum_of_lanes(&sum[i][j]);
}

/* `vectors` vectors of columns, the last of which has `last` columns */
INLINE void block_nn(const problem *p, const float *a, const float *b, float *c, const int rows, const int vectors,
                     const int last) {
    vector sum[ROWS][COLUMNS];
    memset(sum, 0, sizeof(sum));
    for (int64_t k = 0; k < p->k; k++) {
        vector y[COLUMNS];
        for (int j = 0; j < vectors; j++) {
            const float *from = b + k * p->b_row + j * LANES;
            if (last < LANES && j == vectors - 1) {
                memset(&y[j], 0, sizeof(y[j]));
                memcpy(&y[j], from, last * sizeof(float));
            } else {
                y[j] = *(const vector *)from;
            }
        }
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < vectors; j++) sum[i][j] += a[i * p->a_row + k] * y[j];
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++)
            memcpy(c + i * p->n + j * LANES, &sum[i][j], (j == vectors - 1 ? last : LANES) * sizeof(float));
}

#define FOR_ROWS(block, count, ...)            \
    switch (count) {                           \
        case 1: block(1, __VA_ARGS__); break;  \
        case 2: block(2, __VA_ARGS__); break;  \
        case 3: block(3, __VA_ARGS__); break;  \
        default: block(4, __VA_ARGS__);        \
    }

#define BLOCK_NT(rows, columns) block_nt(p, a, b, c, rows, columns)
#define BLOCK_NN(rows, vectors, last) block_nn(p, a, b, c, rows, vectors, last)

INLINE void task_nt(const problem *p, const float *a_rows, const float *b_columns, float *c_task, int64_t rows,
                    int64_t columns) {
    for (int64_t j = 0; j < columns; j += COLUMNS)
        for (int64_t i = 0; i < rows; i += ROWS) {
            const float *a = a_rows + i * p->a_row, *b = b_columns + j * p->b_row;
            float *c = c_task + i * p->n + j;
            switch (columns - j) {
                case 1: FOR_ROWS(BLOCK_NT, rows - i, 1) break;
                case 2: FOR_ROWS(BLOCK_NT, rows - i, 2) break;
                case 3: FOR_ROWS(BLOCK_NT, rows - i, 3) break;
                default: FOR_ROWS(BLOCK_NT, rows - i, 4)
            }
        }
}

INLINE void task_nn(const problem *p, const float *a_rows, const float *b_columns, float *c_task, int64_t rows,
                    int64_t columns) {
    int64_t step;
    for (int64_t j = 0; j < columns; j += step) {
        const int64_t left = columns - j;
        step = left >= COLUMNS * LANES ? COLUMNS * LANES : left >= LANES ? LANES : left;
        for (int64_t i = 0; i < rows; i += ROWS) {
            const float *a = a_rows + i * p->a_row, *b = b_columns + j;
            float *c = c_task + i * p->n + j;
            if (step == COLUMNS * LANES) {
                FOR_ROWS(BLOCK_NN, rows - i, COLUMNS, LANES)
            } else if (step == LANES) {
                FOR_ROWS(BLOCK_NN, rows - i, 1, LANES)
            } else {
                FOR_ROWS(BLOCK_NN, rows - i, 1, (int)step)
            }
        }
    }
}

typedef void task(const problem *, const float *, const float *, float *, int64_t, int64_t);

#if defined(__x86_64__)
#define FOR_EACH_CPU(form)                                                                                          \
    __attribute__((target("avx512f,fma"))) static void form##_avx512(                                              \
        const problem *p, const float *a, const float *b, float *c, int64_t rows, int64_t columns) {               \
        form(p, a, b, c, rows, columns);                                                                            \
    }                                                                                                               \
    __attribute__((target("avx2,fma"))) static void form##_avx2(                                                   \
        const problem *p, const float *a, const float *b, float *c, int64_t rows, int64_t columns) {               \
        form(p, a, b, c, rows, columns);                                                                            \
    }                                                                                                               \
    static void form##_any(const problem *p, const float *a, const float *b, float *c, int64_t rows,               \
                           int64_t columns) {                                                                       \
        form(p, a, b, c, rows, columns);                                                                            \
    }                                                                                                               \
    static task *form##_for_this_cpu(void) {                                                                        \
        if (__builtin_cpu_supports("avx512f")) return form##_avx512;                                                \
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return form##_avx2;                    \
        return form##_any;                                                                                          \
    }
#else
#define FOR_EACH_CPU(form)                                                                                          \
    static void form##_any(const problem *p, const float *a, const float *b, float *c, int64_t rows,               \
                           int64_t columns) {                                                                       \
        form(p, a, b, c, rows, columns);                                                                            \
    }                                                                                                               \
    static task *form##_for_this_cpu(void) { return form##_any; }
#endif

FOR_EACH_CPU(task_nt)
FOR_EACH_CPU(task_nn)

static void run(const problem *p, task *one, int64_t batch, int b_is_transposed, int num_threads) {
    const int64_t row_tasks = (p->m + TASK_ROWS - 1) / TASK_ROWS;
    const int64_t column_tasks = (p->n + TASK_COLUMNS - 1) / TASK_COLUMNS;
    const int64_t num_tasks = batch * row_tasks * column_tasks;
#pragma omp parallel for schedule(static) num_threads(num_threads) \
    if (num_threads > 1 && num_tasks > 1 && batch * p->m * p->n * p->k > SMALL_WORK)
    for (int64_t t = 0; t < num_tasks; t++) {
        const int64_t matrix = t / (row_tasks * column_tasks);
        const int64_t row = t / column_tasks % row_tasks * TASK_ROWS, column = t % column_tasks * TASK_COLUMNS;
        const int64_t rows = p->m - row < TASK_ROWS ? p->m - row : TASK_ROWS;
        const int64_t columns = p->n - column < TASK_COLUMNS ? p->n - column : TASK_COLUMNS;
        const float *b = p->b + (p->b_ids ? p->b_ids[matrix] : matrix) * p->b_batch;
        one(p, p->a + matrix * p->a_batch + row * p->a_row, b + column * (b_is_transposed ? p->b_row : 1),
            p->c + (matrix * p->m + row) * p->n + column, rows, columns);
    }
}

/* c[x] = a[x] @ b[b_ids[x]].T; a [batch, m, k], b [any, n, k], c [batch, m, n] */
void gemm_nt(const problem *p, int64_t batch, int num_threads) { run(p, task_nt_for_this_cpu(), batch, 1, num_threads); }

/* c[x] = a[x] @ b[b_ids[x]]; a [batch, m, k], b [any, k, n], c [batch, m, n] */
void gemm_nn(const problem *p, int64_t batch, int num_threads) { run(p, task_nn_for_this_cpu(), batch, 0, num_threads); }
