# A recipe for Spack 1.0 or later: packages/py_pdgemm/package.py of a repository of the site's own.

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyPdgemm(PythonPackage):
    """Distributed dense linear algebra for Python on MPI and GPUs, around C := alpha op(A) op(B) + beta C."""

    pypi = "pdgemm/pdgemm-0.1.0.tar.gz"

    license("Apache-2.0")

    version("0.1.0")  # scripts/release.sh prints the sha256 of the sdist, which belongs here

    variant("cuda", default=False, description="Multiply on NVIDIA GPUs through CuPy")
    variant("plot", default=False, description="Draw scaling studies")

    depends_on("py-setuptools@77:", type="build")
    with default_args(type=("build", "run")):
        depends_on("python@3.11:")
        depends_on("py-numpy@2.0:")
        depends_on("py-scipy@1.13:")
        depends_on("py-ml-dtypes@0.5:")
        depends_on("py-mpi4py@4.1:")
        depends_on("py-h5py@3.11: +mpi")  # pdgemm itself needs no parallel h5py, but writes compressed datasets by one
        depends_on("py-msgspec@0.19:")
        depends_on("py-threadpoolctl@3.5:")
        depends_on("py-click@8.1:")
        depends_on("py-rich@13.7:")
        depends_on("py-opt-einsum@3.4:")
        depends_on("py-cupy@14:", when="+cuda")
        depends_on("py-matplotlib@3.9:", when="+plot")
        depends_on("py-jinja2@3.1:", when="+plot")

    def test_plan(self):
        """A plan, which needs neither a launcher nor a GPU."""
        pdgemm = which(self.prefix.bin.pdgemm)
        pdgemm("plan", "--shape", "4096,4096,4096", "--ranks", "4")
