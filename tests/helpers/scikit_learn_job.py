"""Estimators and metrics of scikit-learn on distributed arrays, compared with their results on NumPy's.

SCIPY_ARRAY_API=1 mpiexec -n 2 python -m mpi4py scikit_learn_job.py prints "equal", or ends with an exception.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import array_api_compat
import array_api_extra as xpx
import numpy as np
import sklearn
from mpi4py import MPI
from scipy import integrate, stats
from scipy.cluster import vq
from sklearn import metrics
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import (
    LogisticRegression,
    PoissonRegressor,
    Ridge,
    RidgeClassifier,
    RidgeClassifierCV,
    RidgeCV,
)
from sklearn.metrics import pairwise
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    Binarizer,
    KernelCenterer,
    LabelEncoder,
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    PolynomialFeatures,
    StandardScaler,
)

from pdgemm import array_api as xp

ROWS, COLUMNS = 60, 8
Function = Callable[..., Any]


def results(make: Function, *methods: str, attributes: tuple[str, ...] = ()) -> Function:
    """Return a function that fits an estimator, and returns the results of its methods and its attributes."""

    def fitted(X: Any, *y: Any) -> list[Any]:
        estimator = make().fit(X, *y)
        return [getattr(estimator, x)(X) for x in methods] + [getattr(estimator, x) for x in attributes]

    return fitted


def functions(X: np.ndarray, y: np.ndarray, classes: np.ndarray) -> dict[str, tuple[Function, tuple[np.ndarray, ...]]]:
    """Return, by name, a function and the arrays that it takes."""
    near, others, positive = y + 0.1, np.where(np.arange(ROWS) % 5, classes, 1 - classes), np.abs(y) + 1
    chance = np.clip(np.abs(y) / 10, 0.01, 0.99)
    estimators = {
        "StandardScaler": (results(StandardScaler, "transform", attributes=("mean_", "scale_")), (X,)),
        "MinMaxScaler": (results(MinMaxScaler, "transform"), (X,)),
        "MaxAbsScaler": (results(MaxAbsScaler, "transform"), (X,)),
        "Normalizer": (results(Normalizer, "transform"), (X,)),
        "Binarizer": (results(Binarizer, "transform"), (X,)),
        "PolynomialFeatures": (results(PolynomialFeatures, "transform"), (X,)),
        "PCA": (results(partial(PCA, 3, svd_solver="full"), "transform", attributes=("explained_variance_",)), (X,)),
        "PCA of the covariance": (results(partial(PCA, 3, svd_solver="covariance_eigh"), "transform"), (X,)),
        "Ridge": (results(partial(Ridge, solver="svd"), "predict", attributes=("coef_",)), (X, y)),
        "RidgeCV": (results(RidgeCV, "predict", attributes=("coef_",)), (X, y)),
        "RidgeClassifier": (results(partial(RidgeClassifier, solver="svd"), "predict"), (X, classes)),
        "LinearDiscriminantAnalysis": (
            results(LinearDiscriminantAnalysis, "predict", "predict_proba"), (X, classes)),
        "LogisticRegression": (results(LogisticRegression, "predict", "predict_proba"), (X, classes)),
        "GaussianNB": (results(GaussianNB, "predict", "predict_proba"), (X, classes)),
        "Nystroem": (results(partial(Nystroem, n_components=5, random_state=0), "transform"), (X,)),
        "GaussianMixture": (
            results(partial(GaussianMixture, 2, random_state=0, init_params="random"), "predict"), (X,)),
    }  # fmt: skip
    tasks = {  # many calls, compared on up to 2 ranks
        "RidgeClassifierCV": (results(RidgeClassifierCV, "predict"), (X, classes)),
        "PoissonRegressor": (results(partial(PoissonRegressor, solver="lbfgs"), "predict"), (X, np.abs(y))),
        "KernelCenterer": (KernelCenterer().fit_transform, (X @ X.T,)),
        "LabelEncoder": (LabelEncoder().fit_transform, (3 * classes,)),
        "PCA by random projections": (
            results(partial(PCA, 3, svd_solver="randomized", random_state=0), "transform"), (X,)),
        "cross-validation": (lambda X, y: list(cross_val_score(Ridge(solver="svd"), X, y, cv=3)), (X, y)),
        "a pipeline": (
            results(lambda: make_pipeline(StandardScaler(), PCA(3), Ridge(solver="svd")), "predict"), (X, y)),
    }  # fmt: skip
    errors = ("mean_squared_error", "mean_absolute_error", "r2_score", "max_error", "median_absolute_error",
              "explained_variance_score", "mean_gamma_deviance")  # fmt: skip
    scores = ("accuracy_score", "zero_one_loss", "confusion_matrix", "f1_score", "precision_score", "recall_score",
              "jaccard_score", "balanced_accuracy_score", "hamming_loss", "cohen_kappa_score")  # fmt: skip
    kernels = ("euclidean_distances", "linear_kernel", "rbf_kernel", "polynomial_kernel", "sigmoid_kernel",
               "cosine_similarity", "laplacian_kernel", "chi2_kernel", "manhattan_distances")  # fmt: skip
    return {
        **estimators,
        **(tasks if MPI.COMM_WORLD.size < 4 else {}),
        **{name: (getattr(metrics, name), (positive, np.abs(near) + 1)) for name in errors},
        **{name: (getattr(metrics, name), (classes, others)) for name in scores},
        **{name: (getattr(pairwise, name), (np.abs(X), np.abs(X[:10]))) for name in kernels},
        "log_loss": (metrics.log_loss, (classes, chance)),
        "brier_score_loss": (metrics.brier_score_loss, (classes, chance)),
        "train_test_split": (partial(train_test_split, random_state=0), (X, y)),
        **{f"scipy.stats.{x.__name__}": (x, (X,)) for x in (stats.zscore, stats.skew, stats.kurtosis, stats.sem)},
        "scipy.stats.ttest_1samp": (lambda x: stats.ttest_1samp(x, 0.0).pvalue, (X,)),
        "scipy.integrate.trapezoid": (partial(integrate.trapezoid, axis=0), (X,)),
        "scipy.cluster.vq.whiten": (partial(vq.whiten, check_finite=False), (X,)),
        "array_api_extra.cov": (xpx.cov, (X,)),
        "array_api_extra.one_hot": (partial(xpx.one_hot, num_classes=2), (classes,)),
    }


def numbers(x: Any) -> np.ndarray:
    """Return an array on every rank."""
    return x.allgather() if isinstance(x, xp.Array) else np.asarray(x)


def main() -> None:
    """Compare all functions, and raise AssertionError for the first one that differs."""
    sklearn.set_config(array_api_dispatch=True)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((ROWS, COLUMNS))
    y = X @ rng.standard_normal(COLUMNS) + 0.1 * rng.standard_normal(ROWS)
    for name, (function, arrays) in functions(X, y, (y > 0).astype(np.int64)).items():
        distributed = [xp.asarray(x) for x in arrays]
        assert array_api_compat.array_namespace(*distributed) is xp
        expected, got = function(*arrays), function(*distributed)
        several = isinstance(expected, list)
        for a, b in zip(expected if several else [expected], got if several else [got], strict=True):
            assert isinstance(b, xp.Array) or not np.ndim(b), (name, type(b))
            assert np.allclose(numbers(b), numbers(a), rtol=1e-10, atol=1e-10 if "euclid" not in name else 1e-7), name
    if MPI.COMM_WORLD.rank == 0:
        print("equal")


if __name__ == "__main__":
    main()
