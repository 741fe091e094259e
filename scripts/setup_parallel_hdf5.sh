#!/usr/bin/env bash
# Makes .venv-parallel: pdgemm with an h5py that supports parallel HDF5, on Debian's or Ubuntu's
# Open MPI and HDF5:
#
#   PDGEMM_VENV=.venv-parallel; . scripts/env.sh; mpirun -n 4 pdgemm info
#
# h5py is compiled once (two minutes); the wheel is stored in the user's cache.
# ScaLAPACK, on the same Open MPI, is installed too if possible:
# tests/ranks/interop/test_scalapack_reference.py compares with it.
# Exit code 3: packages are missing, and this script may not install them.
set -euo pipefail
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv-parallel
stamp=$venv/pdgemm-setup
. "$root/scripts/common.sh"
help_asked "$@"
[ $# = 0 ] || exit_code=2 die "takes no arguments, not '$*'"

h5py=3.16.0
mpi4py=4.1.2        # h5py is compiled against this version, and runs with it
scalapack=libscalapack-openmpi-dev      # the package of the library itself has a version in its name

print=''
[ ! -r "$stamp" ] || read -r print <"$stamp"
launcher=$(command -v mpiexec.openmpi || true)
if [ -n "$launcher" ] && [ "$print" = "$(fingerprint "$h5py" "$mpi4py" "$scalapack")" ]; then exit 0; fi

lock
exit_code=3
command -v apt-get >/dev/null || die "needs Debian's or Ubuntu's packages libhdf5-openmpi-dev and openmpi-bin"
if [ -z "$launcher" ] || ! command -v h5pcc.openmpi >/dev/null; then
    apt_install libhdf5-openmpi-dev openmpi-bin libopenmpi-dev
fi
if ! dpkg -s "$scalapack" >/dev/null 2>&1; then
    { can_apt && quietly "apt-get install $scalapack" _apt_install "$scalapack"; } ||
        say "going on without $scalapack: tests/ranks/interop/test_scalapack_reference.py will be skipped"
fi
make_venv
rm -f "$stamp"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

hdf5=$(h5pcc.openmpi -showconfig | sed -n 's/.*HDF5 Version: *//p')
openmpi=$(mpiexec.openmpi --version | sed -n '1s/.* //p')
tag=$("$venv/bin/python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
wheels=${XDG_CACHE_HOME:-$HOME/.cache}/pdgemm/wheels/h5py-$h5py-mpi4py-$mpi4py-$tag-hdf5-$hdf5-openmpi-$openmpi

build_h5py() {
    # --no-build-isolation: otherwise pip would also compile an old mpi4py, for ten minutes.
    HDF5_MPI=ON CC=mpicc.openmpi HDF5_DIR=/usr/lib/$(mpicc.openmpi -print-multiarch)/hdf5/openmpi CFLAGS="-O1 -g0" \
        "${pip[@]}" wheel --no-build-isolation --no-deps --no-binary=h5py --no-cache-dir -w "$wheels.new" "h5py==$h5py" &&
        mv "$wheels.new" "$wheels"
}
if ! ls "$wheels"/h5py-*.whl >/dev/null 2>&1; then
    python_h=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
    if ! command -v gcc >/dev/null || [ ! -r "$python_h" ]; then
        apt_install gcc libc6-dev "python${tag:2:1}.${tag:3}-dev"
    fi
    exit_code=1
    rm -rf "$wheels" "$wheels.new"
    mkdir -p "$(dirname "$wheels")"
    quietly "installing the build requirements of h5py" "${pip[@]}" install \
        "mpi4py==$mpi4py" 'numpy>=2' 'Cython>=3,<4' pkgconfig 'setuptools>=77' wheel packaging
    quietly "compiling h5py $h5py for HDF5 $hdf5 and Open MPI $openmpi (about two minutes)" build_h5py
fi
exit_code=1
quietly "installing pdgemm[plot,test] into .venv-parallel" \
    "${pip[@]}" install "mpi4py==$mpi4py" "$wheels"/h5py-*.whl -e "${root}[plot,test]"
# In this environment mpirun is mpirun.openmpi, whatever MPI comes first on PATH.
ln -sf "$(command -v mpiexec.openmpi)" "$venv/bin/mpirun"
ln -sf mpirun "$venv/bin/mpiexec"

# If mpi4py uses another MPI than HDF5, calls recurse without end: exactly one libmpi may be loaded.
quietly "checking h5py, HDF5 and mpi4py together on 2 ranks" check_ranks mpiexec "
import h5py
libraries = {line.split()[-1] for line in open('/proc/self/maps') if '/libmpi.so' in line}
assert h5py.get_config().mpi, 'h5py was built without MPI'
assert len(libraries) == 1, f'mpi4py and HDF5 use different MPIs: {libraries}'
assert 'Open MPI v$openmpi,' in MPI.Get_library_version(), f'HDF5 needs Open MPI $openmpi, not {libraries}'
" || die "mpi4py, h5py and mpirun.openmpi do not fit together (is another MPI in LD_LIBRARY_PATH or MPI4PY_LIBMPI?)"

fingerprint "$h5py" "$mpi4py" "$scalapack" >"$stamp.new"
mv "$stamp.new" "$stamp"
