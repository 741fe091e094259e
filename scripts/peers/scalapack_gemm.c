/* C := A B by ScaLAPACK's PDGEMM or PSGEMM, as a contender of scripts/bench_peers.py:

       mpiexec -n P scalapack_gemm float64|float32 native|columns

   Rank 0 reads "m n k" from each line and answers with the seconds of that product and how it was laid out.  The first
   product of a shape tries all grids of P and some block sizes, keeps the fastest, and checks it: C x = A (B x).
   native: A, B and C lie in that layout.  columns: they lie in one block of columns per rank, and are multiplied there,
   or moved by PDGEMR2D and back, whichever is faster.  LOGICAL_BLOCK replaces the logical block size of PBLAS, 32.
   Before its first answer rank 0 says for which processors its BLAS multiplies: "kernel NAME". */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef const int *In;
void Cblacs_pinfo(int *rank, int *ranks);
void Cblacs_get(int context, int what, int *value);
void Cblacs_gridinit(int *context, const char *order, int rows, int cols);
void Cblacs_gridinfo(int context, int *rows, int *cols, int *row, int *col);
int numroc_(In n, In nb, In place, In source, In places);
void descinit_(int *desc, In m, In n, In mb, In nb, In rsrc, In csrc, In context, In lld, int *info);
void pdgemm_(const char *, const char *, In m, In n, In k, const void *alpha, const void *a, In, In, In desca,
             const void *b, In, In, In descb, const void *beta, void *c, In, In, In descc);
void psgemm_(const char *, const char *, In m, In n, In k, const void *alpha, const void *a, In, In, In desca,
             const void *b, In, In, In descb, const void *beta, void *c, In, In, In descc);
void pdgemr2d_(In m, In n, const void *a, In, In, In desca, void *b, In, In, In descb, In context);
void psgemr2d_(In m, In n, const void *a, In, In, In desca, void *b, In, In, In descb, In context);

#ifdef LOGICAL_BLOCK
int pilaenv_(int *context, char *precision) { return LOGICAL_BLOCK; }
#endif

typedef struct {
    int m, n, mb, nb, context, pr, pc, i, j, rows, cols, desc[9];
    void *local;
} Matrix;

typedef struct { int context, pr, pc, nb; } Way; /* nb 0: as the columns lie */

typedef struct { Way way; Matrix user[3], work[3]; } Product; /* A, B, C */

static const int ZERO = 0, ONE = 1, BLOCKS[] = {64, 128, 256};
static const double SURPLUS = 1.5; /* a way that takes so much longer than the best at first gets no second chance */
static int rank, ranks, single, columns, one_by_all;

static double element(uint64_t i, uint64_t j, uint64_t seed) /* in [-1/2, 1/2), the same wherever it lies */
{
    uint64_t x = (i * 0x9E3779B97F4A7C15u ^ seed) + j * 0xD1B54A32D192ED03u;
    x = (x ^ x >> 32) * 0xD6E8FEB86659FD93u;
    x = (x ^ x >> 32) * 0xD6E8FEB86659FD93u;
    return (double)((x ^ x >> 32) >> 40) * 0x1p-24 - 0.5;
}

static Matrix make(int context, int m, int n, int mb, int nb)
{
    Matrix x = {m, n, mb, nb, context};
    int info, lld;
    Cblacs_gridinfo(context, &x.pr, &x.pc, &x.i, &x.j);
    x.rows = numroc_(&m, &mb, &x.i, &ZERO, &x.pr);
    x.cols = numroc_(&n, &nb, &x.j, &ZERO, &x.pc);
    lld = x.rows > 1 ? x.rows : 1;
    descinit_(x.desc, &m, &n, &mb, &nb, &ZERO, &ZERO, &context, &lld, &info);
    x.local = malloc(((size_t)lld * x.cols + 1) * (single ? sizeof(float) : sizeof(double)));
    if (info || !x.local) MPI_Abort(MPI_COMM_WORLD, 1);
    return x;
}

static size_t row(const Matrix *x, int l) { return ((size_t)(l / x->mb) * x->pr + x->i) * x->mb + l % x->mb; }
static size_t col(const Matrix *x, int l) { return ((size_t)(l / x->nb) * x->pc + x->j) * x->nb + l % x->nb; }

static void fill(Matrix *x, uint64_t seed)
{
    for (int c = 0; c < x->cols; c++)
        for (int r = 0; r < x->rows; r++) {
            double value = element(row(x, r), col(x, c), seed);
            size_t at = (size_t)c * x->rows + r;
            if (single) ((float *)x->local)[at] = (float)value;
            else ((double *)x->local)[at] = value;
        }
}

/* y := X v, whole vectors on all ranks */
static double *times(const Matrix *x, const double *v)
{
    double *y = calloc(x->m, sizeof *y);
    for (int c = 0; c < x->cols; c++)
        for (int r = 0; r < x->rows; r++) {
            size_t at = (size_t)c * x->rows + r;
            y[row(x, r)] += v[col(x, c)] * (single ? ((float *)x->local)[at] : ((double *)x->local)[at]);
        }
    MPI_Allreduce(MPI_IN_PLACE, y, x->m, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    return y;
}

/* |C x - A (B x)| / |A (B x)| */
static double error(const Matrix *abc)
{
    double *x = malloc(abc[1].n * sizeof *x), difference = 0, size = 0;
    for (int j = 0; j < abc[1].n; j++) x[j] = element(j, 0, 3);
    double *bx = times(&abc[1], x), *abx = times(&abc[0], bx), *cx = times(&abc[2], x);
    for (int i = 0; i < abc[0].m; i++) {
        difference += (cx[i] - abx[i]) * (cx[i] - abx[i]);
        size += abx[i] * abx[i];
    }
    free(x), free(bx), free(abx), free(cx);
    return sqrt(difference / size);
}

/* Of n indices over so many places: no larger than leaves a block for each. */
static int block(int nb, int n, int places)
{
    int most = (n + places - 1) / places;
    return nb && nb < most ? nb : most;
}

static Product prepare(Way way, int m, int n, int k)
{
    Product p = {way};
    int kb = block(way.nb, k, way.pr > way.pc ? way.pr : way.pc);
    int mb = block(way.nb, m, way.pr), nb = block(way.nb, n, way.pc);
    int extents[3][2] = {{m, k}, {k, n}, {m, n}}, blocks[3][2] = {{mb, kb}, {kb, nb}, {mb, nb}};
    for (int x = 0; x < 3; x++) {
        int rows = extents[x][0], cols = extents[x][1];
        if (columns) p.user[x] = make(one_by_all, rows, cols, rows, block(0, cols, ranks));
        if (way.nb) p.work[x] = make(way.context, rows, cols, blocks[x][0], blocks[x][1]);
        if (!columns) p.user[x] = p.work[x];
        if (!way.nb) p.work[x] = p.user[x];
        if (x < 2) fill(&p.user[x], x + 1);
    }
    return p;
}

static void discard(Product *p)
{
    for (int x = 0; x < 3; x++) {
        free(p->user[x].local);
        if (p->work[x].local != p->user[x].local) free(p->work[x].local);
    }
}

static void move(const Matrix *x, Matrix *y)
{
    if (x->local == y->local) return;
    (single ? psgemr2d_ : pdgemr2d_)(&x->m, &x->n, x->local, &ONE, &ONE, x->desc, y->local, &ONE, &ONE, y->desc,
                                     &one_by_all);
}

static double timed(Product *p)
{
    const double one = 1, zero = 0;
    const float one_single = 1, zero_single = 0;
    const void *alpha = single ? (void *)&one_single : (void *)&one;
    const void *beta = single ? (void *)&zero_single : (void *)&zero;
    Matrix *a = &p->work[0], *b = &p->work[1], *c = &p->work[2];
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    move(&p->user[0], a);
    move(&p->user[1], b);
    (single ? psgemm_ : pdgemm_)("N", "N", &c->m, &c->n, &a->n, alpha, a->local, &ONE, &ONE, a->desc, b->local, &ONE,
                                 &ONE, b->desc, beta, c->local, &ONE, &ONE, c->desc);
    move(c, &p->user[2]);
    MPI_Barrier(MPI_COMM_WORLD);
    return MPI_Wtime() - start;
}

/* The fastest way by rank 0's clock. */
static Product tuned(const Way *ways, int count, int m, int n, int k)
{
    Product best;
    double least = INFINITY;
    for (int w = 0; w < count; w++) {
        Product p = prepare(ways[w], m, n, k);
        double seconds[2] = {timed(&p), INFINITY};
        MPI_Bcast(seconds, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
        if (seconds[0] < SURPLUS * least) seconds[1] = timed(&p);
        double taken = fmin(seconds[0], seconds[1]);
        MPI_Bcast(&taken, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
        if (taken < least) {
            if (least < INFINITY) discard(&best);
            least = taken, best = p;
        } else
            discard(&p);
    }
    return best;
}

/* What the BLAS says that products are made by: OpenBLAS, MKL, or another, of which only the file is known. */
static void say_kernel(void)
{
    struct { int major, minor, update; char *status, *build, *processor, *platform; } mkl;
    Dl_info file = {"unknown"};
    dladdr(dlsym(RTLD_DEFAULT, "dgemm_"), &file);
    void *blas = dlopen(file.dli_fname, RTLD_LAZY); /* a reference BLAS may be there beside the OpenBLAS of LAPACK */
    char *(*openblas)(void) = (char *(*)(void))dlsym(blas, "openblas_get_corename");
    void (*version)(void *) = (void (*)(void *))dlsym(blas, "MKL_Get_Version");
    if (version) version(&mkl);
    printf("kernel %s\n", openblas ? openblas() : version ? mkl.processor : file.dli_fname);
}

/* The next line of rank 0's input, on all ranks; they sleep until it comes, to leave others the cores. */
static int next(int *mnk)
{
    char line[256] = "";
    int here = rank == 0;
    if (here) {
        int whole = fgets(line, sizeof line, stdin) && sscanf(line, "%d %d %d", mnk, mnk + 1, mnk + 2) == 3;
        if (!whole) memset(mnk, 0, 3 * sizeof *mnk);
        for (int other = 1; other < ranks; other++) MPI_Send(mnk, 3, MPI_INT, other, 0, MPI_COMM_WORLD);
    } else {
        while (MPI_Iprobe(0, 0, MPI_COMM_WORLD, &here, MPI_STATUS_IGNORE), !here) usleep(20000);
        MPI_Recv(mnk, 3, MPI_INT, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    return mnk[0] > 0;
}

int main(int count, char **arguments)
{
    MPI_Init(&count, &arguments);
    if (count != 3) {
        fprintf(stderr, "usage: scalapack_gemm float64|float32 native|columns\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    single = !strcmp(arguments[1], "float32");
    columns = !strcmp(arguments[2], "columns");
    Cblacs_pinfo(&rank, &ranks);
    if (!rank) say_kernel();

    Way *ways = calloc(1 + 3 * ranks, sizeof *ways);
    int known = 0;
    if (columns) ways[known++] = (Way){0, 1, ranks, 0};
    for (int pr = 1; pr <= ranks; pr++) {
        int context;
        if (ranks % pr) continue;
        Cblacs_get(-1, 0, &context);
        Cblacs_gridinit(&context, "R", pr, ranks / pr);
        if (pr == 1) one_by_all = context;
        for (int b = 0; b < 3; b++) ways[known++] = (Way){context, pr, ranks / pr, BLOCKS[b]};
    }

    int now[3] = {0}, mnk[3];
    double wrong = 0;
    Product p;
    while (next(mnk)) {
        if (memcmp(now, mnk, sizeof now)) {
            if (now[0]) discard(&p);
            memcpy(now, mnk, sizeof now);
            p = tuned(ways, known, mnk[0], mnk[1], mnk[2]);
            wrong = error(p.user);
        }
        double seconds = timed(&p);
        /* random signs: the error of C x is about sqrt(k) eps of its size at most */
        double tolerance = 8 * sqrt(mnk[2]) * (single ? 0x1p-23 : 0x1p-52);
        if (rank) continue;
        if (!(wrong <= tolerance)) printf("- wrong: relative error %.1e\n", wrong);
        else if (p.way.nb) printf("%.9f grid %d x %d, blocks of up to %d\n", seconds, p.way.pr, p.way.pc, p.way.nb);
        else printf("%.9f multiplied in the columns as they lie\n", seconds);
        fflush(stdout);
    }
    MPI_Finalize();
    return 0;
}
