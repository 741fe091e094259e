/* Shared code of the ScaLAPACK drivers: matrices in block-cyclic layouts, random elements, and the protocol of a
   contender (scripts/benchmarks/peers/job.py), whose ranks sleep between their turns. */

#define _GNU_SOURCE
#include <dlfcn.h>
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

typedef struct {
    int m, n, mb, nb, context, pr, pc, i, j, rows, cols, desc[9];
    void *local;
} Matrix;

static const int ZERO = 0, ONE = 1;
static int rank, ranks, single;

static double element(uint64_t i, uint64_t j, uint64_t seed) /* in [-1/2, 1/2), the same in every layout */
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

enum Part { ALL, LOWER, STRICT, UPPER }; /* a triangle with the diagonal, or without it */

/* y := X v, or X^T v, where X may be replaced by a part of X; v and y are whole vectors on all ranks */
static double *times(const Matrix *x, const double *v, enum Part part, int transposed)
{
    int length = transposed ? x->n : x->m;
    double *y = calloc(length, sizeof *y);
    for (int c = 0; c < x->cols; c++)
        for (int r = 0; r < x->rows; r++) {
            size_t i = row(x, r), j = col(x, c), at = (size_t)c * x->rows + r;
            if ((part == LOWER && i < j) || (part == STRICT && i <= j) || (part == UPPER && i > j)) continue;
            double value = single ? ((float *)x->local)[at] : ((double *)x->local)[at];
            if (transposed) y[j] += v[i] * value;
            else y[i] += v[j] * value;
        }
    MPI_Allreduce(MPI_IN_PLACE, y, length, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    return y;
}

/* Prints the kernel that OpenBLAS or MKL names, or the file of another BLAS. */
static void say_kernel(void)
{
    struct { int major, minor, update; char *status, *build, *processor, *platform; } mkl;
    Dl_info file = {"unknown"};
    dladdr(dlsym(RTLD_DEFAULT, "dgemm_"), &file);
    void *blas = dlopen(file.dli_fname, RTLD_LAZY); /* a reference BLAS may be loaded besides LAPACK's OpenBLAS */
    char *(*openblas)(void) = (char *(*)(void))dlsym(blas, "openblas_get_corename");
    void (*version)(void *) = (void (*)(void *))dlsym(blas, "MKL_Get_Version");
    if (version) version(&mkl);
    printf("kernel %s\n", openblas ? openblas() : version ? mkl.processor : file.dli_fname);
}

/* The next line of rank 0's input, on all ranks; they sleep until then, so that other jobs have the cores. */
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
