/* Factorisations and solves by ScaLAPACK, as a contender of scripts/benchmarks/bench_linalg.py:

       mpiexec -n P scalapack_linalg FUNCTION float64|float32

   `KNOWN` lists the functions.  Rank 0 reads lines "n n n", and prints the seconds of each call and the layout.  For the
   first call of a size, all grids of P, some block sizes and some logical block sizes of PBLAS are tried, on matrices of
   order `trial_order`; the fastest layout is used, and its result checked by products with a vector.
   Matrices that a function overwrites are filled again before each timed call. */

#include "scalapack_common.h"
#include <math.h>

typedef void *Out;
#define DECLARE(p)                                                                                                         \
    void p##potrf_(const char *, In n, Out a, In, In, In desca, int *info, size_t);                                        \
    void p##getrf_(In m, In n, Out a, In, In, In desca, int *pivots, int *info);                                           \
    void p##geqrf_(In m, In n, Out a, In, In, In desca, Out tau, Out work, In lwork, int *info);                           \
    void p##orgqr_(In m, In n, In k, Out a, In, In, In desca, Out tau, Out work, In lwork, int *info);                     \
    void p##trsm_(const char *, const char *, const char *, const char *, In m, In n, const void *alpha, Out a, In, In,    \
                  In desca, Out b, In, In, In descb);                                                                      \
    void p##trmm_(const char *, const char *, const char *, const char *, In m, In n, const void *alpha, Out a, In, In,    \
                  In desca, Out b, In, In, In descb);                                                                      \
    void p##syrk_(const char *, const char *, In n, In k, const void *alpha, Out a, In, In, In desca, const void *beta,    \
                  Out c, In, In, In descc);                                                                                \
    void p##syevd_(const char *, const char *, In n, Out a, In, In, In desca, Out w, Out z, In, In, In descz, Out work,    \
                   In lwork, int *iwork, In liwork, int *info);                                                            \
    void p##syevr_(const char *, const char *, const char *, In n, Out a, In, In, In desca, Out vl, Out vu, In il, In iu,  \
                   int *m, int *nz, Out w, Out z, In, In, In descz, Out work, In lwork, int *iwork, In liwork, int *info); \
    void p##gesvd_(const char *, const char *, In m, In n, Out a, In, In, In desca, Out s, Out u, In, In, In descu,        \
                   Out vt, In, In, In descvt, Out work, In lwork, int *info);                                              \
    void p##geqpf_(In m, In n, Out a, In, In, In desca, int *pivots, Out tau, Out work, In lwork, int *info);
DECLARE(pd)
DECLARE(ps)
#define CALL(name, ...) (single ? ps##name##_ : pd##name##_)(__VA_ARGS__)

typedef struct { int context, pr, pc, nb, logical; } Way;

typedef struct { Way way; Matrix a, b, c; void *tau, *w; double *work; int *pivots, *iwork, lwork, liwork; } Task;

static const int BLOCKS[] = {32, 64, 128, 256}, LOGICAL[] = {32, 128, 256};
static const double SURPLUS = 1.5; /* a layout whose first run takes this many times the best time is not run again */
static const char *function;
static int logical = 32;

int pilaenv_(int *context, char *precision) { return logical; } /* overrides the library's, which returns 32 */

static const char *KNOWN[] = {"cholesky", "trsm", "trmm", "syrk", "lu", "qr-r", "qr", "eigh", "eigh-10%", "eigvalsh",
                              "svd", "svdvals", "qr-pivoted", NULL};

static int is(const char *name) { return !strcmp(function, name); }

static void refill(Task *t)
{
    int heavy = is("cholesky") || is("trsm") || is("trmm"); /* positive definite, well-conditioned */
    fill(&t->a, 1);
    fill(&t->b, 2);
    for (int c = 0; heavy && c < t->a.cols; c++)
        for (int r = 0; r < t->a.rows; r++) {
            size_t at = (size_t)c * t->a.rows + r;
            if (row(&t->a, r) != col(&t->a, c)) continue;
            if (single) ((float *)t->a.local)[at] += t->a.n;
            else ((double *)t->a.local)[at] += t->a.n;
        }
}

/* The length of a workspace, which ScaLAPACK writes into the first element */
static int length(const double *size)
{
    float as_single;
    memcpy(&as_single, size, sizeof as_single);
    return single ? (int)as_single : (int)*size;
}

static int tenth(int n) { return n < 20 ? 1 : n / 10; }

/* The order of the matrices on which layouts are tried: n, or less for functions that take seconds */
static int trial_order(int n)
{
    int most = is("svd") ? 512 : is("svdvals") || is("qr-pivoted") ? 1024 : n;
    return n < most ? n : most;
}

/* Whether p?syevr returns eigenvectors.  It transforms them back by p?ormtr with a part of its workspace that does not
   depend on lwork.  This part is too small if a rank has more than one block of rows of Z, and less than one block of the
   wanted columns (or vice versa): then p?ormtr only prints that its argument 16 is illegal, and info is 0
   (ScaLAPACK 2.2.1). */
static int transforms_back(Way way, int n)
{
    int nb = way.nb, some = tenth(n);
    int rows = numroc_(&n, &nb, &ZERO, &ZERO, &way.pr), cols = numroc_(&some, &nb, &ZERO, &ZERO, &way.pc);
    int has = rows * cols + 2 * nb * nb;
    return (rows + cols) * nb + nb * nb <= (has > 18 * n ? has : 18 * n);
}

/* Computes eigenvalues or singular values in t->w; with lwork -1, returns the lengths of the workspaces */
static int spectrum(Task *t, void *work, int lwork, int *iwork, int liwork)
{
    int info = 0, n = t->a.n, some = tenth(n), m, nz;
    double bounds[2] = {0};
    void *a = t->a.local, *z = t->b.local, *vt = t->c.local;
    const int *da = t->a.desc, *dz = t->b.desc, *dt = t->c.desc;
    if (is("eigh")) CALL(syevd, "V", "L", &n, a, &ONE, &ONE, da, t->w, z, &ONE, &ONE, dz, work, &lwork, iwork, &liwork, &info);
    if (is("eigh-10%"))
        CALL(syevr, "V", "I", "L", &n, a, &ONE, &ONE, da, bounds, bounds + 1, &ONE, &some, &m, &nz, t->w, z, &ONE, &ONE,
             dz, work, &lwork, iwork, &liwork, &info);
    if (is("eigvalsh")) /* p?syevd cannot compute only values */
        CALL(syevr, "N", "A", "L", &n, a, &ONE, &ONE, da, bounds, bounds + 1, &ONE, &some, &m, &nz, t->w, z, &ONE, &ONE,
             dz, work, &lwork, iwork, &liwork, &info);
    if (is("svd"))
        CALL(gesvd, "V", "V", &n, &n, a, &ONE, &ONE, da, t->w, z, &ONE, &ONE, dz, vt, &ONE, &ONE, dt, work, &lwork, &info);
    if (is("svdvals"))
        CALL(gesvd, "N", "N", &n, &n, a, &ONE, &ONE, da, t->w, z, &ONE, &ONE, dz, z, &ONE, &ONE, dz, work, &lwork, &info);
    return info;
}

static Task prepare(Way way, int n)
{
    Task t = {way};
    int info, query = -1;
    double size[2] = {0};
    t.a = make(way.context, n, n, way.nb, way.nb);
    t.b = make(way.context, n, n, way.nb, way.nb);
    t.c = is("svd") ? make(way.context, n, n, way.nb, way.nb) : make(way.context, 0, 0, way.nb, way.nb);
    t.pivots = calloc(t.a.rows + t.a.cols + way.nb, sizeof(int));
    t.tau = calloc(t.a.cols + way.nb, sizeof(double));
    CALL(geqrf, &n, &n, t.a.local, &ONE, &ONE, t.a.desc, t.tau, size, &query, &info);
    t.lwork = length(size);
    CALL(orgqr, &n, &n, &n, t.a.local, &ONE, &ONE, t.a.desc, t.tau, size, &query, &info);
    if (length(size) > t.lwork) t.lwork = length(size);
    CALL(geqpf, &n, &n, t.a.local, &ONE, &ONE, t.a.desc, t.pivots, t.tau, size, &query, &info);
    if (length(size) > t.lwork) t.lwork = length(size);
    t.w = calloc(n + 1, sizeof(double));
    t.liwork = 1;
    memset(size, 0, sizeof size);
    if (spectrum(&t, size, query, &t.liwork, query)) MPI_Abort(MPI_COMM_WORLD, 3);
    if (length(size) > t.lwork) t.lwork = length(size);
    t.lwork += (t.a.rows + t.a.cols + way.nb) * way.nb; /* p?ormtr needs it; p?syevd's query leaves it out */
    t.iwork = calloc(t.liwork + 1, sizeof(int));
    t.work = malloc((t.lwork + 1) * sizeof(double));
    return t;
}

static void discard(Task *t)
{
    free(t->a.local), free(t->b.local), free(t->c.local);
    free(t->tau), free(t->work), free(t->pivots), free(t->w), free(t->iwork);
}

static double timed(Task *t)
{
    const double one[] = {1, 0};
    const float one_single[] = {1, 0};
    const void *alpha = single ? (void *)one_single : (void *)one;
    const void *beta = single ? (void *)(one_single + 1) : (void *)(one + 1);
    int info = 0, n = t->a.n;
    void *a = t->a.local, *b = t->b.local;
    const int *da = t->a.desc, *db = t->b.desc;
    logical = t->way.logical;
    refill(t);
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    if (is("cholesky")) CALL(potrf, "L", &n, a, &ONE, &ONE, da, &info, 1);
    if (is("trsm")) CALL(trsm, "L", "L", "N", "N", &n, &n, alpha, a, &ONE, &ONE, da, b, &ONE, &ONE, db);
    if (is("trmm")) CALL(trmm, "L", "L", "N", "N", &n, &n, alpha, a, &ONE, &ONE, da, b, &ONE, &ONE, db);
    if (is("syrk")) CALL(syrk, "L", "N", &n, &n, alpha, a, &ONE, &ONE, da, beta, b, &ONE, &ONE, db);
    if (is("lu")) CALL(getrf, &n, &n, a, &ONE, &ONE, da, t->pivots, &info);
    if (is("qr") || is("qr-r")) CALL(geqrf, &n, &n, a, &ONE, &ONE, da, t->tau, t->work, &t->lwork, &info);
    if (is("qr-pivoted")) CALL(geqpf, &n, &n, a, &ONE, &ONE, da, t->pivots, t->tau, t->work, &t->lwork, &info);
    if (is("qr")) CALL(orgqr, &n, &n, &n, a, &ONE, &ONE, da, t->tau, t->work, &t->lwork, &info);
    info += spectrum(t, t->work, t->lwork, t->iwork, t->liwork);
    MPI_Barrier(MPI_COMM_WORLD);
    if (info) MPI_Abort(MPI_COMM_WORLD, 3);
    return MPI_Wtime() - start;
}

static double *sum(double *x, double *y, int n)
{
    for (int i = 0; i < n; i++) x[i] += y[i];
    free(y);
    return x;
}

/* X v of a symmetric X, of which the lower triangle is stored */
static double *symmetric(const Matrix *x, const double *v)
{
    return sum(times(x, v, LOWER, 0), times(x, v, STRICT, 1), x->n);
}

/* Applies the exchanges of rows to v, in their order */
static void exchange(const Task *t, double *v)
{
    int n = t->a.n, *all = calloc(n, sizeof *all);
    for (int r = 0; r < t->a.rows; r++) all[row(&t->a, r)] = t->pivots[r];
    MPI_Allreduce(MPI_IN_PLACE, all, n, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    for (int i = 0; i < n; i++) {
        double held = v[i];
        v[i] = v[all[i] - 1], v[all[i] - 1] = held;
    }
    free(all);
}

/* P v, or P^T v, where A P = Q R */
static double *permuted(const Task *t, const double *v, int transposed)
{
    int n = t->a.n, *all = calloc(n, sizeof *all);
    double *y = calloc(n, sizeof *y);
    for (int c = 0; c < t->a.cols; c++) all[col(&t->a, c)] = t->pivots[c];
    MPI_Allreduce(MPI_IN_PLACE, all, n, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    for (int j = 0; j < n; j++) {
        if (transposed) y[j] = v[all[j] - 1];
        else y[all[j] - 1] = v[j];
    }
    free(all);
    return y;
}

/* The trace and the norm of a symmetric X, of which the lower triangle is stored; or only the norm of another X */
static double *moments(const Matrix *x, int symmetric)
{
    double *y = calloc(2, sizeof *y);
    for (int c = 0; c < x->cols; c++)
        for (int r = 0; r < x->rows; r++) {
            size_t i = row(x, r), j = col(x, c), at = (size_t)c * x->rows + r;
            double value = single ? ((float *)x->local)[at] : ((double *)x->local)[at];
            if (i == j && symmetric) y[0] += value;
            y[1] += value * value * (symmetric ? (i > j) * 2 + (i == j) : 1);
        }
    MPI_Allreduce(MPI_IN_PLACE, y, 2, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    y[1] = sqrt(y[1]);
    return y;
}

static double value(const Task *t, int i) { return single ? ((float *)t->w)[i] : ((double *)t->w)[i]; }

/* |y - expected| / |expected|, where y is the result applied to a random vector */
static double error(Task *t)
{
    Matrix *a = &t->a, *b = &t->b;
    int n = a->n, length = n, some = tenth(n);
    double *x = malloc(n * sizeof *x), *y = NULL, *expected = NULL, difference = 0, size = 0;
    for (int j = 0; j < n; j++) x[j] = element(j, 0, 3);
    if (is("cholesky")) y = times(a, times(a, x, LOWER, 1), LOWER, 0);
    if (is("trsm") || is("trmm")) y = times(b, x, ALL, 0);
    if (is("syrk")) y = symmetric(b, x);
    if (is("qr-r") || is("qr-pivoted")) y = times(a, times(a, x, UPPER, 0), UPPER, 1);
    if (is("qr")) y = times(a, times(a, x, ALL, 0), ALL, 1);
    if (is("lu")) {
        double *u = times(a, x, UPPER, 0);
        y = sum(times(a, u, STRICT, 0), u, n);
    }
    if (is("eigh")) {
        double *v = times(b, x, ALL, 1);
        for (int i = 0; i < n; i++) v[i] *= value(t, i);
        y = times(b, v, ALL, 0);
    }
    if (is("svd")) {
        double *v = times(&t->c, x, ALL, 0);
        for (int i = 0; i < n; i++) v[i] *= value(t, i);
        y = times(b, v, ALL, 0);
    }
    double *combined = NULL;
    if (is("eigh-10%")) {
        double *v = calloc(n, sizeof *v);
        for (int i = 0; i < some; i++) v[i] = x[i];
        combined = times(b, v, ALL, 0);
        for (int i = 0; i < some; i++) v[i] *= value(t, i);
        y = times(b, v, ALL, 0);
    }
    if (is("eigvalsh") || is("svdvals")) {
        length = 2, y = calloc(2, sizeof *y);
        for (int i = 0; i < n; i++) y[0] += is("eigvalsh") * value(t, i), y[1] += value(t, i) * value(t, i);
        y[1] = sqrt(y[1]);
    }
    refill(t);
    if (is("cholesky") || is("eigh")) expected = symmetric(a, x);
    if (is("eigh-10%")) expected = symmetric(a, combined);
    if (is("eigvalsh") || is("svdvals")) expected = moments(a, is("eigvalsh"));
    if (is("trsm")) y = times(a, y, LOWER, 0), expected = times(b, x, ALL, 0);
    if (is("trmm")) expected = times(a, times(b, x, ALL, 0), LOWER, 0);
    if (is("syrk")) expected = times(a, times(a, x, ALL, 1), ALL, 0);
    if (is("qr-r")) expected = times(a, times(a, x, ALL, 0), ALL, 1);
    if (is("qr-pivoted"))
        expected = permuted(t, times(a, times(a, permuted(t, x, 0), ALL, 0), ALL, 1), 1); /* (A P)^T A P = R^T R */
    if (is("svd")) expected = times(a, x, ALL, 0);
    if (is("qr")) expected = x; /* Q^T Q = I */
    if (is("lu")) exchange(t, expected = times(a, x, ALL, 0));
    for (int i = 0; i < length; i++) {
        difference += (y[i] - expected[i]) * (y[i] - expected[i]);
        size += expected[i] * expected[i];
    }
    return sqrt(difference / size); /* the few vectors of each size are not freed before the job ends */
}

/* Returns the task in the fastest layout by rank 0's clock, for matrices of order n. */
static Task tuned(const Way *ways, int count, int n)
{
    int best = -1, order = trial_order(n);
    double least = INFINITY;
    for (int w = 0; w < count; w++) {
        if (is("eigh-10%") && !transforms_back(ways[w], n)) continue;
        Task t = prepare(ways[w], order);
        double seconds[2] = {timed(&t), INFINITY};
        MPI_Bcast(seconds, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
        if (seconds[0] < SURPLUS * least) seconds[1] = timed(&t);
        double taken = fmin(seconds[0], seconds[1]);
        MPI_Bcast(&taken, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
        if (taken < least) least = taken, best = w;
        discard(&t);
    }
    if (best < 0) fprintf(stderr, "p?syevr has too small a workspace in all layouts\n"), MPI_Abort(MPI_COMM_WORLD, 3);
    return prepare(ways[best], n);
}

int main(int count, char **arguments)
{
    int fine = 0;
    MPI_Init(&count, &arguments);
    if (count == 3) {
        function = arguments[1];
        for (int f = 0; KNOWN[f]; f++) fine |= is(KNOWN[f]);
    }
    if (!fine) {
        fprintf(stderr, "usage: scalapack_linalg FUNCTION float64|float32\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    single = !strcmp(arguments[2], "float32");
    Cblacs_pinfo(&rank, &ranks);
    if (!rank) say_kernel();

    Way *ways = calloc(12 * ranks, sizeof *ways);
    int tried = 0;
    for (int pr = 1; pr <= ranks; pr++) {
        int context;
        if (ranks % pr) continue;
        Cblacs_get(-1, 0, &context);
        Cblacs_gridinit(&context, "R", pr, ranks / pr);
        for (int b = 0; b < 4; b++)
            for (int l = 0; l < 3; l++) ways[tried++] = (Way){context, pr, ranks / pr, BLOCKS[b], LOGICAL[l]};
    }

    int now = 0, mnk[3];
    double wrong = 0;
    Task t;
    while (next(mnk)) {
        if (now != mnk[0]) {
            if (now) discard(&t);
            now = mnk[0];
            t = tuned(ways, tried, now);
            timed(&t);
            wrong = error(&t);
        }
        double seconds = timed(&t), tolerance = 30.0 * now * (single ? 0x1p-23 : 0x1p-52);
        if (rank) continue;
        if (!(wrong <= tolerance)) printf("- wrong: relative error %.1e\n", wrong);
        else
            printf("%.9f %d x %d, blocks of %d, logical block %d\n", seconds, t.way.pr, t.way.pc, t.way.nb, t.way.logical);
        fflush(stdout);
    }
    MPI_Finalize();
    return 0;
}
