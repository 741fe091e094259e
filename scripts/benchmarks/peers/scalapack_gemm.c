/* C := A B by ScaLAPACK's PDGEMM or PSGEMM, as a contender of scripts/benchmarks/bench_peers.py:

       mpiexec -n P scalapack_gemm float64|float32 native|columns

   Rank 0 reads lines "m n k", and prints the seconds of each product and its layout.  For the first product of a shape,
   all grids of P and some block sizes are tried; the fastest layout is used, and its result checked: C x = A (B x).
   native: A, B and C have that layout.  columns: they have one block of columns per rank, and are multiplied there, or
   redistributed by PDGEMR2D and back, whichever is faster.  LOGICAL_BLOCK replaces PBLAS's logical block size, 32.
   Before its first answer rank 0 says for which processors its BLAS multiplies: "kernel NAME". */

#include "scalapack_common.h"
#include <math.h>
void pdgemm_(const char *, const char *, In m, In n, In k, const void *alpha, const void *a, In, In, In desca,
             const void *b, In, In, In descb, const void *beta, void *c, In, In, In descc);
void psgemm_(const char *, const char *, In m, In n, In k, const void *alpha, const void *a, In, In, In desca,
             const void *b, In, In, In descb, const void *beta, void *c, In, In, In descc);
void pdgemr2d_(In m, In n, const void *a, In, In, In desca, void *b, In, In, In descb, In context);
void psgemr2d_(In m, In n, const void *a, In, In, In desca, void *b, In, In, In descb, In context);

#ifdef LOGICAL_BLOCK
int pilaenv_(int *context, char *precision) { return LOGICAL_BLOCK; }
#endif

typedef struct { int context, pr, pc, nb; } Way; /* a layout; nb 0: one block of columns per rank */

typedef struct { Way way; Matrix user[3], work[3]; } Product; /* A, B, C */

static const int BLOCKS[] = {64, 128, 256};
static const double SURPLUS = 1.5; /* a layout whose first run takes this many times the best time is not run again */
static int columns, one_by_all;

/* |C x - A (B x)| / |A (B x)| */
static double error(const Matrix *abc)
{
    double *x = malloc(abc[1].n * sizeof *x), difference = 0, size = 0;
    for (int j = 0; j < abc[1].n; j++) x[j] = element(j, 0, 3);
    double *bx = times(&abc[1], x, ALL, 0), *abx = times(&abc[0], bx, ALL, 0), *cx = times(&abc[2], x, ALL, 0);
    for (int i = 0; i < abc[0].m; i++) {
        difference += (cx[i] - abx[i]) * (cx[i] - abx[i]);
        size += abx[i] * abx[i];
    }
    free(x), free(bx), free(abx), free(cx);
    return sqrt(difference / size);
}

/* The block size of n indices: nb, or less if a place would have no block otherwise. */
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

/* Returns the product in the fastest layout by rank 0's clock. */
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
        else printf("%.9f multiplied in the given columns\n", seconds);
        fflush(stdout);
    }
    MPI_Finalize();
    return 0;
}
